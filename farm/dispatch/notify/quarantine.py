"""Notices that a device was quarantined: one POST or mail to each receiver in farm.toml.

Threads send the notices: jobs neither wait for them nor fail with them.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from typing import TYPE_CHECKING

import msgspec

from farm.base.config.runs import Mail
from farm.base.errors import FarmError
from farm.base.machine import user_name
from farm.base.text import one_line
from farm.dispatch.notify.channels import hide_secrets, slack_text
from farm.dispatch.notify.delivery import GRACE_S, Notice, Receiver, find_receivers, send_notices
from farm.store.leases.registry import Quarantine
from farm.store.messages.messages import Message, NoticeArguments, defer_notices

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from sqlalchemy import Connection

    from farm.base.config.settings import Config
    from farm.store.store import Store

logger = logging.getLogger(__name__)

_REASON_CHARS = 300
_LOOK_SECONDS = 2.0
_LAST_SECONDS = 15.0
"""Longest wait at the end of a command for notices in transit."""


class QuarantineNotice(Quarantine, frozen=True, kw_only=True):
    """Notice of a quarantine."""

    test: bool = False
    """True for a test of notices: no device was quarantined."""

    @property
    def called(self) -> str:
        """Name of the device, or its id without one."""
        return one_line(self.name or self.device, 80)

    @property
    def subject(self) -> str:
        """Subject of the mail, one line."""
        what = "a test of notices: " if self.test else ""
        soc = f" ({self.soc})" if self.soc else ""
        return one_line(f"[farm] {what}{self.called}{soc} is quarantined: {one_line(self.reason, _REASON_CHARS)}", 400)

    @property
    def commands(self) -> dict[str, str]:
        """Commands for the next steps, with their purposes."""
        return {
            f"farm devices show {self.called}": "its history",
            f"farm devices unquarantine {self.called}": "gives it another chance: its health check decides",
        }

    def text(self) -> str:
        """Return the notice for mail."""
        facts = {
            "device": self.called if self.called == self.device else f"{self.called} ({one_line(self.device, 80)})",
            "what": " ".join(filter(None, (self.soc, self.kind))),
            "at": one_line(self.host, 80),
            "since": _clock(self.since_ms),
            "run": one_line(self.run, 80),
            "why": one_line(self.reason, _REASON_CHARS),
            "sent by": _sender(),
        }
        lines = ["This is a test of notices: nothing happened.", ""] if self.test else []
        lines += ["A device is in quarantine: it gets no job until a person releases it.", ""]
        lines += [f"{label + ':':9}{value}" for label, value in facts.items() if value]
        lines += ["", *(f"{command}\n    {purpose}" for command, purpose in self.commands.items())]
        return "\n".join(lines) + "\n"

    def json(self) -> str:
        """Return the notice as JSON."""
        facts = {
            "schema": 1,
            "event": "device_quarantined",
            "test": self.test,
            "text": self.subject,
            "device": {
                "id": one_line(self.device, 200),
                **{key: one_line(getattr(self, key), 80) for key in ("name", "serial", "soc", "kind", "host")},
            },
            "reason": one_line(self.reason, _REASON_CHARS),
            "since_ms": self.since_ms,
            "since": _clock(self.since_ms),
            "run": one_line(self.run, 80),
            "sent_by": _sender(),
            "commands": list(self.commands),
        }
        return msgspec.json.encode(facts).decode()

    def slack(self) -> str:
        """Return the notice as JSON for Slack and compatible services, without mentions and links."""
        text = "\n".join((self.subject, *(f"`{command}`" for command in self.commands)))
        return msgspec.json.encode({"text": slack_text(text)}).decode()


def quarantine_notices(receivers: Iterable[Receiver], notice: QuarantineNotice) -> list[Notice]:
    """Return the notice for all receivers in farm.toml."""
    about = f"quarantine of {notice.called}, {notice.since_ms}"
    return [Notice(one, NoticeArguments(_message(one, notice), about, notice.claim)) for one in receivers]


def made_up_notice() -> QuarantineNotice:
    """Return a notice of a device that does not exist."""
    return QuarantineNotice(
        device="no-device", soc="SM8650", reason="nothing happened", since_ms=time.time_ns() // 1_000_000, test=True
    )


class Announcer:
    """Sender of a notice for each quarantine in `store` without one; a notice that cannot be sent is logged."""

    def __init__(self, config: Config, store: Store) -> None:
        self._config, self._store = config, store
        hide_secrets(config.notify.webhook, config.notify.mail)
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
        defer_notices(connection, [notice.queued() for notice in self._notices(one)], GRACE_S)

    def _notices(self, one: Quarantine) -> list[Notice]:
        receivers = find_receivers(self._config.notify.webhook, self._config.notify.mail)
        return quarantine_notices(receivers, QuarantineNotice(**msgspec.structs.asdict(one)))

    def _send(self, one: Quarantine) -> None:
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
    hide_secrets(config.notify.webhook, config.notify.mail)
    try:
        yield
    finally:
        Announcer(config, store).close()


def _message(receiver: Receiver, notice: QuarantineNotice) -> Message:
    if isinstance(receiver.table, Mail):
        return Message(notice.text(), notice.subject)
    return Message(notice.slack() if getattr(receiver.table, "template", "") == "slack" else notice.json())


def _sender() -> str:
    return f"{one_line(user_name(), 80)} on {one_line(socket.gethostname(), 80)}"


def _clock(time_ms: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(time_ms / 1000))
