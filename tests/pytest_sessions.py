"""`farm pytest` over a user's own tests, and its records of them."""

from __future__ import annotations

import subprocess
from typing import Any

from farm_home import FarmHome

from farm.store.records import JobView, RunView
from farm.store.store import open_store

# Other plugins of this environment take pytest longer to import than it takes to run these tests.
ALONE = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}


def pytest_words(*words: str, devices: int = 1) -> tuple[str, ...]:
    """Return the words of a command with virtual devices; `words` are pytest's."""
    return ("pytest", "--soc", "SM8650", "--virtual", str(devices), "--", "-p", "no:cacheprovider", *words)


def run_tests(
    home: FarmHome, suite: str, *words: str, devices: int = 1, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run the tests of a text on virtual devices; `words` are pytest's."""
    (home.cwd / "test_own.py").write_text(suite)
    return home.farm(*pytest_words(*words, devices=devices), **{"timeout_s": 300, "env": ALONE, **options})


def latest(home: FarmHome) -> RunView:
    """Return the latest run of a home."""
    with open_store(home.state / "farm.db") as store:
        run_id = store.runs.latest_id()
        assert run_id is not None
        return store.runs.view(run_id)


def jobs_of(home: FarmHome) -> dict[str, JobView]:
    """Return the jobs of the latest run by the names of their tests."""
    return {job.case.rpartition("::")[2]: job for job in latest(home).jobs}
