"""Notices of devices that were quarantined: sent beside the work, which neither waits for them nor fails with them."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from typing import TYPE_CHECKING

import msgspec

from farm.base.errors import FarmError
from farm.dispatch.notify.credentials import Credentials

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from farm.base.config.settings import Config
    from farm.store.leases.quarantines import Quarantine
    from farm.store.store import Store

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 2.0
_LAST_SECONDS = 15.0
"""Longest wait at the end of a command for notices in transit."""


def hide_secrets(config: Config) -> None:
    """Take the secrets of notices out of the environment, before anything starts that would inherit them."""
    Credentials(config.notify.webhook, config.notify.mail)


class Announcer:
    """Sender of a notice for each quarantine in `store` without one; a notice that cannot be sent is logged."""

    def __init__(self, config: Config, store: Store) -> None:
        self._config, self._store = config.notify, store
        self._credentials = Credentials(self._config.webhook, self._config.mail)
        self._looked_s = float("-inf")
        self._sending: dict[threading.Thread, Quarantine] = {}

    def look(self) -> None:
        """Send due notices, each from its own thread; the store is asked once in two seconds."""
        if self._config.is_set and time.monotonic() >= self._looked_s + _LOOK_SECONDS:
            self._looked_s = time.monotonic()
            with contextlib.suppress(FarmError):
                for one in self._store.quarantines.claim():
                    thread = threading.Thread(target=self._send, args=(one,), daemon=True, name="notice")
                    self._sending[thread] = one
                    thread.start()

    def close(self) -> None:
        """Send due notices, and wait shortly for those in transit."""
        self._looked_s = float("-inf")
        self.look()
        deadline = time.monotonic() + _LAST_SECONDS
        for thread, one in self._sending.items():
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                self._finish(one, [], [f"no answer in {_LAST_SECONDS:g} s"])

    def _send(self, one: Quarantine) -> None:
        from farm.dispatch.notify.quarantine import QuarantineNotice, send_notice

        facts = msgspec.structs.asdict(one)
        facts.pop("claim")
        deliveries = send_notice(self._config, self._credentials, QuarantineNotice(**facts))
        failed = [f"{delivery.to}: {delivery.problem}" for delivery in deliveries if not delivery.ok]
        self._finish(one, [delivery.to for delivery in deliveries if delivery.ok], failed)

    def _finish(self, one: Quarantine, sent: Sequence[str], failed: Sequence[str]) -> None:
        for line in failed:
            logger.warning("NOT NOTIFIED that %s is quarantined: %s", one.name or one.device, line)
        outcome = [*(f"sent: {to}" for to in sent), *(f"NOT SENT: {line}" for line in failed)]
        with contextlib.suppress(FarmError):
            self._store.quarantines.finish(one.claim, "; ".join(outcome))


@contextlib.contextmanager
def announcing(config: Config, store: Store) -> Iterator[None]:
    """Send, at the end of the body, a notice of every device that was quarantined."""
    hide_secrets(config)
    try:
        yield
    finally:
        Announcer(config, store).close()
