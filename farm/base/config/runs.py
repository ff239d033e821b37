"""Tables of farm.toml and nightly.toml for runs: receivers of notifications, and retention."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum
from pathlib import Path, PurePath
from typing import Annotated, Literal, TypeVar
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from farm.base.errors import ConfigError
from farm.base.forms import age_in_seconds

# Receivers of notifications and the places of their secrets: tables of farm.toml and nightly.toml.


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


# Retention of runs: the reason for which each stays. Pure; `docs/reference/store.md` explains the rules.


RESULTS = 30
"""Newest results of every job that stay by default: a baseline of 21 and room for nights that cannot be compared."""


class RetentionConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`[retention]` of farm.toml: conditions under which a run stays. None is no rule."""

    keep: str | None = None
    """Age up to which runs stay: `90d`, `12w`, `36h`."""
    keep_nightly: str | None = None
    """Age up to which nightly runs stay; default: as `keep`."""
    keep_runs: int | None = None
    """Newest runs of a branch that stay; local runs are counted apart."""
    keep_results: int = RESULTS
    """Newest results of each job whose runs stay, at least 1."""


class FailuresConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`[failures]` of farm.toml: limits of the inputs and outputs that are kept of failed attempts."""

    keep_attempts: int = 20
    """Failed attempts of a run with kept files; 0 keeps none."""
    keep_mb: int = 64
    """Inputs and outputs of one attempt together, in MiB."""


class Rules(msgspec.Struct, frozen=True):
    """Conditions under which a run stays; `keep_ms`, `keep_runs` or both are set."""

    keep_ms: int | None = None
    keep_nightly_ms: int | None = None
    """None: as for others."""
    keep_runs: int | None = None
    keep_results: int = RESULTS


class RunFacts(msgspec.Struct, frozen=True):
    """Facts of a run for the decision about it."""

    run_id: str
    started_ms: int
    """Epoch, milliseconds."""
    priority: str
    branch: str = ""
    private: bool = False
    """True for a run outside its branch's history."""


class KeepReason(StrEnum):
    """Reason for which a run stays."""

    AGE = "age"
    NEWEST = "newest"
    """Among the newest runs of its branch that `keep_runs` asks for."""
    RESULTS = "results"
    """The run has a result that is among the newest of its job."""
    GOING_ON = "going on"
    """The run has no end and began, or got a record, within a day."""
    ALERT = "alert"
    """Something else in the store names it."""


def age_ms(text: str) -> int | None:
    """Return `90d`, `12w` or `36h` in milliseconds; None for other text."""
    seconds = age_in_seconds(text)
    return None if seconds is None else int(seconds * 1000)


def decide(
    runs: Sequence[RunFacts], rules: Rules, now_ms: int, protected: Mapping[str, KeepReason]
) -> dict[str, KeepReason | None]:
    """Return the reason for which each run stays, None for a run to delete, in the order of `runs`, newest first.

    A run stays for any single reason. Runs in `protected` stay at any age.
    """
    nightly_ms = rules.keep_ms if rules.keep_nightly_ms is None else rules.keep_nightly_ms
    decided: dict[str, KeepReason | None] = {}
    newer: Counter[tuple[str, bool]] = Counter()
    for run in runs:
        # Local runs are counted apart, so that they push no nightly run out.
        group = ("", True) if run.private else (run.branch, False)
        number, newer[group] = newer[group], newer[group] + 1
        keep_ms = nightly_ms if run.priority == "nightly" else rules.keep_ms
        if keep_ms is not None and run.started_ms > now_ms - keep_ms:
            decided[run.run_id] = KeepReason.AGE
        elif rules.keep_runs is not None and number < rules.keep_runs:
            decided[run.run_id] = KeepReason.NEWEST
        else:
            decided[run.run_id] = protected.get(run.run_id)
    return decided
