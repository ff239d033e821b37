"""The first bad run between a good one and a bad one: bundles of the runs between are run again, few of them."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING

import msgspec

from farm.base.errors import UsageError
from farm.base.interrupts import InterruptHandler
from farm.numbers.regressions.confirm_job import PairsRequest, bench_for, choose_results, require_bundles
from farm.numbers.regressions.paired_test import Compared, Probe, compare, first_bad, series_of, worse
from farm.replay.repro import differences
from farm.replay.stored_result import StoredResult, results_before
from farm.results.analysis.confirmation import Answer
from farm.results.analysis.first_bad import MOST_PROBES, Bracket

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from farm.base.config.settings import Config
    from farm.results.analysis.scale import Series
    from farm.store.store import Store

logger = logging.getLogger(__name__)


class BisectOutcome(msgspec.Struct, frozen=True):
    """Position of a step."""

    runs: tuple[StoredResult, ...]
    """The comparable ones, oldest first: the first is the good one, the last the bad one."""
    values: tuple[float, ...]
    """Recorded value of each run; NaN for none."""
    left_out: int
    """Runs between them whose case is another test."""
    device: str
    """Serial."""
    kind: str
    """`virtual` or `hardware`."""
    whole: Compared
    """The bad run's bundle against the good run's."""
    probes: tuple[Probe, ...]
    bracket: Bracket
    """Bounds in `runs`; all runs for an unconfirmed step."""

    @property
    def found(self) -> bool:
        """True if a step was confirmed."""
        return self.whole.confirmation.answer is Answer.CONFIRMED

    @property
    def last_good(self) -> StoredResult:
        """The newest run that is known to be good."""
        return self.runs[self.bracket.good]

    @property
    def first_bad(self) -> StoredResult:
        """The oldest run that is known to be bad."""
        return self.runs[self.bracket.bad]

    @property
    def differences(self) -> dict[str, tuple[str, str]]:
        """Facts that are not the same in these two, good and bad."""
        return differences(self.last_good.run.fingerprint, self.first_bad.run.fingerprint)

    @property
    def reason(self) -> str:
        """Reason of a range instead of a single run; empty for a single run."""
        between = range(self.bracket.good + 1, self.bracket.bad)
        reasons = {probe.number: probe.reason for probe in self.probes}
        unknown = [f"{self.runs[number].run.id}: {reasons[number]}" for number in between if number in reasons]
        rest = len(between) - len(unknown)
        if rest:
            unknown.append(f"{rest} more that were not looked at, as {MOST_PROBES} old bundles are enough")
        return "; ".join(unknown)


def find_ends(store: Store, pattern: str, good: str, bad: str) -> tuple[StoredResult, StoredResult]:
    """Return the results of the two runs. Raises UnknownNameError, UsageError where they cannot be compared."""
    old, new = choose_results(store, pattern, good, bad)
    if old.run.id == new.run.id:
        raise UsageError(f"run {old.run.id} is both ends: name a good run that is older than the bad one")
    return old, new


def bisect(
    config: Config,
    store: Store,
    good: StoredResult,
    bad: StoredResult,
    request: PairsRequest,
    metric: str = "",
    on_probe: Callable[[StoredResult, Probe], None] = lambda _past, _probe: None,
) -> BisectOutcome:
    """Confirm the step from `good` to `bad`, and find the first bad run between them; `on_probe` gets each probe.

    Nothing is recorded. Raises as `confirm_job`.
    """
    series, *_ = series_of(good, bad, [metric] if metric else ())
    between = [one for one in _between(store, good, bad) if one.kind == good.kind]
    same = [one for one in between if one.view.case_version == good.view.case_version]
    runs = (good, *same, bad)
    values = tuple(_value(one, series) for one in runs)
    probes: list[Probe] = []

    def keep(probe: Probe) -> None:
        probes.append(probe)
        on_probe(runs[probe.number], probe)

    with InterruptHandler(), bench_for(config, store, bad, request) as bench:
        require_bundles(config, store, bench, (good, bad))
        if good.attempt.bundle_key == bad.attempt.bundle_key:
            logger.info(
                "both ends have the same program, in which there can be no step: 'farm perf confirm' swaps what differs"
            )
        logger.info("measuring the whole step on %s (%s)", bench.device.serial, bench.device.kind)
        [whole] = compare(bench, [worse(series)], good, bad, request.pairs, request.inferences)
        bracket = Bracket(0, len(runs) - 1)
        if whole.confirmation.answer is Answer.CONFIRMED:
            bracket = first_bad(
                bench, series, runs, values, bracket, whole.confirmation.change, request.pairs, request.inferences,
                on_probe=keep,
            )  # fmt: skip
        return BisectOutcome(
            runs,
            values,
            len(between) - len(same),
            bench.device.serial,
            bench.device.kind,
            whole,
            tuple(probes),
            bracket,
        )


def _between(store: Store, good: StoredResult, bad: StoredResult) -> Sequence[StoredResult]:
    """Return the results of the job in runs between two, oldest first."""
    found: list[StoredResult] = []
    for one in results_before(store, bad):
        if (one.run.started_ms, one.run.id) <= (good.run.started_ms, good.run.id):
            break
        found.append(one)
    return found[::-1]


def _value(past: StoredResult, series: Series) -> float:
    value = next((one.value for one in past.attempt.measurements if one.metric == series.metric), None)
    return math.nan if value is None else value
