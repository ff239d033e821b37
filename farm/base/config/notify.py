"""Receivers of notifications and the places of their secrets: tables of farm.toml and nightly.toml."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path, PurePath
from typing import Annotated, Literal, TypeVar
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from farm.base.errors import ConfigError

_Receiver = TypeVar("_Receiver", bound="Webhook | Mail")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_MAILBOX = re.compile(r"[^\s@<>(),;:\"\\]+@[^\s@<>(),;:\"\\]+")
_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9.-]*|[0-9A-Fa-f:.]+")


class Webhook(msgspec.Struct, frozen=True, kw_only=True):
    """Receiver of messages as JSON; its address and token are secrets."""

    url_env: str = ""
    """Environment variable with the address."""
    url_file: str = ""
    """File with the address."""
    token_env: str = ""
    """Environment variable with a bearer token."""
    token_file: str = ""
    """File with a bearer token."""


class Mail(msgspec.Struct, frozen=True, kw_only=True):
    """Receiver of messages as mail."""

    host: str
    """Mail server."""
    sender: str = msgspec.field(name="from")
    """Address of the sender."""
    to: Annotated[tuple[str, ...], Meta(min_length=1)]
    """Addresses of the recipients."""
    port: Annotated[int, Meta(ge=1, le=65535)] = 587
    """Port of the mail server."""
    starttls: bool = True
    """True to encrypt; may be false only without a password."""
    user_env: str = ""
    """Environment variable with the user."""
    password_env: str = ""
    """Environment variable with the password."""
    password_file: str = ""
    """File with the password."""


class QuarantineWebhook(Webhook, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[[notify.webhook]]` of farm.toml."""

    url: str = ""
    """Address in place of `url_env` and `url_file`, where it is no secret."""
    template: Literal["json", "slack"] = "json"
    """Form of the message."""


class QuarantineMail(Mail, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[notify.mail]` of farm.toml."""


class NotifyConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`[notify]` of farm.toml: receivers of quarantine notices."""

    webhook: tuple[QuarantineWebhook, ...] = ()
    """Webhooks that receive each quarantine."""
    mail: QuarantineMail | None = None
    """Mail for each quarantine."""

    @property
    def is_set(self) -> bool:
        """True if a receiver is configured."""
        return bool(self.webhook) or self.mail is not None


def read_notify(path: Path, table: NotifyConfig, beside: Callable[[str], PurePath | None]) -> NotifyConfig:
    """Return the table with absolute paths; `beside` makes a path of the file absolute. Raises ConfigError."""
    webhooks = []
    for number, hook in enumerate(table.webhook):
        for problem in (*webhook_problems(hook), *_address_problems(hook)):
            raise ConfigError(path, f"notify.webhook[{number}]", problem)
        webhooks.append(with_files_of(hook, beside))
    mail = table.mail
    if mail is not None:
        for problem in mail_problems(mail):
            raise ConfigError(path, "notify.mail", problem)
        mail = with_files_of(mail, beside)
    return NotifyConfig(tuple(webhooks), mail)


def with_files_of(receiver: _Receiver, beside: Callable[[str], PurePath | None]) -> _Receiver:
    """Return a receiver with absolute paths of the files with its secrets."""
    keys = [key for key in ("url_file", "token_file", "password_file") if getattr(receiver, key, "")]
    return msgspec.structs.replace(receiver, **{key: str(beside(getattr(receiver, key))) for key in keys})


class NightlyReceivers(msgspec.Struct, frozen=True):
    """`[notify]` of nightly.toml without templates and occasions, for agents."""

    webhook: tuple[Webhook, ...] = ()
    mail: Mail | None = None


def _address_problems(hook: QuarantineWebhook) -> Iterator[str]:
    """Yield the problems of an address in the file itself."""
    if not hook.url:
        return
    try:
        parts = urlsplit(hook.url)
        # Reading `port` raises ValueError for a text that is no number.
        has_host = bool(parts.hostname) and parts.username is None and parts.port != 0
        is_address = has_host and parts.scheme in ("http", "https")
    except ValueError:
        is_address = False
    if not is_address:
        # The value is not shown: it may be a secret in the wrong key.
        yield "url: expected http://HOST/PATH or https://HOST/PATH, without a user"
    elif parts.scheme == "http" and (hook.token_env or hook.token_file):
        yield "http would send the token unencrypted: use https"


def webhook_problems(hook: Webhook) -> Iterator[str]:
    """Yield the problems of a webhook."""
    keys = ("url", "url_env", "url_file")
    yield from _one_of(hook, tuple(key for key in keys if hasattr(hook, key)), needed=True)
    yield from _one_of(hook, ("token_env", "token_file"))


def mail_problems(mail: Mail) -> Iterator[str]:
    """Yield the problems of a mail receiver."""
    yield from _one_of(mail, ("password_env", "password_file"))
    yield from _one_of(mail, ("user_env",))
    password = mail.password_env or mail.password_file
    if bool(mail.user_env) != bool(password):
        yield "user_env and a password (password_env or password_file) go together"
    if password and not mail.starttls:
        yield "a password without starttls would be sent in the clear: leave starttls true"
    if not _HOST.fullmatch(mail.host):
        yield f"host {mail.host!r} is no name or address of a machine"
    for key, address in (("from", mail.sender), *(("to", one) for one in mail.to)):
        if not _MAILBOX.fullmatch(address):
            yield f"{key}: {address!r} is no address: expected name@host"


def _one_of(table: msgspec.Struct, keys: tuple[str, ...], *, needed: bool = False) -> Iterator[str]:
    """Yield the problems with `keys`, of which at most one may name the place of a secret; `needed`: exactly one."""
    given = [key for key in keys if getattr(table, key)]
    if len(given) > 1 or (needed and not given):
        yield f"expected {' or '.join(keys)}, one of them"
    for key in given:
        # The value is not shown: it may be the secret itself.
        if key.endswith("_env") and not _VARIABLE.fullmatch(getattr(table, key)):
            yield f"{key} is no name of an environment variable; the secret itself has no place here"
