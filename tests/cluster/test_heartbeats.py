"""Time at which an agent knows that the store has received the heartbeats of all living agents."""

from __future__ import annotations

from typing import Any

import pytest

from farm.base.errors import StoreError
from farm.dispatch.cluster.agent import heartbeats
from farm.dispatch.cluster.agent.heartbeats import HeartbeatSender
from farm.dispatch.cluster.agent.ledger import Ledger
from farm.store import answers
from farm.store.cluster.records import AgentId, HeartbeatReply

_TTL_S, _HEARTBEAT_S = 10.0, 3.0


class Slow:
    """A store whose clock is the test's; it answers a heartbeat `late_s` after it was sent, or refuses it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s, self.late_s, self.is_away = 1000.0, 0.0, False
        self.asked: list[bool] = []
        for module in (heartbeats, answers):
            monkeypatch.setattr(module, "now_s", lambda: self.now_s)
        monkeypatch.setattr(HeartbeatSender, "_run", lambda _: None)
        facts: Any = object()
        store: Any = self
        self.sender = HeartbeatSender(
            store, Ledger(), lambda: facts, on_reply=lambda *_: None, on_hints=lambda _: False,
            ttl_s=_TTL_S, heartbeat_s=_HEARTBEAT_S,
        )  # fmt: skip
        self.sender.begin(AgentId("h1", "token"))

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


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Slow:
    return Slow(monkeypatch)


def test_after_a_time_to_live_with_answers(store: Slow) -> None:
    assert not store.sender.is_stable()
    assert not store.beat(3)
    assert store.beat()
    assert store.beat(100)


def test_not_after_a_gap_nor_while_it_lasts(store: Slow) -> None:
    store.beat(10)
    store.late_s = 8.0
    assert not store.beat()
    assert store.asked[-1] is False
    store.late_s = 0.0
    assert not store.beat(3)
    assert store.beat()


def test_not_while_the_database_is_away(store: Slow) -> None:
    assert store.beat(10)
    store.is_away = True
    assert not store.beat(2)
    store.is_away = False
    assert not store.beat(4)
    assert store.beat()


def test_an_answer_that_is_a_little_late_changes_nothing(store: Slow) -> None:
    store.beat(10)
    store.late_s = 1.5
    assert store.beat()
