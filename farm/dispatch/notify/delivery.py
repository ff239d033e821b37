"""Notices to receivers: attempts, their repetition, and their outcome.

A process sends its notices itself. On a shared farm it queues a job of Procrastinate before: if the process dies, or if
the receiver stays away, agents that have the same receiver go on (`farm.dispatch.cluster.delivery`).
"""

from __future__ import annotations

import hashlib
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from farm.base.config.runs import Mail, Webhook
from farm.base.errors import FarmError
from farm.dispatch.notify.channels import (
    NotifyError,
    hide_secrets,
    mail_message,
    origin,
    post,
    read_secret,
    send_mail,
)
from farm.store.messages.messages import Message, Messages, NoticeArguments, QueuedNotice

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

_WAITS_S = (1.0, 2.0, 4.0)
"""Waits before each further attempt of one process."""
_PATIENCE_S = 60.0
"""Time of the last attempt of one process to begin: a mail server takes up to two minutes for each."""
GRACE_S = 300.0
"""Time in which the process that queued a notice sends it, before agents may."""
_LONGEST_S = _PATIENCE_S + 120.0
"""Longest time of all attempts of one process for one receiver."""
# Settings that differ between receivers, without template and occasion.
_IDENTITY = ("url", "url_env", "url_file", "token_env", "token_file", "host", "port", "sender", "to", "starttls",
             "user_env", "password_env", "password_file")  # fmt: skip


class Delivery(msgspec.Struct, frozen=True):
    """Delivery of a notification that was tried."""

    to: str
    """Receiver, without secrets."""
    ok: bool
    problem: str = ""

    @property
    def line(self) -> str:
        """Outcome in a line."""
        return f"sent: {self.to}" if self.ok else f"NOT SENT: {self.to}: {self.problem}"


@dataclass(frozen=True)
class Receiver:
    """Receiver of notices: a webhook or the mail of a configuration."""

    table: Webhook | Mail
    number: int
    """Position among the webhooks of its file."""

    @property
    def queue(self) -> str:
        """Name of its queue, the same on all hosts with the same configuration; made of names, not of secrets."""
        identity = msgspec.json.encode([getattr(self.table, name, "") for name in _IDENTITY])
        return f"notice:{hashlib.sha256(identity).hexdigest()[:32]}"

    @property
    def to(self) -> str:
        """Receiver for messages, without secrets."""
        if isinstance(self.table, Mail):
            return f"mail to {', '.join(self.table.to)}"
        with suppress(NotifyError):
            return f"webhook {self.number} ({origin(self._address(self.table)[0])})"
        return f"webhook {self.number}"

    def deliver(self, message: Message, key: str) -> None:
        """Attempt once to deliver `message`; `key` is the same in all attempts. Raises NotifyError."""
        if isinstance(self.table, Webhook):
            address, is_secret = self._address(self.table)
            token = read_secret(self.table.token_env, self.table.token_file)
            post(address, message.body, token, secret=is_secret, key=key)
            return
        table = self.table
        user = read_secret(table.user_env)
        password = read_secret(table.password_env, table.password_file)
        made = mail_message(table, message.subject, message.body, message.html, key)
        send_mail(table, made, user, password)

    def _address(self, hook: Webhook) -> tuple[str, bool]:
        """Return the address of a webhook, and whether it is secret. Raises NotifyError."""
        public = getattr(hook, "url", "")
        return public or read_secret(hook.url_env, hook.url_file), not public


def find_receivers(webhooks: Sequence[Webhook], mail: Mail | None) -> list[Receiver]:
    """Return the receivers of a configuration; their secrets leave the environment."""
    hide_secrets(webhooks, mail)
    tables: list[Webhook | Mail] = [*webhooks, *([mail] if mail is not None else [])]
    return [Receiver(table, number) for number, table in enumerate(tables, start=1)]


@dataclass(frozen=True)
class Notice:
    """Notice of an event for one receiver."""

    receiver: Receiver
    args: NoticeArguments
    """Message and event; no two events are described by the same words."""

    @property
    def key(self) -> str:
        """Name of the notice, the same in all attempts of all processes."""
        return f"notice:{hashlib.sha256(f'{self.receiver.queue} {self.args.about}'.encode()).hexdigest()[:32]}"

    def queued(self) -> QueuedNotice:
        """Return the notice for the queue of its receiver."""
        return QueuedNotice(self.receiver.queue, self.key, self.args)


def send_notices(notices: Iterable[Notice], messages: Messages | None) -> list[Delivery]:
    """Send the notices, one after the other, and return their deliveries; never raises.

    `messages` has the queue of a shared farm, to which the notices were added a moment ago.
    """
    end_s = time.monotonic() + GRACE_S - _LONGEST_S
    return [_send(notice, messages, end_s) for notice in notices]


def _send(notice: Notice, messages: Messages | None, end_s: float) -> Delivery:
    to, later = notice.receiver.to, "" if messages is None else "; agents with this receiver try again"
    try:
        if messages is not None and time.monotonic() > end_s:
            return Delivery(to, ok=False, problem=f"no time was left{later}")
        persistently(lambda: notice.receiver.deliver(notice.args.message, notice.key))
        delivery = Delivery(to, ok=True)
    except NotifyError as error:
        delivery = Delivery(to, ok=False, problem=f"{error}{later if error.may_pass else ''}")
        if error.may_pass:
            return delivery
    if messages is not None:
        # Without an answer of the store agents send the notice again, with the same key.
        with suppress(FarmError):
            messages.end_notice(notice.key)
    return delivery


def persistently(attempt: Callable[[], None], wait: Callable[[float], object] = time.sleep) -> None:
    """Call `attempt`, four times in all while its error may pass, 1, 2 and 4 seconds apart. Raises NotifyError."""
    end_s = time.monotonic() + _PATIENCE_S
    for tries, seconds in enumerate((*_WAITS_S, float("inf")), start=1):
        try:
            attempt()
        except NotifyError as error:
            if not error.may_pass:
                raise
            if time.monotonic() + seconds > end_s:
                tried = f", {tries} times" if tries > 1 else ""
                raise NotifyError(f"{error}{tried}", may_pass=True) from None
            wait(seconds)
        else:
            return
