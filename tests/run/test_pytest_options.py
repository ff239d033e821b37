"""What pytest's options do to a run: workers have sessions of pytest's only where the user hands it something."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from farm_home import FarmHome

RUN = ("run", "--soc", "SM8650", "--virtual", "1", "--suite", "./mine")
# The bundles of test_kills.py: limits are no part of them.
SUITE = """
[suite]
name = "mine"
description = "jobs that all fail"
[suite.tolerance.8a8w.fp32]
sqnr_db = 500.0
""" + "".join(
    f"""
[case.{name}]
module = "torch.nn:Hardtanh"
kwargs = {{ min_val = -{limit}, max_val = {limit} }}
inputs = [{{ shape = [1, 3, 16, 16] }}]
"""
    for name, limit in (("add", 1.0), ("mul", 1.1), ("sub", 1.2))
)
PLUGIN = """
import os
def pytest_runtest_logreport(report):
    where = "worker" if "PYTEST_XDIST_WORKER" in os.environ else "controller"
    with open(os.environ["SEEN"], "a") as file:
        print(where, report.nodeid, report.when, file=file)
"""


def write_suite(home: FarmHome) -> None:
    (home.cwd / "mine").mkdir()
    (home.cwd / "mine" / "suite.toml").write_text(SUITE)


def test_after_the_first_failure_nothing_begins(home: FarmHome) -> None:
    write_suite(home)
    done = home.farm(*RUN, "-x", "--json", timeout_s=240)
    assert done.returncode == 1, done.stderr
    verdicts = [attempt["verdict"] for job in json.loads(done.stdout)["jobs"] for attempt in job["attempts"]]
    assert verdicts == ["failed"]


def test_a_plugin_that_the_user_names_sees_every_phase_of_every_job_here_and_in_the_worker(home: FarmHome) -> None:
    write_suite(home)
    (home.cwd / "looks.py").write_text(PLUGIN)
    seen = home.cwd / "seen.txt"
    env = {"PYTHONPATH": str(home.cwd), "SEEN": str(seen)}
    done = home.farm(*RUN, "-k", "add", "--", "-p", "looks", timeout_s=240, env=env)
    assert done.returncode == 1, done.stderr
    lines = [line for line in seen.read_text().splitlines() if "mine/add" in line]
    job = "mine/add[SM8650-htp-8a8w]"
    expected = [f"{where} {job} {when}" for where in ("controller", "worker") for when in ("call", "setup", "teardown")]
    assert sorted(lines) == expected
