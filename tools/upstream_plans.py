"""Runs the test plans of the four upstream changes on virtual devices, and compares with upstream's own counts.

    tools/upstream_plans.py                    all plans
    tools/upstream_plans.py --only 16316       plans of one pull request

Tests of the installed ExecuTorch run unchanged, in a `farm pytest` for each kind of library: QNN's HTP simulator, and
stubs in its place for LPAI and for the DSP's heap (tests/lpai_sdk_stub.py, tests/heap_sdk_stub.py). Upstream's counts
are read from its tests while they run (tools/upstream_counts.py). Plans whose tests are in no wheel or need a phone are
listed as not tried; if farm has its own test of the same contract, that runs instead. Exit code 1 for a checked count
that differs or is missing, and for a test that did not pass.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TOOLS = Path(__file__).resolve().parent
sys.path[:0] = [str(TOOLS.parent), str(TOOLS.parent / "tests"), str(TOOLS)]

from conformance import MODULE, farm, outcome_of, sdk_variables  # noqa: E402
from upstream_counts import FILE_VARIABLE  # noqa: E402

INSTEAD = "tests/native_runner/test_load_options.py"
PASSES = "executorch.backends.qualcomm.tests.test_passes"


@contextmanager
def heap_variables() -> Iterator[dict[str, str]]:
    """Yield the variables for a DSP with heap counts: they name a stub of an SDK, which is deleted afterwards."""
    from heap_sdk_stub import make_heap_sdk

    from farm.base.config.settings import load_config

    with tempfile.TemporaryDirectory(prefix="heap-stub-") as folder:
        yield {"QNN_SDK_ROOT": str(make_heap_sdk(Path(folder, "stub-sdk"), load_config().cache_dir))}


@dataclass(frozen=True)
class Library:
    """Library below the tests of a plan."""

    name: str
    soc: str
    backend: str
    variables: Callable[[], Any]


SIMULATOR = Library("HTP simulator", "SM8650", "htp", lambda: sdk_variables(lpai=False))
LPAI = Library("stub of LPAI", "SM8850", "lpai", lambda: sdk_variables(lpai=True))
HEAP = Library("stub of the DSP heap", "SM8650", "htp", heap_variables)


@dataclass(frozen=True)
class Plan:
    """Tests of one upstream change, as its description names them."""

    change: str
    about: str
    library: Library
    tests: tuple[str, ...]
    """`module::Class::test` of the installed ExecuTorch."""


def _delegate(cls: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{MODULE}::{cls}::test_qnn_backend_{name}" for name in names)


# Pull requests of pytorch/executorch; a number after a slash is a later one with a plan of its own.
PLANS = (
    Plan("18151", "LPAI", LPAI, _delegate("TestQNNQuantizedOperator", "mean")),
    Plan("18151/20369", "LPAI, layers", LPAI,
         _delegate("TestQNNQuantizedUtils", "dump_intermediate_outputs_simple_model")),
    Plan("16316/17804", "debug handles", SIMULATOR, (f"{PASSES}::TestPasses::test_resolve_debug_handle",)),
    Plan("16316/18834", "debug handles", SIMULATOR, tuple(
        test for cls in ("TestQNNFloatingPointUtils", "TestQNNQuantizedUtils")
        for test in _delegate(cls, "dump_intermediate_outputs_simple_model", "dump_intermediate_outputs_topk"))),
    Plan("19716/20272", "DSP heap", HEAP, tuple(
        test for cls in ("TestQNNFloatingPointUtils", "TestQNNQuantizedUtils")
        for test in _delegate(cls, "runtime_option_heap_profile"))),
)  # fmt: skip

NOT_TRIED = (
    ("18151", "the same tests with `-s SERIAL`", "need a phone: `farm pytest --soc SM8850 --backend lpai -- ...`"),
    ("18151/19142", "operators and inception_v3 in direct mode, `--direct_build_folder`", "need a phone and a build"),
    ("19673", "`extension/module/test/module_test.cpp`, C++", "no wheel has it"),
    ("16316/18834", "`TestUtilsScript.test_intermediate_debugger`, a script", "needs the images of ImageNet"),
    ("19716/20272", "the same tests with `-s SERIAL`", "need a phone: the heap of the stub is made up"),
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """Count of a test."""

    plan: Plan
    test: str
    place: str
    """File and line in ExecuTorch."""
    what: str
    upstream: int | None
    ours: int | None
    checked: bool
    """True for a count that upstream's test checks."""
    outcome: str
    reason: str

    @property
    def holds(self) -> bool:
        """Return whether the test passed, and with upstream's count if upstream checks it."""
        if self.outcome != "passed":
            return False
        return not self.checked or (self.upstream is not None and self.upstream == self.ours)


def rows_of(plans: tuple[Plan, ...], run: dict[str, Any], counts: list[dict[str, Any]]) -> list[Row]:
    """Return a row for each count of each test of `plans`, all over one library; tests without counts have one row."""
    outcomes = {job["id"].rpartition("[")[0].partition("::")[2]: outcome_of(job) for job in run["jobs"]}
    rows = []
    for plan in plans:
        for test in plan.tests:
            module, _, name = test.partition("::")
            outcome, reason = outcomes.get(name, ("not run", ""))
            # A test that ran again has its newest counts.
            found = list({one["what"]: one for one in counts if one["test"] == name}.values())
            for one in found or [{"line": 0, "what": "", "upstream": None, "ours": None, "checked": True}]:
                place = f"{module.replace('.', '/')}.py" + (f":{one['line']}" if one["line"] else "")
                counted = (one["what"], one["upstream"], one["ours"], one["checked"])
                rows.append(Row(plan, name, place, *counted, outcome, reason))
    return rows


def run_plans(plans: tuple[Plan, ...], library: Library) -> tuple[list[Row], str]:
    """Run the tests of `plans`, all over `library`, and return their rows and the command."""
    tests = dict.fromkeys(test for plan in plans for test in plan.tests)
    with tempfile.TemporaryDirectory(prefix="upstream-plans-") as folder, library.variables() as variables:
        file = Path(folder, "counts.jsonl")
        paths = os.pathsep.join(filter(None, (str(TOOLS), os.environ.get("PYTHONPATH", ""))))
        run = farm(
            "pytest", "--soc", library.soc, "--backend", library.backend, "--virtual", "1", "--name", "upstream-plans",
            "--json", "--", "-p", "no:cacheprovider", "-p", "upstream_counts", "-W", "ignore", "--pyargs", *tests,
            variables={**variables, FILE_VARIABLE: str(file), "PYTHONPATH": paths},
        )  # fmt: skip
        lines = file.read_text().splitlines() if file.exists() else []
    return rows_of(plans, run, [json.loads(line) for line in lines]), str(run["command"])


NONE = "-"
HEADER = ("plan", "over", "test", "counted", "upstream", "ours", "test ended", "")


def cells(row: Row) -> tuple[str, ...]:
    """Return a row of the table."""
    counts = [NONE if count is None else str(count) for count in (row.upstream, row.ours)]
    mark = ("✓" if row.checked else "not checked upstream") if row.holds else "✗"
    return (f"#{row.plan.change}", row.plan.library.name, f"{row.test} ({row.place})", row.what or NONE, *counts,
            row.outcome + (f": {row.reason}" if row.outcome != "passed" and row.reason else ""), mark)  # fmt: skip


def markdown(rows: list[Row]) -> str:
    """Return the tables: counts, and tests that were not tried."""

    def line(words: tuple[str, ...]) -> str:
        return f"| {' | '.join(word.replace('|', chr(92) + '|') for word in words)} |"

    lines = [line(HEADER), "|---" * len(HEADER) + "|", *(line(cells(row)) for row in rows), "", "Not tried:", ""]
    lines += [
        "| plan | what | why |",
        "|---|---|---|",
        *(line((f"#{change}", what, why)) for change, what, why in NOT_TRIED),
    ]
    return "\n".join(lines)


def run_instead() -> tuple[str, bool]:
    """Run farm's own tests of options at load; return a line about them, and whether all passed."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", INSTEAD]
    done = subprocess.run(command, cwd=TOOLS.parent, stdout=subprocess.PIPE, text=True, check=False)
    sys.stderr.write(done.stdout)
    ended = (done.stdout.strip().splitlines() or ["no result"])[-1].strip("= ")
    return f"#19673, instead of its C++ tests: {INSTEAD}: {ended}", done.returncode == 0


def main() -> None:
    """Run the selected plans, and print their tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="NUMBER", help="plans of one pull request, as 16316")
    chosen = parser.parse_args()
    plans = tuple(plan for plan in PLANS if chosen.only is None or chosen.only in plan.change.split("/"))
    known = sorted({number for change in (*(plan.change for plan in PLANS), "19673") for number in change.split("/")})
    if chosen.only not in (None, *known):
        parser.error(f"no plan of {chosen.only}: choose one of {', '.join(known)}")
    rows: list[Row] = []
    for library in dict.fromkeys(plan.library for plan in plans):
        found, command = run_plans(tuple(plan for plan in plans if plan.library == library), library)
        sys.stdout.write(f"`{command}`\n\n")
        rows += found
    sys.stdout.write(f"{markdown(rows)}\n")
    good = all(row.holds for row in rows)
    if chosen.only in (None, "19673"):
        line, passed = run_instead()
        sys.stdout.write(f"\n{line}\n")
        good = good and passed
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
