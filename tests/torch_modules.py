"""Test modules that import torch, `torch_*.py`: pytest runs each in a fork of the process that has imported torch."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import sys
from collections import defaultdict
from pathlib import Path

import pytest

FAILURES = "failures.json"


def functions_of(module: Path) -> list[str]:
    """Return the names of the test functions in a module, without importing it."""
    body = ast.parse(module.read_text()).body
    return [one.name for one in body if isinstance(one, ast.FunctionDef) and one.name.startswith("test_")]


class Failures:
    """Plugin of pytest that keeps the failures of each function: an empty text for a function that passed."""

    def __init__(self) -> None:
        self.texts = defaultdict[str, str](str)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = report.nodeid.rpartition("::")[2].partition("[")[0]
        self.texts[name] += f"{report.nodeid}\n{report.longreprtext}\n" if report.failed else ""


def main(module: str) -> None:
    """Run the tests of a module and write their failures into the current folder."""
    failures = Failures()
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    words = ["-c", os.devnull, "--rootdir", ".", "--basetemp", "temporary", "--import-mode", "importlib"]
    with contextlib.redirect_stdout(sys.stderr):
        code = pytest.main([module, *words, "--noconftest", "-p", "no:cacheprovider"], plugins=[failures])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        sys.exit(int(code))
    Path(FAILURES).write_text(json.dumps(failures.texts))


if __name__ == "__main__":
    main(sys.argv[1])
