"""Operators x precisions: the newest result for every operator that the backend can build. Pure."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import msgspec

from farm.report.model.summary import Outcome, outcome_of
from farm.results.attempt import Stage
from farm.store.records import JobResult, ListedJob

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from farm.suites.suite import Job


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

    def reasons(self) -> dict[tuple[Outcome, str], tuple[CoveredJob, ...]]:
        """Return all jobs except passed and not-run ones by state and reason, the worst first."""
        found: dict[tuple[Outcome, str], list[CoveredJob]] = {}
        for state in Outcome:
            for item in self.items:
                if item.state is state and state not in {Outcome.PASSED, Outcome.NOT_RUN}:
                    found.setdefault((state, item.reason), []).append(item)
        return {key: tuple(items) for key, items in found.items()}


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
    cases: dict[str, set[str]] = {}
    for item in items:
        for name in built[item.job_id]:
            cases.setdefault(name, set()).add(item.case)
    about: dict[str, list[CoveredJob]] = {}
    passing: dict[str, list[CoveredJob]] = {}
    for item in items:
        names = built[item.job_id]
        fewest = min((len(cases[name]) for name in names), default=0)
        # A case without known operators has a row of its own.
        for name in names or {item.case}:
            subject = not names or len(cases[name]) == fewest
            (about if subject else passing).setdefault(name if names else f"case {name}", []).append(item)

    used = dict.fromkeys(item.precision for item in items)
    # Programs compiled elsewhere may have a precision that the backend does not list.
    columns = [name for name in precisions if name in used] + [name for name in used if name not in precisions]

    def row(name: str) -> CoverageRow:
        cells = {}
        for precision in columns:
            own, others = ([i for i in part.get(name, ()) if i.precision == precision] for part in (about, passing))
            if own or others:
                cells[precision] = CoverageCell(tuple(own or others), in_passing=not own)
        return CoverageRow(name, tuple(builders.get(name, ())), cells, "" if cells else without.get(name, ""))

    return Coverage(
        soc=soc,
        backend=backend,
        precisions=tuple(columns),
        unused=tuple(precision for precision in precisions if precision not in used),
        rows=tuple(row(name) for name in sorted(builders)),
        beyond=tuple(row(name) for name in sorted((about.keys() | passing.keys()) - builders.keys())),
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
