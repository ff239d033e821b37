"""Worlds unlike the usual one of bench/regressions.py, whose Farm goes through them: `--worlds` there runs this."""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from typing import TYPE_CHECKING

import numpy as np
from regressions import BETWEEN_NIGHTS, DEVICES, STEPS, VALUES, WITHIN_RUN, Farm, Score, World

from farm.analysis.candidates import CANDIDATES, LEAST_BASELINE
from farm.analysis.confirmation import INFERENCES
from farm.analysis.flakiness import wilson
from farm.analysis.nights import Observation, judge_night
from farm.analysis.scale import Series
from farm.analysis.sequential import inferences_for
from farm.results.attempt import Direction

if TYPE_CHECKING:
    from step_alerts import Alert

    from farm.analysis.confirmation import Pair

# Of a mode of running slower that a program has by chance, as where its memory lies: its size and how often it comes.
LUCK, LUCKY = 0.06, 0.3
SWITCH = 0.1
CLOCK_NS = 10_000.0
FAMILY = 10


class Luck(World):
    """A program is slower by 6 % in three sessions of ten, for as long as its process lives."""

    def _nights(self, truth: np.random.Generator) -> np.ndarray:
        self._slow: dict[tuple[int, int], float] = {}
        lucky = truth.random((self.series, self.nights)) < LUCKY
        return super()._nights(truth) * np.where(lucky, 1.0 + LUCK, 1.0)

    def new_session(self) -> None:
        self._slow = {}

    def pair(self, series: int, good: int, new: int, number: int = 0, inferences: int = INFERENCES) -> Pair:
        sides = super().pair(series, good, new, number, inferences)
        return sides[0] * self._luck(series, good), sides[1] * self._luck(series, new)

    def _luck(self, series: int, night: int) -> float:
        if (series, night) not in self._slow:
            self._slow[series, night] = 1.0 + LUCK * (self._draw.random() < LUCKY)
        return self._slow[series, night]


class Switching(World):
    """Whoever runs after the other one takes 10 % longer."""

    def pair(self, series: int, good: int, new: int, number: int = 0, inferences: int = INFERENCES) -> Pair:
        was, now = super().pair(series, good, new, number, inferences)
        return (was, now * (1.0 + SWITCH)) if number % 2 == 0 else (was * (1.0 + SWITCH), now)


class Load(World):
    """Each night each device is busier or less so, and everything on it noisier by that."""

    def _nights(self, truth: np.random.Generator) -> np.ndarray:
        by_device = np.exp(truth.normal(0.75, 0.5, size=(DEVICES, self.nights)))
        self._load = by_device[self.device]
        self._tonight = 0
        return 1.0 + BETWEEN_NIGHTS * self._load * truth.standard_normal((self.series, self.nights))

    def _runs(self, truth: np.random.Generator, night: np.ndarray) -> np.ndarray:
        within = 1.0 + WITHIN_RUN * self._load[:, :, None] * truth.standard_normal((self.series, self.nights, VALUES))
        return np.median(self._level[:, :, None] * night[:, :, None] * np.maximum(within, 0.2), axis=2)

    def begin(self, night: int) -> None:
        self._tonight = night

    def pair(self, series: int, good: int, new: int, number: int = 0, inferences: int = INFERENCES) -> Pair:
        del number
        return self._noisy(series, good, new, WITHIN_RUN * self._load[series, self._tonight], inferences)


class Noisy(World):
    """Single inferences vary by 10 %."""

    within = 0.1

    def _runs(self, truth: np.random.Generator, night: np.ndarray) -> np.ndarray:
        within = 1.0 + self.within * truth.standard_normal((self.series, self.nights, VALUES))
        return np.median(self._level[:, :, None] * night[:, :, None] * np.maximum(within, 0.2), axis=2)

    def pair(self, series: int, good: int, new: int, number: int = 0, inferences: int = INFERENCES) -> Pair:
        del number
        return self._noisy(series, good, new, self.within, inferences)


class Few(Noisy):
    """Twelve series alone, of which single inferences vary by 8 %."""

    within = 0.08


class CoarseClock(World):
    """Inferences of 40 to 80 us, with a clock that ticks every 10 us."""

    def _nights(self, truth: np.random.Generator) -> np.ndarray:
        self._level *= (truth.uniform(4e4, 8e4, size=self.series) / self._level[:, 0])[:, None]
        return super()._nights(truth)

    def _runs(self, truth: np.random.Generator, night: np.ndarray) -> np.ndarray:
        within = 1.0 + WITHIN_RUN * truth.standard_normal((self.series, self.nights, VALUES))
        took = self._level[:, :, None] * night[:, :, None] * within
        return np.median(_ticks(took, truth), axis=2)

    def inferences(self, series: int) -> int:
        return inferences_for(float(self._level[series, 0]), INFERENCES)

    def pair(self, series: int, good: int, new: int, number: int = 0, inferences: int = INFERENCES) -> Pair:
        del number
        was, now = self._noisy(series, good, new, WITHIN_RUN, inferences)
        return _ticks(was, self._draw), _ticks(now, self._draw)


def _ticks(took: np.ndarray, draw: np.random.Generator) -> np.ndarray:
    """Return what a clock shows of durations that begin anywhere between two of its ticks."""
    return np.floor(took / CLOCK_NS + draw.random(took.shape)) * CLOCK_NS


class TwoDevices(World):
    """Each series runs each night on one of two devices, of which one is slower by 4 %."""

    def _nights(self, truth: np.random.Generator) -> np.ndarray:
        self._on = truth.integers(2, size=(self.series, self.nights))
        # Three SoCs with two devices each.
        self.device = self.device % (DEVICES // 2)
        return super()._nights(truth) * np.where(self._on == 1, 1.04, 1.0)

    def device_of(self, series: int, night: int) -> int:
        return int(self.device[series]) * 2 + int(self._on[series, night])

    def _ran_on(self, device: int, night: int) -> np.ndarray:
        return np.asarray(self.device * 2 + self._on[:, night] == device)


class Firmware(World):
    """Every device has a new firmware once, with which everything is 3 to 6 % faster: another fingerprint class."""

    def _nights(self, truth: np.random.Generator) -> np.ndarray:
        self._since = truth.integers(self.nights // 3, 2 * self.nights // 3, size=DEVICES)
        faster = 1.0 - truth.uniform(0.03, 0.06, size=DEVICES)
        after = np.arange(self.nights) >= self._since[self.device][:, None]
        return super()._nights(truth) * np.where(after, faster[self.device][:, None], 1.0)

    def begins(self, series: int, night: int) -> int:
        since = int(self._since[self.device[series]])
        return since if night >= since else 0


class Autocorrelated(World):
    """What a night does lasts: the next one has 0.6 of it."""

    def _nights(self, truth: np.random.Generator) -> np.ndarray:
        draws = truth.standard_normal((self.series, self.nights))
        state = draws[:, 0]
        found = np.empty_like(draws)
        for night in range(self.nights):
            found[:, night] = state = 0.6 * state + 0.8 * draws[:, night] if night else state
        return 1.0 + BETWEEN_NIGHTS * found


class HeavyTails(World):
    """Nights and inferences are those of Student's distribution with 3 degrees of freedom."""

    def _nights(self, truth: np.random.Generator) -> np.ndarray:
        draws = truth.standard_t(3, size=(self.series, self.nights))
        return np.asarray(1.0 + BETWEEN_NIGHTS / math.sqrt(3.0) * np.clip(draws, -20.0, 20.0))


class Weekly(World):
    """Every seventh night is slower by 4 %."""

    def is_off(self, device: int, night: int) -> bool:
        return night % 7 == 6 or super().is_off(device, night)

    def _nights(self, truth: np.random.Generator) -> np.ndarray:
        return super()._nights(truth) * np.where(np.arange(self.nights) % 7 == 6, 1.04, 1.0)


class Drifting(World):
    """Devices get slower and faster again by 4 % in all, within 40 nights."""

    def _nights(self, truth: np.random.Generator) -> np.ndarray:
        phase = truth.uniform(0.0, 2.0 * math.pi, size=DEVICES)[self.device]
        return super()._nights(truth) * (1.0 + 0.02 * np.sin(np.arange(self.nights) * math.pi / 20.0 + phase[:, None]))


class Missing(World):
    """Three nights of twenty have no number of a series."""

    def _runs(self, truth: np.random.Generator, night: np.ndarray) -> np.ndarray:
        found = super()._runs(truth, night)
        return np.where(truth.random(found.shape) < 0.15, np.nan, found)


class Sloping(World):
    """What changes does so more than once: an alert is right where the level moved that way, or just before."""

    def is_true(self, series: int, alert: Alert) -> bool:
        was, now = (
            self._level[series, max(0, run)] for run in (int(alert.range.last_good) - 3, int(alert.range.first_bad))
        )
        return bool((now - was) * alert.change > 0.0)


class Improving(Sloping):
    """Ten improvements of 1 %, one every second night, end four nights before a series steps."""

    def _plant(self, truth: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        size, night = super()._plant(truth)
        return size, np.where(size > 0, np.maximum(night, LEAST_BASELINE + 24), night)

    def _nights(self, truth: np.random.Generator) -> np.ndarray:
        better = np.clip((np.arange(self.nights) - (self.step_night[:, None] - 24)) // 2, 0, 10)
        self._level *= np.where(self.step_size[:, None] > 0, 0.99**better, 1.0)
        return super()._nights(truth)


class Families(World):
    """Ten series of one device step together, by the same size in the same night."""

    def _plant(self, truth: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        size, night = np.zeros(self.series), np.full(self.series, self.nights)
        for number in range(self.series // 3 // FAMILY):
            free = np.flatnonzero((size == 0.0) & (self.device == truth.integers(DEVICES)))
            members = truth.permutation(free)[:FAMILY]
            size[members] = STEPS[number % len(STEPS)]
            night[members] = truth.integers(LEAST_BASELINE, self.nights - 1)
        return size, night


class Ramps(Sloping):
    """What gets slower does so by a tenth of its step, ten nights one after the other."""

    def _nights(self, truth: np.random.Generator) -> np.ndarray:
        nights = np.arange(self.nights)
        sudden = np.where(nights >= self.step_night[:, None], 1.0 + self.step_size[:, None], 1.0)
        slowly = np.clip((nights - self.step_night[:, None] + 1) / 10.0, 0.0, 1.0)
        self._level *= (1.0 + self.step_size[:, None]) ** slowly / sudden
        return super()._nights(truth)


WORLDS: dict[str, tuple[type[World], str]] = {
    "usual": (World, "as bench/regressions.py without --worlds"),
    "sticking luck": (Luck, Luck.__doc__ or ""),
    "switching costs": (Switching, Switching.__doc__ or ""),
    "noise by load": (Load, Load.__doc__ or ""),
    "10 % an inference": (Noisy, Noisy.__doc__ or ""),
    "12 series, 8 %": (Few, Few.__doc__ or ""),
    "coarse clock": (CoarseClock, CoarseClock.__doc__ or ""),
    "two devices": (TwoDevices, TwoDevices.__doc__ or ""),
    "new firmware": (Firmware, Firmware.__doc__ or ""),
    "autocorrelated": (Autocorrelated, Autocorrelated.__doc__ or ""),
    "heavy tails": (HeavyTails, HeavyTails.__doc__ or ""),
    "weekly": (Weekly, Weekly.__doc__ or ""),
    "drifting": (Drifting, Drifting.__doc__ or ""),
    "missing nights": (Missing, Missing.__doc__ or ""),
    "after improvements": (Improving, Improving.__doc__ or ""),
    "families": (Families, Families.__doc__ or ""),
    "ramps": (Ramps, Ramps.__doc__ or ""),
}
FLIPS = "flips"


def flips(seed: int, series: int, nights: int) -> dict[str, object]:
    """Return how often exact counters of which each flips between two values are news."""
    draw = np.random.default_rng(seed)
    low = draw.integers(1, 1000, size=(series, 1))
    values = np.where(draw.random((series, nights)) < 0.3, low + 1, low)
    kinds = [Series(str(one), "fallback_ops", "count", Direction.LOWER, exact=True) for one in range(series)]
    news, told = 0, 0
    for night in range(1, nights):
        seen = judge_night(
            [
                Observation(kind, "0", values[one, :night].tolist(), float(values[one, night]))
                for one, kind in enumerate(kinds)
            ]
        )
        news += len(seen.exact)
        told += len(getattr(seen, "flipping", ()))
        assert all(seen.judgements[one].finding in CANDIDATES for one in seen.exact)
    return {
        "world": FLIPS,
        "series_nights": series * nights,
        **_rate("false_in_1000", news, series * nights),
        "said_not_deterministic": told,
    }


def run_world(name: str, seeds: range, series: int, nights: int, *, changed: bool) -> dict[str, object]:
    """Return what is found in a world, with 95 % intervals."""
    if name == FLIPS:
        found = [flips(seed, series, nights) for seed in seeds[:1]]
        return found[0]
    kind, _ = WORLDS[name]
    total, extra = Score(), Counter[str]()
    if kind is Few:
        # As many series-nights as in the others.
        seeds, series = range(seeds.start, seeds.start + len(seeds) * max(1, series // 12)), 12
    for seed in seeds:
        farm = Farm(kind(seed, series, nights), changed=changed)
        farm.run()
        total.add(farm)
        extra += _sizes(farm)
    spent = total.spent
    return {
        "world": name,
        "series_nights": total.series_nights,
        **_rate("false_in_1000", total.false, total.series_nights),
        # What comes slowly has no second night.
        **({} if kind is Ramps else _share("found_8pct_2_nights", total.in_two[0.08], total.planted[0.08])),
        **({} if kind is Ramps else _share("found_12pct_2_nights", total.in_two[0.12], total.planted[0.12])),
        **_share("found_8pct_ever", total.found[0.08], total.planted[0.08]),
        **({} if kind is Ramps else _share("first_bad_exact", total.exact, total.found.total())),
        "pairs_a_night_of_300": round(300.0 * spent["pairs"] / total.series_nights, 1),
        "inferences_a_night_of_300": round(300.0 * spent["inferences"] / total.series_nights, 1),
        "candidates_a_night_of_300": round(300.0 * spent["candidates"] / total.series_nights, 1),
        "shifts_told": spent["hot nights told"] + spent["hot nights told wrongly"],
        "shifts_wrong": spent["hot nights told wrongly"],
        "told_of_truth": round(extra["told"] / max(1, extra["true"]), 3),
        **_share("interval_holds_truth", extra["inside"], extra["alerts"]),
    }


def _sizes(farm: Farm) -> Counter[str]:
    """Return what alerts say that series got slower by, and what they did, in millionths; and what intervals hold."""
    found: Counter[str] = Counter()
    levels = np.log(farm.world._level)  # noqa: SLF001 - the truth is what is asked for
    for one, good, bad, said in farm.spans:
        truth = levels[one, bad] - levels[one, good]
        found["alerts"] += 1
        found["inside"] += bool(said.low - 1e-9 <= truth <= said.high + 1e-9)
        if farm.world.step_size[one] and said.change > 0:
            found["told"] += round(1e6 * said.change)
    for one, size in enumerate(farm.world.step_size):
        if any(alert.series == str(one) and alert.change > 0 for told in farm.alerts.values() for alert in told):
            found["true"] += round(1e6 * math.log1p(size))
    return found


def _share(name: str, part: int, whole: int) -> dict[str, object]:
    low, high = wilson(part, whole)
    return {name: round(part / max(1, whole), 4), f"{name}_95": [round(low, 4), round(high, 4)]}


def _rate(name: str, part: int, whole: int) -> dict[str, object]:
    low, high = wilson(part, whole)
    return {name: round(1000.0 * part / whole, 3), f"{name}_95": [round(1000 * low, 3), round(1000 * high, 3)]}


def run_worlds(names: list[str], seeds: range, series: int, nights: int, *, changed: bool) -> None:
    """Print a line for each world, and the worst of all as the last."""
    lines = []
    for name in names or [*WORLDS, FLIPS]:
        began = time.perf_counter()
        line = run_world(name, seeds, series, nights, changed=changed)
        print(json.dumps({**line, "seconds": round(time.perf_counter() - began, 1)}), flush=True)
        lines.append(line)
    by_name = {str(line["world"]): line for line in lines}
    print(
        json.dumps(
            {
                "worlds": len(lines),
                "false_in_1000": {name: line["false_in_1000"] for name, line in by_name.items()},
                "found_8pct_2_nights": {
                    name: line["found_8pct_2_nights"] for name, line in by_name.items() if "found_8pct_2_nights" in line
                },
                "pairs_a_night": by_name.get("usual", {}).get("pairs_a_night_of_300"),
            }
        )
    )
