"""Stored results of a job compared on one device: two of them with the likely cause, and the first bad run."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import takewhile

import msgspec

from farm.base.config.settings import Config
from farm.base.errors import NoDeviceError, NoHistoryError, UnknownNameError, UsageError
from farm.base.interrupts import InterruptHandler
from farm.devices.adb.protocol import named_device
from farm.dispatch.pool.fleet import Choice
from farm.numbers.regressions.interleaved_ab import InterleavedBench, Turn
from farm.numbers.regressions.paired_test import (
    Attribution,
    Compared,
    Probe,
    compare,
    first_bad,
    plan_swaps,
    series_of,
    swap_factors,
    worse,
)
from farm.replay.repro import differences
from farm.replay.stored_result import StoredResult, find_job, find_made_bundle, find_stored_result, results_before
from farm.results.analysis.attribution import MOST_PROBES, Bracket
from farm.results.analysis.confirmation import INFERENCES, PAIRS, Answer
from farm.results.analysis.statistics import Series
from farm.store.store import Store

# Comparison of two results of a job on one device: choice of results and device, and attribution of the change.


logger = logging.getLogger(__name__)

# Most results searched for one with another bundle.
_MOST_BACK = 50


class PairsRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Device and number of pairs for a comparison of two results."""

    virtual: bool = False
    device: str = ""
    """Name, serial or id of an attached device; empty for the new run's device, or any of its SoC and kind."""
    pairs: int = PAIRS
    inferences: int = INFERENCES
    least_inferences: int = 0
    """Inferences named by the user; 0 for none, so that a runner with files per inference may make fewer."""
    command: str = ""


class ConfirmOutcome(msgspec.Struct, frozen=True):
    """Outcome of pairs of two results' bundles."""

    good: StoredResult
    new: StoredResult
    device: str
    """Serial."""
    kind: str
    """`virtual` or `hardware`."""
    fence: tuple[str, int] | None
    """Id of the device and the fence of the lease that it was measured under; None for a device of its own."""
    compared: tuple[Compared, ...]
    differences: dict[str, tuple[str, str]]
    """Facts that are not the same in both runs, good and new."""
    attribution: Attribution | None
    """Attribution of the first change; None for no change."""
    turns: tuple[Turn, ...]
    """All that was measured."""

    @property
    def same_bundle(self) -> bool:
        """True for equal programs, so that only runtime, SDK or the date can be the cause."""
        return self.good.attempt.bundle_key == self.new.attempt.bundle_key

    @property
    def confirmed(self) -> bool:
        """True if a number got worse."""
        whole = self.attribution is not None and self.attribution.whole.answer is Answer.CONFIRMED
        return whole or any(one.confirmation.answer is Answer.CONFIRMED for one in self.compared)


def choose_results(store: Store, pattern: str, good: str | None, bad: str | None) -> tuple[StoredResult, StoredResult]:
    """Return the results to compare: of the runs that are named, else the newest and the last of another bundle.

    Raises UnknownNameError, and UsageError where there are no two that can be compared, with the reason.
    """
    new = find_stored_result(store, pattern, bad)
    if good is not None:
        old = find_stored_result(store, new.view.id, good)
        require_comparable(old, new)
        return old, new
    nearest: StoredResult | None = None
    for number, one in enumerate(results_before(store, new)):
        if number == _MOST_BACK or one.view.case_version != new.view.case_version:
            break
        if not one.attempt.measurements:
            continue
        nearest = nearest or one
        if one.attempt.bundle_key != new.attempt.bundle_key:
            return one, new
    if nearest is None:
        raise NoHistoryError(
            f"{new.view.id} has no result before run {new.run.id} that can be compared with it (same version of the "
            f"case, {new.kind} device): name one with --good"
        )
    return nearest, new


def require_comparable(good: StoredResult, new: StoredResult) -> None:
    """Raise UsageError unless `good` is the older one and both are numbers of the same test on the same kind."""
    if good.place > new.place:
        raise UsageError(f"run {good.run.id} is newer than run {new.run.id}: the good run is the older one, swap them")
    if good.kind != new.kind:
        raise UsageError(
            f"run {good.run.id} was on a {good.kind} device and run {new.run.id} on a {new.kind} one: their numbers "
            "are not compared, name two runs of one kind"
        )
    if good.view.case_version != new.view.case_version:
        raise UsageError(
            f"{new.view.id} is another test in run {new.run.id} than in run {good.run.id}: its case changed (version "
            f"{good.view.case_version[:12]}, now {new.view.case_version[:12]}), name runs on one side of that"
        )


@contextmanager
def bench_for(
    config: Config, store: Store, past: StoredResult, request: PairsRequest, until_s: float = math.inf
) -> Iterator[InterleavedBench]:
    """Yield a bench on a device of the SoC and the kind that a result is of; `until_s` as in `InterleavedBench`.

    Raises NoDeviceError, UnknownNameError, and UsageError for a device of another kind.
    """
    virtual = request.virtual or (past.kind == "virtual" and not request.device)
    if virtual and past.kind != "virtual":
        raise UsageError(f"run {past.run.id} was on hardware, and a simulator cannot repeat it: leave --virtual out")
    job = find_job(config, past)
    # The device of a past run is no name on the command line.
    wishes = [request.device or ("" if named_device(os.environ) else past.attempt.device)]
    if wishes[0] and not request.device and not virtual:
        wishes.append("")
    with ExitStack() as stack:
        for wish in wishes:
            choice = Choice((wish,)) if wish and not virtual else None
            bench = InterleavedBench(
                config, store, job.target, virtual=virtual, choice=choice, purpose=request.command, until_s=until_s,
                least_inferences=request.least_inferences,
            )  # fmt: skip
            try:
                stack.enter_context(bench)
                break
            except (NoDeviceError, UnknownNameError):
                if wish == wishes[-1]:
                    raise
                logger.warning(
                    "%s, where run %s was, cannot be had: looking for another %s", wish, past.run.id, job.target.soc
                )
        if bench.device.kind != past.kind:
            raise UsageError(
                f"{bench.device.serial} is {bench.device.kind} and run {past.run.id} was on a {past.kind} device: "
                "their numbers are not compared, name another device"
            )
        yield bench


def require_bundles(config: Config, store: Store, bench: InterleavedBench, pasts: Sequence[StoredResult]) -> None:
    """Raise UsageError for a pruned bundle that cannot be made again, with the nearest run that has one.

    Raises UsageError also for more named inferences than its runner can make.
    """
    for past in pasts:
        try:
            side = bench.side(past)
        except UsageError as error:
            newest = max(pasts, key=lambda one: one.place)
            nearest = _nearest(config, store, newest, past)
            hint = f"; the nearest run whose bundle is here is {nearest.run.id}" if nearest else ""
            raise type(error)(f"{error}{hint}") from None
        bench.require_inferences(side)


def _nearest(config: Config, store: Store, newest: StoredResult, past: StoredResult) -> StoredResult | None:
    found = [
        one
        for one in results_before(store, newest)
        if one.view.case_version == past.view.case_version and find_made_bundle(config, one.attempt.bundle_key)
    ]
    return min(found, key=lambda one: abs(one.run.started_ms - past.run.started_ms), default=None)


def confirm_job(
    config: Config,
    store: Store,
    good: StoredResult,
    new: StoredResult,
    request: PairsRequest,
    metrics: Sequence[str] = (),
) -> ConfirmOutcome:
    """Compare two results' bundles in turns on one device, and name the factor that causes what got worse.

    Nothing is recorded. Raises NoDeviceError, InfraError, UsageError where a bundle is gone, UnknownNameError.
    """
    series = series_of(good, new, metrics)
    with InterruptHandler(), bench_for(config, store, new, request) as bench:
        require_bundles(config, store, bench, (good, new))
        swaps = plan_swaps(bench, good, new)
        if good.attempt.bundle_key == new.attempt.bundle_key:
            logger.info("both runs have the same program: only runtime, SDK, device or the night can be at fault")
        logger.info("measuring %s pairs on %s (%s)", request.pairs, bench.device.serial, bench.device.kind)
        compared = compare(bench, [worse(one) for one in series], good, new, request.pairs, request.inferences)
        worst = next((one for one in compared if one.confirmation.answer is Answer.CONFIRMED), None)
        attribution = None
        # A change without a difference of bundles may come from runner or SDK.
        if worst is not None or swaps.alone.keys() - {"program"}:
            one = worst or compared[0]
            logger.info("swapping what differs, one at a time")
            effort = request.pairs, request.inferences
            attribution = swap_factors(bench, worse(one.series), swaps, *effort, program=one)
        device, changed = bench.device, differences(good.run.fingerprint, new.run.fingerprint)
        turns, results = tuple(bench.turns), tuple(compared)
        return ConfirmOutcome(good, new, device.serial, device.kind, bench.fence, results, changed, attribution, turns)


# The first bad run between a good one and a bad one: bundles of the runs between are run again, few of them.


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
    later = takewhile(lambda one: one.place > good.place, results_before(store, bad))
    between = [one for one in later if one.kind == good.kind][::-1]
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
        left_out, device = len(between) - len(same), bench.device
        return BisectOutcome(runs, values, left_out, device.serial, device.kind, whole, tuple(probes), bracket)


def _value(past: StoredResult, series: Series) -> float:
    value = next((one.value for one in past.attempt.measurements if one.metric == series.metric), None)
    return math.nan if value is None else value
