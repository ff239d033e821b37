"""Night of 1,000 hosts: utilization of 10,000 devices, waiting times of users, and calls to the database.

    python bench/cluster_simulation.py [--seed 1] [--quick]

The night is simulated (bench/simulated_farm.py): 200 users, 500,000 jobs of nightly runs, 400 runs of people, hosts
that die. **Only the decisions are real**: the choice of a device, the hand-over of a device, the size of a shard. All
bundles are made before. The last line is JSON:

`night_s`, `ideal_s`     time until the last verdict; shortest time in which each SoC's devices could do the work
`utilization`            share of all device time until the last verdict that ran jobs
`idle_while_work_waits`  share in which a device was idle although a job that it could run waited
`person_wait_s`, `nightly_wait_s`  from submission to the first job: median, 95 %, longest
`shards`, `handed_over`  number of started shards; number of these that ended early for another run
`calls_per_s`            calls of agents, on average and in the busiest second
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence

from simulated_farm import HEARTBEAT_S, Found, Night, Size

from farm.policy.situation import Priority

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
