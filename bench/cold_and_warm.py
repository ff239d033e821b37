"""Time of the main job from an empty bundle cache, and of the same job again.

    python bench/cold_and_warm.py                      quantized_ops for SM8650 on 2 virtual devices
    python bench/cold_and_warm.py --against CHECKOUT   the same in turns with another checkout: by its .venv, if any
    python bench/cold_and_warm.py -k conv              jobs with `conv` in their names
    python bench/cold_and_warm.py --quick              one job of smoke on 1 virtual device

The cache has no bundles; runner and SDK of $FARM_CACHE_DIR are links in it, or are made before the clock starts: both
are made once a machine. The last line is one JSON object:

* jobs, cold_s, warm_s, cold_over_warm: jobs, and seconds from Enter to prompt; medians of the rounds.
* cold_processor_s: processor time of the cold run and its ended child processes, without virtual devices.
* cold_idle_s: seconds of the cold run in which its devices had no job, summed over the devices.
* cold_ratio, warm_ratio, processor_ratio, idle_ratio: medians of the ratios to the other checkout in each round; null
  without one.

On a machine with other work the processor time is the figure to compare.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from empty_cache import empty_environment, python_of

FARM = ["-P", "-m", "farm.cli.main"]
"""Words after the interpreter: `farm` without the current folder in the search path, which would precede a checkout."""
# The command that makes the runner, and its name until 2026-11-27.
SET_UPS = (["setup", "runtime", "build"], ["runtime", "build"])


class Took(NamedTuple):
    """Time of a run of the main job."""

    seconds: float
    processor_s: float
    jobs: int
    idle_s: float


class Round(NamedTuple):
    """Times of a cold and a warm run of one farm."""

    cold: Took
    warm: Took


def run(python: str, chosen: list[str], env: dict[str, str]) -> Took:
    """Run the main job, from Enter to prompt."""
    started, before = time.perf_counter(), os.times()
    done = subprocess.run(
        [python, *FARM, "run", "--soc", "SM8650", *chosen, "--json"], env=env, stdout=subprocess.PIPE, check=True
    )
    seconds, after = time.perf_counter() - started, os.times()
    processor_s = after.children_user + after.children_system - before.children_user - before.children_system
    run_data = json.loads(done.stdout)
    attempts = [attempt for job in run_data["jobs"] for attempt in job["attempts"]]
    devices = len({attempt["device"] for attempt in attempts})
    idle_s = seconds * devices - sum(attempt["seconds"] for attempt in attempts)
    return Took(seconds, processor_s, len(run_data["jobs"]), idle_s)


def set_up(python: str, env: dict[str, str]) -> None:
    """Make the runner, before the clock starts."""
    for words in SET_UPS:
        done = subprocess.run([python, *FARM, *words], env=env, capture_output=True, text=True, check=False)
        if not done.returncode:
            return
    sys.exit(done.stderr)


def measure(chosen: list[str], builders: int, checkout: Path | None = None) -> Round:
    """Run the main job twice from an empty bundle cache, with this farm or the farm of `checkout`."""
    with tempfile.TemporaryDirectory(prefix="farm-bench-") as folder, contextlib.chdir(folder):
        env = empty_environment(Path(folder), builders=builders)
        python = sys.executable
        if checkout is not None:
            python = python_of(checkout, env)
        set_up(python, env)
        return Round(run(python, chosen, env), run(python, chosen, env))


def ratio(pairs: list[tuple[Took, Took]], of: str) -> float | None:
    """Return the median of the ratios of this farm to the other in the field `of`; None without another farm."""
    ratios: list[float] = [getattr(one, of) / getattr(other, of) for one, other in pairs]
    return round(statistics.median(ratios), 3) if ratios else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one job of smoke")
    parser.add_argument("--against", type=Path, metavar="CHECKOUT", help="checkout of farm to compare with")
    parser.add_argument("--rounds", type=int, default=1, help="times that each farm runs")
    parser.add_argument("-k", dest="text", default="", help="jobs with this text in their names")
    arguments = parser.parse_args()
    chosen = ["--suite", "quantized_ops", "--virtual", "2"]
    if arguments.quick:
        chosen = ["--suite", "smoke", "--virtual", "1", "-k", "add"]
    elif arguments.text:
        chosen += ["-k", arguments.text]
    # The start of a second builder takes longer than one job.
    builders, other = 1 if arguments.quick else 0, arguments.against and arguments.against.resolve()
    if other is not None and not (other / "farm" / "__init__.py").is_file():
        parser.error(f"--against {other}: expected a checkout of farm; git worktree add makes one")
    own: list[Round] = []
    pairs: list[tuple[Round, Round]] = []
    for number in range(arguments.rounds):
        sides = [None] if other is None else [None, other] if number % 2 == 0 else [other, None]
        found = {side: measure(chosen, builders, side) for side in sides}
        own.append(found[None])
        if other is not None:
            pairs.append((found[None], found[other]))
            print(f"round {number + 1}: {found[None]}, {found[other]}", flush=True)
    cold_s, warm_s = (statistics.median(getattr(one, what).seconds for one in own) for what in ("cold", "warm"))
    jobs, cold_pairs = own[0].cold.jobs, [(one.cold, other.cold) for one, other in pairs]
    print(f"{jobs} jobs on {os.cpu_count()} cores: cold {cold_s:.1f} s, warm {warm_s:.1f} s")
    result = {
        "jobs": jobs,
        "cold_s": round(cold_s, 2),
        "warm_s": round(warm_s, 2),
        "cold_over_warm": round(cold_s / warm_s, 1),
        "cold_processor_s": round(statistics.median(one.cold.processor_s for one in own), 2),
        "cold_idle_s": round(statistics.median(one.cold.idle_s for one in own), 1),
        "cold_ratio": ratio(cold_pairs, "seconds"),
        "warm_ratio": ratio([(one.warm, other.warm) for one, other in pairs], "seconds"),
        "processor_ratio": ratio(cold_pairs, "processor_s"),
        "idle_ratio": ratio(cold_pairs, "idle_s"),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
