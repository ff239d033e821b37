"""Writes test_suites/quantized_ops/operators.json: which of ExecuTorch's operators each case makes the backend build.

    farm run --soc SM8650 --suite quantized_ops --suite fp_ops --virtual 2 --json > run.json
    python tools/generate_operators.py run.json           write it
    python tools/generate_operators.py run.json --check   fail when it is not what would be written

The reasons for builders without a case are kept as they are: they are written by hand. The bundles of the run are read
from the cache, as FARM_CACHE_DIR or farm.toml name it.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT)]

from farm.bundles.cache import BundleCache  # noqa: E402 - also where farm is not installed
from farm.config.settings import load_config  # noqa: E402

TABLE = ROOT / "test_suites" / "quantized_ops" / "operators.json"


def built_by_cases(run: dict[str, Any], bundles: BundleCache) -> dict[str, list[str]]:
    """Return the operators that the backend built for the cases of a run, over all of their precisions and SoCs."""
    found: dict[str, set[str]] = {}
    for job in run["jobs"]:
        operators = found.setdefault(job["case"], set())
        for key in {attempt["bundle_key"] for attempt in job["attempts"]} - {""}:
            if bundle := bundles.lookup(key):
                operators.update(bundle.manifest.operators)
    return {case: sorted(operators) for case, operators in sorted(found.items())}


def main() -> int | str:
    """Write or check the table; what is returned is what the process ends with."""
    parser = argparse.ArgumentParser(description="Writes test_suites/quantized_ops/operators.json.")
    parser.add_argument("run", type=Path, help="what farm run --json printed")
    parser.add_argument("--check", action="store_true", help="fail when the file is not what would be written")
    options = parser.parse_args()
    cases = built_by_cases(json.loads(options.run.read_bytes()), BundleCache(load_config().cache_dir))
    written = json.loads(TABLE.read_bytes()) if TABLE.exists() else {"without": {}}
    if options.check:
        return 0 if written["cases"] == cases else f"{TABLE} is out of date: run this without --check"
    rows = ",\n".join(f"    {json.dumps(case)}: {json.dumps(operators)}" for case, operators in cases.items())
    reasons = json.dumps(written["without"], indent=2).replace("\n", "\n  ")
    TABLE.write_text(f'{{\n  "cases": {{\n{rows}\n  }},\n  "without": {reasons}\n}}\n')
    return 0


if __name__ == "__main__":
    sys.exit(main())
