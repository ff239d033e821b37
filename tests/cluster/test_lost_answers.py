"""An agent whose connection breaks after the database has committed a claim, and before the answer arrives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from log_lines import LogLines
from shared_rows import SOC, TTL_S, agent, shards, submit
from store_template import drop_database
from waiting import until

from farm.base.clock import now_s
from farm.base.errors import StoreError
from farm.dispatch.cluster.agent.claimer import Claimer
from farm.dispatch.cluster.agent.heartbeats import HeartbeatSender
from farm.dispatch.cluster.agent.ledger import Ledger
from farm.store.cluster.records import AgentFacts, HeldShard
from farm.store.store import open_store


def test_an_agent_gets_its_device_back_after_the_answer_to_a_claim_was_lost(
    new_store: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    address = new_store("lost_answer")
    with open_store(address, connections=2) as store:
        claim = store.cluster.claim
        lost: list[HeldShard] = []
        heard: list[HeldShard] = []
        until_s: list[float] = []
        notes = LogLines()

        def claim_unheard(*args: Any, **kwargs: Any) -> list[HeldShard]:
            found = claim(*args, **kwargs)
            if found and not lost:
                lost.extend(found)
                raise StoreError("server closed the connection unexpectedly")
            return found

        monkeypatch.setattr(store.cluster, "claim", claim_unheard)
        one = agent(store)
        submit(store, shards(1))
        ledger = Ledger()
        facts = AgentFacts(host="h1", pid=1, version="1", protocol=1)
        sender = HeartbeatSender(
            store, ledger, lambda: facts, on_reply=lambda *_: None, on_hints=lambda _: claimer.wake() or False,
            ttl_s=TTL_S, heartbeat_s=0.2,
        )  # fmt: skip

        def claimed(held: HeldShard, end_s: float) -> None:
            until_s.append(end_s)
            heard.append(held)

        claimer = Claimer(store, ledger, claimed, TTL_S, sender.is_stable)
        try:
            asked_s = now_s()
            claimer.begin(one)
            sender.begin(one)
            claimer.request("h1-0", SOC, None)
            until(lambda: heard, lambda: f"the shard for its device: {notes}", 15)
        finally:
            claimer.close()
            sender.close()
    # The process may use the device for the time of the lease, counted from before the request.
    assert TTL_S - 5 < until_s[0] - asked_s < TTL_S + 15
    assert (heard[0].id, heard[0].lease.fence) == (lost[0].id, lost[0].lease.fence + 1)
    drop_database(address)
