"""Tables of nightly.toml as written, and all problems of their keys at once."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from farm.base.backends.registry import DEFAULT_BACKEND
from farm.base.config.notify import Mail, Webhook
from farm.base.errors import ConfigError, UnknownNameError, UsageError
from farm.base.toml_tables import seconds_of
from farm.devices.execution.raw import MOST_SECONDS
from farm.dispatch.request.profiling import Profile

_T = TypeVar("_T", bound=msgspec.Struct)

When = Literal["always", "change", "failure"]
OptionValue = str | int | bool
_Names = Annotated[tuple[str, ...], Meta(min_length=1)]


class NightlyTable(msgspec.Struct, frozen=True, kw_only=True):
    """`[nightly]`."""

    name: str
    budget: str = ""
    wait: str = "30m"
    report_dir: str = ""
    report_url: str = ""
    keep: Annotated[int, Meta(ge=1, le=10_000)] = 30
    """Number of nightly runs to keep."""
    debug: Annotated[int, Meta(ge=0, le=1000)] = 5
    """Most jobs of a run that are debugged."""


class RunTable(msgspec.Struct, frozen=True, kw_only=True):
    """`[[run]]`."""

    socs: _Names
    suites: _Names
    name: str = ""
    backends: _Names = (DEFAULT_BACKEND,)
    precisions: tuple[str, ...] = ()
    options: dict[str, OptionValue | tuple[OptionValue, ...]] = {}
    toolchains: tuple[str, ...] = ()
    virtual: Annotated[int, Meta(ge=0, le=64)] = 0
    devices: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()
    most_devices: Annotated[int, Meta(ge=1)] | None = None
    iterations: Annotated[int, Meta(ge=1, le=100_000)] | None = None
    warm_up: Annotated[int, Meta(ge=0, le=100_000)] | None = None
    timeout_s: Annotated[float, Meta(ge=1)] = 300.0
    profile: Profile = Profile.AUTO
    heap: bool = False
    seconds: Annotated[int, Meta(ge=1, le=MOST_SECONDS)] | None = None
    keyword: str = ""
    last_failed: bool = False
    failed_first: bool = False
    share: Annotated[float, Meta(gt=0, le=1000)] = 1.0


class ExportTable(msgspec.Struct, frozen=True, kw_only=True):
    """`[export]`."""

    folder: Annotated[str, Meta(min_length=1)]
    formats: _Names


class WebhookTable(Webhook, frozen=True, kw_only=True):
    """`[[notify.webhook]]`."""

    template: str = "json"
    when: When = "change"


class MailTable(Mail, frozen=True, kw_only=True):
    """`[notify.mail]`."""

    template: str = ""
    html_template: str = ""
    when: When = "change"


class Tables(msgspec.Struct, frozen=True, kw_only=True):
    """Tables of the file, without the unreadable ones."""

    nightly: NightlyTable | None = None
    run: tuple[tuple[str, RunTable], ...] = ()
    """Name in messages and table, for each `[[run]]`."""
    export: ExportTable | None = None
    webhooks: tuple[tuple[str, WebhookTable], ...] = ()
    mail: MailTable | None = None


def read_tables(path: Path, problems: list[str]) -> Tables:
    """Return the tables of a file and add their errors to `problems`.

    Raises UsageError for a missing file, ConfigError for an unreadable one or invalid TOML, with the line.
    """
    data = _read(path)
    _check_keys(data, ("nightly", "run", "export", "notify"), "the file", problems, kind="table")
    notify = data.get("notify", {})
    if isinstance(notify, dict):
        _check_keys(notify, ("webhook", "mail"), "[notify]", problems, kind="table")
    else:
        problems.append("notify: expected tables [[notify.webhook]] and [notify.mail]")
        notify = {}
    if "nightly" not in data:
        problems.append("[nightly] is missing: it needs a name")
    runs = _several(RunTable, data.get("run", []), "run", problems)
    if not data.get("run"):
        problems.append("[[run]] is missing: it says what to run")
    return Tables(
        nightly=_table(NightlyTable, data["nightly"], "[nightly]", problems) if "nightly" in data else None,
        run=runs,
        export=_table(ExportTable, data["export"], "[export]", problems) if "export" in data else None,
        webhooks=_several(WebhookTable, notify.get("webhook", []), "notify.webhook", problems),
        mail=_table(MailTable, notify["mail"], "[notify.mail]", problems) if "mail" in notify else None,
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(path, "", str(error)) from None
    except FileNotFoundError:
        raise UsageError(f"{path}: no such file") from None
    except OSError as error:
        raise ConfigError(path, "", error.strerror or str(error)) from None


def _several(kind: type[_T], data: object, name: str, problems: list[str]) -> tuple[tuple[str, _T], ...]:
    """Return the readable tables `[[name]]`, each with its name in messages."""
    if not isinstance(data, list):
        problems.append(f"{name}: expected tables [[{name}]], with two brackets")
        return ()
    found = []
    for number, one in enumerate(data, start=1):
        own = one.get("name") if isinstance(one, dict) else None
        place = f"[[{name}]] {number}" + (f" ({own})" if isinstance(own, str) else "")
        table = _table(kind, one, place, problems)
        if table is not None:
            found.append((place, table))
    return tuple(found)


def _table(kind: type[_T], data: object, place: str, problems: list[str]) -> _T | None:
    """Return one table, with defaults for invalid keys; None if a required key is missing or invalid."""
    if not isinstance(data, dict):
        problems.append(f"{place}: expected a table")
        return None
    fields = {field.encode_name: field for field in msgspec.structs.fields(kind)}
    _check_keys(data, fields, place, problems)
    values: dict[str, Any] = {}
    for key, field in fields.items():
        if key not in data:
            problems += [f"{place}: {key} is missing"] * field.required
            continue
        try:
            values[field.name] = msgspec.convert(seconds_of(key, data[key]), field.type)
        except msgspec.ValidationError as error:
            # Messages show numbers alone: other values may be secrets.
            value = f" is {data[key]:g}" if isinstance(data[key], int | float) else ""
            problems.append(f"{place}: {key}{value}: {error}")
    return kind(**values) if all(field.name in values for field in fields.values() if field.required) else None


def _check_keys(data: dict[str, Any], known: Any, place: str, problems: list[str], kind: str = "key") -> None:
    problems += [f"{place}: {UnknownNameError(kind, key, known)}" for key in data if key not in known]
