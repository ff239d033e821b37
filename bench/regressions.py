"""Made-up series with known steps: how many are found, how soon, and how often is there an alert about nothing?

    python bench/regressions.py [--seeds 5] [--first-seed 1] [--series 300] [--nights 60] [--sigmas N] [--changed]
                                [--worlds [NAME...]] [--quick]

Nights are noisy by 2 %, single inferences by 3 %; one night in fifty is 20 to 60 % off, on three nights everything on a
device is 5 to 15 % slower. A third of the series get slower by 5, 8 or 12 % in a random night. Every night goes
through the functions of farm/analysis, as the farm calls them; only the devices are made up. A line for each seed, the
last line is JSON over all seeds: `false_alerts_per_series_night`; `found_8pct_2_nights`, `found_12pct_2_nights`: share
found in the first or second night with it; `first_bad_exact`: share of the found ones whose first bad run is named.
The line before tells what it costs (pairs of two times five inferences, old runs looked at), what becomes of steps of
5 %, and what change points alone find in the histories afterwards, without running anything again.

With `--changed` every program is taken to be new every night, and there is time to measure also those that do not stand
out, wherever the history does not rule out that they got worse. `--worlds` goes through worlds unlike this one
(worlds.py), a line for each; the last line has `false_in_1000` and `found_8pct_2_nights` of each world and
`pairs_a_night` of the usual one.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from step_alerts import Alert, RunRange, grouped, new_alerts

from farm.analysis.candidates import LEAST_BASELINE, levelled, may_hide_regression, reference, way
from farm.analysis.change_points import LEAST_LEVEL, change_points
from farm.analysis.confirmation import (
    INFERENCES,
    P_CONFIRMED,
    P_UNSUSPECTED,
    PAIRS,
    Answer,
    Confirmation,
    Pair,
    alone_level,
    confirm,
    control,
    pairs_needed,
    unsure,
)
from farm.analysis.families import P_MEMBER, common_step, families, member
from farm.analysis.first_bad import MOST_PROBES, Bracket, narrowed, next_probe, suspicion
from farm.analysis.nights import REPRESENTATIVES, Observation, judge_night, programs_are_cause
from farm.analysis.robust import discoveries
from farm.analysis.scale import GATES, Scale, Series
from farm.analysis.sequential import LEAST_PAIRS, add_pairs, confirmed_again, steady_inferences, until_clear
from farm.results.attempt import Direction

if TYPE_CHECKING:
    from collections.abc import Sequence

    from step_alerts import AlertGroup

    from farm.analysis.candidates import Judgement
    from farm.analysis.nights import NightJudgement
    from farm.analysis.sequential import Look

DEVICES = 6
BETWEEN_NIGHTS, WITHIN_RUN = 0.02, 0.03
# Of a run: three samples with three iterations each.
VALUES = 9
OUTLIERS, OUTLIER = 0.02, (0.2, 0.6)
HOT_NIGHTS, HOT = 3, (0.05, 0.15)
STEPS = (0.05, 0.08, 0.12)
# Within a pair the device warms up or cools down, alike for both bundles.
DRIFT = 0.05
DAY_MS = 86_400_000


class World:
    """What really happens: nothing here is known to the farm but `measured` and what `pair` gives."""

    def __init__(self, seed: int, series: int, nights: int) -> None:
        truth, self._draw = (np.random.default_rng(one) for one in np.random.SeedSequence(seed).spawn(2))
        self.series, self.nights = series, nights
        self.device = np.arange(series) % DEVICES
        self.step_size, self.step_night = self._plant(truth)
        level = 10 ** truth.uniform(5, 8, size=series)
        self._level = level[:, None] * np.where(
            np.arange(nights) >= self.step_night[:, None], 1.0 + self.step_size[:, None], 1.0
        )
        night = self._nights(truth)
        outliers = truth.random((series, nights)) < OUTLIERS
        night *= np.where(outliers, 1.0 + truth.uniform(*OUTLIER, size=(series, nights)), 1.0)
        self.hot = {
            (device, int(one))
            for device in range(DEVICES)
            for one in truth.choice(np.arange(nights), size=min(HOT_NIGHTS, nights), replace=False)
        }
        for device, one in sorted(self.hot):
            night[self._ran_on(device, one), one] *= 1.0 + truth.uniform(*HOT)
        self.measured = self._runs(truth, night)

    def _nights(self, truth: np.random.Generator) -> np.ndarray:
        """Return what each night does to each series, as a factor."""
        return 1.0 + BETWEEN_NIGHTS * truth.standard_normal((self.series, self.nights))

    def _runs(self, truth: np.random.Generator, night: np.ndarray) -> np.ndarray:
        """Return what each run measured: the median of its samples."""
        within = 1.0 + WITHIN_RUN * truth.standard_normal((self.series, self.nights, VALUES))
        return np.median(self._level[:, :, None] * night[:, :, None] * within, axis=2)

    def past(self, series: int, night: int) -> np.ndarray:
        """Return the nights before that can be compared with this one, oldest first."""
        return np.flatnonzero(~np.isnan(self.measured[series, self.begins(series, night) : night])) + self.begins(
            series, night
        )

    def begins(self, series: int, night: int) -> int:
        """Return the first night that can be compared with this one."""
        del series, night
        return 0

    def _ran_on(self, device: int, night: int) -> np.ndarray:
        """Return for each series whether a device ran it in a night."""
        del night
        return np.asarray(self.device == device)

    def is_true(self, series: int, alert: Alert) -> bool:
        """Return whether an alert that is not the first of a planted step is about something all the same."""
        del series, alert
        return False

    def is_off(self, device: int, night: int) -> bool:
        """Return whether everything on a device is slower in a night than in those before."""
        return (device, night) in self.hot

    def device_of(self, series: int, night: int) -> int:
        """Return the device that ran a series in a night."""
        del night
        return int(self.device[series])

    def new_session(self) -> None:
        """Begin new processes on every device."""

    def _plant(self, truth: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Return the size of each series' step, 0 for two thirds, and its night: one that can be judged at all."""
        size, night = np.zeros(self.series), np.full(self.series, self.nights)
        chosen = truth.permutation(self.series)[: self.series // 3]
        size[chosen] = np.resize(STEPS, len(chosen))
        night[chosen] = truth.integers(LEAST_BASELINE, self.nights - 1, size=len(chosen))
        return size, night

    def slow_down(self, device: int, night: int, size: float) -> None:
        """Make every bundle for `device` slower from `night` on, as a change of a compiler would."""
        slower = np.where(np.arange(self.nights) >= night, 1.0 + size, 1.0)
        self._level[self.device == device] *= slower
        self.measured[self.device == device] *= slower

    def begin(self, night: int) -> None:
        """Let a night begin."""

    def inferences(self, series: int) -> int:
        """Return how many inferences a side has in a pair, at least."""
        del series
        return INFERENCES

    def pair(self, series: int, good: int, new: int, number: int = 0, inferences: int = INFERENCES) -> Pair:
        """Run the bundles of two nights one after the other on one device, tonight; the good one begins even ones."""
        del number
        return self._noisy(series, good, new, WITHIN_RUN, inferences)

    def _noisy(self, series: int, good: int, new: int, within: float, inferences: int) -> tuple[np.ndarray, np.ndarray]:
        tonight = 1.0 + DRIFT * self._draw.standard_normal()
        noise = np.maximum(1.0 + within * self._draw.standard_normal((2, inferences)), 0.2)
        return self._level[series, good] * tonight * noise[0], self._level[series, new] * tonight * noise[1]


@dataclass
class Farm:
    """What the farm does, night by night, and what it remembers."""

    world: World
    screen: float | None = None
    """False discovery rate among candidates, before they are confirmed; None confirms all."""
    sigmas: float = GATES[Scale.RATIO].sigmas
    changed: bool = False
    """Measure also what does not stand out: every program is another one every night."""
    together: bool = True
    """Of series that step together measure few in full."""
    alerts: dict[int, list[Alert]] = field(default_factory=dict)
    """By night."""
    steps: list[dict[int, float]] = field(default_factory=list)
    """Of each series: the run where a level begins, and its change."""
    spent: Counter[str] = field(default_factory=Counter)
    spans: list[tuple[int, int, int, Confirmation]] = field(default_factory=list)
    """Of each confirmed change its series, the good night, the first bad one, and what is said of these two."""

    def __post_init__(self) -> None:
        self.series = [Series(str(one), "latency", "ns", Direction.LOWER) for one in range(self.world.series)]
        self.steps = [{} for _ in self.series]
        # How many are measured beside the one that is.
        self._family = 1

    def run(self) -> None:
        for night in range(self.world.nights):
            self.world.begin(night)
            self.world.new_session()
            found = self._night(night)
            self.alerts[night] = [alert for group in found for alert in group.alerts]

    def _night(self, night: int) -> Sequence[AlertGroup]:
        # Of each observation its series: not every one has a number every night.
        self._seen = [one for one in range(self.world.series) if not np.isnan(self.world.measured[one, night])]
        observations = [self._observation(series, night) for series in self._seen]
        usual = GATES[Scale.RATIO]
        gates = {**GATES, Scale.RATIO: msgspec.structs.replace(usual, sigmas=self.sigmas)}
        seen = judge_night(observations, gates=gates)
        programs = set()
        for shift in seen.shifts:
            answers = [self._compare(self._seen[one], night, up=shift.change > 0) for one in shift.representatives]
            programs |= {(shift.device, shift.metric)} if programs_are_cause(answers) else set()
            truly = self.world.is_off(int(shift.device), night)
            self.spent["hot nights told" if truly else "hot nights told wrongly"] += 1
        if programs:
            self.spent["devices whose programs were blamed"] += len(programs)
            seen = judge_night(observations, programs=programs, gates=gates)
        candidates = seen.candidates
        if self.screen is not None:
            kept = discoveries([judgement.p_value for judgement in seen.judgements], self.screen)
            candidates = tuple(one for one in candidates if kept[one])
        self.spent["candidates"] += len(candidates)
        others = self._others(seen) if self.changed and night else []
        self.spent["others"] += len(others)
        pairs = pairs_needed(len(candidates))
        judgements = [seen.judgements[one] for one in candidates]
        candidates = tuple(self._seen[one] for one in candidates)
        self._family = len(candidates)
        answers = self._measure_all(candidates, judgements, night, pairs)
        self._family = len(others)
        pairs = pairs_needed(len(others))
        more = [self._compare(one, night, up=True, first=pairs, level=P_UNSUSPECTED) for one in others]
        self._family = 1
        found: list[Alert] = []
        said = zip([*candidates, *others], [*self._control(answers), *control(more)], strict=True)
        # Members of families have the first bad run of their representatives.
        for one, answer in sorted(said, key=lambda item: item[0] in self._inherits):
            self.spent[answer.answer.value] += 1
            if answer.answer is Answer.CONFIRMED:
                found.append(self._inherited(one, night, answer, found) or self._attribute(one, night, answer))
        new = new_alerts(found, [alert for told in self.alerts.values() for alert in told])
        return grouped(new)

    def _measure_all(
        self, candidates: Sequence[int], judgements: Sequence[Judgement], night: int, pairs: int
    ) -> list[Confirmation]:
        """Measure candidates, of families only representatives in full."""
        self._inherits: dict[int, tuple[int, ...]] = {}
        keys = [self.world.device_of(one, night) for one in candidates]
        groups = families(keys, judgements) if self.together else []
        members = {place for group in groups for place in group[REPRESENTATIVES:]}
        answers: dict[int, Confirmation] = {}
        for place, one in enumerate(candidates):
            if place not in members:
                answers[place] = self._compare(one, night, up=judgements[place].change > 0, first=pairs)
        for group in groups:
            step = common_step([answers[place] for place in group[:REPRESENTATIVES]])
            for place in group[REPRESENTATIVES:]:
                one, up = candidates[place], judgements[place].change > 0
                if step is not None:
                    good = self._good(one, night)
                    gate = abs(step.change) / 2.0
                    own = self._measure(
                        one, good, night, up=up, first=LEAST_PAIRS, gate=gate, level=P_MEMBER, fresh=True, family=1
                    )
                    if own.answer is Answer.CONFIRMED:
                        sure = [of for of in group[:REPRESENTATIVES] if answers[of].answer is Answer.CONFIRMED]
                        answers[place] = member(Scale.RATIO, step, own, f"{len(sure)} others")
                        self._inherits[one] = tuple(candidates[of] for of in sure)
                        continue
                answers[place] = self._compare(one, night, up=up, first=pairs)
        self._places = {one: place for place, one in enumerate(candidates)}
        return [answers[place] for place in range(len(candidates))]

    def _control(self, answers: Sequence[Confirmation]) -> list[Confirmation]:
        """Take back what is chance among all that were measured in full, and what inherits from it."""
        inheriting = {self._places[one]: of for one, of in self._inherits.items()}
        full = [place for place in range(len(answers)) if place not in inheriting]
        found = dict(zip(full, control([answers[place] for place in full]), strict=True))
        for place, of in inheriting.items():
            stands = all(found[self._places[one]].answer is Answer.CONFIRMED for one in of)
            found[place] = answers[place] if stands else unsure(answers[place])
        return [found[place] for place in range(len(answers))]

    def _inherited(self, series: int, night: int, answer: Confirmation, found: Sequence[Alert]) -> Alert | None:
        """Return the alert of a member of a family, where its representatives have one first bad run."""
        of = {str(one) for one in self._inherits.get(series, ())}
        ranges = {alert.range for alert in found if alert.series in of}
        if len(ranges) != 1:
            return None
        [range_] = ranges
        good, first_bad = self._good(series, night), int(range_.first_bad)
        if not good < first_bad:
            return None
        self.spans.append((series, good, first_bad, answer))
        self.steps[series][first_bad] = self.steps[series].get(first_bad, 0.0) + answer.change
        return Alert(
            str(series), way(Direction.LOWER, answer.change), range_, answer.change, answer.low, answer.high,
            answer.p_value, answer.reason,
        )  # fmt: skip

    def _others(self, seen: NightJudgement) -> list[int]:
        return [
            one
            for one, judgement in zip(self._seen, seen.judgements, strict=True)
            if may_hide_regression(self.series[one], judgement)
        ]

    def _observation(self, series: int, night: int) -> Observation:
        past = self.world.past(series, night)
        values = levelled(Scale.RATIO, self.world.measured[series, past].tolist(), self._steps(series, past))
        device = str(self.world.device_of(series, night))
        devices = [str(self.world.device_of(series, one)) for one in past.tolist()]
        return Observation(self.series[series], device, values, float(self.world.measured[series, night]), devices)

    def _steps(self, series: int, past: np.ndarray) -> dict[int, float]:
        """Return the known steps by their place among the nights `past`."""
        found: dict[int, float] = {}
        for night, change in self.steps[series].items():
            place = int(np.searchsorted(past, night))
            if place:
                found[place] = found.get(place, 0.0) + change
        return found

    def _compare(
        self, series: int, night: int, *, up: bool, first: int = PAIRS, level: float = P_CONFIRMED
    ) -> Confirmation:
        return self._measure(series, self._good(series, night), night, up=up, first=first, level=level)

    def _good(self, series: int, night: int) -> int:
        """Return the night that tonight is confirmed against."""
        past = self.world.past(series, night)
        if not len(past):
            return night - 1
        steps = {place: change for place, change in self._steps(series, past).items() if place < len(past)}
        return int(past[reference(self.series[series], self.world.measured[series, past].tolist(), steps)])

    def _measure(
        self,
        series: int,
        good: int,
        new: int,
        *,
        up: bool,
        first: int = PAIRS,
        gate: float | None = None,
        level: float = P_CONFIRMED,
        fresh: bool = False,
        family: int = 0,
    ) -> Confirmation:
        """Measure pairs until it is clear, and what they confirm once more; with `fresh` all in new processes."""
        pairs: list[Pair] = []
        gate = GATES[Scale.RATIO].confirmed if gate is None else gate
        answer = confirm(Scale.RATIO, pairs, up=up)
        least = self.world.inferences(series)

        def measure(look: Look) -> bool:
            if look.renews:
                self.world.new_session()
            inferences = steady_inferences(pairs, least)
            add_pairs(
                pairs, look.begin, self._pairs(series, good, new, look.begin, look.pairs, inferences, fresh=fresh)
            )
            return True

        def is_open(looks: int) -> bool:
            nonlocal answer
            needed = min(level, alone_level(family or self._family)) if looks == 1 else level
            answer = confirm(Scale.RATIO, pairs, up=up, gate=gate, level=needed, looks=looks)
            return answer.answer is Answer.UNKNOWN

        until_clear(first, measure, is_open, early=True)
        if answer.answer is Answer.CONFIRMED and not fresh:
            again = self._pairs(series, good, new, 0, PAIRS, steady_inferences(pairs, least), fresh=True)
            answer = confirmed_again(Scale.RATIO, answer, again, up=up, gate=gate)
        return answer

    def _pairs(
        self, series: int, good: int, new: int, begin: int, count: int, inferences: int, *, fresh: bool
    ) -> list[Pair]:
        self.spent["pairs"] += count
        self.spent["inferences"] += 2 * count * inferences
        found = []
        for number in range(begin, begin + count):
            if fresh:
                self.world.new_session()
            found.append(self.world.pair(series, good, new, number, inferences))
        return found

    def _attribute(self, series: int, night: int, seen: Confirmation) -> Alert:
        """Run old bundles again until the first bad one is known."""
        runs = [*self.world.past(series, night).tolist(), night]
        values = self.world.measured[series, runs].tolist()
        bracket = Bracket(runs.index(self._good(series, night)), len(runs) - 1)
        good = runs[bracket.good]
        weights = suspicion(Scale.RATIO, values, bracket, seen.change)
        whole, at = seen, {len(runs) - 1: seen}
        for _ in range(MOST_PROBES):
            probe = next_probe(bracket, weights)
            if probe is None:
                break
            self.spent["probes"] += 1
            gate = abs(whole.change) / 2.0
            answer = at[probe] = self._measure(series, good, runs[probe], up=whole.change > 0, gate=gate, fresh=True)
            bracket = narrowed(bracket, probe, answer.answer)
        first_bad, last_good = runs[bracket.bad], runs[bracket.good]
        seen = at[bracket.bad]
        self.spans.append((series, good, first_bad, seen))
        self.steps[series][first_bad] = self.steps[series].get(first_bad, 0.0) + seen.change
        range_ = RunRange(first_bad * DAY_MS, last_good * DAY_MS, str(first_bad), str(last_good))
        finding = way(Direction.LOWER, seen.change)
        return Alert(
            str(series), finding, range_, seen.change, seen.low, seen.high, whole.p_value, f"{whole.reason}; {night}"
        )


@dataclass
class Score:
    """What was found, against what was planted."""

    series_nights: int = 0
    false: int = 0
    alerts: int = 0
    planted: Counter[float] = field(default_factory=Counter)
    found: Counter[float] = field(default_factory=Counter)
    in_one: Counter[float] = field(default_factory=Counter)
    in_two: Counter[float] = field(default_factory=Counter)
    exact: int = 0
    nights: int = 0
    spent: Counter[str] = field(default_factory=Counter)
    points: Counter[str] = field(default_factory=Counter)
    """What change points find in whole histories."""

    def add(self, farm: Farm) -> None:
        world = farm.world
        self.series_nights += world.series * world.nights
        self.nights += world.nights
        self.spent += farm.spent
        self.planted.update(float(size) for size in world.step_size if size)
        seen = set()
        for night, alerts in farm.alerts.items():
            for alert in alerts:
                self.alerts += 1
                one = int(alert.series)
                size, begun = float(world.step_size[one]), int(world.step_night[one])
                having = np.flatnonzero(~np.isnan(world.measured[one, begun:]))[:2] + begun
                # A second alert about one step is about nothing, as is one about its end.
                if not size or night < begun or one in seen or alert.change < 0:
                    self.false += not world.is_true(one, alert)
                    continue
                seen.add(one)
                self.found[size] += 1
                self.in_one[size] += night == having[0]
                self.in_two[size] += night in having
                self.exact += alert.range.first_bad == str(having[0])
        for one in range(world.series):
            self._look_back(world, one)

    def _look_back(self, world: World, one: int) -> None:
        """Score the change points of a whole history: those nearest to the step against the truth, others are false."""
        found = change_points(Scale.RATIO, world.measured[one].tolist())
        size, begun = float(world.step_size[one]), int(world.step_night[one])
        self.points["series"] += 1
        if begun > world.nights - LEAST_LEVEL:
            # None, or too late to be a level.
            self.points["false"] += len(found)
            return
        self.points[f"steps {size}"] += 1
        near = [point for point in found if point.earliest <= begun <= point.latest or abs(point.index - begun) <= 2]
        self.points["false"] += len(found) - len(near[:1])
        if near:
            self.points[f"found {size}"] += 1
            self.points["found"] += 1
            self.points["exact"] += near[0].index == begun
            self.points["inside"] += near[0].earliest <= begun <= near[0].latest

    def merge(self, other: Score) -> None:
        self.series_nights += other.series_nights
        self.false += other.false
        self.alerts += other.alerts
        self.exact += other.exact
        self.nights += other.nights
        for name in ("planted", "found", "in_one", "in_two", "spent", "points"):
            getattr(self, name).update(getattr(other, name))

    def figures(self) -> dict[str, float]:
        return {
            "false_alerts_per_series_night": round(self.false / self.series_nights, 6),
            "found_8pct_2_nights": _share(self.in_two[0.08], self.planted[0.08]),
            "found_12pct_2_nights": _share(self.in_two[0.12], self.planted[0.12]),
            "first_bad_exact": _share(self.exact, self.found.total()),
        }

    def more(self) -> dict[str, float]:
        spent, nights = self.spent, self.nights
        return {
            "false_alerts": self.false,
            "alerts": self.alerts,
            "found_5pct_2_nights": _share(self.in_two[0.05], self.planted[0.05]),
            **{
                f"found_{size * 100:.0f}pct_same_night": _share(self.in_one[size], self.planted[size]) for size in STEPS
            },
            **{f"found_{size * 100:.0f}pct_ever": _share(self.found[size], self.planted[size]) for size in STEPS},
            "candidates_a_night": round(spent["candidates"] / nights, 2),
            "others_a_night": round(spent["others"] / nights, 2),
            "refuted_share": _share(spent["refuted"], spent["candidates"] + spent["others"]),
            "unknown_share": _share(spent["unknown"], spent["candidates"] + spent["others"]),
            "pairs_a_night": round(spent["pairs"] / nights, 1),
            "inferences_a_night": round(spent["inferences"] / nights, 1),
            "old_runs_looked_at_per_alert": round(spent["probes"] / max(1, self.alerts), 2),
            "hot_nights_told": spent["hot nights told"],
            "hot_nights_told_wrongly": spent["hot nights told wrongly"],
            "programs_blamed": spent["devices whose programs were blamed"],
            **{
                f"change_points_found_{size * 100:.0f}pct": _share(
                    self.points[f"found {size}"], self.points[f"steps {size}"]
                )
                for size in STEPS
            },
            "change_points_exact": _share(self.points["exact"], self.points["found"]),
            "change_points_interval_right": _share(self.points["inside"], self.points["found"]),
            "change_points_false_per_series": _share(self.points["false"], self.points["series"]),
        }


def _share(part: float, whole: float) -> float:
    return round(part / max(1, whole), 4)


def main() -> None:
    """Go through the nights of every seed."""
    parser = argparse.ArgumentParser(description="Regressions that were planted, and what is found of them.")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--series", type=int, default=300)
    parser.add_argument("--nights", type=int, default=60)
    parser.add_argument("--sigmas", type=float, default=GATES[Scale.RATIO].sigmas, help="the candidates' sigma gate")
    parser.add_argument("--screen", type=float, help="false discovery rate among candidates, before they are confirmed")
    parser.add_argument("--changed", action="store_true", help="measure also new programs that do not stand out")
    parser.add_argument("--quick", action="store_true", help="one seed; of worlds, also fewer series and nights")
    parser.add_argument("--worlds", nargs="*", metavar="NAME", help="other worlds, a line for each; all without names")
    options = parser.parse_args()
    if options.worlds is not None:
        from worlds import run_worlds

        size = (45, 40) if options.quick else (options.series, options.nights)
        seeds = range(options.first_seed, options.first_seed + (1 if options.quick else options.seeds))
        run_worlds(options.worlds, seeds, *size, changed=options.changed)
        return
    total = Score()
    for seed in range(options.first_seed, options.first_seed + (1 if options.quick else options.seeds)):
        began = time.perf_counter()
        farm = Farm(World(seed, options.series, options.nights), options.screen, options.sigmas, options.changed)
        farm.run()
        score = Score()
        score.add(farm)
        total.merge(score)
        print(json.dumps({"seed": seed, "seconds": round(time.perf_counter() - began, 1), **score.figures()}))
    print(json.dumps({"of_all": True, **total.more()}))
    print(json.dumps(total.figures()))


if __name__ == "__main__":
    main()
