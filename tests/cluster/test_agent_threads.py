"""Process of an agent: its threads with late or lost answers and defects, and its imports without torch."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from log_lines import LogLines
from shared_rows import SOC, TTL_S, agent, facts, made_config, shards, submit
from waiting import until

from farm.base.errors import ExitCode, InfraError, StoreError
from farm.base.machine import now_s
from farm.dispatch.cluster.agent import shared_jobs
from farm.dispatch.cluster.agent.host_agent import HostAgent
from farm.dispatch.cluster.agent.shared_jobs import AgentLink
from farm.dispatch.recorder import Recorder
from farm.store import clock
from farm.store.cluster.records import AgentId, HeartbeatReply, HeldShard
from farm.store.store import open_store

# Threads of an agent: heartbeats, claims and records, with answers that are late or lost, and defects.


_HEARTBEAT_S = 3.0


class Slow:
    """A store whose clock is the test's; it answers a heartbeat `late_s` after it was sent, or refuses it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s, self.late_s, self.is_away = 1000.0, 0.0, False
        self.asked: list[bool] = []
        for module in (shared_jobs, clock):
            monkeypatch.setattr(module, "now_s", lambda: self.now_s)
        monkeypatch.setattr(AgentLink, "_run", lambda _: None)
        facts: Any = object()
        store: Any = self
        self.sender = AgentLink(
            store, lambda: facts, on_reply=lambda *_: None, on_hints=lambda _: False,
            on_claimed=lambda *_: None, ttl_s=TTL_S, heartbeat_s=_HEARTBEAT_S,
        )  # fmt: skip
        self.sender.begin(AgentId("h1", "token"))
        self.sender.start()

    @property
    def cluster(self) -> Slow:
        return self

    def heartbeat(self, *_: Any) -> HeartbeatReply:
        self.now_s += self.late_s
        # A repair pass that waits at the same time, and is answered first, asks for this.
        self.asked.append(self.sender.is_stable())
        if self.is_away:
            raise StoreError("no answer")
        return HeartbeatReply()

    def beat(self, times: int = 1) -> bool:
        for _ in range(times):
            self.now_s += _HEARTBEAT_S
            self.sender._send()
        return self.sender.is_stable()


def test_an_agent_is_stable_after_a_time_to_live_with_answers_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Slow(monkeypatch)
    assert not store.sender.is_stable()
    assert not store.beat(3)
    assert store.beat()
    # An answer that is a little late changes nothing.
    store.late_s = 1.5
    assert store.beat()
    # Not after a gap, nor while it lasts.
    store.late_s = 8.0
    assert not store.beat()
    assert store.asked[-1] is False
    store.late_s = 0.0
    assert not store.beat(3)
    assert store.beat()
    # Not while the database is away.
    store.is_away = True
    assert not store.beat(2)
    store.is_away = False
    assert not store.beat(4)
    assert store.beat()


def test_an_agent_gets_its_device_back_after_the_answer_to_a_claim_was_lost(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_store(address, connections=2) as store:
        claim = store.cluster.claim
        lost, heard, notes = list[HeldShard](), list[tuple[HeldShard, float]](), LogLines()

        def claim_unheard(*args: Any, **kwargs: Any) -> list[HeldShard]:
            found = claim(*args, **kwargs)
            if found and not lost:
                lost.extend(found)
                raise StoreError("server closed the connection unexpectedly")
            return found

        monkeypatch.setattr(store.cluster, "claim", claim_unheard)
        one = agent(store)
        submit(store, shards(1))
        link = AgentLink(
            store, lambda: facts("h1"), on_reply=lambda *_: None, on_hints=lambda _: link.claim(SOC) or False,
            on_claimed=lambda *what: heard.append(what), ttl_s=TTL_S, heartbeat_s=0.2,
        )  # fmt: skip
        try:
            asked_s = now_s()
            link.begin(one)
            link.start()
            link.request("h1-0", SOC, None)
            until(lambda: heard, lambda: f"the shard for its device: {notes}", 15)
        finally:
            link.close()
    # The process may use the device for the time of the lease, counted from before the request.
    [(held, end_s)] = heard
    assert TTL_S - 5 < end_s - asked_s < TTL_S + 15
    assert (held.id, held.lease.fence) == (lost[0].id, lost[0].lease.fence + 1)


@pytest.mark.parametrize(("part", "method"), [(AgentLink, "_send"), (Recorder, "_next")])
def test_an_agent_ends_with_its_thread(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: type, method: str
) -> None:
    monkeypatch.setattr("threading.excepthook", lambda _: None)

    def broken(*_: object, **__: object) -> None:
        raise AttributeError("a defect")

    monkeypatch.setattr(part, method, broken)
    agent = HostAgent(made_config(tmp_path, "h1", store=address), "h1", has_devices=False)
    with pytest.raises(InfraError, match="AttributeError: a defect: the agent ends, to be started again") as raised:
        agent.run()
    # systemd starts an agent again after this exit code: see tests/test_exit_codes.py.
    assert raised.value.exit_code == ExitCode.INFRA


# A host of devices has neither torch nor ExecuTorch: what its agent and its device processes import does without.


_MODULES = """
farm.cli.setup.lab farm.dispatch.cluster.agent.host_agent farm.dispatch.device_runner farm.dispatch.device_process
farm.dispatch.cluster.files farm.dispatch.device_run.device_worker farm.results.judge
farm.results.generation
"""
_REFUSING = """
import importlib.abc, importlib.util, sys

class Refusing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "executorch", "transformers", "torchao"}:
            raise ImportError(f"a host of devices has no {name}")

sys.meta_path.insert(0, Refusing())
for module in sys.argv[1:]:
    importlib.import_module(module)
"""


def test_an_agent_and_device_processes_are_loaded_where_there_is_no_torch() -> None:
    argv = [sys.executable, "-c", f"import importlib\n{_REFUSING}", *_MODULES.split()]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_request_is_claimed_although_another_agent_decides_at_that_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Slow(monkeypatch)
    link, waiting = slow.sender, slow.sender._waiting
    requests = list[threading.Thread]()

    def waiting_slowly(soc: str) -> Any:
        found = waiting(soc)
        if not requests:
            # The device runner asks between the look at the requests and the removal of the decision.
            requests.append(threading.Thread(target=link.request, args=("h1-0", SOC, None)))
            requests[0].start()
            requests[0].join(0.2)
        return found

    monkeypatch.setattr(link, "_waiting", waiting_slowly)
    link.decided(SOC)
    requests[0].join()
    until(lambda: link._due_soc() == SOC, "a claim for the request", 5)
