"""Coverage of a backend's operators by suites: the newest result of each operator and precision."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from farm.base.backends.registry import runs_on_cpu
from farm.base.errors import IllegalTargetError, UsageError
from farm.base.grouping import grouped
from farm.base.socs import check_backend, find_soc
from farm.report.model import format as fmt
from farm.report.model.summary import Outcome, outcome_of
from farm.results.attempt import Stage
from farm.store.records import JobResult, ListedJob
from farm.store.rows import case_versions
from farm.store.store import Store
from farm.suites.manifests import find_suites, resolve_suite
from farm.suites.op_builders import installed_builders, operators_in_tests, suite_operators
from farm.suites.suite import Job, Suite, plan

# Operators x precisions: the newest result for every operator that the backend can build. Pure.


class CoveredJob(msgspec.Struct, frozen=True):
    """Job of the table."""

    job_id: str
    case: str
    precision: str
    state: Outcome
    reason: str
    """Reason why the job did not pass or its result is outdated; "" when it passed."""
    operators: tuple[str, ...] | None
    """Operators that the backend builds for the job; None when they are not known."""
    run_id: str = ""
    time_ms: int = 0
    kind: str = ""


class CoverageCell(msgspec.Struct, frozen=True):
    """Jobs of one operator in one precision."""

    items: tuple[CoveredJob, ...]
    in_passing: bool = False
    """True when the jobs are about other operators and only contain this one."""

    @property
    def state(self) -> Outcome | None:
        """Return the worst state of the jobs; None without a job.

        If jobs only contain the operator, a pass of any of them decides: their failures concern the operators they
        test.
        """
        states = {item.state for item in self.items}
        if self.in_passing and Outcome.PASSED in states:
            return Outcome.PASSED
        return next((state for state in Outcome if state in states), None)

    @property
    def count(self) -> int:
        """Return the number of jobs in this state."""
        return sum(item.state is self.state for item in self.items)


class CoverageRow(msgspec.Struct, frozen=True):
    """Row of a builder, of an operator without a builder, or of a case whose operators are not known."""

    name: str
    targets: tuple[str, ...]
    cells: dict[str, CoverageCell]
    """Cells by precision; precisions without a job are absent."""
    without: str = ""
    """Reason why no case tests the builder."""


class MadeOfOthers(msgspec.Struct, frozen=True):
    """ATen operator without a case, whose tests in ExecuTorch consist of other operators."""

    name: str
    operators: tuple[str, ...]
    cases: tuple[str, ...]
    """Smallest case with all of the operators, or a case for each operator."""


class Coverage(msgspec.Struct, frozen=True):
    """Table of one SoC and backend."""

    soc: str
    backend: str
    precisions: tuple[str, ...]
    """Precisions with jobs, in the order of the backend, then other precisions."""
    unused: tuple[str, ...]
    """Precisions of the backend without a case."""
    rows: tuple[CoverageRow, ...]
    """Rows of every builder, by name."""
    beyond: tuple[CoverageRow, ...]
    """Rows of cases beyond the builders."""
    items: tuple[CoveredJob, ...]
    tested: tuple[str, ...] = ()
    """ATen operators that ExecuTorch's own tests name."""
    made_of_others: tuple[MadeOfOthers, ...] = ()
    """Tested operators without a case, whose tests consist of operators with cases."""
    untested: tuple[str, ...] = ()
    """Tested operators without a case in any way."""

    @property
    def counts(self) -> dict[Outcome, int]:
        """Return the number of jobs by state, for every state."""
        counted = Counter(item.state for item in self.items)
        return {state: counted[state] for state in Outcome}

    @property
    def uncovered(self) -> tuple[CoverageRow, ...]:
        """Return the builders that are in the program of no job."""
        return tuple(row for row in self.rows if not row.cells)

    def reasons(self) -> dict[tuple[Outcome, str], list[CoveredJob]]:
        """Return all jobs except passed and not-run ones by state and reason, the worst first."""
        shown = [state for state in Outcome if state not in {Outcome.PASSED, Outcome.NOT_RUN}]
        return grouped(((state, item.reason), item) for state in shown for item in self.items if item.state is state)


def listed(job: Job) -> ListedJob:
    """Return a job as a table lists it."""
    return ListedJob(job.id, job.case.module, job.case.name, job.target.precision)


def items_of(
    jobs: Iterable[ListedJob],
    results: Mapping[str, JobResult],
    versions: Mapping[str, str],
    declared: Mapping[tuple[str, str], tuple[str, ...]],
) -> tuple[CoveredJob, ...]:
    """Return the jobs with their newest results.

    `versions` are the current versions of the cases, by job id; a job without one is not checked for a change. The
    operators of a case come from the job, else from the same case in other precisions, else from `declared`, by module
    and name of the case.
    """
    by_case: dict[tuple[str, str], dict[str, None]] = {}
    for result in results.values():
        if result.operators:
            by_case.setdefault((result.module, result.case), {}).update(dict.fromkeys(result.operators))
    items = []
    for job in jobs:
        found, key = results.get(job.job_id), (job.module, job.case)
        known = tuple(by_case[key]) if key in by_case else declared.get(key)
        if found and found.operators:
            known = tuple(found.operators)
        if found is None:
            items.append(CoveredJob(job.job_id, job.case, job.precision, Outcome.NOT_RUN, "", known))
            continue
        (state, reason), one = _state(found, versions.get(job.job_id)), found.result
        items.append(
            CoveredJob(job.job_id, job.case, job.precision, state, reason, known, one.run_id, one.time_ms, one.kind)
        )
    return tuple(items)


def coverage(
    soc: str,
    backend: str,
    precisions: Sequence[str],
    items: Sequence[CoveredJob],
    builders: Mapping[str, Sequence[str]],
    without: Mapping[str, str],
) -> Coverage:
    """Return the table; `builders` maps names to operators, `without` has the reasons for builders without a case.

    A job counts for its subject: the operator of its program with the fewest cases. So a failing convolution is not
    held against the transpositions around it.
    """
    builder_of = {target: name for name, targets in builders.items() for target in targets}
    built = {item.job_id: {builder_of.get(name, name) for name in item.operators or ()} for item in items}
    cases = {name: set(own) for name, own in grouped((name, i.case) for i in items for name in built[i.job_id]).items()}
    about: dict[tuple[str, str], list[CoveredJob]] = {}
    passing: dict[tuple[str, str], list[CoveredJob]] = {}
    for item in items:
        names = built[item.job_id]
        fewest = min((len(cases[name]) for name in names), default=0)
        # A case without known operators has a row of its own.
        for name in names or {f"case {item.case}"}:
            subject = not names or len(cases[name]) == fewest
            (about if subject else passing).setdefault((name, item.precision), []).append(item)
    used = dict.fromkeys(item.precision for item in items)
    # Programs compiled elsewhere may have a precision that the backend does not list.
    columns = [name for name in precisions if name in used] + [name for name in used if name not in precisions]

    def row(name: str) -> CoverageRow:
        cells = {}
        for precision in columns:
            own = about.get((name, precision), [])
            if jobs := own or passing.get((name, precision)):
                cells[precision] = CoverageCell(tuple(jobs), in_passing=not own)
        return CoverageRow(name, tuple(builders.get(name, ())), cells, "" if cells else without.get(name, ""))

    return Coverage(
        soc=soc,
        backend=backend,
        precisions=tuple(columns),
        unused=tuple(precision for precision in precisions if precision not in used),
        rows=tuple(row(name) for name in sorted(builders)),
        beyond=tuple(row(name) for name in sorted({name for name, _ in (*about, *passing)} - builders.keys())),
        items=tuple(items),
    )


def made_of_others(
    names: Iterable[str], tests: Mapping[str, Sequence[str]], cases: Mapping[str, Collection[str]]
) -> tuple[MadeOfOthers, ...]:
    """Return the operators among `names` whose tests consist of other operators, each of them in a case.

    `names` are operators without a case; `tests` has the operators of each name's tests, `cases` the operators of each
    case.
    """
    smallest_first = sorted(cases, key=lambda case: (len(cases[case]), case))
    found = []
    for name in names:
        others = tuple(operator for operator in tests.get(name, ()) if operator != name)
        having = [next((case for case in smallest_first if other in cases[case]), "") for other in others]
        whole = next((case for case in smallest_first if set(others) <= set(cases[case])), "")
        if others and all(having):
            found.append(MadeOfOthers(name, others, (whole,) if whole else tuple(dict.fromkeys(having))))
    return tuple(found)


def _state(result: JobResult, version: str | None) -> tuple[Outcome, str]:
    attempt = result.result.attempt
    outcome = outcome_of(attempt)
    was = "was a known issue" if outcome is Outcome.KNOWN else outcome.value
    if result.newer_run:
        return Outcome.OUTDATED, f"{was}, but a newer run did not come to it"
    if version is not None and version != result.result.case_version:
        return Outcome.OUTDATED, f"{was}, but the case has changed since"
    reason = attempt.known_issue or attempt.reason
    if attempt.verdict != "passed" and attempt.stage is Stage.BUILD:
        reason = f"does not compile: {reason}"
    return outcome, reason


# `farm jobs coverage`: suites, runs and the installed ExecuTorch -> table operator x precision.


# Suites of single operators.
_USUAL = ("quantized_ops", "fp_ops")


def read_coverage(
    store: Store,
    folders: Sequence[Path],
    soc_name: str | None,
    backend: str,
    names: Sequence[str],
    refs: Sequence[str],
    branch: str | None = None,
) -> tuple[Coverage, list[str]]:
    """Return the table of a SoC and backend, and the facts that its results depend on.

    `names` are suites, `refs` runs. Without runs the table has the newest result of every job in a branch; without
    suites it covers the suites of the runs, or of single operators. Without `soc_name` the SoC is the only one with
    jobs in these. `branch` has the meaning of `StatusReader.branch_to_show`. Raises UsageError for unknown names, and
    MissingToolError without ExecuTorch.
    """
    if runs_on_cpu(backend):
        raise IllegalTargetError(f"{backend} has none of the operators of ExecuTorch's Qualcomm backend: name another")
    run_ids = [store.runs.resolve(ref) for ref in refs] or None
    soc = find_soc(soc_name or _only_soc(store, folders, backend, names, run_ids or ()))
    precisions = check_backend(soc, backend).precisions
    planned = store.runs.planned_jobs(run_ids, soc.name, backend) if run_ids else []
    if run_ids and not planned:
        raise UsageError(f"{', '.join(refs)}: no job for {soc.name} and {backend}: name another run, SoC or backend")
    suites = _suites(folders, names, backend, planned)
    if names:
        planned = [job for job in planned if _suite_of(job) in {suite.name for suite in suites}]
    jobs: tuple[Job, ...] = plan(suites, [soc], backend) if suites else ()
    chosen = store.status.branch_to_show(branch)
    shown = {job.job_id: job for job in (*map(listed, jobs), *planned)}
    results = {found.result.job_id: found for found in store.status.job_results(shown, run_ids, chosen)}
    tools = store.history.fingerprints(found.fingerprint for found in results.values())
    declared: dict[tuple[str, str], tuple[str, ...]] = {}
    without: dict[str, str] = {}
    aten: dict[str, tuple[str, ...]] = {}
    tests: dict[str, tuple[str, ...]] = {}
    for folder, cases in grouped((job.case.folder, job.case) for job in jobs).items():
        declared_by = suite_operators(Path(folder))
        without |= declared_by.without
        modules = {case.name: case.module for case in cases}
        aten |= {name: operators for name, operators in declared_by.aten.items() if name in modules}
        tests |= declared_by.tests
        declared |= {(modules[name], name): found for name, found in declared_by.cases.items() if name in modules}
    # A named run shows its own results, even if the case has changed since.
    items = items_of(shown.values(), results, {} if run_ids else case_versions(jobs), declared)
    table = coverage(soc.name, backend, precisions, items, installed_builders(), without)
    tested = operators_in_tests()
    missing = sorted(set(tested).difference(*aten.values()))
    elsewhere = made_of_others(missing, tests, aten)
    untested = tuple(name for name in missing if name not in {found.name for found in elsewhere})
    table = msgspec.structs.replace(table, tested=tested, made_of_others=elsewhere, untested=untested)
    about = facts(table.items, tools.values())
    return table, [*about, f"branch {chosen}"] if chosen and not run_ids else about


def _only_soc(store: Store, folders: Sequence[Path], backend: str, names: Sequence[str], run_ids: Sequence[str]) -> str:
    """Return the only SoC with jobs in the runs, else in the suites. Raises UsageError for none or several."""
    if run_ids:
        jobs = (job for run_id in run_ids for job in store.runs.view(run_id).jobs)
        found = sorted({job.soc for job in jobs if job.backend == backend})
    else:
        known = find_suites(folders)
        found = store.history.socs([resolve_suite(name, known).name for name in names] or _USUAL)
    if len(found) == 1:
        return found[0]
    there = f"there are results on {', '.join(found)}" if found else "there is no result on any SoC"
    raise UsageError(f"name the SoC with --soc: {there}")


def facts(items: Iterable[CoveredJob], fingerprints: Collection[Mapping[str, str]]) -> list[str]:
    """Return the facts that the results of a table depend on: tools, kinds of devices, dates."""
    tried = [item for item in items if item.run_id]
    if not tried:
        return ["no result yet"]
    tools = [
        f"{label} {', '.join(sorted(versions))}"
        for name, label in (("executorch", "ExecuTorch"), ("qnn", "QNN"))
        if (versions := {facts[name] for facts in fingerprints if name in facts})
    ]
    kinds = {item.kind for item in tried} - {""}
    where = {"virtual": "on VIRTUAL devices, Qualcomm's HTP simulator", "hardware": "on hardware"}
    days = sorted({fmt.day(item.time_ms) for item in tried})
    results = f"{len(tried)} results of {fmt.plural(len({item.run_id for item in tried}), 'run')}"
    places = " and ".join(where.get(kind, kind) for kind in sorted(kinds)) or "without a device"
    return [", ".join([results, places, *tools, days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"])]


def _suites(folders: Sequence[Path], names: Sequence[str], backend: str, planned: Sequence[ListedJob]) -> list[Suite]:
    """Return the named suites, else the suites of planned jobs, else the usual ones."""
    known = find_suites(folders)
    if names:
        return [resolve_suite(name, known) for name in dict.fromkeys(names)]
    # A suite that a run named by its path may be anywhere or deleted; its jobs are in the store.
    wanted = dict.fromkeys(map(_suite_of, planned)) or dict.fromkeys(_USUAL)
    found = [resolve_suite(name, known) for name in wanted if name in known]
    usable = [suite for suite in found if backend in suite.backends]
    if not usable and not planned:
        raise UsageError(f"no suite of operators is made for {backend}: name one with --suite (farm suites lists them)")
    return usable


def _suite_of(job: ListedJob) -> str:
    return job.job_id.partition("/")[0]
