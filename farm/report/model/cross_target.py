"""Results of the case of a failed job on other targets: other SoCs, and other precisions. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from farm.base.grouping import grouped
from farm.base.socs import load_socs
from farm.report.model.format import plural
from farm.report.model.summary import WORDS, JobSummary, Outcome, RunSummary, key_numbers, outcome_of
from farm.store.records import CaseResult

RED = frozenset({Outcome.FAILED, Outcome.KNOWN})
_SHOWN_NAMES = 6
_DAY_MS = 86_400_000


class TargetResult(msgspec.Struct, frozen=True):
    """Newest result of the case on one other target."""

    result: CaseResult
    outcome: Outcome
    sqnr_fp32: float | None
    """SQNR of the worst output in dB; inf when it is equal."""
    arch: str
    """HTP architecture of the SoC, `V75`; "" for a SoC without a profile."""
    where: str
    """Difference of the target in a word: the SoC or the precision."""
    link: int | None
    """Place of the job in the shown run; None for a job of another run."""
    other_test: bool
    """True when the case was changed between the two results."""

    @property
    def reason(self) -> str:
        """Return why the job did not pass; for a known issue its description."""
        return self.result.attempt.known_issue or self.result.attempt.reason


class CrossTarget(msgspec.Struct, frozen=True):
    """Newest results of the case of a failed job on other targets."""

    conclusion: str
    """Conclusion in one line: `fails on SM8450 (V69) alone, passes on SM8650`; "" without other results."""
    on_socs: tuple[TargetResult, ...]
    """Results of the same backend and precision on other SoCs."""
    here: tuple[TargetResult, ...]
    """Results of other precisions and backends on the same SoC."""

    @property
    def places(self) -> tuple[TargetResult, ...]:
        """Return the results on all other targets."""
        return self.on_socs + self.here


def cross_targets(run: RunSummary) -> dict[int, CrossTarget]:
    """Return the other results of each failed job's case, known issues included, by the job's place in the run."""
    indices = {item.job.id: item.index for item in run.jobs}
    return {item.index: _cross_target(item, run.view.id, indices) for item in run.jobs if item.outcome in RED}


def _cross_target(item: JobSummary, run_id: str, indices: Mapping[str, int]) -> CrossTarget:
    job = item.job
    on_socs: list[TargetResult] = []
    here: list[TargetResult] = []
    for result in job.elsewhere:
        other_soc = result.soc != job.soc
        kind = f" ({result.kind})" if result.kind and item.kind and result.kind != item.kind else ""
        place = TargetResult(
            result=result,
            outcome=outcome_of(result.attempt),
            sqnr_fp32=key_numbers(job, result.attempt).sqnr_fp32,
            arch=_arch(result.soc),
            where=(result.soc if other_soc else _precision(result, job.backend)) + kind,
            link=indices.get(result.job_id) if result.run_id == run_id else None,
            other_test=result.case_version != job.case_version,
        )
        (on_socs if other_soc else here).append(place)
    conclusion = "; ".join(filter(None, (_about_socs(job.soc, on_socs), _about_precisions(here))))
    return CrossTarget(conclusion, tuple(on_socs), tuple(here))


def elsewhere_line(cross: CrossTarget, now_ms: int) -> str:
    """Return the results as terminal text, by verdict: `passed on SM8550; failed on SM8450 (3 days ago)`."""
    parts = [
        f"{word} {preposition} {_names([place.where for place in places])}{_age(places, now_ms)}"
        for preposition, group in (("on", cross.on_socs), ("here in", cross.here))
        for word, places in _by_verdict(group)
    ]
    return "; ".join(parts)


def _about_socs(soc: str, places: Sequence[TargetResult]) -> str:
    failing, passing = _split(places)
    names, arch = [soc, *(place.where for place in failing)], _arch(soc)
    if not passing:
        return f"fails on {'both' if len(names) == 2 else f'all {len(names)}'} SoCs that were tried" if failing else ""
    passes = _names([place.where for place in passing])
    if not failing:
        return f"fails on {soc}{f' ({arch})' if arch else ''} alone, passes on {passes}"
    failing_archs, passing_archs = {arch, *(place.arch for place in failing)}, {place.arch for place in passing}
    if "" not in failing_archs | passing_archs and not failing_archs & passing_archs:
        return f"fails on {_names(sorted(failing_archs))}, passes on {_names(sorted(passing_archs))}"
    return f"fails on {_names(sorted(names))}, passes on {passes}"


def _about_precisions(places: Sequence[TargetResult]) -> str:
    failing, passing = ([place.where for place in part] for part in _split(places))
    if not passing:
        return "fails here in every precision that was tried" if failing else ""
    return f"passes here in {_names(passing)}" + (f", fails in {_names(failing)}" if failing else "")


def _split(places: Sequence[TargetResult]) -> list[list[TargetResult]]:
    """Return the places where the case fails, and those where it passes."""
    return [[place for place in places if place.outcome in outcomes] for outcomes in (RED, {Outcome.PASSED})]


def _by_verdict(places: Iterable[TargetResult]) -> list[tuple[str, list[TargetResult]]]:
    order = (Outcome.PASSED, Outcome.FAILED, Outcome.KNOWN, Outcome.INFRA, Outcome.SKIPPED)
    found = grouped((place.outcome, place) for place in places)
    words = WORDS | {Outcome.INFRA: "infra trouble"}
    return [(words[outcome], found[outcome]) for outcome in order if outcome in found]


def _age(places: Sequence[TargetResult], now_ms: int) -> str:
    days = {max(0, now_ms - place.result.time_ms) // _DAY_MS for place in places}
    oldest = max(days)
    return f" ({'' if len(days) == 1 else 'up to '}{plural(oldest, 'day')} ago)" if oldest else ""


def _precision(result: CaseResult, backend: str) -> str:
    return result.precision if result.backend == backend else f"{result.precision} on {result.backend}"


def _arch(soc: str) -> str:
    known = load_socs().get(soc)
    return f"V{known.htp_arch}" if known else ""


def _names(names: Sequence[str]) -> str:
    if len(names) > _SHOWN_NAMES + 1:
        return f"{', '.join(names[:_SHOWN_NAMES])} and {len(names) - _SHOWN_NAMES} more"
    return ", ".join(names)
