"""Share of planted steps in simulated series that are found, how soon, and how many alerts are false.

    python bench/regressions.py [--seeds 5] [--first-seed 1] [--series 300] [--nights 60] [--quick]

Nights vary by 2 %, single inferences by 3 %; one night in fifty is 20 to 60 % slower, and on three nights everything on
a device is 5 to 15 % slower. A third of the series get slower by 5, 8 or 12 % in a random night. Every night goes
through the functions of farm/results/analysis as the farm calls them; the devices alone are simulated. Each seed prints
a line; the line of all seeds has the costs (pairs of two times five inferences, old runs that are measured again) and
the steps of 5 %. The last line is JSON over all seeds: `false_alerts_per_series_night`; `found_8pct_2_nights` and
`found_12pct_2_nights`, the share found in the first or second night; `first_bad_exact`, the share of found steps whose
first bad run is named.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from farm.results.analysis.confirmation import (
    INFERENCES,
    P_CONFIRMED,
    PAIRS,
    Answer,
    Confirmation,
    Pair,
    alone_level,
    confirm,
    control,
    pairs_needed,
    programs_are_cause,
    unsure,
)
from farm.results.analysis.families import P_MEMBER, common_step, families, member
from farm.results.analysis.first_bad import MOST_PROBES, Bracket, narrowed, next_probe, suspicion
from farm.results.analysis.run_judgement import REPRESENTATIVES, Observation, judge_run
from farm.results.analysis.scale import GATES, Scale, Series
from farm.results.analysis.sequential import (
    LEAST_PAIRS,
    Look,
    add_pairs,
    confirmed_again,
    steady_inferences,
    until_clear,
)
from farm.results.analysis.suspected import LEAST_BASELINE, Finding, Judgement, levelled, reference, way
from farm.results.attempt import Direction

DEVICES = 6
BETWEEN_NIGHTS, WITHIN_RUN = 0.02, 0.03
# Values of a run: three samples with three iterations each.
VALUES = 9
OUTLIERS, OUTLIER = 0.02, (0.2, 0.6)
HOT_NIGHTS, HOT = 3, (0.05, 0.15)
STEPS = (0.05, 0.08, 0.12)
# Within a pair the device warms up or cools down, alike for both bundles.
DRIFT = 0.05


class Alert(NamedTuple):
    """Alert about one series: a step between its last good night and its first bad one."""

    series: int
    finding: Finding
    last_good: int
    first_bad: int
    change: float


class World:
    """Simulated devices and programs; the farm sees only `measured` and the results of `pair`."""

    def __init__(self, seed: int, series: int, nights: int) -> None:
        truth, self._draw = (np.random.default_rng(one) for one in np.random.SeedSequence(seed).spawn(2))
        self.series, self.nights = series, nights
        self.device = np.arange(series) % DEVICES
        self.step_size, self.step_night = np.zeros(series), np.full(series, nights)
        chosen = truth.permutation(series)[: series // 3]
        self.step_size[chosen] = np.resize(STEPS, len(chosen))
        # Earlier nights are not judged, as their history is too short.
        self.step_night[chosen] = truth.integers(LEAST_BASELINE, nights - 1, size=len(chosen))
        level = 10 ** truth.uniform(5, 8, size=series)
        self._level = level[:, None] * np.where(
            np.arange(nights) >= self.step_night[:, None], 1.0 + self.step_size[:, None], 1.0
        )
        night = 1.0 + BETWEEN_NIGHTS * truth.standard_normal((series, nights))
        outliers = truth.random((series, nights)) < OUTLIERS
        night *= np.where(outliers, 1.0 + truth.uniform(*OUTLIER, size=(series, nights)), 1.0)
        self.hot = {
            (device, int(one))
            for device in range(DEVICES)
            for one in truth.choice(np.arange(nights), size=min(HOT_NIGHTS, nights), replace=False)
        }
        for device, one in sorted(self.hot):
            night[self.device == device, one] *= 1.0 + truth.uniform(*HOT)
        within = 1.0 + WITHIN_RUN * truth.standard_normal((series, nights, VALUES))
        self.measured = np.median(self._level[:, :, None] * night[:, :, None] * within, axis=2)

    def slow_down(self, device: int, night: int, size: float) -> None:
        """Make every bundle for `device` slower from `night` on, as a change of a compiler does."""
        slower = np.where(np.arange(self.nights) >= night, 1.0 + size, 1.0)
        self._level[self.device == device] *= slower
        self.measured[self.device == device] *= slower

    def pair(self, series: int, good: int, new: int, inferences: int) -> Pair:
        """Run the bundles of two nights one after the other on one device, tonight."""
        tonight = 1.0 + DRIFT * self._draw.standard_normal()
        noise = np.maximum(1.0 + WITHIN_RUN * self._draw.standard_normal((2, inferences)), 0.2)
        return self._level[series, good] * tonight * noise[0], self._level[series, new] * tonight * noise[1]


@dataclass
class Farm:
    """Nights of a farm, and its records of them."""

    world: World
    alerts: dict[int, list[Alert]] = field(default_factory=dict)
    """Alerts by night."""
    steps: list[dict[int, float]] = field(default_factory=list)
    """For each series, nights where a level begins, with its change."""
    spent: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.series = [Series(str(one), "latency", "ns", Direction.LOWER) for one in range(self.world.series)]
        self.steps = [{} for _ in self.series]
        # Suspected changes of a night, which are measured together.
        self._family = 1

    def run(self) -> None:
        """Go through all nights."""
        for night in range(self.world.nights):
            self.alerts[night] = self._new(self._night(night))

    def _new(self, found: Sequence[Alert]) -> list[Alert]:
        """Return alerts of steps without an earlier alert: another series, finding, or range of nights."""
        known = [alert for alerts in self.alerts.values() for alert in alerts]
        new: list[Alert] = []
        for alert in found:
            if not any(
                (alert.series, alert.finding) == (one.series, one.finding)
                and alert.last_good < one.first_bad
                and one.last_good < alert.first_bad
                for one in (*known, *new)
            ):
                new.append(alert)
        return new

    def _night(self, night: int) -> list[Alert]:
        observations = [self._observation(series, night) for series in range(self.world.series)]
        seen = judge_run(observations)
        programs = set()
        for shift in seen.shifts:
            answers = [self._compare(one, night, up=shift.change > 0) for one in shift.representatives]
            programs |= {(shift.device, shift.metric)} if programs_are_cause(answers) else set()
            is_hot = (int(shift.device), night) in self.world.hot
            self.spent["hot nights told" if is_hot else "hot nights told wrongly"] += 1
        if programs:
            self.spent["devices whose programs were at fault"] += len(programs)
            seen = judge_run(observations, programs=programs)
        self._family = len(seen.suspected)
        self.spent["suspected"] += self._family
        answers = self._measure_all(seen.suspected, [seen.judgements[one] for one in seen.suspected], night)
        self._family = 1
        found: list[Alert] = []
        controlled = zip(seen.suspected, self._control(answers), strict=True)
        # Members of families have the first bad night of their representatives.
        for one, answer in sorted(controlled, key=lambda item: item[0] in self._inherits):
            if answer.answer is Answer.CONFIRMED:
                found.append(self._inherited(one, night, answer, found) or self._attribute(one, night, answer))
        return found

    def _measure_all(self, suspected: Sequence[int], judgements: Sequence[Judgement], night: int) -> list[Confirmation]:
        """Measure suspected changes, of families only representatives in full."""
        self._inherits: dict[int, tuple[int, ...]] = {}
        pairs = pairs_needed(len(suspected))
        groups = families([int(self.world.device[one]) for one in suspected], judgements)
        members = {place for group in groups for place in group[REPRESENTATIVES:]}
        answers: dict[int, Confirmation] = {}
        for place, one in enumerate(suspected):
            if place not in members:
                answers[place] = self._compare(one, night, up=judgements[place].change > 0, first=pairs)
        for group in groups:
            step = common_step([answers[place] for place in group[:REPRESENTATIVES]])
            for place in group[REPRESENTATIVES:]:
                one, up = suspected[place], judgements[place].change > 0
                if step is not None:
                    own = self._measure(
                        one, self._good(one, night), night, up=up, first=LEAST_PAIRS, gate=abs(step.change) / 2.0,
                        level=P_MEMBER, fresh=True, family=1,
                    )  # fmt: skip
                    if own.answer is Answer.CONFIRMED:
                        sure = [of for of in group[:REPRESENTATIVES] if answers[of].answer is Answer.CONFIRMED]
                        answers[place] = member(Scale.RATIO, step, own, f"{len(sure)} others")
                        self._inherits[one] = tuple(suspected[of] for of in sure)
                        continue
                answers[place] = self._compare(one, night, up=up, first=pairs)
        self._places = {one: place for place, one in enumerate(suspected)}
        return [answers[place] for place in range(len(suspected))]

    def _control(self, answers: Sequence[Confirmation]) -> list[Confirmation]:
        """Return the confirmations with false discoveries controlled among fully measured ones, and their heirs."""
        inheriting = {self._places[one]: of for one, of in self._inherits.items()}
        full = [place for place in range(len(answers)) if place not in inheriting]
        found = dict(zip(full, control([answers[place] for place in full]), strict=True))
        for place, of in inheriting.items():
            stands = all(found[self._places[one]].answer is Answer.CONFIRMED for one in of)
            found[place] = answers[place] if stands else unsure(answers[place])
        return [found[place] for place in range(len(answers))]

    def _inherited(self, series: int, night: int, answer: Confirmation, found: Sequence[Alert]) -> Alert | None:
        """Return the alert of a member of a family, where its representatives have one first bad night."""
        of = self._inherits.get(series, ())
        ranges = {(alert.last_good, alert.first_bad) for alert in found if alert.series in of}
        if len(ranges) != 1:
            return None
        [(last_good, first_bad)] = ranges
        if not self._good(series, night) < first_bad:
            return None
        return self._alert(series, answer, last_good, first_bad)

    def _alert(self, series: int, answer: Confirmation, last_good: int, first_bad: int) -> Alert:
        self.steps[series][first_bad] = self.steps[series].get(first_bad, 0.0) + answer.change
        return Alert(series, way(Direction.LOWER, answer.change), last_good, first_bad, answer.change)

    def _observation(self, series: int, night: int) -> Observation:
        values = levelled(Scale.RATIO, self.world.measured[series, :night].tolist(), self._steps(series, night))
        device = str(self.world.device[series])
        return Observation(
            self.series[series], device, values, float(self.world.measured[series, night]), [device] * night
        )

    def _steps(self, series: int, night: int) -> dict[int, float]:
        """Return the known steps that are no later than a night."""
        return {one: change for one, change in self.steps[series].items() if one <= night}

    def _compare(self, series: int, night: int, *, up: bool, first: int = PAIRS) -> Confirmation:
        return self._measure(series, self._good(series, night), night, up=up, first=first)

    def _good(self, series: int, night: int) -> int:
        """Return the night that tonight is confirmed against."""
        steps = {one: change for one, change in self._steps(series, night).items() if one < night}
        return reference(self.series[series], self.world.measured[series, :night].tolist(), steps) if night else -1

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
        """Measure pairs until the answer is clear, and confirmed pairs once more unless they are `fresh`."""
        pairs: list[Pair] = []
        gate = GATES[Scale.RATIO].confirmed if gate is None else gate
        answer = confirm(Scale.RATIO, pairs, up=up)

        def measure(look: Look) -> bool:
            inferences = steady_inferences(pairs, INFERENCES)
            add_pairs(pairs, look.begin, self._pairs(series, good, new, look.pairs, inferences))
            return True

        def is_open(looks: int) -> bool:
            nonlocal answer
            needed = min(level, alone_level(family or self._family)) if looks == 1 else level
            answer = confirm(Scale.RATIO, pairs, up=up, gate=gate, level=needed, looks=looks)
            return answer.answer is Answer.UNKNOWN

        until_clear(first, measure, is_open, early=True)
        if answer.answer is Answer.CONFIRMED and not fresh:
            again = self._pairs(series, good, new, PAIRS, steady_inferences(pairs, INFERENCES))
            answer = confirmed_again(Scale.RATIO, answer, again, up=up, gate=gate)
        return answer

    def _pairs(self, series: int, good: int, new: int, count: int, inferences: int) -> list[Pair]:
        self.spent["pairs"] += count
        return [self.world.pair(series, good, new, inferences) for _ in range(count)]

    def _attribute(self, series: int, night: int, whole: Confirmation) -> Alert:
        """Run old bundles again until the first bad night is known."""
        good = self._good(series, night)
        bracket = Bracket(good, night)
        values = self.world.measured[series, : night + 1].tolist()
        weights, at = suspicion(Scale.RATIO, values, bracket, whole.change), {night: whole}
        for _ in range(MOST_PROBES):
            probe = next_probe(bracket, weights)
            if probe is None:
                break
            self.spent["probes"] += 1
            gate = abs(whole.change) / 2.0
            answer = at[probe] = self._measure(series, good, probe, up=whole.change > 0, gate=gate, fresh=True)
            bracket = narrowed(bracket, probe, answer.answer)
        return self._alert(series, at[bracket.bad], bracket.good, bracket.bad)


@dataclass
class Score:
    """Comparison of the found regressions with the planted ones."""

    series_nights: int = 0
    nights: int = 0
    false: int = 0
    alerts: int = 0
    planted: Counter[float] = field(default_factory=Counter)
    found: Counter[float] = field(default_factory=Counter)
    in_two: Counter[float] = field(default_factory=Counter)
    exact: int = 0
    spent: Counter[str] = field(default_factory=Counter)

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
                size, begun = float(world.step_size[alert.series]), int(world.step_night[alert.series])
                # A second alert about a step is false, and so is an alert about its end.
                if not size or night < begun or alert.series in seen or alert.change < 0:
                    self.false += 1
                    continue
                seen.add(alert.series)
                self.found[size] += 1
                self.in_two[size] += night <= begun + 1
                self.exact += alert.first_bad == begun

    def merge(self, other: Score) -> None:
        for name in ("series_nights", "nights", "false", "alerts", "exact"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("planted", "found", "in_two", "spent"):
            getattr(self, name).update(getattr(other, name))

    def figures(self) -> dict[str, float]:
        return {
            "false_alerts_per_series_night": round(self.false / self.series_nights, 6),
            "found_8pct_2_nights": _share(self.in_two[0.08], self.planted[0.08]),
            "found_12pct_2_nights": _share(self.in_two[0.12], self.planted[0.12]),
            "first_bad_exact": _share(self.exact, self.found.total()),
        }

    def more(self) -> dict[str, float]:
        return {
            "found_5pct_2_nights": _share(self.in_two[0.05], self.planted[0.05]),
            **{f"found_{size * 100:.0f}pct_ever": _share(self.found[size], self.planted[size]) for size in STEPS},
            "suspected_a_night": round(self.spent["suspected"] / self.nights, 2),
            "pairs_a_night": round(self.spent["pairs"] / self.nights, 1),
            "old_runs_looked_at_per_alert": round(self.spent["probes"] / max(1, self.alerts), 2),
            "hot_nights_told": self.spent["hot nights told"],
            "hot_nights_told_wrongly": self.spent["hot nights told wrongly"],
            "programs_at_fault": self.spent["devices whose programs were at fault"],
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
    parser.add_argument("--quick", action="store_true", help="one seed, 90 series, 40 nights")
    options = parser.parse_args()
    if options.quick:
        options.seeds, options.series, options.nights = 1, 90, 40
    total = Score()
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        began = time.perf_counter()
        farm = Farm(World(seed, options.series, options.nights))
        farm.run()
        score = Score()
        score.add(farm)
        total.merge(score)
        print(json.dumps({"seed": seed, "seconds": round(time.perf_counter() - began, 1), **score.figures()}))
    print(json.dumps({"of_all": True, **total.more()}))
    print(json.dumps(total.figures()))


if __name__ == "__main__":
    main()
