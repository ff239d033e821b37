"""Plan of a nightly run, from nightly.toml: cells, receivers of notifications, and the forecast of `--check`."""

from __future__ import annotations

import hashlib
import math
import re
import shlex
import textwrap
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal
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
from farm.base.toml_tables import read_table
from farm.devices.device import common_kind
from farm.devices.execution.raw import MOST_SECONDS
from farm.dispatch.nightly.render import BUILT_IN, LEAST_WIDTH, SAMPLE, render
from farm.dispatch.pool.fleet import Choice
from farm.dispatch.request.profiling import Profile
from farm.dispatch.request.request import RunRequest
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


When = Literal["always", "change", "failure"]
OptionValue = str | int | bool
# Default timeout of `farm run`.
_TIMEOUT_S = 300.0
_Names = Annotated[tuple[str, ...], Meta(min_length=1)]


class NightlyTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
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


class RunTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
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
    timeout_s: float = _TIMEOUT_S
    profile: Profile = Profile.AUTO
    heap: bool = False
    seconds: Annotated[int, Meta(ge=1, le=MOST_SECONDS)] | None = None
    keyword: str = ""
    last_failed: bool = False
    failed_first: bool = False
    share: Annotated[float, Meta(gt=0, le=1000)] = 1.0


class ExportTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[export]`."""

    folder: Annotated[str, Meta(min_length=1)]
    formats: _Names


class WebhookTable(Webhook, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[[notify.webhook]]`."""

    template: str = "json"
    when: When = "change"


class MailTable(Mail, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[notify.mail]`."""

    template: str = ""
    html_template: str = ""
    when: When = "change"


class NotifyTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`[notify]`."""

    webhook: tuple[WebhookTable, ...] = ()
    mail: MailTable | None = None


class NightlyFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """nightly.toml."""

    nightly: NightlyTable
    run: tuple[RunTable, ...] = ()
    export: ExportTable | None = None
    notify: NotifyTable = NotifyTable()


_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]{0,79}")
# Keys of a `[[run]]` that are fields of its request.
_SAME = ("precisions", "virtual", "keyword", "timeout_s", "profile", "heap", "seconds", "most_devices", "last_failed",
         "failed_first")  # fmt: skip


class PlannedCell(msgspec.Struct, frozen=True):
    """Cell of a nightly run: the SoCs and suites of a `[[run]]` on one backend, with one toolchain."""

    name: str
    """Name of its files, the same in every nightly run."""
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


@contextmanager
def _at(path: Path, key: str) -> Iterator[None]:
    """Raise ConfigError with the key in the file for an error of the body."""
    try:
        yield
    except FarmError as error:
        raise ConfigError(path, key, str(error)) from None


def read_plan(path: Path, config: Config) -> tuple[Plan, dict[str, tuple[Job, ...]]]:
    """Return the plan of the file, and the jobs of each cell after -k, before selection by results in the store.

    Raises UsageError for a missing file, ConfigError for the first problem of the file, with its key or line.
    """
    try:
        file = read_table(path, NightlyFile)
    except FileNotFoundError:
        raise UsageError(f"{path}: no such file") from None
    except OSError as error:
        raise ConfigError(path, "", error.strerror or str(error)) from None
    base, nightly, export = path.absolute().parent, file.nightly, file.export
    _check_nightly(path, nightly)
    with _at(path, "nightly.wait"):
        wait_s = 0.0 if nightly.wait.strip() in ("0", "0s") else _seconds(nightly.wait)
    with _at(path, "nightly.budget"):
        budget_s = _seconds(nightly.budget) if nightly.budget else None
    if not file.run:
        raise ConfigError(path, "run", "[[run]] is missing: it names the suites to run")
    cells: list[PlannedCell] = []
    jobs: dict[str, tuple[Job, ...]] = {}
    for number, table in enumerate(file.run):
        place = f"run[{number}]" + (f" ({table.name})" if table.name else "")
        for cell in _cells(table, path, place, wait_s, config):
            if cell.name in jobs:
                raise ConfigError(path, place, f"another [[run]] is called {cell.name} as well: give it a name")
            with _at(path, f"{place}: {cell.request.backend}"):
                jobs[cell.name] = _jobs(cell, config)
            cells.append(cell)
    for name in export.formats if export is not None else ():
        if name not in export_formats():
            raise ConfigError(path, "export.formats", str(UnknownNameError("format", name, export_formats())))
    plan = Plan(
        path=path.absolute(),
        name=nightly.name,
        budget_s=budget_s,
        report_dir=beside(base, nightly.report_dir) if nightly.report_dir else None,
        report_url=nightly.report_url.rstrip("/"),
        keep=nightly.keep,
        debug=nightly.debug,
        cells=tuple(cells),
        formats=tuple(dict.fromkeys(export.formats)) if export else (),
        export_dir=beside(base, export.folder) if export else None,
        webhooks=tuple(_webhook(path, f"notify.webhook[{n}]", one) for n, one in enumerate(file.notify.webhook)),
        mail=_mail(path, file.notify.mail) if file.notify.mail is not None else None,
    )
    return plan, jobs


def _check_nightly(path: Path, table: NightlyTable) -> None:
    if not _NAME.fullmatch(table.name):
        raise ConfigError(path, "nightly", _bad_name(table.name))
    parts = urlsplit(table.report_url)
    is_address = parts.scheme in ("http", "https") and parts.hostname and parts.username is None
    if table.report_url and not is_address:
        # The message omits the value: a mistaken address may hold a password.
        problem = "expected http://HOST/PATH or https://HOST/PATH, without a user"
        raise ConfigError(path, "nightly.report_url", problem)


def _seconds(text: str) -> float:
    if (seconds := in_seconds(text)) is None:
        raise UsageError(f"is {text!r}, expected a time of at most 30 days, such as 90s, 10m, 1h30m or 2d")
    return seconds


def _cells(table: RunTable, path: Path, place: str, wait_s: float, config: Config) -> Iterator[PlannedCell]:
    """Yield one cell for each toolchain and backend."""
    base = path.absolute().parent
    with _at(path, place):
        _check_run(table)
    suites = tuple(_beside(base, name) if is_suite_path(name) else name for name in table.suites)
    toolchains = dict.fromkeys(_beside(base, name) if is_path(name) else name for name in table.toolchains)
    _check_names(table, suites, toolchains, path, place, config)
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
        yield PlannedCell(name, msgspec.structs.replace(request, command=command_of(request)), table.share)


def _check_run(table: RunTable) -> None:
    if table.name and not _NAME.fullmatch(table.name):
        raise UsageError(_bad_name(table.name))
    chosen = [key for key in ("devices", "labels", "most_devices") if getattr(table, key)]
    if table.virtual and chosen:
        raise UsageError(f"{', '.join(chosen)}: for attached devices, not for virtual")
    if table.heap and table.warm_up is not None:
        raise UsageError("heap times nothing: leave warm_up out")
    if not 1 <= table.timeout_s < math.inf:
        raise UsageError("timeout_s: expected a finite number of at least 1")


def _check_names(
    table: RunTable, suites: Iterable[str], toolchains: Iterable[str], path: Path, place: str, config: Config
) -> None:
    """Raise ConfigError for an unknown SoC, suite, backend, precision or toolchain."""
    from farm.builds.toolchains.selection import toolchain_of
    from farm.suites.manifests import find_suites, resolve_suite

    known_suites = find_suites(config.suite_folders)
    finders: dict[str, tuple[Iterable[str], Callable[[str], object]]] = {
        "socs": (table.socs, find_soc),
        "suites": (suites, lambda name: resolve_suite(name, known_suites)),
        "backends": (table.backends, find_backend),
        "precisions": (table.precisions, _find_precision),
        "toolchains": (toolchains, lambda name: toolchain_of(config, name)),
    }
    for key, (names, find) in finders.items():
        with _at(path, f"{place}: {key}"):
            for name in names:
                find(name)


def _find_precision(name: str) -> None:
    if name not in PRECISIONS:
        raise UnknownNameError("precision", name, PRECISIONS)


def _bad_name(name: str) -> str:
    return f"name {name!r}: letters, digits and _ . + -, at most 80, as files have it"


def _option(name: str, value: object) -> str:
    values = value if isinstance(value, tuple) else (value,)
    return f"{name}={','.join(str(one).lower() if isinstance(one, bool) else str(one) for one in values)}"


def _jobs(cell: PlannedCell, config: Config) -> tuple[Job, ...]:
    """Return the jobs of a cell that pytest's -k selects; an empty selection is no problem of the file."""
    from farm.dispatch.request.choose import jobs_of, select

    try:
        return select(cell.request, jobs_of(config, cell.request))
    except NothingSelectedError:
        return ()


def _webhook(path: Path, place: str, hook: WebhookTable) -> WebhookTable:
    """Return a webhook with absolute paths. Raises ConfigError."""
    base = path.absolute().parent
    for problem in webhook_problems(hook):
        raise ConfigError(path, place, problem)
    template = hook.template if hook.template in BUILT_IN else _beside(base, hook.template)
    with _at(path, f"{place}: template"):
        render(template, "json", SAMPLE)
    return msgspec.structs.replace(with_files_of(hook, partial(beside, base)), template=template)


def _mail(path: Path, mail: MailTable) -> MailTable:
    """Return the mail with absolute paths. Raises ConfigError."""
    base = path.absolute().parent
    for problem in mail_problems(mail):
        raise ConfigError(path, "notify.mail", problem)
    templates = {key: _beside(base, getattr(mail, key)) for key in ("template", "html_template")}
    for (key, template), form in zip(templates.items(), ("text", "html"), strict=True):
        with _at(path, f"notify.mail: {key}"):
            render(template, form, SAMPLE)
    return msgspec.structs.replace(with_files_of(mail, partial(beside, base)), **templates)


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
        jobs=len(jobs),
        expected_s=expected,
        problem=_lacks(config, cell),
        **{name: getattr(request, name) for name in ("socs", "suites", "backend", "virtual", "command")},
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
