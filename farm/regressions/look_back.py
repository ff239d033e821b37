"""The numbers of a run against those of the runs before it: which stand out. No device is asked."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec

from farm.store.records import STEPS, AlertState, NewAlert

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from farm.analysis.history import Point
    from farm.analysis.nights import NightJudgement
    from farm.store.queries.points import JobPast, SeriesPast
    from farm.store.records import AlertRecord
    from farm.store.store import Store


class Seen(msgspec.Struct, frozen=True):
    """One number of the run, and the runs that it is compared with."""

    past: JobPast
    series: SeriesPast
    points: tuple[Point, ...]
    """That can be compared with the newest, which is the last, oldest first; their values are `values`."""
    values: tuple[float, ...]
    steps: dict[int, float]
    """Index of the first run on a new level, and the change."""
    told: frozenset[str] = frozenset()
    """Findings that newer runs gave, as a step that came with this run or with one near it."""

    @property
    def first(self) -> int:
        """Return the index of the oldest run of the level: the good one of a confirmation."""
        from farm.analysis.candidates import reference

        before = len(self.points) - 1
        return reference(before, [step for step in self.steps if step < before])


class LookBack(msgspec.Struct, frozen=True):
    """All numbers of a run, and what stands out among them."""

    seen: tuple[Seen, ...]
    night: NightJudgement
    """Its indices are those of `seen`."""
    insufficient: int
    """Numbers that have too few runs to compare with."""

    def told(self, *, confirm: bool = False) -> list[str]:
        """Return what a user is told of it, one line each; nothing of a quiet run. `confirm`: it is measured again."""
        lines = [shift.reason for shift in self.night.shifts]
        exact, looks = len(self.night.exact), len(self.night.candidates)
        if exact:
            what = "number that repeats" if exact == 1 else "numbers that repeat"
            lines.append(f"{exact} {what} changed: 'farm triage' lists what got worse")
        if looks:
            what = "number looks" if looks == 1 else "numbers look"
            hint = "" if confirm else ": 'farm confirm' measures again"
            lines.append(f"{looks} {what} different from before{hint}")
        return lines


def is_judged(past: JobPast, one: SeriesPast) -> bool:
    """Tell whether a number says something about the program: times of a simulated device are those of this machine."""
    return one.series.unit != "ns" or past.runs[-1].device_kind != "virtual"


def look_back(store: Store, run_id: str, *, programs: Collection[tuple[str, str]] = ()) -> LookBack:
    """Judge every number of a run against the runs before it. Nothing is written; `programs` as in `judge_night`."""
    pasts = store.history.pasts_of_run(run_id)
    known: dict[tuple[int, str], list[AlertRecord]] = {}
    for alert in store.alerts.of_jobs(past.job_id for past in pasts):
        # Also what newer runs gave: a run is looked at again when it is resumed, or came late from another machine.
        if alert.run_id != run_id:
            known.setdefault((alert.series_id, alert.device_kind), []).append(alert)
    return judge_pasts(pasts, known, programs)


def judge_pasts(
    pasts: Iterable[JobPast],
    known: Mapping[tuple[int, str], Sequence[AlertRecord]],
    programs: Collection[tuple[str, str]] = (),
) -> LookBack:
    """Judge the newest run of every job; `known` has by series and device kind what stood out before. Pure."""
    from farm.analysis.candidates import Finding
    from farm.analysis.nights import Observation, judge_night

    seen = [one for past in pasts for one in seen_of(past, known)]
    night = judge_night(
        [Observation(one.series.series, one.past.device, _levelled(one), one.values[-1]) for one in seen],
        programs=programs,
    )

    def is_new(index: int) -> bool:
        return night.judgements[index].finding not in seen[index].told

    night = msgspec.structs.replace(
        night, candidates=tuple(filter(is_new, night.candidates)), exact=tuple(filter(is_new, night.exact))
    )
    insufficient = sum(judgement.finding is Finding.INSUFFICIENT_DATA for judgement in night.judgements)
    return LookBack(tuple(seen), night, insufficient)


def seen_of(past: JobPast, known: Mapping[tuple[int, str], Sequence[AlertRecord]]) -> Iterator[Seen]:
    """Yield the numbers of a job's newest run that are judged; `known` as in `judge_pasts`. Pure."""
    from farm.analysis.history import split

    # What can be compared is a question of the runs, the same for all numbers of a job.
    comparable = {point.run_id for point in split(past.runs).comparable()}
    indices = [index for index, run in enumerate(past.runs) if run.run_id in comparable]
    for one in past.series:
        if math.isnan(one.values[-1]) or not is_judged(past, one):
            continue
        having = [index for index in indices if not math.isnan(one.values[index])]
        points = tuple(past.runs[index] for index in having)
        values = tuple(one.values[index] for index in having)
        alerts = [alert for alert in known.get((one.id, past.runs[-1].device_kind), ()) if alert.state in STEPS]
        yield Seen(past, one, points, values, _steps(points, alerts), _told(points[-1].run_id, alerts))


def found_alerts(looked: LookBack) -> list[NewAlert]:
    """Return what stands out, to be recorded: candidates, and exact numbers that changed. Pure."""
    return [
        *(_alert(looked, index, AlertState.EXACT) for index in looked.night.exact),
        *(_alert(looked, index, AlertState.CANDIDATE) for index in looked.night.candidates),
    ]


def record_look_back(store: Store, run_id: str) -> LookBack:
    """Judge every number of a run, record what stands out, and return it."""
    looked = look_back(store, run_id)
    store.alerts.record(run_id, found_alerts(looked))
    return looked


def _steps(points: Sequence[Point], alerts: Iterable[AlertRecord]) -> dict[int, float]:
    found: dict[int, float] = {}
    for alert in alerts:
        if not alert.exact and not math.isnan(alert.change):
            index = next((index for index, point in enumerate(points) if point.run_id >= alert.first_bad), 0)
            if 0 < index < len(points):
                found[index] = found.get(index, 0.0) + alert.change
    return found


def _told(run_id: str, alerts: Iterable[AlertRecord]) -> frozenset[str]:
    return frozenset(alert.finding for alert in alerts if alert.last_good < run_id < alert.first_bad)


def _levelled(one: Seen) -> list[float]:
    from farm.analysis.candidates import levelled

    # A step that came with this very run is taken out of all before it.
    return levelled(one.series.series.scale, one.values[:-1], one.steps)


def _alert(looked: LookBack, index: int, state: AlertState) -> NewAlert:
    one, judgement = looked.seen[index], looked.night.judgements[index]
    exact = state is AlertState.EXACT
    good = one.points[-2 if exact else one.first]
    return NewAlert(
        series_id=one.series.id,
        device_kind=one.points[-1].device_kind,
        finding=judgement.finding,
        state=state,
        last_good=good.run_id,
        first_bad=one.points[-1].run_id,
        change=judgement.change,
        low=judgement.change if exact else math.nan,
        high=judgement.change if exact else math.nan,
        p_value=judgement.p_value,
        reason=judgement.reason,
    )
