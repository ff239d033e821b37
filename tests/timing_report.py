"""Wall seconds of a test run by file and by fixture: a table at its end, and the JSON file of FARM_TEST_TIMINGS."""

from __future__ import annotations

import json
import os
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

FILE = "FARM_TEST_TIMINGS"
"""Environment variable with the path of the JSON file; without it nothing is measured."""

_SHOWN = 25


class TimingReport:
    """Seconds of each test file and of each fixture, summed over the workers."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self.fixtures: Counter[str] = Counter()
        self._inner: list[float] = []

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Iterator[None]:
        """Add the own time of a fixture: without the fixtures that it asks for while it is set up."""
        start = time.perf_counter()
        self._inner.append(0.0)
        try:
            return (yield)
        finally:
            took, inner = time.perf_counter() - start, self._inner.pop()
            self.fixtures[f"{fixturedef.baseid or 'tests'}::{fixturedef.argname}"] += took - inner
            if self._inner:
                self._inner[-1] += took

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add a phase of a test to its file."""
        self.files[report.nodeid.partition("::")[0]][report.when] += report.duration

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Send the fixtures of a worker to the controller, or write the file."""
        if (answer := getattr(session.config, "workeroutput", None)) is not None:
            answer["fixtures"] = dict(self.fixtures)
            return
        files = {name: {when: round(s, 2) for when, s in phases.items()} for name, phases in self._by_seconds()}
        fixtures = {name: round(seconds, 2) for name, seconds in self.fixtures.most_common()}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps({"schema": 1, "files": files, "fixtures": fixtures}, indent=1) + "\n")

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Add the fixtures of a worker that ended."""
        self.fixtures.update(getattr(node, "workeroutput", {}).get("fixtures", {}))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the most expensive files and fixtures."""
        terminalreporter.section(f"seconds by file and by fixture, all in {self.path}")
        for name, phases in self._by_seconds()[:_SHOWN]:
            each = ", ".join(f"{when} {seconds:.1f}" for when, seconds in phases.items())
            terminalreporter.write_line(f"{phases.total():8.1f}  {name} ({each})")
        for name, seconds in self.fixtures.most_common(_SHOWN):
            terminalreporter.write_line(f"{seconds:8.1f}  fixture {name}")

    def _by_seconds(self) -> list[tuple[str, Counter[str]]]:
        return sorted(self.files.items(), key=lambda row: -row[1].total())


def pytest_configure(config: pytest.Config) -> None:
    """Measure where the environment names a file."""
    if path := os.environ.get(FILE):
        config.pluginmanager.register(TimingReport(Path(path)), "farm-timing-report")
