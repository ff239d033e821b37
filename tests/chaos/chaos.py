"""Runs under killed processes, full disks and a lost database.

    python tests/chaos/chaos.py [--minutes 20] [--seed 1] [--quick] [--only ROUND]

Every round is one run of a stub farm (chaos_farm.py), on virtual devices of its own or on attached ones, with SQLite or
PostgreSQL, as the seed and the number of the round decide. It is disturbed, and resumed until no verdict is missing;
the last resumptions run undisturbed. `--only ROUND` plays one round again with the same acts at the same times; the
progress of the run by then depends on the machine.

The last line is JSON: `verdicts`; `wrong_verdict`, jobs that failed through the farm's fault, or passed although their
code is at fault; `lost`, jobs without a verdict about their code after the last resumption; `duplicated`, jobs with
more than one verdict; `orphans`, processes and leases that are left; `hangs`, runs without progress for longer than
`bound_s` between two acts; `longest_wait_s`, the longest such wait; `wrong_cause`, attempts against a device in rounds
whose acts met only farm's own processes, its disk or its database; `quarantined`, devices, and `quarantined_locally`,
devices of rounds without an act against a device; `given_up`, devices that one run stopped to use; `tracebacks` in the
output for a user; `refused`, runs that could not be resumed; `broke_down`, sessions that ended early on a healthy
device; `faults`, acts that met a target.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from chaos_acts import Pace
from chaos_home import has_sshd
from chaos_round import LONGEST_WAIT_S, Round, Settings, Tally
from chaos_store import postgres_cluster
from stub_farm import stub_runtime

JOBS, QUICK_JOBS = 48, 16
# With seed 1: workers that are killed as they are born, a full state disk behind a tunnel, a database that is away.
QUICK_ROUNDS = (0, 1, 3)
PACE, QUICK_PACE = Pace(most=5, longest_s=40.0, last_s=7.0), Pace(most=2, longest_s=3.0, last_s=5.0)


def main() -> int:
    """Play rounds until the time is over; print the findings, and return 1 if there are any, else 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="three rounds")
    parser.add_argument("--minutes", type=float, default=20.0, help="how long no round begins any more after")
    parser.add_argument("--only", type=int, help="one round, by its number")
    parser.add_argument("--bound", type=float, help="seconds without progress that are a hang; what is documented")
    arguments = parser.parse_args()
    # Processes and mounts are cleaned up after SIGTERM as well.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    _enter_namespace()
    print(
        "THE RUNNER AND THE COMPILER ARE STUBS; all other processes, disks and databases are the real thing", flush=True
    )
    started = time.monotonic()
    tally = Tally()
    kept = Path(tempfile.mkdtemp(prefix="farm-chaos-found-"))
    try:
        settings = _play(arguments, tally, kept)
    finally:
        # The folder stays if it has files.
        with contextlib.suppress(OSError):
            kept.rmdir()
    return _report(tally, settings, time.monotonic() - started)


def _play(arguments: argparse.Namespace, tally: Tally, kept: Path) -> Settings:
    started = time.monotonic()
    seconds = arguments.minutes * 60
    numbers = [arguments.only] if arguments.only is not None else QUICK_ROUNDS if arguments.quick else range(10**6)
    with tempfile.TemporaryDirectory(prefix="farm-chaos-") as name, postgres_cluster() as cluster:
        if isinstance(cluster, str):
            print(f"skipped: PostgreSQL, as {cluster}")
        if not has_sshd():
            print("skipped: tunnels, as sshd is not installed")
        folder = Path(name)
        stub_runtime(folder / "runtime")
        settings = Settings(
            folder,
            folder / "runtime/stub_runner",
            arguments.seed,
            QUICK_JOBS if arguments.quick else JOBS,
            QUICK_PACE if arguments.quick else PACE,
            arguments.bound or LONGEST_WAIT_S,
            None if isinstance(cluster, str) else cluster,
            kept,
        )
        for number in numbers:
            if time.monotonic() - started > seconds:
                break
            Round(settings, number, tally).play()
    return settings


def _report(tally: Tally, settings: Settings, seconds: float) -> int:
    bad = any(tally.found.values())
    print(f"{seconds:.0f} s, {tally.rounds} rounds, {tally.runs} runs; what was met: {dict(tally.acts)}")
    print(f"causes of infra attempts: {dict(tally.causes)}")
    for what, found in tally.found.items():
        for text in found[:20]:
            print(f"{what}: {text}")
    if bad:
        print(f"what is known of these: {settings.kept}")
    print(
        json.dumps(
            {
                "jobs": tally.jobs,
                "verdicts": dict(tally.verdicts),
                **{what: len(found) for what, found in tally.found.items()},
                "quarantined": tally.quarantined,
                "given_up": tally.given_up,
                "faults": tally.faults,
                "longest_wait_s": round(tally.longest_wait_s, 1),
                "bound_s": settings.bound_s,
                "rounds": tally.rounds,
                "runs": tally.runs,
            }
        )
    )
    return 1 if bad else 0


def _enter_namespace() -> None:
    """Have mounts of our own, which end with this process however it ends; without root nothing is mounted at all."""
    if os.environ.get("CHAOS_NAMESPACE"):
        return
    if os.geteuid() or shutil.which("unshare") is None:
        print("skipped: full disks, as only root may mount file systems")
        return
    words = ["unshare", "--mount", "--propagation", "private", sys.executable, *sys.argv]
    if subprocess.run([*words[:4], "true"], check=False, capture_output=True).returncode:
        print("skipped: full disks, as this machine lets nobody mount file systems")
        return
    # Program and arguments are this process's own.
    os.execvpe(words[0], words, {**os.environ, "CHAOS_NAMESPACE": "1"})  # noqa: S606


if __name__ == "__main__":
    sys.exit(main())
