"""Is a compiler that makes a program 8 % slower found the same night, on the simulator?

    python bench/planted.py [--times 5] [--layers 1] [--nights 9] [--iterations 3] [--quick]

Each time: a new store, `--nights` runs of a program of twelve equal layers, then one by a release of torchao that makes
thirteen of them (`tests/planted.py`), and `farm confirm`. Found is what `farm confirm` tells as confirmed, with that
run as the first bad one. A line each time, with the change that pairs measured; the simulator counts the time of its
host as cycles, so that it is found on a quiet machine. The last line is JSON: `times`, `candidates`, `found`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from farm_home import FarmHome
from planted import Planted, write_suite

from farm.analysis.candidates import LEAST_BASELINE
from farm.store.store import open_store


def once(cache: Path, nights: int, layers: int, iterations: int) -> tuple[bool, bool]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "cwd").mkdir()
        home = FarmHome(cache, folder / "state", folder / "cwd")
        planted = Planted(home, folder, write_suite(folder / "planted"))
        for _ in range(nights):
            planted.run(0, "--iterations", str(iterations))
        slower = planted.run(layers, "--iterations", str(iterations))
        with open_store(home.state / "farm.db") as store:
            looks = any(one.metric == "htp_cycles" for one in store.alerts.of_run(slower))
        findings = planted.json("confirm", code=None)["findings"]
        found = [one for one in findings["alerts"] if one["metric"] == "htp_cycles"]
        for one in found:
            print(f"{one['state']}: {100 * math.expm1(one['change'] or 0.0):+.1f} %: {one['reason']}", flush=True)
        return looks, any(one["state"] == "confirmed" and one["first_bad"] == slower for one in found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--layers", type=int, default=1, help="More than the twelve that there are.")
    parser.add_argument("--nights", type=int, default=9)
    parser.add_argument("--iterations", type=int, default=3, help="Of each run, as farm run takes them.")
    parser.add_argument("--quick", action="store_true", help="Once, with the fewest nights.")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.times, arguments.nights = 1, LEAST_BASELINE
    cache = Path(os.environ.get("FARM_CACHE_DIR") or Path.home() / ".cache" / "farm")
    told = [once(cache, arguments.nights, arguments.layers, arguments.iterations) for _ in range(arguments.times)]
    candidates, found = (sum(column) for column in zip(*told, strict=True))
    print(json.dumps({"times": arguments.times, "candidates": candidates, "found": found}))


if __name__ == "__main__":
    main()
