"""Support for upstream's newer tests, below `backends/qualcomm/tests/rework`.

These tests have the options of their conftest. They import a class of pytest-subtests, which pytest 9 has itself. They
create a folder on the device once a process, although the device may reboot.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, MutableMapping
from types import ModuleType
from typing import Any

import pytest

_UTILITIES = "executorch.backends.qualcomm.export_utils"
# executorch 1.5.1, tests/rework/conftest.py: the key in pytest's stash of reports by node id.
_COUNTS: Any = "total_test_count"


def is_framework(config: pytest.Config) -> bool:
    """Return whether upstream's conftest has declared its options."""
    return hasattr(config.option, "direct_build_folder")


def provide_subtests(modules: MutableMapping[str, ModuleType] = sys.modules) -> None:
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


def follow_workspaces(notify: Callable[[Any], None]) -> None:
    """Call `notify` with every new SimpleADB, before its first use of a device."""
    cls = getattr(sys.modules.get(_UTILITIES), "SimpleADB", None)
    if cls is None or hasattr(cls, "farm_follows"):
        return
    initialize = cls.__init__

    def followed(self: Any, *arguments: Any, **named: Any) -> None:
        initialize(self, *arguments, **named)
        notify(self)

    cls.__init__, cls.farm_follows = followed, True
