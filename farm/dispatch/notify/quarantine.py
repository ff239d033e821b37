"""The notice that a device was quarantined: its text, and one POST or mail to everybody who wants it."""

from __future__ import annotations

import socket
import time
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from farm.base.text import one_line
from farm.base.user import user_name
from farm.dispatch.notify.delivery import Delivery, by_mail, by_webhook
from farm.dispatch.notify.webhook import slack_text

if TYPE_CHECKING:
    from farm.base.config.notify import NotifyConfig
    from farm.dispatch.notify.credentials import Credentials

_REASON_CHARS = 300


class QuarantineNotice(msgspec.Struct, frozen=True, kw_only=True):
    """What is said of a device that was quarantined."""

    device: str
    """Its id."""
    name: str = ""
    serial: str = ""
    soc: str = ""
    kind: str = ""
    host: str = ""
    reason: str
    since_ms: int
    """Epoch."""
    run: str = ""
    test: bool = False
    """Nothing happened: somebody tries whether notices arrive."""

    @property
    def called(self) -> str:
        """What people call the device."""
        return one_line(self.name or self.device, 80)

    @property
    def subject(self) -> str:
        """One line."""
        what = "a test of notices: " if self.test else ""
        soc = f" ({self.soc})" if self.soc else ""
        return one_line(f"[farm] {what}{self.called}{soc} is quarantined: {one_line(self.reason, _REASON_CHARS)}", 400)

    @property
    def commands(self) -> dict[str, str]:
        """Return what to do, by what it is for."""
        return {
            f"farm devices show {self.called}": "its history",
            f"farm devices unquarantine {self.called}": "gives it another chance: its canary decides",
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
        """Return the notice as Slack, and what understands the same, takes it: no mention, no link."""
        text = "\n".join((self.subject, *(f"`{command}`" for command in self.commands)))
        return msgspec.json.encode({"text": slack_text(text)}).decode()


def send_notice(config: NotifyConfig, credentials: Credentials, notice: QuarantineNotice) -> tuple[Delivery, ...]:
    """Send the notice to everybody that farm.toml names, one after the other, and return how each went; never raises.

    A receiver that does not answer takes 50 s, a mail server two minutes.
    """
    found = [
        by_webhook(hook, number, credentials, notice.slack if hook.template == "slack" else notice.json, hook.url)
        for number, hook in enumerate(config.webhook, start=1)
    ]
    if config.mail is not None:
        found.append(by_mail(config.mail, credentials, notice.subject, partial(_mail, notice)))
    return tuple(found)


def made_up_notice() -> QuarantineNotice:
    """Return a notice of a device that does not exist."""
    return QuarantineNotice(
        device="no-device", soc="SM8650", reason="nothing happened", since_ms=time.time_ns() // 1_000_000, test=True
    )


def _mail(notice: QuarantineNotice) -> tuple[str, str]:
    return notice.text(), ""


def _sender() -> str:
    return f"{one_line(user_name(), 80)} on {one_line(socket.gethostname(), 80)}"


def _clock(time_ms: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(time_ms / 1000))
