"""Night of 1,000 hosts: utilization of 10,000 devices, waiting times of users, and load of the database.

    python bench/cluster_simulation.py [--seed 1] [--only simulation | database] [--quick]

The night is simulated (bench/simulated_farm.py): 200 users, 500,000 jobs of nightly runs, 400 runs of people, hosts
that die. **Only the decisions are real**: the choice of a device, the hand-over of a device, the size of a shard. Then
a real PostgreSQL is filled to that size (bench/filled_farm.py), the calls of agents and clients are measured in it, and
multiplied by their number in the simulated night. All bundles are made before. The last line is JSON:

`night_s`, `ideal_s`     time until the last verdict; shortest time in which each SoC's devices could do the work
`utilization`            share of all device time until the last verdict that ran jobs
`idle_while_work_waits`  share in which a device was idle although a job that it could run waited
`person_wait_s`, `nightly_wait_s`  from submission to the first job: median, 95 %, longest
`shards`, `handed_over`  number of started shards; number of these that ended early for another run
`calls_per_s`            calls of agents, on average and in the busiest second
`queries_per_s`          statements that agents send, on average and in the busiest second
`cost_ms`, `caller_ms`   processor time of PostgreSQL and of the caller for one call of each kind
`statements`             number of statements of one call
`database_cores`         busy processors of such a database server in an average second of the night
`breaks_first`           resource that reaches its bound with the fewest hosts, and their approximate number
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from collections.abc import Sequence

from filled_farm import Costs, measure
from simulated_farm import HEARTBEAT_S, Found, Night, Size

from farm.policy.situation import Priority

QUICK = Size(hosts=20, devices=160, socs=3, users=20, jobs=4_000, person_runs=12, deaths=2)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=("simulation", "database"))
    parser.add_argument("--quick", action="store_true", help="a farm of 40 hosts")
    given = parser.parse_args(argv)
    size = Size(seed=given.seed)
    if given.quick:
        size = Size(**{**vars(QUICK), "seed": given.seed})
    line: dict[str, object] = {"hosts": size.hosts, "devices": size.devices, "users": size.users, "jobs": size.jobs}
    found: Found | None = None
    if given.only != "database":
        began = time.perf_counter()
        found = Night(size).run()
        print(f"simulated in {time.perf_counter() - began:.0f} s", flush=True)
        line |= what_was_found(found, size)
        print(json.dumps(line), flush=True)
    if given.only != "simulation":
        costs = measure(size)
        line |= {"cost_ms": costs.cost_ms, "caller_ms": costs.caller_ms, "statements": costs.statements}
        if found is not None:
            line |= what_the_database_does(found, costs, size)
    print(json.dumps(line))


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
        "decisions": found.decisions,
        "most_runs_of_a_soc": found.most_orders,
        "calls_per_s": {name: [round(rate, 1) for rate in both] for name, both in rates(found, size).items()},
        "claims_of_largest_soc_per_s": round(_claims_of_largest(found) / found.ended_s, 1),
    }


def rates(found: Found, size: Size) -> dict[str, tuple[float, float]]:
    """Return the calls of each kind per second: on average, and in the busiest second."""
    beats = size.hosts / HEARTBEAT_S
    return {
        "claim": (sum(found.claims.values()) / found.ended_s, float(max(found.claims.values()))),
        "record": (sum(found.records.values()) / found.ended_s, float(max(found.records.values()))),
        "heartbeat": (beats, beats),
    }


def what_the_database_does(found: Found, costs: Costs, size: Size) -> dict[str, object]:
    """Return the cost of the night's calls, and the resource that reaches its bound first."""
    calls = rates(found, size)
    queries = [sum(costs.statements[name] * rate[n] for name, rate in calls.items()) for n in (0, 1)]
    cores = {name: rate[0] * costs.cost_ms[name] / 1000 for name, rate in calls.items()}
    # Decisions about one SoC come one after the other.
    locked = _claims_of_largest(found) / found.ended_s * (costs.cost_ms["claim"] + costs.caller_ms["claim"]) / 1000
    bounds = {
        "decisions of the largest SoC, one after the other": locked,
        f"processors of a database with {costs.cores}": sum(cores.values()) / costs.cores,
        f"connections, 6 an agent, of {costs.connections}": 6 * size.hosts / costs.connections,
    }
    first = max(bounds, key=lambda name: bounds[name])
    return {
        "queries_per_s": [round(number) for number in queries],
        "database_cores": round(sum(cores.values()), 2),
        "database_cores_by_call": {name: round(used, 2) for name, used in cores.items()},
        "bounds": {name: round(used, 3) for name, used in bounds.items()},
        "breaks_first": {"what": first, "hosts": int(size.hosts / bounds[first])},
    }


def _claims_of_largest(found: Found) -> int:
    claims: Counter[str] = Counter()
    for (_, soc), count in found.claims_of_soc.items():
        claims[soc] += count
    return max(claims.values())


def _spread(waits_s: Sequence[float]) -> list[float]:
    ordered = sorted(waits_s)
    return [round(ordered[min(len(ordered) - 1, int(len(ordered) * part))], 2) for part in (0.5, 0.95, 1.0)]


if __name__ == "__main__":
    main()
