"""Plan of a nightly run, from nightly.toml: cells, receivers of notifications, and the forecast of `--check`."""

from __future__ import annotations

import hashlib
import math
import re
import shlex
import textwrap
import tomllib
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from farm.base.backends.registry import DEFAULT_BACKEND, find_backend
from farm.base.config.runs import Mail, Webhook, mail_problems, webhook_problems, with_files_of
from farm.base.config.toolchains import DEFAULT
from farm.base.errors import (
    ConfigError,
    FarmError,
    MissingToolError,
    NothingSelectedError,
    StoreError,
    UnknownNameError,
    UsageError,
)
from farm.base.forms import in_seconds
from farm.base.paths import beside, is_path, is_suite_path
from farm.base.socs import PRECISIONS, find_soc
from farm.base.text import one_line
from farm.base.toml_tables import seconds_of
from farm.devices.device import common_kind
from farm.devices.execution.raw import MOST_SECONDS
from farm.dispatch.nightly.render import BUILT_IN, LEAST_WIDTH, check_template
from farm.dispatch.pool.fleet import Choice
from farm.dispatch.request.request import Profile, RunRequest
from farm.dispatch.request.selection import total_seconds
from farm.report.formats import export_formats
from farm.report.model import format as fmt
from farm.store.records import Purpose

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from farm.base.config.settings import Config
    from farm.store.store import Store
    from farm.suites.suite import Job


# Plan of a nightly run, from nightly.toml: its cells, each one `farm run`, and the receivers of notifications.
#
# The tables are checked as written, and all problems of their keys are reported at once.


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


_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]{0,79}")
# Keys of a `[[run]]` that are fields of its request.
_SAME = ("precisions", "virtual", "keyword", "timeout_s", "profile", "heap", "seconds", "most_devices", "last_failed",
         "failed_first")  # fmt: skip
# Default timeout of `farm run`.
_TIMEOUT_S = 300.0


class PlannedCell(msgspec.Struct, frozen=True):
    """Cell of a nightly run: the SoCs and suites of a `[[run]]` on one backend, with one toolchain."""

    name: str
    """Name of its files, the same in every nightly run."""
    place: str
    """Table of the cell in nightly.toml."""
    request: RunRequest
    """Request without a budget, which depends on the remaining time."""
    share: float
    """Share of the remaining time, relative to the shares of the remaining cells."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Plan of a nightly run."""

    path: Path
    name: str
    budget_s: float | None
    report_dir: Path | None
    """Folder of reports; None for the state folder."""
    report_url: str
    """Address of `report_dir` for other users; empty without a web server."""
    keep: int
    """Number of nightly runs to keep."""
    debug: int
    """Most jobs of a run that newly fail by numerics and are debugged."""
    cells: tuple[PlannedCell, ...]
    formats: tuple[str, ...] = ()
    export_dir: Path | None = None
    webhooks: tuple[WebhookTable, ...] = ()
    mail: MailTable | None = None
    """Mail; file paths in it and in `webhooks` are absolute."""

    @property
    def digest(self) -> str:
        """Hash of the cells' requests: a nightly run is resumed only with the same requests."""
        return hashlib.sha256(msgspec.json.encode([(one.name, one.request) for one in self.cells])).hexdigest()


def read_plan(path: Path, config: Config) -> tuple[Plan, dict[str, tuple[Job, ...]]]:
    """Return the plan of the file, and the jobs of each cell after -k, before selection by results in the store.

    Raises UsageError for a missing file, and with all problems of the file, each with its table; ConfigError for an
    unreadable file or invalid TOML, with the line.
    """
    problems: list[str] = []
    data = _read(path)
    _check_keys(data, ("nightly", "run", "export", "notify"), "the file", problems, kind="table")
    base = path.absolute().parent
    nightly = _nightly(data, problems)
    wait_s = _seconds(nightly.wait, "[nightly]: wait", problems)
    cells: list[PlannedCell] = []
    jobs: dict[str, tuple[Job, ...]] = {}
    if not data.get("run"):
        problems.append("[[run]] is missing: it names the suites to run")
    for place, table in _several(RunTable, data.get("run", []), "run", problems):
        for cell in _cells(table, place, base, wait_s, config, problems):
            if cell.name in jobs:
                problems.append(f"{place}: another [[run]] is called {cell.name} as well: give it a name")
            jobs[cell.name] = _jobs(cell, config, problems)
            cells.append(cell)
    mail, webhooks = _notify(data.get("notify", {}), base, problems)
    export = _table(ExportTable, data["export"], "[export]", problems) if "export" in data else None
    if export is not None:
        unknown = [name for name in export.formats if name not in export_formats()]
        problems += [f"[export]: formats: {UnknownNameError('format', name, export_formats())}" for name in unknown]
    if problems:
        several = f"{len(problems)} problems:\n  " if len(problems) > 1 else ""
        raise UsageError(f"{path}: {several}" + "\n  ".join(problems))
    plan = Plan(
        path=path.absolute(),
        name=nightly.name,
        budget_s=in_seconds(nightly.budget) if nightly.budget else None,
        report_dir=beside(base, nightly.report_dir) if nightly.report_dir else None,
        report_url=nightly.report_url.rstrip("/"),
        keep=nightly.keep,
        debug=nightly.debug,
        cells=tuple(cells),
        formats=tuple(dict.fromkeys(export.formats)) if export else (),
        export_dir=beside(base, export.folder) if export else None,
        webhooks=webhooks,
        mail=mail,
    )
    return plan, jobs


def _nightly(data: dict[str, Any], problems: list[str]) -> NightlyTable:
    """Return the table [nightly], for a missing or unreadable one a valid table without a meaning."""
    table = None
    if "nightly" in data:
        table = _table(NightlyTable, data["nightly"], "[nightly]", problems)
    else:
        problems.append("[nightly] is missing: it needs a name")
    if table is None:
        return NightlyTable(name="unnamed")
    if not _NAME.fullmatch(table.name):
        problems.append(f"[nightly]: {_bad_name(table.name)}")
    if table.budget:
        _seconds(table.budget, "[nightly]: budget", problems)
    if table.report_url:
        parts = urlsplit(table.report_url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username is not None:
            # The message omits the value: a mistaken address may hold a password.
            problems.append("[nightly]: report_url: expected http://HOST/PATH or https://HOST/PATH, without a user")
    return table


def _seconds(text: str, place: str, problems: list[str]) -> float:
    seconds = 0.0 if text.strip() in ("0", "0s") and place.endswith("wait") else in_seconds(text)
    if seconds is None:
        problems.append(f"{place} is {text!r}, expected a time of at most 30 days, such as 90s, 10m, 1h30m or 2d")
    return seconds or 0.0


def _cells(
    table: RunTable, place: str, base: Path, wait_s: float, config: Config, problems: list[str]
) -> Iterator[PlannedCell]:
    """Yield one cell for each toolchain and backend; none for a table with problems."""
    before = len(problems)
    _check_run(table, place, problems)
    suites = tuple(_beside(base, name) if is_suite_path(name) else name for name in table.suites)
    toolchains = dict.fromkeys(_beside(base, name) if is_path(name) else name for name in table.toolchains)
    problems += _unknown(table, suites, toolchains, place, config)
    if len(problems) > before:
        return
    suffix = len(table.backends) > 1 or not table.name
    for toolchain, backend in product(toolchains or ("",), dict.fromkeys(table.backends)):
        parts = [table.name] if table.name else [*(Path(name).name for name in table.suites), *table.socs]
        parts += [backend] if suffix else []
        parts += [Path(toolchain).name] if len(toolchains) > 1 else []
        name = re.sub(r"[^A-Za-z0-9_.+-]", "_", "-".join(parts))[:80]
        request = RunRequest(
            socs=tuple(find_soc(name).name for name in dict.fromkeys(table.socs)),
            suites=tuple(dict.fromkeys(suites)),
            backend=backend,
            toolchain=toolchain,
            iterations=3 if table.iterations is None else table.iterations,
            warm_up=1 if table.warm_up is None else table.warm_up,
            reducible=table.iterations is None and table.warm_up is None,
            options=tuple(_option(*item) for item in table.options.items()),
            choice=Choice(table.devices, table.labels, table.heap),
            purpose=Purpose.NIGHTLY,
            confirm=True,
            wait_s=None if table.virtual else wait_s,
            **{name: getattr(table, name) for name in _SAME},
        )
        request = msgspec.structs.replace(request, command=command_of(request))
        yield PlannedCell(name, place, request, table.share)


def _check_run(table: RunTable, place: str, problems: list[str]) -> None:
    if table.name and not _NAME.fullmatch(table.name):
        problems.append(f"{place}: {_bad_name(table.name)}")
    chosen = [key for key in ("devices", "labels", "most_devices") if getattr(table, key)]
    if table.virtual and chosen:
        problems.append(f"{place}: {', '.join(chosen)}: for attached devices, not for virtual")
    if table.heap and table.warm_up is not None:
        problems.append(f"{place}: heap times nothing: leave warm_up out")
    if not math.isfinite(table.timeout_s):
        problems.append(f"{place}: timeout_s: expected a finite number")


def _unknown(
    table: RunTable, suites: tuple[str, ...], toolchains: Iterable[str], place: str, config: Config
) -> list[str]:
    """Return the problems of unknown names: SoCs, suites, backends, precisions and toolchains."""
    from farm.builds.toolchains.selection import toolchain_of
    from farm.suites.manifests import find_suites, resolve_suite

    known_suites = find_suites(config.suite_folders)
    finders: dict[str, tuple[tuple[str, ...], Callable[[str], object]]] = {
        "socs": (table.socs, find_soc),
        "suites": (suites, lambda name: resolve_suite(name, known_suites)),
        "backends": (table.backends, find_backend),
        "precisions": (table.precisions, _find_precision),
        "toolchains": (tuple(toolchains), lambda name: toolchain_of(config, name)),
    }
    found = []
    for key, (names, find) in finders.items():
        for name in names:
            try:
                find(name)
            except UsageError as error:
                found.append(f"{place}: {key}: {error}")
    return found


def _find_precision(name: str) -> None:
    if name not in PRECISIONS:
        raise UnknownNameError("precision", name, PRECISIONS)


def _bad_name(name: str) -> str:
    return f"name {name!r}: letters, digits and _ . + -, at most 80, as files have it"


def _option(name: str, value: object) -> str:
    values = value if isinstance(value, tuple) else (value,)
    return f"{name}={','.join(str(one).lower() if isinstance(one, bool) else str(one) for one in values)}"


def _jobs(cell: PlannedCell, config: Config, problems: list[str]) -> tuple[Job, ...]:
    """Return the jobs of a cell that pytest's -k selects; an empty selection is no problem of the file."""
    from farm.dispatch.request.choose import jobs_of, select

    try:
        return select(cell.request, jobs_of(config, cell.request))
    except NothingSelectedError:
        return ()
    except FarmError as error:
        problems.append(f"{cell.place}: {cell.request.backend}: {error}")
        return ()


def _notify(data: object, base: Path, problems: list[str]) -> tuple[MailTable | None, tuple[WebhookTable, ...]]:
    if not isinstance(data, dict):
        problems.append("notify: expected tables [[notify.webhook]] and [notify.mail]")
        return None, ()
    _check_keys(data, ("webhook", "mail"), "[notify]", problems, kind="table")
    webhooks = []
    for place, hook in _several(WebhookTable, data.get("webhook", []), "notify.webhook", problems):
        problems += [f"{place}: {why}" for why in webhook_problems(hook)]
        template = hook.template if hook.template in BUILT_IN else _beside(base, hook.template)
        problems += [f"{place}: template: {why}" for why in check_template(template, "json")]
        webhooks.append(msgspec.structs.replace(with_files_of(hook, partial(beside, base)), template=template))
    mail = _table(MailTable, data["mail"], "[notify.mail]", problems) if "mail" in data else None
    if mail is not None:
        problems += [f"[notify.mail]: {why}" for why in mail_problems(mail)]
        mail = msgspec.structs.replace(
            with_files_of(mail, partial(beside, base)),
            template=_beside(base, mail.template),
            html_template=_beside(base, mail.html_template),
        )
        for key, form in (("template", "text"), ("html_template", "html")):
            problems += [f"[notify.mail]: {key}: {why}" for why in check_template(getattr(mail, key), form)]
    return mail, tuple(webhooks)


def _beside(base: Path, name: str) -> str:
    return str(beside(base, name)) if name else ""


def command_of(request: RunRequest) -> str:
    """Return the equivalent `farm run`, a local run of the user who types it; quoted for a shell."""
    repeated = {
        "--soc": request.socs,
        "--suite": request.suites,
        "--precision": request.precisions,
        "--option": request.options,
        "--device": request.choice.devices,
        "--label": request.choice.labels,
    }
    words = [
        "farm",
        "run",
        *(word for option, values in repeated.items() for value in values for word in (option, value)),
    ]
    words += ["--toolchain", request.toolchain] if request.toolchain else []
    words += ["--backend", request.backend] if request.backend != DEFAULT_BACKEND else []
    words += ["--virtual", str(request.virtual)] if request.virtual else []
    words += [] if request.most_devices is None else ["--max-devices", str(request.most_devices)]
    timed = ["--iterations", str(request.iterations), "--warm-up", str(request.warm_up)]
    words += ["--heap", *([] if request.reducible else timed[:2])] if request.heap else timed
    words += [] if request.seconds is None else ["--seconds", str(request.seconds)]
    words += ["--timeout", f"{request.timeout_s:g}"] if request.timeout_s != _TIMEOUT_S else []
    words += ["--profile", str(request.profile)] if request.profile is not Profile.AUTO else []
    words += ["-k", request.keyword] if request.keyword else []
    words += [*["--lf"] * request.last_failed, *["--ff"] * request.failed_first]
    return shlex.join(words)


# Forecast of a nightly run, with its expected time: `farm nightly --check`. It creates no file.


class CellForecast(msgspec.Struct, frozen=True, kw_only=True):
    """Forecast of a cell."""

    name: str
    socs: tuple[str, ...]
    suites: tuple[str, ...]
    backend: str
    jobs: int
    virtual: int
    expected_s: float | None
    """Expected time from past runs, on one device of each SoC or on the virtual devices; None without past runs."""
    command: str
    problem: str = ""
    """Missing tools of this machine for the cell; empty for none."""


def matrix(config: Config, plan: Plan, jobs: Mapping[str, tuple[Job, ...]]) -> list[CellForecast]:
    """Return the cells with their jobs and expected time; `jobs` comes from `read_plan`."""
    from farm.store.store import open_store

    try:
        store = open_store(config.store_url, readonly=True)
    except StoreError:
        # The store does not exist yet, or cannot be read, which a run will report: a check creates nothing.
        return [_forecast(config, cell, jobs[cell.name], None) for cell in plan.cells]
    with store:
        return [_forecast(config, cell, jobs[cell.name], store) for cell in plan.cells]


def matrix_lines(name: str, rows: Sequence[CellForecast], budget_s: float | None, width: int = 80) -> list[str]:
    """Return the forecast of a nightly run as lines of text, with a paragraph for each cell."""
    width = max(width, LEAST_WIDTH)
    jobs = sum(row.jobs for row in rows)
    budget = f"within {fmt.duration(budget_s)}" if budget_s is not None else "without a budget"
    lines = [f"nightly run {name}: runs: {len(rows)}, jobs: {jobs}, {budget}"]
    for row in rows:
        on = f"virtual devices, {row.virtual} of each SoC" if row.virtual else "attached devices"
        expected = (
            "no earlier run for an estimate" if row.expected_s is None else f"about {fmt.duration(row.expected_s)}"
        )
        if row.expected_s is not None and not row.virtual:
            expected += " on one device a SoC"
        lines += ["", one_line(row.name, width)]
        for text in (
            f"{', '.join(row.socs)}; {row.backend}; {', '.join(one_line(suite) for suite in row.suites)}",
            f"{fmt.plural(row.jobs, 'job')} on {on}; {expected}",
            *([f"CANNOT RUN HERE: {one_line(row.problem)}"] if row.problem else []),
        ):
            lines += textwrap.wrap(text, width, initial_indent="  ", subsequent_indent="    ")
    return lines


def _forecast(config: Config, cell: PlannedCell, jobs: tuple[Job, ...], store: Store | None) -> CellForecast:
    from farm.builds.toolchains.selection import branch_of, toolchain_of

    request = cell.request
    branch = branch_of(config, toolchain_of(config, request.toolchain or DEFAULT))
    if store is not None and request.last_failed and jobs:
        failed = store.selection.failed_last(
            [job.id for job in jobs], _kind_of(cell, store), store.user, branch, private=False
        )
        jobs = tuple(job for job in jobs if job.id in failed) or jobs
    expected = None
    if store is not None:
        ids = [job.id for job in jobs]
        past = store.selection.expected(ids, _kind_of(cell, store), branch)
        if past:
            seconds = total_seconds(ids, past)
            per_soc: dict[str, float] = {}
            for job in jobs:
                per_soc[job.target.soc] = per_soc.get(job.target.soc, 0.0) + seconds[job.id]
            # Devices of several SoCs work side by side.
            expected = max(per_soc.values()) / max(request.virtual, 1)
    return CellForecast(
        name=cell.name,
        socs=request.socs,
        suites=request.suites,
        backend=request.backend,
        jobs=len(jobs),
        virtual=request.virtual,
        expected_s=expected,
        command=request.command,
        problem=_lacks(config, cell),
    )


def _kind_of(cell: PlannedCell, store: Store) -> str:
    """Return the kind of a cell's devices from the store: looking for the devices could start an adb server."""
    if cell.request.virtual:
        return "virtual"
    socs = {find_soc(name).name for name in cell.request.socs}
    kind = common_kind(known.kind for known in store.devices.all() if known.soc in socs and known.last_seen_ms)
    return kind if kind == "virtual" else "hardware"


def _lacks(config: Config, cell: PlannedCell) -> str:
    """Return the missing tools of this machine for a cell; empty for none."""
    from farm.dispatch.request.choose import check_machine

    try:
        check_machine(config, cell.request)
    except MissingToolError as error:
        return str(error)
    return ""
