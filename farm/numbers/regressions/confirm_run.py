"""The suspected changes of a run, confirmed by interleaved A/B, with the first bad run and the likely cause of each."""

from __future__ import annotations

import itertools
import logging
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from farm.base.config.settings import Config
from farm.base.grouping import grouped
from farm.base.text import reason_line
from farm.dispatch.history_comparison import (
    ComparedSeries,
    HistoryComparison,
    changed_programs,
    compare_with_history,
    found_alerts,
    record_comparison,
)
from farm.dispatch.request.records import write_report
from farm.numbers.regressions.paired_test import worse
from farm.numbers.regressions.remeasure import BenchPool, RemeasuredSeries, Remeasurement, unknown
from farm.numbers.regressions.stored_pairs import PairsRequest
from farm.results.analysis.confirmation import (
    LEAST_PAIRS,
    P_MEMBER,
    P_UNSUSPECTED,
    Answer,
    Confirmation,
    common_step,
    control,
    families,
    member,
    pairs_needed,
    programs_are_cause,
    unsure,
)
from farm.results.analysis.statistics import Scale
from farm.results.analysis.suspected import REPRESENTATIVES, Finding
from farm.store.records import STEPS, AlertRecord, AlertState, NewAlert
from farm.store.store import Store

logger = logging.getLogger(__name__)

CHANGED_S = 600.0
"""Time for programs that changed unsuspected, where no budget is given."""

# So long a free device may take to be leased.
_TAKEN_S = 5.0


class RunFindings(msgspec.Struct, frozen=True, kw_only=True):
    """Findings on the numbers of a run."""

    run_id: str
    alerts: tuple[AlertRecord, ...]
    """Suspected and exact changes of the run in every state."""
    shifts: tuple[str, ...]
    """Shifts of whole devices, one line each."""
    not_measured: int = msgspec.field(name="not_asked")
    """Suspected changes that there was no time or no device for."""
    problems: tuple[str, ...]
    """Reasons, one line each."""
    changed: int
    """Programs that changed unsuspected and were measured."""
    changed_not_measured: int = msgspec.field(name="changed_not_asked")
    """Others of these, that there was no time or no device for."""
    insufficient: int
    """Numbers that have too few runs before them."""

    @property
    def not_all_changed(self) -> str:
        """Say that programs are left that changed; empty where none are."""
        if not (left := self.changed_not_measured):
            return ""
        what = "program that changed was" if left == 1 else "programs that changed were"
        more = f"'farm perf confirm --run {self.run_id}' measures the rest"
        return f"{left} {what} not measured, for want of time or of a device: {more}"

    @property
    def left_out(self) -> list[str]:
        """Return a line for each number that was not measured."""
        lines = [f"not all suspected changes were measured: {problem}" for problem in self.problems]
        return lines + [self.not_all_changed] * bool(self.changed_not_measured)

    @property
    def regressions(self) -> tuple[AlertRecord, ...]:
        """Return what got worse for sure."""
        certain = (AlertState.CONFIRMED, AlertState.EXACT)
        return tuple(one for one in self.alerts if one.finding == "regression" and one.state in certain)


def confirm_run(
    config: Config,
    store: Store,
    run_id: str,
    request: PairsRequest,
    *,
    budget_s: float | None = None,
    benches: BenchPool | None = None,
) -> RunFindings:
    """Judge the numbers of a run, measure suspected changes again, the least probable first, and record the results.

    A number without time or device stays suspected; a number whose measurement failed is unknown, with the reason.
    Raises UnknownNameError for a missing run, KeyboardInterrupt after recording the results so far, with false
    discoveries controlled.
    """
    benches = benches or BenchPool(config, store, request)
    with benches:
        if budget_s is not None:
            benches.end_s = time.monotonic() + budget_s
        return _ConfirmRun(config, store, run_id, request, benches, Remeasurement(store, request, benches)).findings()


@dataclass
class _ConfirmRun:
    _config: Config
    _store: Store
    _run_id: str
    _request: PairsRequest
    _benches: BenchPool
    _remeasurement: Remeasurement
    _results: list[RemeasuredSeries] = field(default_factory=list)

    def findings(self) -> RunFindings:
        """Judge the run, measure, record, and return what came of it."""
        comparison = record_comparison(self._store, self._run_id)
        shifts = [shift.reason for shift in comparison.judged.shifts]
        programs = self._programs(comparison)
        if programs:
            comparison = compare_with_history(self._store, self._run_id, programs=programs)
            self._store.alerts.record(self._run_id, found_alerts(comparison))
        try:
            not_measured = self._suspected(comparison)
            problems = tuple(dict.fromkeys(self._benches.broken.values()))
            changed_not_measured = self._changed(comparison)
        finally:
            self._control()
        if self._results:
            self._report()
        return RunFindings(
            run_id=self._run_id,
            alerts=tuple(self._store.alerts.of_run(self._run_id)),
            shifts=tuple(shifts),
            not_measured=not_measured,
            problems=problems,
            changed=sum(not result.is_suspected for result in self._results),
            changed_not_measured=changed_not_measured,
            insufficient=comparison.insufficient,
        )

    def _report(self) -> None:
        """Write the report of the run anew, where there is one."""
        path = self._config.run_folder(self._run_id) / "report.html"
        if path.is_file():
            write_report(self._store.runs.view(self._run_id), path, self._store, self._config)

    def _programs(self, comparison: HistoryComparison) -> set[tuple[str, str]]:
        """Return the devices and metrics that are off as a whole because of the programs."""
        found, pairs, measure = set(), self._request.pairs, self._remeasurement.measure
        for shift in comparison.judged.shifts:
            results = [
                result
                for index in shift.representatives
                if time.monotonic() < self._benches.end_s
                and (result := measure(comparison.compared[index], pairs, up=shift.change > 0, attribute=False))
            ]
            # A runtime that could not be measured may be the cause as well.
            left = any(result.cause for result in results)
            if results and (left or programs_are_cause(result.confirmation for result in results)):
                found.add((shift.device, shift.metric))
        return found

    def _suspected(self, comparison: HistoryComparison) -> int:
        """Measure suspected changes in their order; return how many there was no time or device for."""
        alerts = {
            (one.series_id, one.device_kind): one
            for one in self._store.alerts.of_run(self._run_id)
            if one.state == AlertState.SUSPECTED
        }
        found = [(comparison.compared[n], comparison.judged.judgements[n]) for n in comparison.judged.suspected]
        # Measured numbers are not measured again; numbers of one program are measured by the same pairs.
        of_jobs = grouped((one.past.job_id, (one, why, alerts[one.key])) for one, why in found if one.key in alerts)
        left = [item for items in of_jobs.values() for item in items]
        measured = sum(self._remeasurement.good(compared) is not None for compared, _, _ in left)
        pairs = self._pairs(measured, is_suspected=True)
        family = measured + len(self._family_before(is_suspected=True))
        not_measured = 0
        groups = families([_family_key(compared) for compared, _, _ in left], [one for _, one, _ in left])
        results: dict[int, RemeasuredSeries] = {}
        for number, (place, group) in enumerate(_representatives_first(len(left), groups)):
            if time.monotonic() >= self._benches.end_s:
                return not_measured + len(left) - number
            compared, judgement, alert = left[place]
            logger.info("%s: %s %s", compared.past.job_id, compared.series.series.metric, judgement.reason)
            up, measure = judgement.change > 0, self._remeasurement.measure
            of = [results[one] for one in group if one in results]
            result = self._member(compared, of, up=up) or measure(compared, pairs, up=up, family=family)
            if result is None:
                not_measured += 1
                continue
            results[place] = result
            self._keep(compared, result, alert)
        return not_measured

    def _member(
        self, compared: ComparedSeries, representatives: Sequence[RemeasuredSeries], *, up: bool
    ) -> RemeasuredSeries | None:
        """Return the result of a few pairs for a series that stepped with others; None if it needs all pairs.

        Few pairs can show that it stepped as well, never that it did not.
        """
        step = common_step([one.confirmation for one in representatives])
        if step is None:
            return None
        result = self._remeasurement.measure(compared, LEAST_PAIRS, up=up, level=P_MEMBER, step=step)
        if result is None or result.confirmation.answer is not Answer.CONFIRMED:
            return None
        result.of = tuple(one for one in representatives if one.confirmation.answer is Answer.CONFIRMED)
        names = ", ".join(one.alert.job_id for one in result.of if one.alert)
        result.confirmation = member(compared.series.series.scale, step, result.confirmation, names)
        self._remeasurement.attribute_as(compared, result, result.of)
        return result

    def _changed(self, comparison: HistoryComparison) -> int:
        """Measure programs that changed unsuspected; return how many there was no time or device for."""
        changed = changed_programs(comparison, self._measured_before(comparison))
        found = [compared for compared in changed if self._remeasurement.good(compared) is not None]
        if not found:
            return 0
        logger.info("programs that changed unsuspected: %s, measured in the time that is left", len(found))
        pairs = self._pairs(len(found), is_suspected=False)
        family = len(found) + len(self._family_before(is_suspected=False))
        end_s = self._benches.end_s if math.isfinite(self._benches.end_s) else time.monotonic() + CHANGED_S
        # Without a suspected change the run waits for no busy device.
        self._benches.wait_s = _TAKEN_S
        not_measured = 0
        impossible: list[str] = []
        for number, compared in enumerate(found):
            if time.monotonic() >= end_s:
                not_measured += len(found) - number
                break
            up = worse(compared.series.series).up
            result = self._remeasurement.measure(compared, pairs, up=up, level=P_UNSUSPECTED, family=family)
            if result is None:
                not_measured += 1
            elif not result.device:
                impossible.append(result.confirmation.reason)
            else:
                result.is_suspected = False
                self._keep(compared, result, self._store.alerts.add(self._run_id, _changed_alert(compared, result)))
        if impossible:
            logger.warning("programs that changed and cannot be measured: %s: %s", len(impossible), impossible[0])
        return not_measured

    def _measured_before(self, comparison: HistoryComparison) -> dict[tuple[int, str], set[str]]:
        """Return the runs with measured pairs or a user's decision, by series and device kind."""
        alerts = itertools.chain(*comparison.alerts.values(), self._store.alerts.of_run(self._run_id, unchanged=True))
        known = (one for one in alerts if one.device or one.state in (*STEPS, AlertState.REFUTED))
        runs = grouped(((one.series_id, one.device_kind), one.run_id) for one in known)
        return {series: set(of_series) for series, of_series in runs.items()}

    def _keep(self, compared: ComparedSeries, result: RemeasuredSeries, alert: AlertRecord) -> None:
        """Record an answer at once, so that nothing is lost when the run ends here."""
        result.alert = alert
        logger.info("%s: %s: %s", compared.past.job_id, result.confirmation.answer, result.confirmation.reason)
        self._results.append(result)
        self._record(result)

    def _pairs(self, measured: int, *, is_suspected: bool) -> int:
        """Return the pairs for each of `measured` numbers, together with the numbers of earlier calls."""
        return max(self._request.pairs, pairs_needed(measured + len(self._family_before(is_suspected=is_suspected))))

    def _family_before(self, *, is_suspected: bool) -> list[Confirmation]:
        """Return what an earlier call measured of this run, in the same night."""
        now = {result.alert.id for result in self._results if result.alert}
        return [
            msgspec.structs.replace(unknown(""), p_value=one.p_value)
            for one in self._store.alerts.of_run(self._run_id, unchanged=True)
            if (one.finding != Finding.UNCHANGED) is is_suspected
            and one.device
            and one.id not in now
            and not math.isnan(one.p_value)
        ]

    def _control(self) -> None:
        """Control false discoveries among all measured suspected changes, and among all other numbers."""
        for is_suspected in (True, False):
            # Unmeasured numbers could not be confirmed.
            measured = [
                one
                for one in self._results
                if one.is_suspected is is_suspected and one.confirmation.pairs and not one.of
            ]
            family = [*(result.confirmation for result in measured), *self._family_before(is_suspected=is_suspected)]
            for result, controlled in zip(measured, control(family)[: len(measured)], strict=True):
                if controlled != result.confirmation:
                    result.confirmation = controlled
                    self._record(result)
        for result in self._results:
            if any(one.confirmation.answer is not Answer.CONFIRMED for one in result.of):
                result.confirmation = unsure(result.confirmation)
                self._record(result)

    def _record(self, result: RemeasuredSeries) -> None:
        alert, confirmation = result.alert, result.confirmation
        if alert is None:
            return
        finding = alert.finding
        if not result.is_suspected:
            # The claim was that it is worse.
            finding = Finding.REGRESSION if confirmation.answer is Answer.CONFIRMED else Finding.UNCHANGED
        state = AlertState(confirmation.answer.value)
        recorded = self._store.alerts.answer(
            alert.id,
            NewAlert(
                series_id=alert.series_id,
                device_kind=alert.device_kind,
                finding=finding,
                state=state,
                last_good=result.points[result.good].run_id,
                first_bad=result.points[result.bad].run_id,
                # An unmeasured change keeps its first estimate.
                change=alert.change if math.isnan(confirmation.change) else confirmation.change,
                low=confirmation.low,
                high=confirmation.high,
                p_value=confirmation.p_value,
                reason=confirmation.reason,
                likely_cause=reason_line(result.cause),
            ),
            device=result.device,
            pairs=[(_median(good), _median(new)) for good, new in result.pairs],
            was=result.state,
        )
        result.state = state
        if not recorded:
            result.alert = None
            logger.warning(
                "%s: %s was measured by another process meanwhile: its result is kept", alert.job_id, alert.metric
            )


def _family_key(compared: ComparedSeries) -> tuple[str, ...]:
    """Return what series have in common that may have stepped together: times of one device."""
    series = compared.series.series
    alone = () if series.scale is Scale.RATIO else (series.id,)
    return compared.points[-1].device, compared.points[-1].device_kind, series.metric, *alone


def _representatives_first(count: int, groups: Sequence[tuple[int, ...]]) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yield the places of suspected changes in their order, members of families after their representatives."""
    members = {place: group for group in groups for place in group[REPRESENTATIVES:]}
    done: set[int] = set()
    for place in range(count):
        if place in members:
            continue
        yield place, ()
        done.add(place)
        for group in groups:
            if place in group and done.issuperset(group[:REPRESENTATIVES]):
                yield from ((one, group[:REPRESENTATIVES]) for one in group[REPRESENTATIVES:])


def _changed_alert(compared: ComparedSeries, result: RemeasuredSeries) -> NewAlert:
    return NewAlert(
        series_id=compared.series.id,
        device_kind=compared.points[-1].device_kind,
        finding=Finding.UNCHANGED,
        state=AlertState.SUSPECTED,
        last_good=compared.points[result.good].run_id,
        first_bad=compared.points[-1].run_id,
        reason="its program changed",
    )


def _median(samples: Sequence[float]) -> float:
    return statistics.median(samples) if samples else math.nan
