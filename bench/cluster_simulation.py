"""Night of 1,000 hosts: utilization of 10,000 devices, waiting times of users, and calls to the database.

    python bench/cluster_simulation.py [--seed 1] [--quick]

The night is a list of events, the same for a seed: 200 users, 500,000 jobs of nightly runs, 400 runs of people, hosts
that die. **Only the decisions are real**: the choice of a device and its hand-over (`farm.policy.sharing`), the size of
a shard (`farm.policy.divide`). All bundles are made before. The last line is JSON:

`night_s`, `ideal_s`     time until the last verdict; shortest time in which each SoC's devices could do the work
`utilization`            share of all device time until the last verdict that ran jobs
`idle_while_work_waits`  share in which a device was idle although a job that it could run waited
`person_wait_s`, `nightly_wait_s`  from submission to the first job: median, 95 %, longest
`shards`, `handed_over`  number of started shards; number of these that ended early for another run
`calls_per_s`            calls of agents, on average and in the busiest second
"""

from __future__ import annotations

import argparse
import functools
import heapq
import json
import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from farm.policy.divide import divide
from farm.policy.sharing import hand_over, share_out
from farm.policy.situation import Lease, LivingDevice, OpenOrder, Priority, Retry, Situation
from farm.store.cluster.records import PlannedJob
from farm.suites.suite import Case, InputSpec, Job, Target

# Time of an agent from the end of a shard to the first job of the next, and from a hint to a claim.
BETWEEN_SHARDS_S, HINT_S = 0.05, 0.1
# Shortest time between two decisions about hand-over for a SoC.
HAND_OVER_EVERY_S = 1.0
HEARTBEAT_S, TTL_S = 3.0, 10.0
# Results of an agent that come within this time are one transaction.
COALESCED_S = 0.05
# Seconds that a job takes on a device: median, spread of a lognormal distribution, the most; how well history knows it.
JOB_MEDIAN_S, JOB_SPREAD, HISTORY_SPREAD, JOB_MOST_S = 6.0, 1.0, 0.2, 120.0
# Jobs for each job that is tried again on another device.
TRIED_AGAIN = 200
# Nightly runs, by their share of all jobs.
NIGHTS = (0.6, 0.2, 0.1, 0.05, 0.05)
# Runs of people: jobs, and how many of ten runs have so many.
PERSON_JOBS = ((1, 5), (30, 3), (400, 2))
# A time long ago, so that no lease has expired.
_FOREVER_MS = 2**60


@dataclass(frozen=True)
class Size:
    """Size of a farm and of its load."""

    hosts: int = 1_000
    devices: int = 10_000
    socs: int = 20
    users: int = 200
    jobs: int = 500_000
    person_runs: int = 400
    deaths: int = 5
    """Number of hosts that die for good."""
    seed: int = 1


@dataclass
class Shard:
    """Jobs of a run for one device."""

    order: Order
    jobs_s: list[float]
    """Real time of each job."""
    expected_s: float
    avoid: tuple[str, ...] = ()
    id: int = 0


@dataclass
class Order:
    """Shards of a run for a SoC."""

    run: Run
    soc: str
    ready: deque[Shard] = field(default_factory=deque)
    retries: list[Shard] = field(default_factory=list)
    held: int = 0

    def as_open(self) -> OpenOrder:
        """Return the facts for a decision."""
        run = self.run
        return OpenOrder(
            run.id,
            run.user,
            run.priority,
            round(run.submitted_s * 1000),
            len(self.ready),
            tuple(Retry(shard.id, shard.avoid) for shard in self.retries),
            labels=run.labels,
            held=self.held,
        )


@dataclass
class Run:
    """Submitted run."""

    id: str
    user: str
    priority: Priority
    submitted_s: float
    labels: tuple[str, ...] = ()
    first_s: float | None = None
    """Time at which the first job began."""
    ended_s: float = 0.0
    unfinished: int = 0
    """Jobs."""


@dataclass
class Held:
    """Shard on a device."""

    shard: Shard
    began_s: float
    lease: Lease
    ends: int
    """Number of the event of the shard's end; events with other numbers are void."""


@dataclass
class Farm:
    """Devices of one SoC."""

    soc: str
    living: dict[str, LivingDevice]
    free: set[str]
    held: dict[str, Held] = field(default_factory=dict)
    holdings: Counter[str] = field(default_factory=Counter)
    orders: dict[str, Order] = field(default_factory=dict)
    decided_s: float = -1e9
    is_woken: bool = False
    is_looking: bool = False
    idle_s: float = 0.0
    """Device-seconds without work while a suitable shard waited."""
    looked_s: float = 0.0
    work_s: float = 0.0
    """Device-seconds of all jobs."""
    size: int = 0
    """Number of devices before the first host died."""

    @property
    def waiting(self) -> list[Order]:
        """Orders with a shard that could begin."""
        return [order for order in self.orders.values() if order.ready or order.retries]


@dataclass
class Found:
    """Results of a night."""

    ended_s: float = 0.0
    ideal_s: float = 0.0
    """Shortest time in which the devices of each SoC could run its jobs, in any order."""
    busy_s: float = 0.0
    idle_while_work_waits_s: float = 0.0
    waits_s: dict[Priority, list[float]] = field(default_factory=lambda: {one: [] for one in Priority})
    jobs: int = 0
    """Jobs with a verdict."""
    shards: int = 0
    handed_over: int = 0
    lost_s: float = 0.0
    """Device-seconds of hosts that died, run again elsewhere."""
    claims: Counter[int] = field(default_factory=Counter)
    """Transactions of claims, by second."""
    records: Counter[int] = field(default_factory=Counter)


class Night:
    """Simulation of a night, from the first submission to the last verdict."""

    def __init__(self, size: Size) -> None:
        self._size, self._draw = size, random.Random(size.seed)
        self.found = Found()
        self._now_s = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._runs: list[Run] = []
        self.submissions: list[tuple[Run, dict[str, int]]] = []
        """Runs, with their number of jobs for each SoC."""
        self._unfinished = 0
        self.host_of: dict[str, str] = {}
        self._recorded: set[tuple[str, int]] = set()
        self.farms = self._make_farms()
        self._submit_all()

    def run(self) -> Found:
        """Process all events, and return the results."""
        while self._unfinished:
            self._now_s, _, happen = heapq.heappop(self._events)
            happen()
        self.found.ended_s = max(run.ended_s for run in self._runs)
        for farm in self.farms.values():
            self._look(farm)
        self.found.ideal_s = max(farm.work_s / farm.size for farm in self.farms.values())
        self.found.idle_while_work_waits_s = sum(farm.idle_s for farm in self.farms.values())
        for run in self._runs:
            self.found.waits_s[run.priority].append((run.first_s or 0.0) - run.submitted_s)
        for _, bucket in self._recorded:
            self.found.records[int(bucket * COALESCED_S)] += 1
        return self.found

    def _make_farms(self) -> dict[str, Farm]:
        size = self._size
        parts = [1 / (rank + 1) ** 0.7 for rank in range(size.socs)]
        socs = [f"SM{rank:02}" for rank in range(size.socs)]
        counts = [max(2, int(size.devices * part / sum(parts))) for part in parts]
        counts[0] += size.devices - sum(counts)
        names = [(soc, f"{soc}-{n:05}") for soc, count in zip(socs, counts, strict=True) for n in range(count)]
        mixed = list(names)
        self._draw.shuffle(mixed)
        self.host_of = {name: f"host{n * size.hosts // len(mixed):04}" for n, (_, name) in enumerate(mixed)}
        living: dict[str, dict[str, LivingDevice]] = {soc: {} for soc in socs}
        for soc, name in names:
            living[soc][name] = LivingDevice(name, ("camera",) * (self._draw.random() < 0.1))
        return {soc: Farm(soc, mine, set(mine), size=len(mine)) for soc, mine in living.items()}

    def _submit_all(self) -> None:
        size, draw = self._size, self._draw
        total = sum(len(farm.living) for farm in self.farms.values())
        for night, part in enumerate(NIGHTS):
            jobs = {
                soc: round(size.jobs * part * len(farm.living) / total * draw.uniform(0.97, 1.03))
                for soc, farm in self.farms.items()
            }
            run = Run(f"night{night}", f"user{night}", Priority.NIGHTLY, 2.0 * night)
            self._at(run.submitted_s, self._submission(run, jobs))
        # Runs of people are submitted within the time that nightly runs alone would take.
        ideal_s = size.jobs * JOB_MEDIAN_S * 1.65 / total
        weights = [weight for _, weight in PERSON_JOBS]
        for number in range(size.person_runs):
            user = f"user{draw.randrange(len(NIGHTS), size.users)}"
            labels = ("camera",) if draw.random() < 0.1 else ()
            run = Run(f"run{number:04}", user, Priority.PERSON, draw.uniform(5.0, ideal_s), labels)
            count = draw.choices([jobs for jobs, _ in PERSON_JOBS], weights)[0]
            # SoCs with many devices are requested more often.
            chosen = draw.choices(sorted(self.farms), [len(farm.living) for _, farm in sorted(self.farms.items())], k=2)
            self._at(run.submitted_s, self._submission(run, dict.fromkeys(chosen[: draw.choice([1, 1, 2])], count)))
        for host in draw.sample(sorted(set(self.host_of.values())), size.deaths):
            self._at(draw.uniform(5.0, ideal_s), self._death(host))

    def _submission(self, run: Run, jobs: dict[str, int]) -> Callable[[], None]:
        run.unfinished = sum(jobs.values())
        self._unfinished += run.unfinished
        self._runs.append(run)
        self.submissions.append((run, jobs))
        return lambda: self._submit(run, jobs)

    def _submit(self, run: Run, jobs: dict[str, int]) -> None:
        wanted, draw = [], self._draw
        truth: dict[str, float] = {}
        for soc, count in sorted(jobs.items()):
            target = Target(soc, "htp", "8a8w")
            for number in range(count):
                job = Job(case(number), target)
                truth[job.id] = min(JOB_MOST_S, draw.lognormvariate(0.0, JOB_SPREAD) * JOB_MEDIAN_S)
                expected_s = truth[job.id] * draw.lognormvariate(0.0, HISTORY_SPREAD)
                wanted.append(PlannedJob(job, job.id, expected_s))
        devices = {
            soc: sum(set(run.labels) <= set(one.labels) for one in self.farms[soc].living.values()) for soc in jobs
        }
        for shard in divide(wanted, devices=devices, cached=truth, sessions={}):
            farm = self.farms[shard.soc]
            farm.work_s += sum(truth[job.job.id] for job in shard.jobs)
            order = farm.orders.setdefault(run.id, Order(run, shard.soc))
            order.ready.append(Shard(order, [truth[job.job.id] for job in shard.jobs], shard.expected_s))
        for soc in jobs:
            self._work_came(self.farms[soc])

    def _death(self, host: str) -> Callable[[], None]:
        def die() -> None:
            for farm in self.farms.values():
                mine = [name for name in farm.living if self.host_of[name] == host]
                self._look(farm)
                for name in mine:
                    del farm.living[name]
                    farm.free.discard(name)
                    held = farm.held.get(name)
                    if held is not None:
                        held.ends = 0
                        self._at(self._now_s + TTL_S, self._missing(farm, name, held))

        return die

    def _missing(self, farm: Farm, name: str, held: Held) -> Callable[[], None]:
        def put_back() -> None:
            done = self._finish_jobs(held, until_s=self._now_s - TTL_S)
            self.found.lost_s += max(0.0, self._now_s - TTL_S - held.began_s - sum(held.shard.jobs_s[:done]))
            self._let_go(farm, name, held)
            self._put_back(farm, held.shard, done)

        return put_back

    def _work_came(self, farm: Farm) -> None:
        """Let agents with idle devices claim after a hint, and look for devices to hand over."""
        self._look(farm)
        if farm.free and not farm.is_woken:
            farm.is_woken = True
            self._at(self._now_s + HINT_S, lambda: self._wake(farm))
        self._look_for_hand_over(farm)

    def _wake(self, farm: Farm) -> None:
        farm.is_woken = False
        if farm.free and farm.waiting:
            self._count_claims(len({self.host_of[name] for name in farm.free}))
            self._claim(farm, sorted(farm.free))

    def _count_claims(self, count: int = 1) -> None:
        self.found.claims[int(self._now_s)] += count

    def _claim(self, farm: Farm, asking: Sequence[str]) -> None:
        orders = farm.waiting
        if not orders:
            return
        self._look(farm)
        # A decision about free devices needs only the number of held ones.
        situation = Situation(
            soc=farm.soc,
            now_ms=round(self._now_s * 1000),
            devices=[farm.living[name] for name in farm.free],
            leases=(),
            orders=[order.as_open() for order in orders],
            here=farm.holdings,
            asking=asking,
        )
        shares, ours = share_out(situation), set(asking)
        for name in sorted(ours & shares.keys()):
            share = shares[name]
            order = farm.orders[share.run_id]
            if share.shard is None:
                shard = order.ready.popleft()
            else:
                shard = next(one for one in order.retries if one.id == share.shard)
                order.retries.remove(shard)
            self._begin(farm, name, shard)
        if farm.waiting:
            self._look_for_hand_over(farm)

    def _begin(self, farm: Farm, name: str, shard: Shard) -> None:
        run = shard.order.run
        farm.free.discard(name)
        began_s = self._now_s + BETWEEN_SHARDS_S
        self._count += 1
        lease = Lease(name, self._count, name, run.user, "", 0, "", run.priority, 0, _FOREVER_MS)
        held = farm.held[name] = Held(shard, began_s, lease, self._count)
        shard.order.held += 1
        farm.holdings[run.user] += 1
        self.found.shards += 1
        if run.first_s is None:
            run.first_s = began_s
        self._at(began_s + sum(shard.jobs_s), self._end(farm, name, held, self._count))

    def _end(self, farm: Farm, name: str, held: Held, number: int, left: int | None = None) -> Callable[[], None]:
        def end() -> None:
            if held.ends != number:
                return
            self._look(farm)
            done = self._finish_jobs(held, until_s=self._now_s + 1e-6)
            self._let_go(farm, name, held)
            farm.free.add(name)
            if left is not None:
                self._put_back(farm, held.shard, done)
            if farm.waiting:
                self._count_claims()
                self._claim(farm, [name])

        return end

    def _finish_jobs(self, held: Held, until_s: float) -> int:
        """Record the verdicts of the jobs that ended by then, and return their number."""
        shard, at_s, done = held.shard, held.began_s, 0
        order = shard.order
        device = held.lease.device
        host = self.host_of[device]
        for took_s in shard.jobs_s:
            if at_s + took_s > until_s:
                break
            at_s += took_s
            done += 1
            self._recorded.add((host, int(at_s / COALESCED_S)))
            self.found.busy_s += took_s
            if not shard.avoid and self._draw.random() < 1 / TRIED_AGAIN:
                self._count += 1
                order.retries.append(Shard(order, [took_s], took_s, (device,), self._count))
                continue
            self.found.jobs += 1
            self._unfinished -= 1
            order.run.unfinished -= 1
            order.run.ended_s = at_s
        return done

    def _let_go(self, farm: Farm, name: str, held: Held) -> None:
        del farm.held[name]
        held.shard.order.held -= 1
        farm.holdings[held.lease.user] -= 1
        if held.shard.order.retries and farm.free:
            self._work_came(farm)

    def _put_back(self, farm: Farm, shard: Shard, done: int) -> None:
        if done < len(shard.jobs_s):
            left = shard.jobs_s[done:]
            rest = Shard(shard.order, left, shard.expected_s * len(left) / len(shard.jobs_s), shard.avoid, shard.id)
            if rest.avoid:
                shard.order.retries.append(rest)
            else:
                shard.order.ready.appendleft(rest)
            self._work_came(farm)

    def _look_for_hand_over(self, farm: Farm) -> None:
        if not farm.is_looking and farm.held:
            farm.is_looking = True
            self._at(max(self._now_s, farm.decided_s + HAND_OVER_EVERY_S), lambda: self._hand_over(farm))

    def _hand_over(self, farm: Farm) -> None:
        farm.is_looking, farm.decided_s = False, self._now_s
        orders = farm.waiting
        if not orders:
            return
        situation = Situation(
            soc=farm.soc,
            now_ms=round(self._now_s * 1000),
            devices=list(farm.living.values()),
            leases=[held.lease for held in farm.held.values()],
            orders=[order.as_open() for order in orders],
            running=farm.held,
        )
        for name in sorted(hand_over(situation)):
            held = farm.held[name]
            # The request is made once: after the running job the device puts back the rest of its shard.
            at_s, position = held.began_s, 0
            while position < len(held.shard.jobs_s) and at_s < self._now_s:
                at_s += held.shard.jobs_s[position]
                position += 1
            if position < len(held.shard.jobs_s) and held.ends > 0:
                self._count += 1
                held.ends = self._count
                self.found.handed_over += 1
                self._at(max(at_s, self._now_s), self._end(farm, name, held, self._count, left=position))

    def _look(self, farm: Farm) -> None:
        """Count the idle time of devices since the last look."""
        waiting = farm.waiting
        if waiting:
            shards = sum(len(order.ready) + len(order.retries) for order in waiting)
            free = farm.free
            if all(order.run.labels for order in waiting):
                free = {name for name in farm.free if farm.living[name].labels}
            farm.idle_s += min(shards, len(free)) * (self._now_s - farm.looked_s)
        farm.looked_s = self._now_s

    def _at(self, when_s: float, happen: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (when_s, self._count, happen))


@functools.cache
def case(number: int) -> Case:
    """Return the case of the jobs with that number in all nights."""
    return Case("s", f"c{number}", "torch.nn:ReLU", (InputSpec((1,)),))


QUICK = Size(hosts=20, devices=160, socs=3, users=20, jobs=4_000, person_runs=12, deaths=2)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="a farm of 20 hosts")
    given = parser.parse_args(argv)
    size = Size(**{**vars(QUICK), "seed": given.seed}) if given.quick else Size(seed=given.seed)
    line = {"hosts": size.hosts, "devices": size.devices, "users": size.users, "jobs": size.jobs}
    print(json.dumps(line | what_was_found(Night(size).run(), size)))


def what_was_found(found: Found, size: Size) -> dict[str, object]:
    """Return the figures of the night that users would see."""
    all_s = size.devices * found.ended_s
    return {
        "night_s": round(found.ended_s, 1),
        "ideal_s": round(found.ideal_s, 1),
        "utilization": round(found.busy_s / all_s, 3),
        "idle_while_work_waits": round(found.idle_while_work_waits_s / all_s, 4),
        "person_wait_s": _spread(found.waits_s[Priority.PERSON]),
        "nightly_wait_s": _spread(found.waits_s[Priority.NIGHTLY]),
        "shards": found.shards,
        "handed_over": found.handed_over,
        "calls_per_s": {name: [round(rate, 1) for rate in both] for name, both in rates(found, size).items()},
    }


def rates(found: Found, size: Size) -> dict[str, tuple[float, float]]:
    """Return the calls of each kind per second: on average, and in the busiest second."""
    beats = size.hosts / HEARTBEAT_S
    return {
        "claim": (sum(found.claims.values()) / found.ended_s, float(max(found.claims.values()))),
        "record": (sum(found.records.values()) / found.ended_s, float(max(found.records.values()))),
        "heartbeat": (beats, beats),
    }


def _spread(waits_s: Sequence[float]) -> list[float]:
    ordered = sorted(waits_s)
    return [round(ordered[min(len(ordered) - 1, int(len(ordered) * part))], 2) for part in (0.5, 0.95, 1.0)]


if __name__ == "__main__":
    main()
