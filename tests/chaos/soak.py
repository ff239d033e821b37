"""Thousands of jobs on dozens of devices that fail all the time: every job has to end with the right verdict, once.

    python tests/chaos/soak.py [--devices 32] [--jobs 5000] [--fault-rate 0.05] [--seed 1] [--quick]
    python tests/chaos/soak.py --chaos [--minutes 20] [--seed 1] [--quick] [--only ROUND]

The runner is a stub that sleeps 50 ms; virtual devices, adb server, workers, leases and store are real
(tests/stub_farm.py). Some jobs have code that is at fault: wrong numbers, crashes, hangs, refusals. The last line is
JSON: `verdicts`; `wrong_verdict`, jobs that failed through the farm's fault, or passed although their code is at fault;
`lost`, jobs without a verdict; `duplicated`, jobs with more than one; `orphans`, processes and leases that are left;
`faults` that struck.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from chaos import run_chaos
from chaos_home import processes_of
from stub_farm import make_stub_farm
from stub_run import judge, run_stub_farm

from farm.base.processes import Supervisor
from farm.results.attempt import Verdict

PLANTED = {"wrong": 60, "crash": 20, "hang": 10, "refused": 30}
# For 5000 jobs; fewer have fewer.
_OF = 5000


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=32)
    parser.add_argument("--jobs", type=int, default=_OF)
    parser.add_argument("--latency-ms", type=int, default=50)
    parser.add_argument("--fault-rate", type=float, default=0.05)
    parser.add_argument("--fault-kinds", default="", help="with commas; all for none")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="4 devices, 100 jobs; three rounds of chaos")
    parser.add_argument("--chaos", action="store_true", help="kill, fill and stop everything: the options below")
    parser.add_argument("--minutes", type=float, default=20.0, help="how long no round begins any more after")
    parser.add_argument("--only", type=int, help="one round, by its number")
    parser.add_argument("--bound", type=float, help="seconds without progress that are a hang; what is documented")
    arguments = parser.parse_args()
    if arguments.chaos:
        return run_chaos(arguments)
    if arguments.quick:
        arguments.devices, arguments.jobs = 4, 100
    print("THE RUNNER IS A STUB that sleeps; virtual devices, adb server, workers, leases and store are the real thing")
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="farm-soak-") as name:
        folder = Path(name)
        with Supervisor() as supervisor:
            farm = make_stub_farm(
                folder,
                devices=arguments.devices,
                jobs=arguments.jobs,
                latency_ms=arguments.latency_ms,
                planted={word: max(1, count * arguments.jobs // _OF) for word, count in PLANTED.items()},
                supervisor=supervisor,
                fault_rate=arguments.fault_rate,
                fault_seed=arguments.seed,
                fault_kinds=tuple(filter(None, arguments.fault_kinds.split(","))),
            )
            done = run_stub_farm(farm, folder, timeout_s=2.0)
            faults = farm.fired()
        left = processes_of(folder)
    wrong = judge(done.view, farm.behaviours)
    verdicts = Counter(str(job.attempts[-1].verdict) for job in done.view.jobs if job.attempts)
    tries = Counter(len({attempt.device for attempt in job.attempts}) for job in done.view.jobs)
    causes = Counter(str(a.cause) for job in done.view.jobs for a in job.attempts if a.verdict is Verdict.INFRA)
    notes = Counter(note.partition(" ")[2].partition(":")[0] for note in done.front.notes)
    for note in done.front.notes:
        if "not used any more" in note or note.startswith("device pool: "):
            print(note)
    print(f"{time.perf_counter() - started:.0f} s")
    print(f"devices that tried a job: {dict(tries)}")
    print(f"causes of infra attempts: {dict(causes)}")
    print(f"faults: {dict(faults)}")
    print(f"notes: {dict(notes.most_common(8))}")
    for what, jobs in wrong.items():
        for job in jobs[:10]:
            print(f"{what}: {job}")
    for what in (*(one.command for one in left), *(f"lease of {lease.device}" for lease in done.leases)):
        print(f"left over: {what}")
    print(
        json.dumps(
            {
                "jobs": arguments.jobs,
                "verdicts": dict(verdicts),
                **{what: len(jobs) for what, jobs in wrong.items()},
                "orphans": len(left) + len(done.leases),
                "faults": sum(faults.values()),
            }
        )
    )
    return 1 if any(wrong.values()) or left or done.leases else 0


if __name__ == "__main__":
    sys.exit(main())
