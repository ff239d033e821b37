"""Notice that a device was quarantined: its text, and one POST or mail to each receiver in farm.toml."""

from __future__ import annotations

import socket
import time
from typing import TYPE_CHECKING

import msgspec

from farm.base.config.notify import Mail
from farm.base.text import one_line
from farm.base.user import user_name
from farm.dispatch.notify.delivery import Notice
from farm.dispatch.notify.webhook import slack_text
from farm.store.messages.notices import Message

if TYPE_CHECKING:
    from collections.abc import Iterable

    from farm.dispatch.notify.delivery import Receiver

_REASON_CHARS = 300


class QuarantineNotice(msgspec.Struct, frozen=True, kw_only=True):
    """Facts of a quarantined device for a notice."""

    device: str
    """Id of the device."""
    name: str = ""
    serial: str = ""
    soc: str = ""
    kind: str = ""
    host: str = ""
    reason: str
    since_ms: int
    """Time of the quarantine; epoch, milliseconds."""
    run: str = ""
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
        lines += ["A device is in quarantine: it is given no job until somebody releases it.", ""]
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


def quarantine_notices(receivers: Iterable[Receiver], notice: QuarantineNotice, claim: int = 0) -> list[Notice]:
    """Return the notice for all receivers in farm.toml."""
    about = f"quarantine of {notice.called}, {notice.since_ms}"
    return [Notice(one, _message(one, notice), about, claim) for one in receivers]


def made_up_notice() -> QuarantineNotice:
    """Return a notice of a device that does not exist."""
    return QuarantineNotice(
        device="no-device", soc="SM8650", reason="nothing happened", since_ms=time.time_ns() // 1_000_000, test=True
    )


def _message(receiver: Receiver, notice: QuarantineNotice) -> Message:
    if isinstance(receiver.table, Mail):
        return Message(notice.text(), notice.subject)
    return Message(notice.slack() if getattr(receiver.table, "template", "") == "slack" else notice.json())


def _sender() -> str:
    return f"{one_line(user_name(), 80)} on {one_line(socket.gethostname(), 80)}"


def _clock(time_ms: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(time_ms / 1000))
