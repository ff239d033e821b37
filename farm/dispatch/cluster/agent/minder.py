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
    from farm.store.cluster.records import AgentFacts, AgentId, Minded
    from farm.store.store import Store

logger = logging.getLogger(__name__)

_AGAIN_SECONDS = 1.0
"""Seconds between two tries while the database is away."""


class Minder:
    """Thread that sends heartbeats and listens for hints."""

    def __init__(
        self,
        store: Store,
        ledger: Ledger,
        facts: Callable[[], AgentFacts],
        *,
        minded: Callable[[Minded, float], None],
        hinted: Callable[[set[str]], bool],
        ttl_s: float,
        heartbeat_s: float,
    ) -> None:
        """`minded` receives the answer to every heartbeat and the end of the leases, on the clock of `now_s`.

        `hinted` receives notifications, and returns whether a heartbeat should follow at once.
        """
        self._store, self._ledger, self._facts, self._minded, self._hinted = store, ledger, facts, minded, hinted
        self._ttl_s, self._heartbeat_s = ttl_s, heartbeat_s
        self._agent: AgentId | None = None
        self._sent: AgentFacts | None = None
        self._problem = ""
        self._answers = Answers()
        self._ear, self._mouth = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._is_ending = False
        self._thread = threading.Thread(target=self._run, daemon=True, name="minder")

    def begin(self, agent: AgentId) -> None:
        """Start heartbeats for `agent`, whose facts the store has from its registration."""
        self._agent, self._sent = agent, self._facts()
        self._answers.begin()
        self._thread.start()

    def is_settled(self) -> bool:
        """Return whether the store has answered for one lease duration: an agent without a heartbeat is dead then."""
        return self._answers.is_settled(self._ttl_s)

    def wake(self) -> None:
        """Send a heartbeat at once: the facts of the agent have changed."""
        with contextlib.suppress(OSError):
            os.write(self._mouth, b".")

    def close(self) -> None:
        """End the thread, waiting at most 5 s for it."""
        self._is_ending = True
        self.wake()
        if self._thread.ident is not None:
            self._thread.join(5.0)
        if not self._thread.is_alive():
            os.close(self._ear)
            os.close(self._mouth)

    def _run(self) -> None:
        due_s = time.monotonic()
        with Hints(self._store) as hints:
            while not self._is_ending:
                heard = hints.wait(max(0.0, due_s - time.monotonic()), self._ear)
                is_called = self._is_called()
                is_urgent = bool(heard) and self._hinted(heard)
                if is_called or is_urgent or time.monotonic() >= due_s:
                    is_well = self._beat()
                    due_s = time.monotonic() + (self._heartbeat_s if is_well else _AGAIN_SECONDS)

    def _is_called(self) -> bool:
        try:
            return bool(os.read(self._ear, 1024))
        except BlockingIOError:
            return False

    def _beat(self) -> bool:
        if self._agent is None:
            return False
        facts = self._facts()
        # The answer may take any time: count the lease from the request, not from the answer.
        until_s = now_s() + self._ttl_s
        news = None if facts == self._sent else facts
        try:
            with self._ledger.changing():
                held, claimed = self._ledger.held(), self._ledger.claimed()
                minded = self._store.cluster.heartbeat(self._agent, news, self._ttl_s, held, claimed)
                self._ledger.minded(minded)
                self._minded(minded, until_s)
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
