"""Runs upstream's own tests on devices, both of its frameworks, and prints the two tables of docs/conformance.md.

    tools/conformance.py                                on two virtual SM8650
    tools/conformance.py --only newer -- -k "8a or utils"
    tools/conformance.py --soc SM8850 --backend lpai --only older -- -k TestQNNQuantizedOperator
    tools/conformance.py --runs RUN RUN                 of runs that are recorded already, also of some that were ended

One `farm pytest` each: the older framework is `test_qnn_delegate`, by class, without its whole models; the newer one is
`tests/rework`, by file. Both are those of the installed wheel. Every test is in the store when it has ended, so that
`--runs` prints what there is of a run that did not end: tests that have no result are counted as not run. What stands
behind `--` is for pytest. Exit code 1 where a test failed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
STUBS = ROOT / "tests/conformance/model_stubs"
CLASSES = (
    "TestQNNQuantizedOperator",
    "TestQNNFloatingPointOperator",
    "TestQNNQuantizedUtils",
    "TestQNNFloatingPointUtils",
)
MODULE = "executorch.backends.qualcomm.tests.test_qnn_delegate"
COLUMNS = ("passed", "skipped", "expected to fail", "failed", "infra", "not run")
REASON = 110


def older() -> list[str]:
    """Return pytest's arguments for the older framework."""
    return ["--pyargs", *(f"{MODULE}::{name}" for name in CLASSES)]


def newer() -> list[str]:
    """Return those for the newer one; its `gpu` and `lpai` folders have no test in the wheel of 1.5.1."""
    spec = importlib.util.find_spec("executorch")
    [folder] = (spec.submodule_search_locations or [""])[:1] if spec else [""]
    return [str(Path(folder, "backends/qualcomm/tests/rework"))]


def farm(*arguments: str) -> dict[str, Any]:
    """Return the run that a `farm` command prints as JSON."""
    path = os.pathsep.join(filter(None, (str(STUBS), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-m", "farm.cli.main", *arguments]
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": path}, stdout=subprocess.PIPE, text=True, check=False
    )
    if not done.stdout.strip():
        sys.exit(done.returncode or 1)
    run: dict[str, Any] = json.loads(done.stdout)
    return run


def outcome_of(job: dict[str, Any]) -> tuple[str, str]:
    """Return the column of one test, and why it is there."""
    if not job["attempts"]:
        return "not run", ""
    last = job["attempts"][-1]
    if last["verdict"] == "failed" and last["known_issue"]:
        return "expected to fail", str(last["reason"])
    return str(last["verdict"]), str(last["reason"])


def group_of(test: str) -> str:
    """Return the class of a test of the older framework, the file of one of the newer."""
    file, _, rest = test.partition("::")
    return rest.partition("::")[0] if "::" in rest else file


def tables(run: dict[str, Any]) -> str:
    """Return what came out, as Markdown: a row for each group, and a row for each reason of what did not pass."""
    counts: dict[str, Counter[str]] = {}
    reasons: dict[tuple[str, str], list[str]] = {}
    for job in run["jobs"]:
        test = re.sub(r"\[[^\[\]]*\]$", "", job["id"].removeprefix("pytest/"))
        column, reason = outcome_of(job)
        counts.setdefault(group_of(test), Counter())[column] += 1
        if column not in ("passed", "not run"):
            short = reason if len(reason) <= REASON else reason[: REASON - 3] + "..."
            name = test.rpartition("::")[2].removeprefix("test_qnn_backend_")
            reasons.setdefault((column, short.replace("|", "\\|")), []).append(f"`{name}`")
    lines = [f"| {' | '.join(('', 'tests', *COLUMNS))} |", "|---" * (len(COLUMNS) + 2) + "|"]
    for group, found in sorted(counts.items()):
        lines.append(f"| `{group}` | {found.total()} | {' | '.join(str(found[one]) for one in COLUMNS)} |")
    lines += ["", "| outcome | reason | tests |", "|---|---|---|"]
    for (column, reason), names in sorted(reasons.items()):
        lines.append(f"| {column} | {reason} | {len(names)}: {', '.join(names)} |")
    return "\n".join(lines)


def about(run: dict[str, Any]) -> str:
    """Return what a run was made with, how long it took and how it ended."""
    made = run["fingerprint"]
    seconds = (run["finished_ms"] - run["started_ms"]) / 1000 if run["finished_ms"] else 0.0
    took = f"{seconds / 60:.0f} min" if seconds else "not ended"
    return f"executorch {made['executorch']}, QNN {made['qnn']}, {took}, exit code {run['exit_code']}"


def main() -> None:
    """Run what is asked for, and print its tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--soc", default="SM8650")
    parser.add_argument("--backend", default="htp")
    parser.add_argument("--virtual", type=int, default=2, help="virtual devices; 0 for attached ones")
    parser.add_argument("--only", choices=("older", "newer"))
    parser.add_argument("--runs", nargs="+", default=[], metavar="RUN", help="print these, and run nothing")
    words = sys.argv[1:]
    at = words.index("--") if "--" in words else len(words)
    chosen, rest = parser.parse_args(words[:at]), words[at + 1 :]
    frameworks = {"older": older, "newer": newer}
    if chosen.runs:
        found = {name: farm("report", name, "--json") for name in chosen.runs}
    else:
        devices = ["--soc", chosen.soc, "--backend", chosen.backend]
        devices += ["--virtual", str(chosen.virtual)] if chosen.virtual else []
        found = {
            name: farm("pytest", *devices, "--name", f"upstream-{name}", "--json", "--", "-p", "no:cacheprovider", "-W",
                       "ignore", *arguments(), *rest)
            for name, arguments in frameworks.items()
            if chosen.only in (None, name)
        }  # fmt: skip
    for name, run in found.items():
        sys.stdout.write(f"### {name}\n\n`{run['command']}`\n\n{about(run)}\n\n{tables(run)}\n\n")
    sys.exit(any(outcome_of(job)[0] in ("failed", "infra") for run in found.values() for job in run["jobs"]))


if __name__ == "__main__":
    main()
