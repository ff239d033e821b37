"""How long a profile takes: an ETDump of 5 MB to events, and those to a row for every node.

    python bench/profiles.py            a real dump of 5 MB from the simulator, about a minute
    python bench/profiles.py --quick    one of a tenth of that
    python bench/profiles.py FILE       another ETDump

The last line is one JSON object: the size in MB (10^6 bytes), and the best of five times in one process, in s:
parse_s for the file to events, rows_s for the events to rows. The first needs to stay under 0.5 s.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from farm.results.profile.cycles import operator_rows
from farm.results.profile.etdump import read_etdump
from farm.results.profile.event_names import INFERENCE

ROUNDS = 5
# A convolution's profile takes 1.1 kB for every inference.
ITERATIONS, QUICK_ITERATIONS = 3900, 390


def best(call: Callable[[], object]) -> float:
    seconds = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def recorded(folder: Path, iterations: int) -> Path:
    """Run one job so many times, and return the dump that farm keeps."""
    farm = [sys.executable, "-m", "farm.cli.main"]
    env = {**os.environ, "FARM_STATE_DIR": str(folder / "state")}
    job = ["run", "--soc", "SM8650", "--suite", "smoke", "-k", "conv2d", "--virtual", "1"]
    for argv in (
        [*farm, *job, "--profile", "detailed", "--iterations", str(iterations), "--timeout", "300"],
        [*farm, "profile", "smoke/conv2d", "--artifacts", str(folder / "files")],
    ):
        subprocess.run(argv, env=env, check=True, stdout=subprocess.DEVNULL)
    return folder / "files" / "etdump.etdp"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", type=Path, metavar="FILE")
    parser.add_argument("--quick", action="store_true", help="a tenth of the inferences")
    given = parser.parse_args()
    iterations = QUICK_ITERATIONS if given.quick else ITERATIONS
    with tempfile.TemporaryDirectory(prefix="farm-bench-") as folder:
        data = (given.file or recorded(Path(folder), iterations)).read_bytes()
    inferences = [block for block in read_etdump(data) if block.name == INFERENCE]
    events = sum(len(block.events) for block in inferences)
    parse_s = best(lambda: read_etdump(data))
    rows_s = best(lambda: operator_rows(inferences))
    print(f"{len(inferences)} inferences, {events} events, {len(operator_rows(inferences))} rows")
    print(
        json.dumps({"etdump_mb": round(len(data) / 1e6, 2), "parse_s": round(parse_s, 3), "rows_s": round(rows_s, 3)})
    )


if __name__ == "__main__":
    main()
