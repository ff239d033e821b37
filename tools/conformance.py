"""Runs upstream's own tests on devices, and prints the tables of docs/evidence/conformance.md and nightly_suite.md.

    tools/conformance.py                                on two virtual SM8650
    tools/conformance.py --only newer -- -k "8a or utils"
    tools/conformance.py --only nightly                 backends/test/suite in two flows
    tools/conformance.py --lpai                         tests for LPAI, on a virtual SM8850, over a stub of its library
    tools/conformance.py --runs RUN RUN                 tables of recorded runs, also of interrupted ones

Each framework runs in its own `farm pytest`: the older one is `test_qnn_delegate`, by class, without its whole models;
the newer one is `tests/rework`, by file; `nightly` is `backends/test/suite`, by kind and flow, only if named, and its
models need torchvision and torchaudio. All come from the installed wheel. Each test is in the store at its end, so
that `--runs` prints the results of an interrupted run: tests without a result are counted as not run. Arguments behind
`--` are for pytest. Exit code 1 if a test failed.

`--lpai` selects the two classes of quantized tests, and the tests for LPAI in `tests/rework/passes`, the only ones of
the wheel in the newer framework. The stub hands all work to HTP's simulator: tests/lpai_sdk_stub.py.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
STUBS = ROOT / "tests/conformance/model_stubs"
PLUGINS = ROOT / "tests/conformance/model_plugins"
CLASSES = (
    "TestQNNQuantizedOperator",
    "TestQNNFloatingPointOperator",
    "TestQNNQuantizedUtils",
    "TestQNNFloatingPointUtils",
)
MODULE = "executorch.backends.qualcomm.tests.test_qnn_delegate"
COLUMNS = ("passed", "skipped", "expected to fail", "failed", "infra", "not run")
REASON = 110


def older(*, lpai: bool) -> list[str]:
    """Return pytest's arguments for the older framework."""
    return ["--pyargs", *(f"{MODULE}::{name}" for name in CLASSES if not lpai or "Quantized" in name)]


def installed() -> Path:
    """Return the folder of the installed executorch."""
    spec = importlib.util.find_spec("executorch")
    [folder] = (spec.submodule_search_locations or [""])[:1] if spec else [""]
    return Path(folder)


def nightly(*, lpai: bool) -> list[str]:
    """Return pytest's arguments for the suite of every backend, which compiles for HTP alone."""
    if lpai:
        sys.exit("backends/test/suite has no flow for LPAI")
    kinds = ["operators", "models"] if importlib.util.find_spec("torchvision") else ["operators"]
    folders = [str(installed() / "backends/test/suite" / kind) for kind in kinds]
    return ["-p", "models_without_cuda", "-m", "flow_qnn or flow_qnn_8a8w", *folders]


def newer(*, lpai: bool) -> list[str]:
    """Return pytest's arguments for the newer framework; its `gpu` and `lpai` folders have no test in wheel 1.5.1."""
    tests = installed() / "backends/qualcomm/tests/rework"
    if lpai:
        return [str(tests / "passes"), "-k", "lpai or Lpai"]
    # Settings of features in upstream's configuration, such as `shared_buffer`, stay for later tests of their process.
    return sorted(map(str, tests.rglob("test.py")), key=lambda one: "/feature/" in one)


@contextmanager
def sdk_variables(*, lpai: bool) -> Iterator[dict[str, str]]:
    """Yield the variables that farm needs: with `lpai` a stub of an SDK, which is deleted afterwards."""
    if not lpai:
        yield {}
        return
    from lpai_sdk_stub import make_stub_sdk

    from farm.base.config.settings import load_config

    with tempfile.TemporaryDirectory(prefix="lpai-stub-") as folder:
        sdk = make_stub_sdk(Path(folder, "stub-sdk"), load_config().cache_dir)
        yield {"QNN_SDK_ROOT": str(sdk.root)}


def farm(*arguments: str, variables: dict[str, str] | None = None) -> dict[str, Any]:
    """Return the run that a `farm` command prints as JSON; `variables` are added to its environment."""
    environment = os.environ | (variables or {})
    path = os.pathsep.join(filter(None, (str(ROOT), str(PLUGINS), str(STUBS), environment.get("PYTHONPATH"))))
    command = [sys.executable, "-m", "farm.cli.main", *arguments]
    environment |= {"PYTHONPATH": path}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        # Ended tests are in the store, also after a signal to farm.
        signal.signal(signal.SIGTERM, lambda *_: process.terminate())
        output, _ = process.communicate()
    if not output.strip():
        sys.exit(process.returncode or 1)
    run: dict[str, Any] = json.loads(output)
    return run


def outcome_of(job: dict[str, Any]) -> tuple[str, str]:
    """Return the column of a test, and the reason."""
    if not job["attempts"]:
        return "not run", ""
    last = job["attempts"][-1]
    if last["verdict"] == "failed" and last["known_issue"]:
        return "expected to fail", str(last["reason"])
    return str(last["verdict"]), str(last["reason"])


def group_of(test: str) -> str:
    """Return the class of a test of the older framework, the file of the newer one, or the kind and flow."""
    file, _, rest = test.partition("::")
    if file.startswith("suite/"):
        flow = re.search(r"qnn\w*", rest.partition("[")[2])
        return f"{file.split('/')[1]} {flow[0] if flow else ''}"
    return rest.partition("::")[0] if "::" in rest else file


def tables(run: dict[str, Any]) -> str:
    """Return the results as Markdown: a row for each group, and a row for each reason of tests that did not pass."""
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
    """Return versions, duration and end of a run."""
    made = run["fingerprint"]
    seconds = (run["finished_ms"] - run["started_ms"]) / 1000 if run["finished_ms"] else 0.0
    took = f"{seconds / 60:.0f} min" if seconds else "not ended"
    return f"executorch {made['executorch']}, QNN {made['qnn']}, {took}, exit code {run['exit_code']}"


FRAMEWORKS = {"older": older, "newer": newer, "nightly": nightly}


def command_of(chosen: argparse.Namespace, name: str, rest: list[str]) -> list[str]:
    """Return the arguments of farm that run one framework; `rest` are pytest's of the user."""
    lpai = chosen.lpai
    devices = ["--soc", chosen.soc or ("SM8850" if lpai else "SM8650"), "--backend", "lpai" if lpai else chosen.backend]
    count = chosen.virtual if chosen.virtual is not None else (1 if lpai else 2)
    devices += ["--virtual", str(count)] if count else []
    tests = ["-p", "no:cacheprovider", "-p", "no:randomly", "-W", "ignore", *FRAMEWORKS[name](lpai=lpai), *rest]
    return ["pytest", *devices, "--name", f"upstream-{name}", "--json", "--", *tests]


def main() -> None:
    """Run the selected tests, and print their tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--soc", help="SM8650, with --lpai SM8850")
    parser.add_argument("--backend", default="htp")
    parser.add_argument("--lpai", action="store_true", help="LPAI, over a stub of its library")
    parser.add_argument("--virtual", type=int, help="virtual devices, 2 and with --lpai 1; 0 for attached ones")
    parser.add_argument("--only", choices=tuple(FRAMEWORKS))
    parser.add_argument("--runs", nargs="+", default=[], metavar="RUN", help="print these, and run nothing")
    words = sys.argv[1:]
    at = words.index("--") if "--" in words else len(words)
    chosen, rest = parser.parse_args(words[:at]), words[at + 1 :]
    if chosen.runs:
        found = {name: farm("report", name, "--json") for name in chosen.runs}
    else:
        with sdk_variables(lpai=chosen.lpai) as variables:
            found = {
                name: farm(*command_of(chosen, name, rest), variables=variables)
                for name in FRAMEWORKS
                if chosen.only == name or (chosen.only is None and name != "nightly")
            }
    for name, run in found.items():
        sys.stdout.write(f"### {name}\n\n`{run['command']}`\n\n{about(run)}\n\n{tables(run)}\n\n")
    sys.exit(any(outcome_of(job)[0] in ("failed", "infra") for run in found.values() for job in run["jobs"]))


if __name__ == "__main__":
    main()
