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
    from collections.abc import Iterator

    from sqlalchemy import Connection

    from farm.base.config.settings import Config
    from farm.dispatch.notify.delivery import Notice
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
        self._config, self._store = config, store
        hide_secrets(config)
        self._looked_s = float("-inf")
        self._sending: dict[threading.Thread, Quarantine] = {}

    def look(self) -> None:
        """Send due notices, each from its own thread; the store is asked once in two seconds."""
        if self._config.notify.is_set and time.monotonic() >= self._looked_s + _LOOK_SECONDS:
            self._looked_s = time.monotonic()
            with contextlib.suppress(FarmError):
                queue = (self._queue,) if self._config.is_shared else ()
                for one in self._store.quarantines.claim(*queue):
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
                self._record(one, f"no answer in {_LAST_SECONDS:g} s", f"NOT SENT: no answer in {_LAST_SECONDS:g} s")

    def _queue(self, connection: Connection, one: Quarantine) -> None:
        from farm.dispatch.notify.delivery import GRACE_S
        from farm.store.messages.notices import defer_notices

        defer_notices(connection, [notice.queued() for notice in self._notices(one)], GRACE_S)

    def _notices(self, one: Quarantine) -> list[Notice]:
        from farm.dispatch.notify.delivery import find_receivers
        from farm.dispatch.notify.quarantine import QuarantineNotice, quarantine_notices

        facts = msgspec.structs.asdict(one)
        claim = facts.pop("claim")
        receivers = find_receivers(self._config.notify.webhook, self._config.notify.mail)
        return quarantine_notices(receivers, QuarantineNotice(**facts), claim)

    def _send(self, one: Quarantine) -> None:
        from farm.dispatch.notify.delivery import send_notices

        for delivery in send_notices(self._notices(one), self._store.messages if self._config.is_shared else None):
            self._record(one, "" if delivery.ok else f"{delivery.to}: {delivery.problem}", delivery.line)

    def _record(self, one: Quarantine, problem: str, line: str) -> None:
        if problem:
            logger.warning("NOT NOTIFIED that %s is quarantined: %s", one.name or one.device, problem)
        with contextlib.suppress(FarmError):
            self._store.quarantines.add_outcome(one.claim, line)


@contextlib.contextmanager
def announcing(config: Config, store: Store) -> Iterator[None]:
    """Send, at the end of the body, a notice of every device that was quarantined."""
    hide_secrets(config)
    try:
        yield
    finally:
        Announcer(config, store).close()
