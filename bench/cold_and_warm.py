"""How long the main job takes from an empty bundle cache, how long again, and how busy the cores are while compiling.

    python bench/cold_and_warm.py           quantized_ops for SM8650 on 2 virtual devices
    python bench/cold_and_warm.py --quick   smoke instead, under a minute

The last line is one JSON object. The cache has no bundles; runner and SDK of $FARM_CACHE_DIR are links in it, or are
made before the clock starts: both are made once a machine.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from empty_cache import make_empty_cache

from farm.config.settings import load_config


def busy_and_all() -> tuple[int, int]:
    """Return the jiffies that all cores were busy, and all there were, since boot."""
    fields = [int(word) for word in Path("/proc/stat").read_text(encoding="ascii").splitlines()[0].split()[1:9]]
    idle = fields[3] + fields[4]
    return sum(fields) - idle, sum(fields)


class BuildWatch(threading.Thread):
    """Notes the machine's counters when the builders begin and when the last one answers."""

    def __init__(self, state: Path) -> None:
        super().__init__(daemon=True)
        self._state, self._over = state, threading.Event()
        self.first: tuple[int, int] | None = None
        self.last: tuple[int, int] | None = None
        self.replies = 0

    def run(self) -> None:
        while not self._over.wait(0.05):
            if self.first is None and any(self._state.glob("runs/*/builds")):
                self.first = busy_and_all()
            replies = sum(1 for _ in self._state.glob("runs/*/builds/*.json"))
            if replies > self.replies:
                self.replies, self.last = replies, busy_and_all()

    def share(self) -> float:
        """Return the busy share of all cores in between."""
        self._over.set()
        self.join()
        if self.first is None or self.last is None:
            return 0.0
        return (self.last[0] - self.first[0]) / max(1, self.last[1] - self.first[1])


def farm(suite: str, env: dict[str, str]) -> tuple[float, dict[str, object]]:
    """Run the main job and return the seconds from Enter to prompt, and what it printed."""
    argv = [
        sys.executable,
        "-m",
        "farm.cli.main",
        "run",
        "--soc",
        "SM8650",
        "--suite",
        suite,
        "--virtual",
        "2",
        "--json",
    ]
    started = time.perf_counter()
    done = subprocess.run(argv, env=env, stdout=subprocess.PIPE, check=False)
    seconds = time.perf_counter() - started
    if done.returncode != 0:
        sys.exit(f"farm run ended with {done.returncode}")
    return seconds, json.loads(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the smoke suite, under a minute")
    suite = "smoke" if parser.parse_args().quick else "quantized_ops"
    with tempfile.TemporaryDirectory(prefix="farm-bench-") as folder:
        state = Path(folder, "state")
        cache = make_empty_cache(Path(folder, "cache"), load_config().cache_dir)
        env = {**os.environ, "FARM_CACHE_DIR": str(cache), "FARM_STATE_DIR": str(state)}
        build = [sys.executable, "-m", "farm.cli.main", "runtime", "build"]
        subprocess.run(build, env=env, check=True, stdout=subprocess.DEVNULL)
        watch = BuildWatch(state)
        watch.start()
        cold_s, run = farm(suite, env)
        share = watch.share()
        warm_s, _ = farm(suite, env)
        jobs = run["jobs"]
        assert isinstance(jobs, list)
    print(f"{len(jobs)} jobs of {suite} on {os.cpu_count()} cores: cold {cold_s:.1f} s, warm {warm_s:.1f} s")
    result = {
        "jobs": len(jobs),
        "cold_s": round(cold_s, 2),
        "warm_s": round(warm_s, 2),
        "build_cpu_share": round(share, 3),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
