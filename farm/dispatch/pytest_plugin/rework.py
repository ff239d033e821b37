"""Support for upstream's newer tests, below `backends/qualcomm/tests/rework`.

These tests need a root folder in a source tree, with the options of their conftest. They import a class of
pytest-subtests, which pytest 9 has itself. They create a folder on the device once a process, although the device may
reboot.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

from farm.base.errors import UsageError
from farm.base.text import one_line

if TYPE_CHECKING:
    from collections.abc import Callable, MutableMapping, Sequence

    from farm.builds.toolchains.toolchain import Compiler

_FOLDER = ("backends", "qualcomm", "tests", "rework")
_PACKAGE = ".".join(("executorch", *_FOLDER))
_TREE = (
    "import importlib.util as u; s = u.find_spec('executorch'); "
    "print(*(s and s.submodule_search_locations or ()), sep='\\n')"
)
# Options that farm fills in for each worker: docs/guides/pytest.md.
_FILLED_IN = ("--device", "--host", "--soc_model", "--backend", "--build_folder", "--target", "--config_file")
_UTILITIES = "executorch.backends.qualcomm.export_utils"
# executorch 1.5.1, tests/rework/conftest.py: the key in pytest's stash of reports by node id.
_COUNTS: Any = "total_test_count"


def find_framework(arguments: Sequence[str], folder: Path) -> Path | None:
    """Return the folder `tests/rework` that contains an argument of pytest, relative to `folder`."""
    for argument in arguments:
        path = Path(os.path.normpath(folder / argument.partition("::")[0]))
        if argument.startswith("-") or not path.exists():
            continue
        for parent in (path, *path.parents):
            if parent.parts[-len(_FOLDER) :] == _FOLDER and (parent / "conftest.py").is_file():
                return parent
    return None


def rooted_arguments(arguments: Sequence[str], folder: Path) -> list[str]:
    """Return further arguments of pytest for collecting these tests from a source tree in any place.

    Their conftest declares options, and pytest looks for a conftest only below its root; many modules are called
    `test`. Empty for other tests. Raises UsageError for options of these tests that farm fills in.
    """
    framework = find_framework(arguments, folder)
    if framework is None:
        return []
    names = [argument.partition("=")[0] for argument in arguments]
    if named := next((name for name in names if name in _FILLED_IN), ""):
        raise UsageError(f"{named} is filled in for each device: say --soc, --backend or --device, before the --")
    wanted = {
        "-c": os.devnull,
        "--rootdir": str(framework.parent),
        "--confcutdir": str(framework),
        "--import-mode": "importlib",
    }
    chosen = [word for name, value in wanted.items() if name not in names for word in (name, value)]
    return [*chosen, "-o", "python_files=test.py"]


def require_tree(arguments: Sequence[str], folder: Path, compiler: Compiler) -> None:
    """Raise UsageError if these tests would import their own modules from another source tree."""
    framework = find_framework(arguments, folder)
    if framework is None or not any(_PACKAGE.encode() in path.read_bytes() for path in framework.rglob("*.py")):
        return
    done = subprocess.run(
        [compiler.python, "-c", _TREE],
        env={**os.environ, **compiler.env},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    trees = [Path(line) for line in done.stdout.splitlines() if line]
    if not any(tree.joinpath(*_FOLDER).resolve() == framework.resolve() for tree in trees):
        found = one_line(done.stdout) or "no executorch"
        raise UsageError(
            f"{framework} would be run with {found}, which is another tree: say --toolchain with an environment that "
            "tree is installed in, or run the tests that are installed there"
        )


def is_framework(config: pytest.Config) -> bool:
    """Return whether upstream's conftest has declared its options."""
    return hasattr(config.option, "direct_build_folder")


def stand_in_for_subtests(modules: MutableMapping[str, ModuleType] = sys.modules) -> None:
    """Provide pytest's report of a subtest under the name in pytest-subtests, unless that package is installed."""
    report = getattr(pytest, "SubtestReport", None)
    if report is None or "pytest_subtests" in modules or importlib.util.find_spec("pytest_subtests") is not None:
        return
    package, plugin = ModuleType("pytest_subtests"), ModuleType("pytest_subtests.plugin")
    plugin.SubTestReport = report  # type: ignore[attr-defined]
    package.plugin = plugin  # type: ignore[attr-defined]
    modules.update({package.__name__: package, plugin.__name__: plugin})


def count_report(config: pytest.Config, report: pytest.TestReport) -> None:
    """Count a worker's report for upstream's summary, which counts only tests of its own process."""
    counts = config.stash.get(_COUNTS, None)
    if counts is not None and report.when == "call":
        counts[report.nodeid] += 1


def follow_workspaces(meet: Callable[[Any], None]) -> None:
    """Have `meet` called with every SimpleADB, before its first use of a device."""
    cls = getattr(sys.modules.get(_UTILITIES), "SimpleADB", None)
    if cls is None or hasattr(cls, "farm_follows"):
        return
    initialize = cls.__init__

    def followed(self: Any, *arguments: Any, **named: Any) -> None:
        initialize(self, *arguments, **named)
        meet(self)

    cls.__init__, cls.farm_follows = followed, True
