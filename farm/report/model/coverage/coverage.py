"""Operators x precisions: what the newest results say of every operator that the backend can build. Pure."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import msgspec

from farm.report.model.summary import Outcome, outcome_of
from farm.results.attempt import Stage
from farm.store.records import ListedJob

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from farm.store.records import JobResult
    from farm.suites.suite import Job


WORST_FIRST = (
    Outcome.FAILED, Outcome.INFRA, Outcome.STALE, Outcome.NOT_RUN, Outcome.SKIPPED, Outcome.KNOWN, Outcome.PASSED
)  # fmt: skip
"""States of a job; stale is also a result of a case that has changed since, or older than a run that left it out."""


class CoveredJob(msgspec.Struct, frozen=True):
    """One job of the table."""

    job_id: str
    case: str
    precision: str
    state: Outcome
    reason: str
    """Why it did not pass, or is stale; empty when it passed."""
    operators: tuple[str, ...] | None
    """What the backend builds of it; None where nobody knows."""
    run_id: str = ""
    time_ms: int = 0
    kind: str = ""


class CoverageCell(msgspec.Struct, frozen=True):
    """One operator in one precision."""

    items: tuple[CoveredJob, ...]
    in_passing: bool = False
    """No job is about this operator: others have it in their programs."""

    @property
    def state(self) -> Outcome | None:
        """The worst; None where there is no job.

        An operator that is in jobs about others has passed where one of them passes: who fails among them, fails for
        what it is about.
        """
        states = {item.state for item in self.items}
        if self.in_passing and Outcome.PASSED in states:
            return Outcome.PASSED
        return next((state for state in WORST_FIRST if state in states), None)

    @property
    def count(self) -> int:
        """Jobs in this state."""
        return sum(item.state is self.state for item in self.items)


class CoverageRow(msgspec.Struct, frozen=True):
    """One builder, or what is not a builder's: an operator without one, or a case whose operators nobody knows."""

    name: str
    targets: tuple[str, ...]
    cells: dict[str, CoverageCell]
    """By precision; those with jobs."""
    without: str = ""
    """Why no case is for it."""


class MadeOfOthers(msgspec.Struct, frozen=True):
    """An ATen operator that no case has, but the operators that ExecuTorch's tests of it are made of."""

    name: str
    operators: tuple[str, ...]
    cases: tuple[str, ...]
    """One with all of the operators; where none has, one for each of them."""


class Coverage(msgspec.Struct, frozen=True):
    """The table of one SoC and backend."""

    soc: str
    backend: str
    precisions: tuple[str, ...]
    """Those that have jobs, in the order of the backend's, then others."""
    unused: tuple[str, ...]
    """Those that the backend has, and no case."""
    rows: tuple[CoverageRow, ...]
    """Every builder, by name."""
    beyond: tuple[CoverageRow, ...]
    """What cases cover beyond."""
    items: tuple[CoveredJob, ...]
    tested: tuple[str, ...] = ()
    """ATen operators that ExecuTorch's own tests name."""
    made_of_others: tuple[MadeOfOthers, ...] = ()
    """Those of them that no case has, but what they are in these tests."""
    untested: tuple[str, ...] = ()
    """Those of them that no case has in any way."""

    @property
    def counts(self) -> dict[Outcome, int]:
        """Jobs by state, every state."""
        counted = Counter(item.state for item in self.items)
        return {state: counted[state] for state in WORST_FIRST}

    @property
    def uncovered(self) -> tuple[CoverageRow, ...]:
        """Builders that no job has in its program."""
        return tuple(row for row in self.rows if not row.cells)

    def reasons(self) -> dict[tuple[Outcome, str], tuple[CoveredJob, ...]]:
        """Return what is not as it should be by state and reason, the worst first."""
        found: dict[tuple[Outcome, str], list[CoveredJob]] = {}
        for state in WORST_FIRST:
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
    """Return the jobs with what is known of them.

    `versions` are what the cases are now, by job id; a job that is not among them is never stale for that. What a
    backend builds of a case is taken from the job, else from the same case in other precisions, else from `declared`,
    by module and name of the case.
    """
    by_case: dict[tuple[str, str], dict[str, None]] = {}
    for result in results.values():
        if result.operators:
            by_case.setdefault((result.module, result.case), {}).update(dict.fromkeys(result.operators))

    def operators(key: tuple[str, str], result: JobResult | None) -> tuple[str, ...] | None:
        if result is not None and result.operators:
            return tuple(result.operators)
        return tuple(by_case[key]) if key in by_case else declared.get(key)

    return tuple(
        _item(job, operators((job.module, job.case), found), found, versions.get(job.job_id))
        for job in jobs
        for found in (results.get(job.job_id),)
    )


def coverage(
    soc: str,
    backend: str,
    precisions: Sequence[str],
    items: Sequence[CoveredJob],
    builders: Mapping[str, Sequence[str]],
    without: Mapping[str, str],
) -> Coverage:
    """Return the table; `builders` and their operators, `without` the reasons of those that no case is for.

    A job is counted in the row of what it is about: of the operators in its program, the one that the fewest cases
    have. So a convolution that fails is not held against the transpositions around it.
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
        # What none is built of, or nobody knows, has a row of its own.
        for name in names or {item.case}:
            subject = not names or len(cases[name]) == fewest
            (about if subject else passing).setdefault(name if names else f"case {name}", []).append(item)

    used = dict.fromkeys(item.precision for item in items)
    # A program that was compiled elsewhere has a precision that is none of the backend's.
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
    """Return those of the operators `names`, which no case has, that are others in their tests, each in a case.

    `tests` has the operators of the tests of each name, `cases` those of each case.
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


def _item(
    job: ListedJob, operators: tuple[str, ...] | None, result: JobResult | None, version: str | None
) -> CoveredJob:
    if result is None:
        return CoveredJob(job.job_id, job.case, job.precision, Outcome.NOT_RUN, "", operators)
    state, reason = _state(result, version)
    found = result.result
    return CoveredJob(
        job.job_id, job.case, job.precision, state, reason, operators, found.run_id, found.time_ms, found.kind
    )


def _state(result: JobResult, version: str | None) -> tuple[Outcome, str]:
    attempt = result.result.attempt
    outcome = outcome_of(attempt)
    was = "was a known issue" if outcome is Outcome.KNOWN else outcome.value
    if result.newer_run:
        return Outcome.STALE, f"{was}, but a newer run did not come to it"
    if version is not None and version != result.result.case_version:
        return Outcome.STALE, f"{was}, but the case has changed since"
    reason = attempt.known_issue or attempt.reason
    if attempt.verdict != "passed" and attempt.stage is Stage.BUILD:
        reason = f"does not compile: {reason}"
    return outcome, reason
