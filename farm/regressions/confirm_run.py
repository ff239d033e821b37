"""What stands out in a run, measured again: old and new bundles in turns, the first bad run, what is to blame."""

from __future__ import annotations

import math
import statistics
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

import msgspec

from farm.analysis.candidates import Finding
from farm.analysis.confirmation import P_UNSUSPECTED, Answer, Confirmation, control, pairs_needed
from farm.analysis.nights import programs_are_cause
from farm.regressions.bench_pool import BenchFactory, BenchPool
from farm.regressions.changed_programs import changed_programs
from farm.regressions.confirm_job import PairsRequest
from farm.regressions.confirming import worse
from farm.regressions.look_back import found_alerts, look_back, record_look_back
from farm.regressions.remeasure import Asked, Asking, unknown
from farm.request.ending import write_report
from farm.store.records import STEPS, AlertState, NewAlert
from farm.system.text import reason_line

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from farm.config.settings import Config
    from farm.regressions.look_back import LookBack, Seen
    from farm.store.records import AlertRecord
    from farm.store.store import Store

_STATES = {
    Answer.CONFIRMED: AlertState.CONFIRMED,
    Answer.REFUTED: AlertState.REFUTED,
    Answer.UNKNOWN: AlertState.UNKNOWN,
}

CHANGED_S = 600.0
"""So long at most are programs measured that changed and do not stand out, where no budget is given."""

# So long a free device may take to be leased.
_TAKEN_S = 5.0


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
    changed: int
    """Programs that are new and do not stand out, and that were measured as well."""
    changed_not_asked: int
    """Others of these, that there was no time or no device for."""
    insufficient: int
    """Numbers that have too few runs before them."""

    @property
    def not_all_changed(self) -> str:
        """Say that programs are left that changed; empty where none are."""
        if not (left := self.changed_not_asked):
            return ""
        what = "program that changed was" if left == 1 else "programs that changed were"
        more = f"'farm confirm --run {self.run_id}' goes on with what is left"
        return f"{left} {what} not measured, for want of time or of a device: {more}"

    @property
    def left_out(self) -> list[str]:
        """Say what was not measured, a line each."""
        lines = [f"not all that stands out was measured: {problem}" for problem in self.problems]
        return lines + [self.not_all_changed] * bool(self.changed_not_asked)

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
    factory: BenchFactory | None = None,
) -> RunFindings:
    """Judge the numbers of a run, measure its candidates again, the least probable first, and record what came of it.

    What there is no time or no device for stays a candidate; what could not be measured is unknown, with the reason.
    Raises UnknownNameError for a run that is not there, KeyboardInterrupt with what is known by then recorded, and
    chance taken out of it.
    """
    factory = factory or BenchFactory(config, store, request, say)
    with ExitStack() as stack:
        return _ConfirmRun(config, store, run_id, request, say, budget_s, factory, stack).findings()


class _ConfirmRun:
    def __init__(
        self,
        config: Config,
        store: Store,
        run_id: str,
        request: PairsRequest,
        say: Callable[[str], None],
        budget_s: float | None,
        factory: BenchFactory,
        stack: ExitStack,
    ) -> None:
        self._config, self._store, self._run_id, self._request, self._say = config, store, run_id, request, say
        self._end_s = math.inf if budget_s is None else time.monotonic() + budget_s
        self._benches = BenchPool(factory, stack, self._end_s)
        self._asking = Asking(store, request, factory, self._benches, say)
        self._asked: list[Asked] = []

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
            problems = tuple(dict.fromkeys(self._benches.broken.values()))
            changed_not_asked = self._changed(looked)
        finally:
            self._control()
        if self._asked:
            self._report()
        return RunFindings(
            run_id=self._run_id,
            alerts=tuple(self._store.alerts.of_run(self._run_id)),
            shifts=tuple(shifts),
            not_asked=not_asked,
            problems=problems,
            changed=sum(not asked.stands_out for asked in self._asked),
            changed_not_asked=changed_not_asked,
            insufficient=looked.insufficient,
        )

    def _report(self) -> None:
        """Write the report of the run anew, where there is one."""
        path = self._config.run_folder(self._run_id) / "report.html"
        if path.is_file():
            write_report(self._store.runs.view(self._run_id), path, self._store, self._config.state_dir)

    def _programs(self, looked: LookBack) -> set[tuple[str, str]]:
        """Return the devices and metrics that are off as a whole because of the programs."""
        found, pairs = set(), self._request.pairs
        for shift in looked.night.shifts:
            answers = [
                asked.confirmation
                for index in shift.representatives
                if time.monotonic() < self._end_s
                and (asked := self._asking.ask(looked.seen[index], pairs, up=shift.change > 0, attribute=False))
            ]
            if answers and programs_are_cause(answers):
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
        measured = sum(self._asking.good(seen) is not None for seen, _, _ in left)
        pairs = self._pairs(measured, stands_out=True)
        not_asked = 0
        for number, (seen, judgement, alert) in enumerate(left):
            if time.monotonic() >= self._end_s:
                return not_asked + len(left) - number
            self._say(f"{seen.past.job_id}: {seen.series.series.metric} {judgement.reason}")
            asked = self._asking.ask(seen, pairs, up=judgement.change > 0)
            if asked is None:
                not_asked += 1
                continue
            self._keep(seen, asked, alert)
        return not_asked

    def _changed(self, looked: LookBack) -> int:
        """Measure programs that changed and do not stand out; return how many there was no time or device for."""
        found = [looked.seen[index] for index in changed_programs(looked, self._measured(looked))]
        found = [seen for seen in found if self._asking.good(seen) is not None]
        if not found:
            return 0
        self._say(f"programs that changed and do not stand out: {len(found)}, measured in the time that is left")
        pairs = self._pairs(len(found), stands_out=False)
        end_s = self._end_s if math.isfinite(self._end_s) else time.monotonic() + CHANGED_S
        # Nothing stands out: nobody is waited for.
        self._benches.wait_s = _TAKEN_S
        not_asked = 0
        impossible: list[str] = []
        for number, seen in enumerate(found):
            if time.monotonic() >= end_s:
                not_asked += len(found) - number
                break
            asked = self._asking.ask(seen, pairs, up=worse(seen.series.series).up, level=P_UNSUSPECTED)
            if asked is None:
                not_asked += 1
            elif not asked.device:
                impossible.append(asked.confirmation.reason)
            else:
                asked.stands_out = False
                self._keep(seen, asked, self._store.alerts.add(self._run_id, _not_standing_out(seen, asked)))
        if impossible:
            self._say(f"programs that changed and cannot be measured: {len(impossible)}: {impossible[0]}")
        return not_asked

    def _measured(self, looked: LookBack) -> dict[tuple[int, str], set[str]]:
        """Return by series and device kind the runs of which pairs were measured, or somebody decided."""
        found: dict[tuple[int, str], set[str]] = {}
        for one in self._store.alerts.of_jobs({seen.past.job_id for seen in looked.seen}):
            if one.device or one.state in STEPS:
                found.setdefault((one.series_id, one.device_kind), set()).add(one.run_id)
        return found

    def _keep(self, seen: Seen, asked: Asked, alert: AlertRecord) -> None:
        """Record an answer at once, so that nothing is lost when the night ends here."""
        asked.alert = alert
        self._say(f"{seen.past.job_id}: {asked.confirmation.answer}: {asked.confirmation.reason}")
        self._asked.append(asked)
        self._record(asked)

    def _pairs(self, measured: int, *, stands_out: bool) -> int:
        """Return how many pairs each of so many numbers takes, together with those of earlier calls."""
        return max(self._request.pairs, pairs_needed(measured + len(self._asked_before(stands_out=stands_out))))

    def _asked_before(self, *, stands_out: bool) -> list[Confirmation]:
        """Return what an earlier call measured of this run: it is of the same night."""
        now = {asked.alert.id for asked in self._asked if asked.alert}
        return [
            msgspec.structs.replace(unknown(""), p_value=one.p_value)
            for one in self._store.alerts.of_run(self._run_id, unchanged=True)
            if (one.finding != Finding.UNCHANGED) is stands_out
            and one.device
            and one.id not in now
            and not math.isnan(one.p_value)
        ]

    def _control(self) -> None:
        """Take back what is confirmed by chance, among all candidates that were measured, and among all others."""
        for stands_out in (True, False):
            # What could not be measured had no chance to be confirmed.
            measured = [one for one in self._asked if one.stands_out is stands_out and one.confirmation.pairs]
            family = [*(asked.confirmation for asked in measured), *self._asked_before(stands_out=stands_out)]
            for asked, told in zip(measured, control(family)[: len(measured)], strict=True):
                if told != asked.confirmation:
                    asked.confirmation = told
                    self._record(asked)

    def _record(self, asked: Asked) -> None:
        alert, told = asked.alert, asked.confirmation
        if alert is None:
            return
        finding = alert.finding
        if not asked.stands_out:
            # It was asked whether it is worse.
            finding = Finding.REGRESSION if told.answer is Answer.CONFIRMED else Finding.UNCHANGED
        recorded = self._store.alerts.answer(
            alert.id,
            NewAlert(
                series_id=alert.series_id,
                device_kind=alert.device_kind,
                finding=finding,
                state=_STATES[told.answer],
                last_good=asked.points[asked.good].run_id,
                first_bad=asked.points[asked.bad].run_id,
                # What could not be measured stays as great as it looked.
                change=alert.change if math.isnan(told.change) else told.change,
                low=told.low,
                high=told.high,
                p_value=told.p_value,
                reason=told.reason,
                guilt=reason_line(asked.guilt),
            ),
            device=asked.device,
            pairs=[(_median(good), _median(new)) for good, new in asked.pairs],
            was=asked.state,
        )
        asked.state = _STATES[told.answer]
        if not recorded:
            asked.alert = None
            self._say(f"{alert.job_id}: {alert.metric} was measured by somebody else meanwhile: theirs stays")


def _not_standing_out(seen: Seen, asked: Asked) -> NewAlert:
    return NewAlert(
        series_id=seen.series.id,
        device_kind=seen.points[-1].device_kind,
        finding=Finding.UNCHANGED,
        state=AlertState.CANDIDATE,
        last_good=seen.points[asked.good].run_id,
        first_bad=seen.points[-1].run_id,
        change=math.nan,
        low=math.nan,
        high=math.nan,
        p_value=math.nan,
        reason="its program changed",
    )


def _median(samples: Sequence[float]) -> float:
    return statistics.median(samples) if samples else math.nan
