"""Results of a case in the store -> limits for its manifest: `farm suites tune`."""

from __future__ import annotations

import math
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from farm.base.backends.registry import runs_on_cpu
from farm.base.errors import NoHistoryError, UnknownNameError, UsageError
from farm.base.socs import PRECISIONS, READY
from farm.dispatch.request.choose import find_case, known_suites
from farm.results.analysis.tolerances import MeasuredOutput, SuggestedLimit, suggest_limits
from farm.results.attempt import Attempt, Verdict
from farm.store.rows import case_versions
from farm.suites.figures import COMPARED, REFERENCES
from farm.suites.options import MANIFEST
from farm.suites.suite import Case, Job, Target

if TYPE_CHECKING:
    from collections.abc import Iterator

    from farm.base.config.settings import Config
    from farm.store.records import JobView, RunView
    from farm.store.store import Store


class TunedPrecision(msgspec.Struct, frozen=True, kw_only=True):
    """Suggestion for a precision."""

    precision: str
    places: tuple[str, ...]
    """Targets and devices of the measurements."""
    limits: tuple[SuggestedLimit, ...]
    written: dict[str, dict[str, float]]
    """All limits that are to be in force, by reference."""
    changes: bool
    """True if the suggestion differs from the limits in force."""


class Tuning(msgspec.Struct, frozen=True, kw_only=True):
    """Suggestions for a case, and the omitted precisions."""

    manifest: str
    case: str
    precisions: tuple[TunedPrecision, ...]
    left_out: tuple[str, ...]


class _Measured(NamedTuple):
    view: JobView
    run: RunView
    attempt: Attempt

    @property
    def place(self) -> str:
        view = self.view
        kinds = {device.serial: device.kind for device in self.run.devices}
        options = "".join(f"-{name}={value}" for name, value in sorted(view.options.items()))
        return f"{view.soc}-{view.backend}{options}, {kinds.get(self.attempt.device, 'device')} (run {self.run.id})"


def tune(config: Config, store: Store, name: str, run: str | None) -> Tuning:
    """Return the limits that the results of the case `name` suggest: of `run`, or without it the newest of each job.

    Raises UsageError for a case whose limits are another suite's, or that has no result that can be used, with why.
    """
    manifest, case, suite = _find(config, name)
    left_out: list[str] = []
    measured = list(_measured(store, run, suite, case, left_out))
    if not measured:
        why = f": {'; '.join(left_out)}" if left_out else ""
        raise NoHistoryError(
            f"{name} has no result to take limits from{why}: run it first: "
            f"{shlex.join(['farm', 'run', '--suite', name.rpartition('/')[0], '-k', case.name])} --soc SOC"
        )
    had = {one.view.precision for one in measured}
    tuned = tuple(_tuned(case, one, measured) for one in (*PRECISIONS, READY) if one in had)
    return Tuning(manifest=str(manifest), case=case.name, precisions=tuned, left_out=tuple(left_out))


def _find(config: Config, name: str) -> tuple[Path, Case, str]:
    name = name.rstrip("/") or name
    suite_name, slash, case_name = name.rpartition("/")
    if not slash or not suite_name or "[" in name:
        raise UsageError(f"{name!r} names no case: expected suite/case, as in my_suite/residual")
    if (Path(name) / MANIFEST).is_file() and not (Path(suite_name) / MANIFEST).is_file():
        raise UsageError(f"{name} is a suite: name a case of it, as in {name}/CASE")
    suite, case = find_case(suite_name, case_name, known_suites(config, suite_name))
    manifest = Path(suite.path)
    if Path(case.folder) != manifest.resolve().parent:
        source = Path(case.folder).name
        raise UsageError(f"{suite.name} takes {case_name} from {source}, with its limits: tune {source}/{case_name}")
    return manifest, case, suite.name


def _measured(store: Store, run: str | None, suite: str, case: Case, left_out: list[str]) -> Iterator[_Measured]:
    name = f"{suite}/{case.name}"
    run_id = None if run is None else store.runs.resolve(run)
    try:
        names = store.history.job_names(name)
    except UnknownNameError:
        # The suite has the case, and no run has.
        return
    runs = store.history.newest_runs(name) if run_id is None else dict.fromkeys(names, run_id)
    views = {run_id: store.runs.view(run_id) for run_id in dict.fromkeys(runs.values())}
    for job_id, run_id in runs.items():
        for view in (one for one in views[run_id].jobs if one.id == job_id):
            if problem := _unusable(view, case):
                left_out.append(f"{job_id} of run {run_id}: {problem}")
                continue
            usable = [one for one in view.attempts if one.comparisons and one.verdict in _JUDGED]
            if not usable:
                left_out.append(f"{job_id} of run {run_id}: there are no outputs that were compared")
            yield from (_Measured(view, views[run_id], attempt) for attempt in usable)


_JUDGED = (Verdict.PASSED, Verdict.FAILED)


def _unusable(view: JobView, case: Case) -> str:
    """Return why limits are not taken from a job; "" where they are."""
    if runs_on_cpu(view.backend) and view.precision not in case.tolerances:
        return f"{view.precision} has a default limit"
    job = Job(case, Target(view.soc, view.backend, view.precision, tuple(sorted(view.options.items()))))
    if view.case_version and view.case_version != case_versions([job])[job.id]:
        return "the case, or its code, has changed since"
    if any(attempt.known_issue for attempt in view.attempts):
        return "it has a known issue there, and no limit is made for that"
    return ""


def _tuned(case: Case, precision: str, measured: list[_Measured]) -> TunedPrecision:
    rows = [one for one in measured if one.view.precision == precision]
    tolerance = case.tolerance(precision)
    in_force = {reference: getattr(tolerance, reference) for reference in REFERENCES}
    observations = [one for row in rows for one in _observed(row.attempt, row.place)]
    try:
        limits = suggest_limits(observations, in_force)
    except ValueError as error:
        raise UsageError(f"{case.suite}/{case.name} at {precision}: {error}") from None
    suggested = {(one.reference, one.figure): one.written for one in limits}
    written = {}
    for reference, one in in_force.items():
        values = {
            figure.name: suggested.get((reference, figure.name), getattr(one, figure.name)) for figure in COMPARED
        }
        if figures := {name: value for name, value in values.items() if value is not None and math.isfinite(value)}:
            written[reference] = figures
    return TunedPrecision(
        precision=precision,
        places=tuple(dict.fromkeys(row.place for row in rows)),
        limits=tuple(limits),
        written=written,
        changes=any(getattr(in_force[reference], name) != value for (reference, name), value in suggested.items()),
    )


def _observed(attempt: Attempt, place: str) -> Iterator[MeasuredOutput]:
    """Yield every output against every reference: each sample where it is kept, else the worst of them."""
    samples = {one.metric: one.samples for one in attempt.measurements}
    for comparison in attempt.comparisons:
        figures = {}
        for figure in COMPARED:
            value = getattr(comparison, figure.name, None)
            metric = f"{figure.word}_{comparison.reference}[{comparison.output}]"
            # Figures without a column are measurements alone.
            if kept := samples.get(metric, () if value is None else (value,)):
                figures[figure.name] = kept
        yield MeasuredOutput(place, comparison.reference, figures)
