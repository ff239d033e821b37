"""What stands out in a run, measured again: old and new bundles in turns, the first bad run, what is to blame."""

from __future__ import annotations

import math
import statistics
import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from farm.analysis.alerts import levelled
from farm.analysis.axes import Axis
from farm.analysis.confirmation import Answer, Confirmation, control, pairs_needed
from farm.analysis.first_bad import Bracket
from farm.analysis.nights import is_the_programs
from farm.build.cache import BundleCache
from farm.engine.command import write_report
from farm.engine.confirm_job import PairsRequest, bench_for
from farm.engine.confirming import Claim, compare, first_bad
from farm.engine.look_back import found_alerts, look_back, record_look_back
from farm.engine.past import Results, find_job
from farm.engine.repro import differences
from farm.engine.swapping import plan_swaps, swap_axes
from farm.errors import FarmError, InfraError, NoDeviceError, UsageError
from farm.results.text import one_line
from farm.store.records import AlertState, NewAlert

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from farm.analysis.confirmation import Pair
    from farm.analysis.history import Point
    from farm.config import Config
    from farm.engine.look_back import LookBack, Seen
    from farm.engine.pairs import PairBench
    from farm.engine.past import Past
    from farm.store.records import AlertRecord
    from farm.store.store import Store

_STATES = {
    Answer.CONFIRMED: AlertState.CONFIRMED,
    Answer.REFUTED: AlertState.REFUTED,
    Answer.UNKNOWN: AlertState.UNKNOWN,
}

# Of one side in a pair: so long at least, or so many.
_TURN_NS = 50e6
_MOST_INFERENCES = 20


class RunFindings(msgspec.Struct, frozen=True, kw_only=True):
    """What became of the numbers of a run."""

    run_id: str
    alerts: tuple[AlertRecord, ...]
    """All that stands out in it."""
    shifts: tuple[str, ...]
    """What is off as a whole, one line each."""
    not_asked: int
    """Candidates that there was no time or no device for."""
    problems: tuple[str, ...]
    """Why, one line each."""
    insufficient: int
    """Numbers that have too few runs before them."""

    @property
    def regressions(self) -> tuple[AlertRecord, ...]:
        """Return what got worse for sure."""
        told = (AlertState.CONFIRMED, AlertState.EXACT)
        return tuple(one for one in self.alerts if one.finding == "regression" and one.state in told)


def confirm_run(
    config: Config,
    store: Store,
    run_id: str,
    request: PairsRequest,
    say: Callable[[str], None],
    *,
    budget_s: float | None = None,
) -> RunFindings:
    """Judge the numbers of a run, measure its candidates again, the least probable first, and record what came of it.

    What there is no time or no device for stays a candidate; what could not be measured is unknown, with the reason.
    Raises UnknownNameError for a run that is not there, KeyboardInterrupt with what is known by then recorded, and
    chance taken out of it.
    """
    with ExitStack() as stack:
        return _ConfirmRun(config, store, run_id, request, say, budget_s, stack).findings()


@dataclass
class _Asked:
    """One candidate that was measured."""

    points: Sequence[Point]
    confirmation: Confirmation
    good: int
    """Index of the last run that is known to be good, and of the first that is known to be bad."""
    bad: int
    pairs: tuple[Pair, ...] = ()
    device: str = ""
    guilt: str = ""
    alert: AlertRecord | None = None
    state: AlertState = AlertState.CANDIDATE
    """As it is recorded."""


class _Benches:
    """A device for each SoC, backend and kind, kept warm."""

    def __init__(
        self, config: Config, store: Store, request: PairsRequest, say: Callable[[str], None], stack: ExitStack
    ) -> None:
        self._config, self._store, self._request, self._say, self._stack = config, store, request, say, stack
        self._open: dict[tuple[str, str, str], PairBench] = {}
        self.broken: dict[tuple[str, str, str], str] = {}

    def of(self, past: Past) -> PairBench:
        """Return the bench that a result is measured on.

        Raises NoDeviceError, also where there was none before, and UsageError for a result whose job is gone.
        """
        key = self.key(past)
        if key in self.broken:
            raise NoDeviceError(self.broken[key])
        if key not in self._open:
            # Not a reason to do without the device.
            find_job(self._config, past)
            try:
                opening = bench_for(self._config, self._store, past, self._request, self._say)
                self._open[key] = self._stack.enter_context(opening)
            except FarmError as error:
                self.broken[key] = one_line(str(error))
                raise NoDeviceError(self.broken[key]) from None
        return self._open[key]

    def give_up(self, past: Past, why: str) -> None:
        """Let nothing be measured there any more."""
        self.broken[self.key(past)] = why

    @staticmethod
    def key(past: Past) -> tuple[str, str, str]:
        """Return what a device has to be."""
        return past.view.soc, past.view.backend, past.kind


class _ConfirmRun:
    def __init__(
        self,
        config: Config,
        store: Store,
        run_id: str,
        request: PairsRequest,
        say: Callable[[str], None],
        budget_s: float | None,
        stack: ExitStack,
    ) -> None:
        self._config, self._store, self._run_id, self._request, self._say = config, store, run_id, request, say
        self._end_s = math.inf if budget_s is None else time.monotonic() + budget_s
        self._results = Results(store)
        self._cache = BundleCache(config.cache_dir)
        self._benches = _Benches(config, store, request, say, stack)
        self._pairs = request.pairs
        self._asked: list[_Asked] = []

    def findings(self) -> RunFindings:
        """Do all of it."""
        looked = record_look_back(self._store, self._run_id)
        shifts = [shift.reason for shift in looked.night.shifts]
        programs = self._programs(looked)
        if programs:
            looked = look_back(self._store, self._run_id, programs=programs)
            self._store.alerts.record(self._run_id, found_alerts(looked))
        try:
            not_asked = self._candidates(looked)
        finally:
            self._control()
        if self._asked:
            self._report()
        return RunFindings(
            run_id=self._run_id,
            alerts=tuple(self._store.alerts.of_run(self._run_id)),
            shifts=tuple(shifts),
            not_asked=not_asked,
            problems=tuple(dict.fromkeys(self._benches.broken.values())),
            insufficient=looked.insufficient,
        )

    def _report(self) -> None:
        """Write the report of the run anew, where there is one."""
        path = self._config.run_folder(self._run_id) / "report.html"
        if path.is_file():
            write_report(self._store.run_view(self._run_id), path, self._store, self._config.state_dir)

    def _programs(self, looked: LookBack) -> set[tuple[str, str]]:
        """Return the devices and metrics that are off as a whole because of the programs."""
        found = set()
        for shift in looked.night.shifts:
            answers = [
                asked.confirmation
                for index in shift.representatives
                if time.monotonic() < self._end_s
                and (asked := self._ask(looked.seen[index], up=shift.change > 0, attribute=False))
            ]
            if answers and is_the_programs(answers):
                found.add((shift.device, shift.metric))
        return found

    def _candidates(self, looked: LookBack) -> int:
        """Measure candidates in their order; return how many there was no time or device for."""
        alerts = {
            (one.series_id, one.device_kind): one
            for one in self._store.alerts.of_run(self._run_id)
            if one.state == AlertState.CANDIDATE
        }
        left = []
        for index in looked.night.candidates:
            seen = looked.seen[index]
            # What was answered before is not asked again.
            if alert := alerts.get((seen.series.id, seen.points[-1].device_kind)):
                left.append((seen, looked.night.judgements[index], alert))
        measured = sum(self._good(seen) is not None for seen, _, _ in left)
        self._pairs = max(self._request.pairs, pairs_needed(measured + len(self._asked_before())))
        not_asked = 0
        for number, (seen, judgement, alert) in enumerate(left):
            if time.monotonic() >= self._end_s:
                return not_asked + len(left) - number
            self._say(f"{seen.past.job_id}: {seen.series.series.metric} {judgement.reason}")
            asked = self._ask(seen, up=judgement.change > 0)
            if asked is None:
                not_asked += 1
                continue
            asked.alert = alert
            self._say(f"{seen.past.job_id}: {asked.confirmation.answer}: {asked.confirmation.reason}")
            self._asked.append(asked)
            # At once, so that nothing is lost when the night ends here.
            self._record(asked)
        return not_asked

    def _ask(self, seen: Seen, *, up: bool, attribute: bool = True) -> _Asked | None:
        """Return what pairs say of a candidate, and where its step is; None where no device can be had."""
        points = seen.points
        new, first = len(points) - 1, seen.first
        good = self._good(seen)
        asked = _Asked(points, _unknown("no bundle of the runs before is there any more"), good or first, new)
        if points[first].bundle and points[first].bundle == points[new].bundle:
            asked.confirmation = _refuted(f"the program is that of {points[first].run_id}: it was the night")
            return asked
        if good is None:
            return asked
        try:
            was, now = (self._results.of(seen.past.job_id, points[index].run_id) for index in (good, new))
            bench = self._benches.of(now)
            series = seen.series.series
            [compared] = compare(bench, [Claim(series, up)], was, now, self._pairs, self._inferences(seen))
            asked.confirmation, asked.pairs, asked.device = compared.confirmation, compared.pairs, bench.device.serial
        except UsageError as error:
            asked.confirmation = _unknown(one_line(str(error)))
            return asked
        except NoDeviceError:
            return None
        except InfraError as error:
            # The device, not the program: others of this kind would only fail as well.
            self._benches.give_up(now, one_line(str(error)))
            return None
        if attribute and compared.confirmation.answer is Answer.CONFIRMED:
            try:
                self._attribute(seen, bench, asked)
            except FarmError as error:
                # What is confirmed is so, wherever it came from.
                self._say(f"{seen.past.job_id}: since when, and what is to blame, is not known: {error}")
                if isinstance(error, InfraError):
                    self._benches.give_up(now, one_line(str(error)))
        return asked

    def _good(self, seen: Seen) -> int | None:
        """Return the oldest run of the level with another program whose bundle is there; None where none is."""
        *before, new = seen.points
        if before[seen.first].bundle == new.bundle:
            return None
        for index in range(seen.first, len(before)):
            bundle = before[index].bundle
            if bundle and bundle != new.bundle and self._cache.lookup(bundle) is not None:
                return index
        return None

    def _inferences(self, seen: Seen) -> int:
        """Return how many inferences a side has in a pair: more of short ones, which a moment can disturb."""
        latencies = [one.values[-1] for one in seen.past.series if one.series.metric == "latency"]
        short = math.ceil(_TURN_NS / latencies[0]) if latencies and latencies[0] > 0 else 0
        return max(self._request.inferences, min(short, _MOST_INFERENCES))

    def _attribute(self, seen: Seen, bench: PairBench, asked: _Asked) -> None:
        """Name the first bad run, and what is to blame."""
        series, change = seen.series.series, asked.confirmation.change
        bracket = Bracket(asked.good, asked.bad)
        runs: list[Past | None] = [None] * len(seen.points)
        for index in range(asked.good, asked.bad + 1):
            if index in (asked.good, asked.bad) or self._cache.lookup(seen.points[index].bundle) is not None:
                runs[index] = self._results.of(seen.past.job_id, seen.points[index].run_id)
        values = levelled(series.scale, seen.values, seen.steps)
        bracket = first_bad(bench, series, runs, values, bracket, change, self._request.pairs, self._inferences(seen))
        asked.good, asked.bad = bracket.good, bracket.bad
        good, bad = runs[bracket.good], runs[bracket.bad]
        if good is None or bad is None:
            return
        swaps = plan_swaps(bench, good, bad)
        told = differences(good.run.fingerprint, bad.run.fingerprint)
        facts = ", ".join(f"{name} {was or 'none'} -> {now or 'none'}" for name, (was, now) in told.items())
        asked.guilt = f"the program{f' ({facts})' if facts else ''}"
        if swaps.alone.keys() - {Axis.PROGRAM}:
            attribution = swap_axes(
                bench, series, good, bad, change > 0, self._request.pairs, self._inferences(seen), swaps=swaps
            )
            asked.guilt = attribution.explanation.reason

    def _asked_before(self) -> list[Confirmation]:
        """Return what an earlier call measured of this run: it is of the same night."""
        now = {asked.alert.id for asked in self._asked if asked.alert}
        return [
            msgspec.structs.replace(_unknown(""), p_value=one.p_value)
            for one in self._store.alerts.of_run(self._run_id)
            if one.device and one.id not in now and not math.isnan(one.p_value)
        ]

    def _control(self) -> None:
        """Take back what is confirmed by chance, among all that was measured."""
        # What could not be measured had no chance to be confirmed.
        measured = [asked for asked in self._asked if asked.confirmation.pairs]
        family = [*(asked.confirmation for asked in measured), *self._asked_before()]
        for asked, told in zip(measured, control(family)[: len(measured)], strict=True):
            if told != asked.confirmation:
                asked.confirmation = told
                self._record(asked)

    def _record(self, asked: _Asked) -> None:
        alert, told = asked.alert, asked.confirmation
        if alert is None:
            return
        recorded = self._store.alerts.answer(
            alert.id,
            NewAlert(
                series_id=alert.series_id,
                device_kind=alert.device_kind,
                finding=alert.finding,
                state=_STATES[told.answer],
                last_good=asked.points[asked.good].run_id,
                first_bad=asked.points[asked.bad].run_id,
                # What could not be measured stays as great as it looked.
                change=alert.change if math.isnan(told.change) else told.change,
                low=told.low,
                high=told.high,
                p_value=told.p_value,
                reason=told.reason,
                guilt=one_line(asked.guilt),
            ),
            device=asked.device,
            pairs=[(_median(good), _median(new)) for good, new in asked.pairs],
            was=asked.state,
        )
        asked.state = _STATES[told.answer]
        if not recorded:
            asked.alert = None
            self._say(f"{alert.job_id}: {alert.metric} was measured by somebody else meanwhile: theirs stays")


def _unknown(reason: str) -> Confirmation:
    return Confirmation(Answer.UNKNOWN, reason, 0, math.nan, math.nan, math.nan, 1.0)


def _refuted(reason: str) -> Confirmation:
    return Confirmation(Answer.REFUTED, reason, 0, 0.0, 0.0, 0.0, 1.0)


def _median(samples: Sequence[float]) -> float:
    return statistics.median(samples) if samples else math.nan
