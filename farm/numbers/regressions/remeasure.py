"""One number of a run, measured again: is it worse, since which run, and for which cause?"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass

import msgspec
import numpy as np

from farm.base.config.settings import Config
from farm.base.errors import FarmError, InfraError, NoDeviceError, UsageError
from farm.base.text import reason_line
from farm.dispatch.history_comparison import ComparedSeries
from farm.numbers.regressions.interleaved_ab import InterleavedBench
from farm.numbers.regressions.paired_test import (
    Claim,
    MeasuredPairs,
    Probe,
    compare,
    first_bad,
    not_measured,
    plan_swaps,
    swap_factors,
    worse,
)
from farm.numbers.regressions.stored_pairs import PairsRequest, bench_for
from farm.replay.repro import differences
from farm.replay.stored_result import Results, StoredResult, find_job, find_made_bundle
from farm.results.analysis.attribution import Bracket, Factor
from farm.results.analysis.change_points import LEAST_LEVEL
from farm.results.analysis.confirmation import (
    P_CONFIRMED,
    Answer,
    Confirmation,
    Pair,
    alone_level,
    inferences_for,
    unsure,
)
from farm.results.analysis.history import Point
from farm.results.analysis.statistics import GATES, median, scaled
from farm.results.analysis.suspected import BASELINE, levelled
from farm.store.records import AlertRecord, AlertState
from farm.store.store import Store

logger = logging.getLogger(__name__)

# Share of a change in its first bad run below which it came in several steps, or creeps.
_ONE_STEP = 0.8


@dataclass
class RemeasuredSeries:
    """Number that was measured again."""

    points: Sequence[Point]
    confirmation: Confirmation
    good: int
    """Index of the last run that is known to be good, and of the first that is known to be bad."""
    bad: int
    pairs: tuple[Pair, ...] = ()
    device: str = ""
    cause: str = ""
    is_suspected: bool = True
    """Otherwise it was measured because its program changed."""
    of: tuple[RemeasuredSeries, ...] = ()
    """Fully measured series that stepped with it, if it was only sampled itself."""
    alert: AlertRecord | None = None
    """As it was before."""
    state: AlertState = AlertState.SUSPECTED
    """As it is recorded."""


def of_one_bundle(was: StoredResult, now: StoredResult) -> Confirmation:
    """Return the answer where both runs had the bundle of one key: refuted, unless the programs differ."""
    programs = {was.view.program, now.view.program}
    if len(programs) > 1 and all(programs):
        return unknown(f"the bundle of {was.run.id} was compiled anew since, to another program")
    reason = f"the program equals that of {was.run.id}: conditions of the run were the cause"
    return Confirmation(Answer.REFUTED, reason, 0, 0.0, 0.0, 0.0, 1.0)


class BenchPool(ExitStack):
    """A device for each SoC, backend and kind that `request` allows, kept warm until the context ends."""

    def __init__(self, config: Config, store: Store, request: PairsRequest) -> None:
        super().__init__()
        self._config, self._store, self._request = config, store, request
        self._open: dict[tuple[str, str, str], InterleavedBench] = {}
        self.broken: dict[tuple[str, str, str], str] = {}
        self.end_s = math.inf
        """End of waits for a busy device, on the clock of `time.monotonic`."""
        self.wait_s = math.inf
        """Longest that one device is waited for, in seconds."""

    def has_bundle(self, key: str) -> bool:
        """Return whether the bundle of a past result can be run again as it is."""
        return find_made_bundle(self._config, key) is not None

    def require_job(self, past: StoredResult) -> None:
        """Raise UsageError for a result whose job is gone."""
        find_job(self._config, past)

    def open(self, past: StoredResult, until_s: float) -> AbstractContextManager[InterleavedBench]:
        """Return the bench for a result; a device is waited for until `until_s` on the clock of `time.monotonic`."""
        return bench_for(self._config, self._store, past, self._request, until_s)

    def of(self, past: StoredResult) -> InterleavedBench:
        """Return the bench that a result is measured on.

        Raises NoDeviceError, also where there was none before, and UsageError for a result whose job is gone.
        """
        key = self.key(past)
        if key in self.broken:
            raise NoDeviceError(self.broken[key])
        if key not in self._open:
            # Not a reason to do without the device.
            self.require_job(past)
            try:
                until_s = min(self.end_s, time.monotonic() + self.wait_s)
                self._open[key] = self.enter_context(self.open(past, until_s))
            except FarmError as error:
                self.broken[key] = reason_line(str(error))
                raise NoDeviceError(self.broken[key]) from None
        return self._open[key]

    def give_up(self, past: StoredResult, why: str) -> None:
        """Exclude the bench of `past` from further measurements."""
        self.broken[self.key(past)] = why

    @staticmethod
    def key(past: StoredResult) -> tuple[str, str, str]:
        """Return the required properties of a device."""
        return past.view.soc, past.view.backend, past.kind


class Remeasurement:
    """Measures numbers of a run again by interleaved A/B, on the devices of `benches`."""

    def __init__(self, store: Store, request: PairsRequest, benches: BenchPool) -> None:
        self._request, self._benches = request, benches
        self._results = Results(store)
        self._measured: MeasuredPairs = {}
        self._job = ""

    def measure(
        self,
        number: ComparedSeries,
        pairs: int,
        *,
        up: bool,
        attribute: bool = True,
        level: float = P_CONFIRMED,
        family: int = 1,
        step: Confirmation | None = None,
    ) -> RemeasuredSeries | None:
        """Return what that many pairs show of a number, and where its step is; None where no device can be had.

        `family`: how many are measured; what would not stand among them has twice as many pairs. `step` is
        the change of series that stepped with it: it is only asked whether it has more than half of that.
        """
        if number.past.job_id != self._job:
            # Numbers of one program are measured by the same pairs.
            self._job, self._measured = number.past.job_id, {}
        points, first, new = number.points, number.first, len(number.points) - 1
        good = self.good(number)
        result = RemeasuredSeries(points, unknown("no bundle of the earlier runs exists now"), good or first, new)
        home = self._home(number) if step is None else None
        origin, base = (good, 0.0) if home is None else (home, number.standing.level)
        if same := self._of_one_program(number, home, base, up=up):
            result.confirmation = same
            return result
        if origin is None:
            return result
        try:
            was, now = self._result(number, origin), self._result(number, new)
            bench = self._benches.of(now)
            claim = Claim(number.series.series, up, base)
            [compared] = compare(
                bench, [claim], was, now, pairs, self._inferences(number),
                level=level, first_level=alone_level(family), early=True,
                gate=None if step is None else abs(step.change) / 2.0, fresh=step is not None, measured=self._measured,
            )  # fmt: skip
        except UsageError as error:
            result.confirmation = unknown(reason_line(str(error)))
            return result
        except NoDeviceError:
            return None
        except InfraError as error:
            # The device, not the program: others of this kind would only fail as well.
            self._benches.give_up(now, reason_line(str(error)))
            return None
        result.confirmation, result.pairs, result.device = compared.confirmation, compared.pairs, bench.device.serial
        result.cause = compared.left and not_measured(compared.left)
        refuted = result.confirmation.answer is Answer.REFUTED
        if refuted and good is not None and self._may_have_step(number, good, up):
            why = f"the programs before run {points[good].run_id} are gone, and it may be as slow itself"
            result.confirmation = unsure(result.confirmation, why)
        is_step = bool(base) and result.confirmation.answer is Answer.CONFIRMED
        if is_step and abs(base + result.confirmation.change) <= GATES[claim.series.scale].confirmed:
            # The level before the first step has returned, and the alert ends.
            result.confirmation = msgspec.structs.replace(result.confirmation, change=-base)
        if attribute and step is None and result.confirmation.answer is Answer.CONFIRMED:
            self._try_to_attribute(number, result)
            if home is None and good is not None and up is worse(claim.series).up:
                self._judge_lost_gain(number, good, claim, bench, result)
        return result

    def _judge_lost_gain(
        self, number: ComparedSeries, good: int, claim: Claim, bench: InterleavedBench, result: RemeasuredSeries
    ) -> None:
        """Judge a confirmed loss of a better level that no alert has, and that is not accepted, by the level before."""
        older = self.good(number, max(0, result.bad - BASELINE, *number.known))
        if older is None or good - older < LEAST_LEVEL:
            return
        was, now = self._result(number, older), self._result(number, -1)
        effort = self._request.pairs, self._inferences(number)
        [before] = compare(bench, [claim], was, now, *effort, early=True, measured=self._measured)
        if before.confirmation.answer is not Answer.CONFIRMED:
            reason = f"{result.confirmation.reason}; since run {was.run.id} {before.confirmation.reason}"
            result.confirmation = msgspec.structs.replace(before.confirmation, reason=reason)

    def _of_one_program(
        self, number: ComparedSeries, home: int | None, base: float, *, up: bool
    ) -> Confirmation | None:
        """Return the answer for a program that was there before, which needs no pairs; None for a new one."""
        points, first, new = number.points, number.first, number.points[-1]
        if home is not None and points[home].side == new.side and up == (base < 0.0):
            reason = f"the program equals that of {points[home].run_id} again"
            return Confirmation(Answer.CONFIRMED, reason, 0, -base, -base, -base, 0.0)
        if not points[first].bundle or points[first].side != new.side:
            return None
        return of_one_bundle(self._result(number, first), self._result(number, -1))

    def attribute_as(self, number: ComparedSeries, result: RemeasuredSeries, of: Sequence[RemeasuredSeries]) -> None:
        """Add the first bad run of series that stepped together, where they have one, else look for it."""
        ranges = {(one.points[one.good].run_id, one.points[one.bad].run_id) for one in of}
        places = {point.run_id: place for place, point in enumerate(result.points)}
        if len(ranges) == 1:
            [(good, bad)] = ranges
            if result.good <= places.get(good, -1) < places.get(bad, -1):
                result.good, result.bad, result.cause = places[good], places[bad], of[0].cause
                return
        self._try_to_attribute(number, result)

    def _try_to_attribute(self, number: ComparedSeries, result: RemeasuredSeries) -> None:
        now = self._result(number, -1)
        try:
            self._attribute(number, self._benches.of(now), result)
        except FarmError as error:
            # The change stays confirmed without a known cause.
            logger.warning("%s: since when, and for which cause, is not known: %s", number.past.job_id, error)
            if isinstance(error, InfraError):
                self._benches.give_up(now, reason_line(str(error)))

    def good(self, number: ComparedSeries, first: int | None = None) -> int | None:
        """Return the oldest run of the level with another program whose bundle is there; None where none is.

        The level begins with `first`, if given.
        """
        *before, new = number.points
        if before[number.first].side == new.side:
            return None
        level = range(number.first if first is None else first, len(before))
        others = (index for index in level if before[index].side != new.side)
        return next((index for index in others if self._has_bundle(before[index])), None)

    def _has_bundle(self, point: Point) -> bool:
        return bool(point.bundle) and self._benches.has_bundle(point.bundle)

    def _home(self, number: ComparedSeries) -> int | None:
        """Return the last good run of an open alert, whose program still measures the whole distance; None for none."""
        if number.standing.alert is None or not math.isfinite(number.standing.level):
            return None
        good = number.standing.alert.last_good
        found = (index for index, point in enumerate(number.points) if point.run_id == good)
        return next((index for index in found if self._has_bundle(number.points[index])), None)

    @staticmethod
    def _may_have_step(number: ComparedSeries, good: int, up: bool) -> bool:
        """Return whether the runs from `good` on are worse than those before it, whose programs are gone."""
        scale = number.series.series.scale
        level = scaled(scale, levelled(scale, number.values, number.steps))
        older, newer = (part[np.isfinite(part)] for part in (level[number.first : good], level[good:-1]))
        if not len(older) or not len(newer):
            return False
        change = median(newer) - median(older)
        return (change if up else -change) > GATES[scale].confirmed

    def _result(self, number: ComparedSeries, index: int) -> StoredResult:
        return self._results.of(number.past.job_id, number.points[index].run_id)

    def _inferences(self, number: ComparedSeries) -> int:
        """Return how many inferences a side has in a pair."""
        latencies = [one.values[-1] for one in number.past.series if one.series.metric == "latency"]
        return inferences_for(latencies[0] if latencies else 0.0, self._request.inferences)

    def _attribute(self, number: ComparedSeries, bench: InterleavedBench, result: RemeasuredSeries) -> None:
        """Add the first bad run and the likely cause to `result`."""
        series, change = number.series.series, result.confirmation.change
        bracket = Bracket(result.good, result.bad)
        runs: list[StoredResult | None] = [None] * len(number.points)
        for index in range(result.good, result.bad + 1):
            if index in (result.good, result.bad) or self._benches.has_bundle(number.points[index].bundle):
                runs[index] = self._result(number, index)
        values = levelled(series.scale, number.values, number.steps)
        effort = self._request.pairs, self._inferences(number)
        probes: list[Probe] = []
        bracket = first_bad(
            bench, series, runs, values, bracket, change, *effort, on_probe=probes.append, measured=self._measured
        )
        whole, result.good, result.bad = result.good, bracket.good, bracket.bad
        # Runs after the first bad run are no part of its step.
        side = number.points[bracket.bad].side
        for probe in probes:
            of_bad = probe.answer is Answer.CONFIRMED and number.points[probe.number].side == side
            if of_bad and (there := probe.confirmation):
                reason = f"{result.confirmation.reason}; {there.reason} in the first bad run"
                if abs(there.change) < _ONE_STEP * abs(change) and not there.low <= change <= there.high:
                    # The first bad run has a part alone, and the last good one may have another: the whole counts.
                    result.good = whole
                    continue
                result.confirmation = msgspec.structs.replace(
                    result.confirmation, change=there.change, low=there.low, high=there.high, reason=reason
                )
        good, bad = runs[bracket.good], runs[bracket.bad]
        if good is None or bad is None:
            return
        swaps = plan_swaps(bench, good, bad)
        changed = differences(good.run.fingerprint, bad.run.fingerprint)
        facts = ", ".join(f"{name} {was or 'none'} -> {now or 'none'}" for name, (was, now) in changed.items())
        result.cause = f"the program{f' ({facts})' if facts else ''}"
        if swaps.alone.keys() - {Factor.PROGRAM}:
            attribution = swap_factors(bench, Claim(series, change > 0), swaps, *effort)
            result.cause = attribution.explanation.reason


def unknown(reason: str) -> Confirmation:
    """Return the answer where nothing could be measured."""
    return Confirmation(Answer.UNKNOWN, reason, 0, math.nan, math.nan, math.nan, 1.0)
