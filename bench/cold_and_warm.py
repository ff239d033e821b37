"""Time of the main job from an empty bundle cache, and of the same job again.

    python bench/cold_and_warm.py           quantized_ops for SM8650 on 2 virtual devices
    python bench/cold_and_warm.py --quick   one job of smoke on 1 virtual device

The cache has no bundles; runner and SDK of $FARM_CACHE_DIR are links in it, or are made before the clock starts: both
are made once a machine. The last line is one JSON object: `jobs`, `cold_s`, `warm_s` and `cold_over_warm`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from empty_cache import empty_environment

FARM = [sys.executable, "-m", "farm.cli.main"]


def run(chosen: list[str], env: dict[str, str]) -> tuple[float, int]:
    """Run the main job and return the seconds from Enter to prompt, and the number of jobs."""
    started = time.perf_counter()
    done = subprocess.run(
        [*FARM, "run", "--soc", "SM8650", *chosen, "--json"], env=env, stdout=subprocess.PIPE, check=True
    )
    return time.perf_counter() - started, len(json.loads(done.stdout)["jobs"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one job of smoke")
    quick = parser.parse_args().quick
    chosen = ["--suite", "quantized_ops", "--virtual", "2"]
    if quick:
        chosen = ["--suite", "smoke", "--virtual", "1", "-k", "add"]
    with tempfile.TemporaryDirectory(prefix="farm-bench-") as folder:
        # The start of a second builder takes longer than one job.
        env = empty_environment(Path(folder), builders=1 if quick else 0)
        subprocess.run([*FARM, "setup", "runtime", "build"], env=env, check=True, stdout=subprocess.DEVNULL)
        (cold_s, jobs), (warm_s, _) = run(chosen, env), run(chosen, env)
    print(f"{jobs} jobs on {os.cpu_count()} cores: cold {cold_s:.1f} s, warm {warm_s:.1f} s")
    result = {
        "jobs": jobs,
        "cold_s": round(cold_s, 2),
        "warm_s": round(warm_s, 2),
        "cold_over_warm": round(cold_s / warm_s, 1),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
