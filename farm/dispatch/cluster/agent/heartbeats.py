"""Heartbeats of an agent and its leases, at an interval and at urgent hints; their answers carry requests to it."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from typing import TYPE_CHECKING

from farm.base.clock import now_s
from farm.base.errors import FarmError
from farm.dispatch.cluster.hints import Hints
from farm.store.answers import Answers

if TYPE_CHECKING:
    from collections.abc import Callable

    from farm.dispatch.cluster.agent.ledger import Ledger
    from farm.store.cluster.records import AgentFacts, AgentId, HeartbeatReply
    from farm.store.store import Store

logger = logging.getLogger(__name__)

_RETRY_SECONDS = 1.0
"""Seconds between two tries while the database is away."""


class HeartbeatSender:
    """Thread that sends heartbeats and listens for hints."""

    def __init__(
        self,
        store: Store,
        ledger: Ledger,
        facts: Callable[[], AgentFacts],
        *,
        on_reply: Callable[[HeartbeatReply, float], None],
        on_hints: Callable[[set[str]], bool],
        ttl_s: float,
        heartbeat_s: float,
    ) -> None:
        """`on_reply` receives the answer to every heartbeat and the end of the leases, on the clock of `now_s`.

        `on_hints` receives notifications, and returns whether a heartbeat should follow at once.
        """
        self._store, self._ledger, self._facts = store, ledger, facts
        self._on_reply, self._on_hints = on_reply, on_hints
        self._ttl_s, self._heartbeat_s = ttl_s, heartbeat_s
        self._agent: AgentId | None = None
        self._sent: AgentFacts | None = None
        self._problem = ""
        self._answers = Answers()
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._is_ending = False
        self._thread = threading.Thread(target=self._run, daemon=True, name="heartbeats")

    def begin(self, agent: AgentId) -> None:
        """Start heartbeats for `agent`, whose facts the store has from its registration."""
        self._agent, self._sent = agent, self._facts()
        self._answers.begin()
        self._thread.start()

    def is_stable(self) -> bool:
        """Return whether the store has answered for one lease duration: an agent without a heartbeat is dead then."""
        return self._answers.is_stable(self._ttl_s)

    def wake(self) -> None:
        """Send a heartbeat at once: the facts of the agent have changed."""
        with contextlib.suppress(OSError):
            os.write(self._wake_write, b".")

    def close(self) -> None:
        """End the thread, waiting at most 5 s for it."""
        self._is_ending = True
        self.wake()
        if self._thread.ident is not None:
            self._thread.join(5.0)
        if not self._thread.is_alive():
            os.close(self._wake_read)
            os.close(self._wake_write)

    def _run(self) -> None:
        due_s = time.monotonic()
        with contextlib.closing(Hints(self._store)) as hints:
            while not self._is_ending:
                received = hints.wait(max(0.0, due_s - time.monotonic()), self._wake_read)
                was_woken = self._was_woken()
                is_urgent = bool(received) and self._on_hints(received)
                if was_woken or is_urgent or time.monotonic() >= due_s:
                    was_answered = self._send()
                    due_s = time.monotonic() + (self._heartbeat_s if was_answered else _RETRY_SECONDS)

    def _was_woken(self) -> bool:
        try:
            return bool(os.read(self._wake_read, 1024))
        except BlockingIOError:
            return False

    def _send(self) -> bool:
        if self._agent is None:
            return False
        facts = self._facts()
        # The answer may take any time: count the lease from the request, not from the answer.
        until_s = now_s() + self._ttl_s
        changed_facts = None if facts == self._sent else facts
        try:
            with self._ledger.changing:
                leases, claimed = list(self._ledger.leases.values()), self._ledger.claimed
                reply = self._store.cluster.heartbeat(self._agent, changed_facts, self._ttl_s, leases, claimed)
                self._ledger.apply(reply)
                self._on_reply(reply, until_s)
        except FarmError as error:
            if str(error) != self._problem:
                self._problem = str(error)
                logger.warning("no heartbeat: %s", error)
            return False
        self._answers.note(self._ttl_s)
        if self._problem:
            self._problem = ""
            logger.info("heartbeats reach the store again")
        self._sent = facts
        return True
