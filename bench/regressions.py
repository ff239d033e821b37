"""Alerts of simulated farms whose truth is known, in one world for each kind of trouble: a table in Markdown.

    python bench/regressions.py [--worlds "usual;returned"] [--first-seed 101] [--seeds 2] [--jobs 40] [--nights 40]

Every night goes through the real store, `history_comparison.py` of farm/dispatch and `confirm_run` of farm/numbers; the
device alone is a **stub** (tests/pair_bench_stub.py): nights vary by 2 %, inferences by 3 %, pairs drift by 5 %.
Programs that changed without suspicion are not measured. Gates were chosen on seeds 1 to 3. Each world and seed prints
a line, then the table follows. The last line is JSON over all worlds: false alerts, and the shares of steps found in
their first two nights and of alerts that name the first bad run.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from collections.abc import Callable, Mapping

from pair_bench_stub import BundleStub, World

from farm.numbers.regressions import confirm_run as confirm_module
from farm.store.records import AlertRecord
from farm.store.store import Store, open_store

REAL = 0.015
"""Least true distance from the level before that an alert may be about, as a logarithm."""
BEGIN = 12
"""First night in which steps begin."""
STEPS = (0.05, 0.08, 0.12)

Levels = NDArray[np.float64]


class Simulated(World):
    """World with a coarse clock, or luck that a bundle has for a night."""

    tick_ns = 0.0
    lucky = 0.0
    """Share of bundles that are slower for one night in every process."""

    def luck_of(self, bundle: BundleStub) -> float:
        draw = np.random.default_rng([len(self.nights), *bundle.key.encode()])
        return float(1.0 + draw.uniform(0.04, 0.1)) if draw.random() < self.lucky else 1.0

    def draw(self, time_ns: float, count: int, *, tailed: bool) -> list[float]:
        times = np.array(super().draw(time_ns, count, tailed=tailed))
        found = np.round(times / self.tick_ns) * self.tick_ns if self.tick_ns else times
        return [float(one) for one in found]


@dataclass
class Plan:
    """Truth of a world."""

    levels: Levels
    """Distance of each job from its accepted level, jobs by nights, as logarithms."""
    night: Callable[[Simulated, int], Mapping[str, Any]] = lambda _world, _night: {}
    """Further arguments of `World.night`; may change the world."""
    sizes: NDArray[np.int64] | None = None
    """Bytes of the programs, jobs by nights, judged in place of times."""
    cause: str = "the program"
    one_alert: bool = False
    """True if the whole history of a job has one cause, and is one alert."""
    of_runner: bool = False
    """True if the levels belong to the runner: programs are equal."""


def stepped(draw: np.random.Generator, jobs: int, nights: int, *, lasts: int = 0, begin: int = BEGIN) -> Plan:
    """Let a third of the jobs step in a random night, and return after as many nights as it `lasts`; 0 is for ever."""
    levels = np.zeros((jobs, nights))
    latest = max(begin + 1, begin + 4 if lasts else nights - 6)
    for place, job in enumerate(draw.permutation(jobs)[: jobs // 3]):
        first = int(draw.integers(begin, latest))
        levels[job, first : first + lasts if lasts else nights] = math.log(1.0 + STEPS[place % 3])
    return Plan(levels)


def usual(draw: np.random.Generator, jobs: int, nights: int) -> Plan:
    """Steps among odd values and three hot nights."""
    plan = stepped(draw, jobs, nights)
    hot = {int(one): float(draw.uniform(1.05, 1.15)) for one in draw.choice(np.arange(8, nights), 3, replace=False)}
    odd = np.where(draw.random((jobs, nights)) < 0.02, draw.uniform(1.2, 1.6, (jobs, nights)), 1.0)
    plan.night = lambda _, night: {"all_by": hot.get(night, 1.0), "odd": dict(enumerate(odd[:, night].tolist()))}
    return plan


def returned(draw: np.random.Generator, jobs: int, nights: int) -> Plan:
    """Steps that are fixed ten nights later."""
    return stepped(draw, jobs, nights, lasts=10)


def reverted(draw: np.random.Generator, jobs: int, nights: int) -> Plan:
    """Improvements that are reverted eight nights later."""
    plan = stepped(draw, jobs, nights, lasts=8)
    plan.levels = -plan.levels
    return plan


def partly(draw: np.random.Generator, jobs: int, nights: int) -> Plan:
    """20 % slower, and six nights later 9.6 % faster: 8.5 % remain."""
    plan = stepped(draw, jobs, nights, lasts=6)
    for row in plan.levels:
        if row.any():
            first = int(np.flatnonzero(row)[0])
            row[first : first + 6], row[first + 6 :] = math.log(1.2), math.log(1.2 * 0.904)
    return plan


def _runner(draw: np.random.Generator, jobs: int, nights: int, *, kept: bool) -> Plan:
    begin = int(draw.integers(BEGIN, BEGIN + 6))
    levels = np.zeros((jobs, nights))
    levels[:, begin:] = math.log(1.1)

    def night(world: Simulated, number: int) -> Mapping[str, Any]:
        world.kept = kept
        if number == begin:
            world.runners["r2"] = 1.1
        return {}

    cause = "runtime" if kept else "not the program; runner r1 -> r2 was not measured"
    return Plan(levels, night, cause=cause, of_runner=True)


def runner_kept(draw: np.random.Generator, jobs: int, nights: int) -> Plan:
    """A new runner slows everything by 10 %, and the old one is kept."""
    return _runner(draw, jobs, nights, kept=True)


def runner_gone(draw: np.random.Generator, jobs: int, nights: int) -> Plan:
    """The same, and the old one is gone."""
    return _runner(draw, jobs, nights, kept=False)


def irreproducible(draw: np.random.Generator, jobs: int, nights: int) -> Plan:
    """A runner that is another one each night, and as fast, while programs step."""
    plan = stepped(draw, jobs, nights)

    def night(world: Simulated, number: int) -> Mapping[str, Any]:
        world.runners[f"build {number}"] = 1.0
        return {}

    plan.night = night
    plan.cause = "program"
    return plan


def two_phones(draw: np.random.Generator, jobs: int, nights: int) -> Plan:
    """Phone b is 8 % faster, and gets another build, 4 % slower, half way."""
    plan = stepped(draw, jobs, nights)

    def night(_: Simulated, number: int) -> Mapping[str, Any]:
        on_b, late = number % 2 == 1, number >= nights // 2
        by = (0.92 if on_b else 1.0) * (1.04 if on_b and late else 1.0)
        return {"phone": "b" if on_b else "a", "build": "2" if on_b and late else "1", "device_by": by}

    plan.night = night
    return plan


def eight_phones(draw: np.random.Generator, jobs: int, nights: int) -> Plan:
    """Eight phones with eight builds in rotation; steps begin when each had three runs."""
    plan = stepped(draw, jobs, nights, begin=26)
    by = draw.uniform(0.92, 1.08, 8).tolist()
    plan.night = lambda _, night: {"phone": f"p{night % 8}", "build": f"b{night % 8}", "device_by": by[night % 8]}
    return plan


def alternating(draw: np.random.Generator, jobs: int, nights: int) -> Plan:
    """Half of the jobs have two programs in turns, 12 % apart."""
    levels = np.zeros((jobs, nights))
    chosen = draw.permutation(jobs)[: jobs // 2]
    levels[chosen[:, None], np.arange(BEGIN, nights, 2)] = math.log(1.12)

    def night(_: Simulated, number: int) -> Mapping[str, Any]:
        return {"keys": {job: f"{job}-{'slow' if levels[job, number] else 'fast'}" for job in chosen.tolist()}}

    return Plan(levels, night, one_alert=True)


def creep(draw: np.random.Generator, jobs: int, nights: int) -> Plan:
    """A fifth of the jobs get 0.3 % slower every night."""
    levels = np.zeros((jobs, nights))
    levels[draw.permutation(jobs)[: jobs // 5]] = math.log1p(0.003) * np.maximum(0, np.arange(nights) - 8)
    return Plan(levels, one_alert=True)


def exact(draw: np.random.Generator, jobs: int, nights: int) -> Plan:
    """Sizes: a quarter of the jobs flips, one has eight values, one grows by 8 bytes a night, one is constant."""
    sizes = np.full((jobs, nights), 1000)
    kind = np.arange(jobs) % 4
    sizes[kind == 1] = np.where(draw.random((int(np.sum(kind == 1)), nights)) < 0.3, 1016, 1000)
    sizes[kind == 2] = 1000 + 8 * draw.integers(0, 8, (int(np.sum(kind == 2)), nights))
    sizes[kind == 3] = 1000 + 8 * np.arange(nights)
    return Plan(np.zeros((jobs, nights)), sizes=sizes, one_alert=True)


def _set(plan: Plan, name: str, value: Any) -> Plan:
    def night(world: Simulated, _: int) -> Mapping[str, Any]:
        setattr(world, name, value)
        return {}

    plan.night = night
    return plan


def clock(draw: np.random.Generator, jobs: int, nights: int) -> Plan:
    """A clock that ticks in steps of 10 % of the inference."""
    return _set(stepped(draw, jobs, nights), "tick_ns", 1e5)


def lucky(draw: np.random.Generator, jobs: int, nights: int) -> Plan:
    """A tenth of the bundles is 4 to 10 % slower for one night, in all processes."""
    return _set(stepped(draw, jobs, nights), "lucky", 0.1)


def pruned(draw: np.random.Generator, jobs: int, nights: int) -> Plan:
    """Bundles live for six nights."""
    plan = stepped(draw, jobs, nights)

    def night(world: Simulated, number: int) -> Mapping[str, Any]:
        if number >= 6:
            world.gone |= {f"{job}-{world.nights[number - 6]}" for job in range(jobs)}
        return {}

    plan.night = night
    return plan


def tails(draw: np.random.Generator, jobs: int, nights: int) -> Plan:
    """Slow 12 % of the 20 inferences of a run by 80 % from a night on, in a third of the jobs: the mean by 10 %."""
    levels = np.zeros((jobs, nights))
    begin = {int(job): int(draw.integers(BEGIN, nights - 6)) for job in draw.permutation(jobs)[: jobs // 3]}
    for job, first in begin.items():
        levels[job, first:] = 0.8

    def night(world: Simulated, number: int) -> Mapping[str, Any]:
        world.inferences = 20
        keys = {
            job: f"{job}-tail-{number}" if number >= begin.get(job, nights) else f"{job}-{number}"
            for job in range(jobs)
        }
        world.tailed |= {key for key in keys.values() if "tail" in key}
        return {"keys": keys, "levels": {}}

    return Plan(levels, night)


WORLDS: dict[str, Callable[[np.random.Generator, int, int], Plan]] = {
    "usual": usual,
    "returned": returned,
    "improvement reverted": reverted,
    "partly fixed": partly,
    "slower runner, old one kept": runner_kept,
    "slower runner, old one gone": runner_gone,
    "another runner every night": irreproducible,
    "two phones, one new build": two_phones,
    "eight phones, eight builds": eight_phones,
    "two bundles in turns": alternating,
    "creep of 0.3 % a night": creep,
    "exact metrics": exact,
    "slow inferences": tails,
    "clock of 10 %": clock,
    "luck of a bundle": lucky,
    "pruned bundles": pruned,
}


@dataclass
class Score:
    """Figures of a world over its seeds."""

    series_nights: int = 0
    nights: int = 0
    pairs: int = 0
    alerts: int = 0
    false: int = 0
    planted: Counter[str] = field(default_factory=Counter)
    """Excursions by their size in per cent."""
    found: Counter[str] = field(default_factory=Counter)
    """Excursions with an alert, by size and nights: `8 in 2`."""
    known: int = 0
    """Excursions with an alert."""
    first_bad: int = 0
    cause: int = 0
    back: int = 0
    """Excursions that ended."""
    still_open: int = 0
    ratios: list[float] = field(default_factory=list)
    """Size of open alerts in the last night as a share of the truth."""

    def add(self, other: Score) -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)

    def row(self) -> list[str]:
        low, high = interval(self.false, self.series_nights)
        per = 1000.0 * self.false / max(1, self.series_nights)
        return [
            f"{per:.2f} ({low:.2f} to {high:.2f}; {self.false} of {self.series_nights:,})",
            *(_share(self.found[f"{size} in {many}"], self.planted[size]) for size in ("8", "12") for many in (2, 5)),
            _share(self.found["any in 5"], self.planted.total()),
            _share(self.first_bad, self.known),
            _share(self.cause, self.known),
            _share(self.still_open, self.back),
            f"{np.mean(self.ratios):.2f}" if self.ratios else "-",
            f"{self.pairs / max(1, self.nights):.0f}",
        ]


HEAD = (
    "world", "false alerts per 1,000 series-nights (95 %)", "8 % in 2 nights", "8 % in 5", "12 % in 2", "12 % in 5",
    "all in 5", "first bad run right", "cause right", "open after a return", "size / truth", "pairs per night",
)  # fmt: skip


def interval(count: int, of: int) -> tuple[float, float]:
    """Return the exact 95 % interval of a rate, per 1,000."""
    from scipy.stats import chi2

    low = chi2.ppf(0.025, 2 * count) / 2.0 if count else 0.0
    return 1000.0 * low / max(1, of), 1000.0 * chi2.ppf(0.975, 2 * count + 2) / 2.0 / max(1, of)


def _share(part: int, whole: int) -> str:
    return f"{100.0 * part / whole:.0f} % of {whole}" if whole else "-"


Seen = dict[tuple[int, int], tuple[int, "AlertRecord"]]
"""First night and first form of an alert, by job and id."""


def simulate(store: Store, name: str, seed: int, jobs: int, nights: int) -> Score:
    """Go through the nights of a world, and compare the open alerts of each night with the truth."""
    plan = WORLDS[name](np.random.default_rng(seed), jobs, nights)
    world = Simulated(store, jobs, seed)
    seen: Seen = {}
    newest: list[AlertRecord] = []
    place = {job.id: number for number, job in enumerate(world.jobs)}
    for night in range(nights):
        levels = np.zeros(jobs) if plan.of_runner else plan.levels[:, night]
        given: dict[str, Any] = {"levels": dict(enumerate(np.exp(levels).tolist()))}
        if plan.sizes is not None:
            given["sizes"] = dict(enumerate(plan.sizes[:, night].tolist()))
        given |= plan.night(world, night)
        world.confirm(world.night(**given))
        newest = store.alerts.open()
        for alert in newest:
            seen.setdefault((place[alert.job_id], alert.id), (night, alert))
    score = Score(series_nights=jobs * nights, nights=nights, pairs=world.pairs, alerts=len(seen))
    at = {run_id: night for night, run_id in enumerate(world.nights)}
    firsts = _count_false(score, plan, at, seen)
    if plan.sizes is None:
        _count_found(score, plan, at, firsts, {place[alert.job_id]: alert for alert in newest})
    return score


def _count_false(score: Score, plan: Plan, at: Mapping[str, int], seen: Seen) -> Seen:
    """Count alerts without a true change, and second ones of an excursion; return the first of each excursion."""
    counted: set[tuple[int, int]] = set()
    firsts: Seen = {}
    for (job, _), (night, alert) in sorted(seen.items(), key=lambda item: item[1][0]):
        begin = -1 if plan.one_alert else _begin(plan.levels[job], night)
        if plan.sizes is not None:
            is_real = alert.exact and len({*plan.sizes[job].tolist()}) > 1
        else:
            row = plan.levels[job]
            until = night if plan.one_alert else at[alert.first_bad]
            is_real = float(row[until] - row[at[alert.last_good]]) > REAL
            if is_real and begin >= 0:
                firsts.setdefault((job, begin), (night, alert))
        score.false += not is_real or (job, begin) in counted
        counted.add((job, begin))
    return firsts


def _count_found(
    score: Score, plan: Plan, at: Mapping[str, int], firsts: Seen, open_now: Mapping[int, AlertRecord]
) -> None:
    for job, row in enumerate(plan.levels):
        alert = open_now.get(job)
        if alert is not None and row[-1] > REAL and math.isfinite(alert.change):
            score.ratios.append(alert.change / float(row[-1] - (row[at[alert.last_good]] if plan.one_alert else 0.0)))
        if plan.one_alert:
            continue
        for begin in [night for night in range(1, len(row)) if row[night] > REAL >= abs(row[night - 1])]:
            size = f"{100.0 * (math.exp(row[begin]) - 1.0):.0f}"
            score.planted[size] += 1
            if (job, begin) not in firsts:
                continue
            night, found = firsts[job, begin]
            for many in (2, 5):
                score.found[f"{size} in {many}"] += night < begin + many
                score.found[f"any in {many}"] += night < begin + many
            score.known += 1
            score.first_bad += at[found.first_bad] == begin
            score.cause += plan.cause in found.likely_cause
        if row.any() and abs(row[-1]) <= REAL:
            score.back += 1
            score.still_open += alert is not None


def _begin(row: Levels, night: int) -> int:
    """Return the first night of the newest excursion of a job by then; -1 for none."""
    return max((one for one in range(1, night + 1) if row[one] > REAL >= row[one - 1]), default=-1)


def main() -> None:
    """Go through the worlds and print the table."""
    parser = argparse.ArgumentParser(description="Alerts of simulated worlds against their truth.")
    parser.add_argument("--worlds", default=";".join(WORLDS), help="beginnings of names, with ';' between")
    parser.add_argument("--first-seed", type=int, default=101)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--jobs", type=int, default=40)
    parser.add_argument("--nights", type=int, default=40)
    parser.add_argument("--quick", action="store_true", help="the usual world with one seed, 6 jobs, 18 nights")
    options = parser.parse_args()
    names = [name for name in WORLDS if any(name.startswith(asked) for asked in options.worlds.split(";"))]
    names = names or list(WORLDS)
    if options.quick:
        options.seeds, options.jobs, options.nights, names = 1, 6, 18, ["usual"]
    # Only suspected changes are measured.
    confirm_module.CHANGED_S = 0.0
    scores = {name: Score() for name in names}
    for name, total in scores.items():
        for seed in range(options.first_seed, options.first_seed + options.seeds):
            began = time.perf_counter()
            with tempfile.TemporaryDirectory() as folder, open_store(Path(folder) / "farm.db") as store:
                score = simulate(store, name, seed, options.jobs, options.nights)
            total.add(score)
            took = {"seconds": round(time.perf_counter() - began, 1), "alerts": score.alerts}
            line = {"world": name, "seed": seed, **took, **dict(zip(HEAD[1:], score.row(), strict=True))}
            print(json.dumps(line), flush=True)
    last = options.first_seed + options.seeds - 1
    print(f"\nseeds {options.first_seed} to {last}, {options.jobs} jobs, {options.nights} nights\n")
    for row in (HEAD, ["---"] * len(HEAD), *([name, *score.row()] for name, score in scores.items())):
        print(f"| {' | '.join(row)} |")
    every = Score()
    for one in scores.values():
        every.add(one)
    parts = {f"found_{size}pct_2_nights": (every.found[f"{size} in 2"], every.planted[size]) for size in ("8", "12")}
    parts |= {"first_bad_exact": (every.first_bad, every.known)}
    parts |= {"false_alerts_per_series_night": (every.false, every.series_nights)}
    print(json.dumps({name: round(part / whole, 6) if whole else None for name, (part, whole) in parts.items()}))


if __name__ == "__main__":
    main()
