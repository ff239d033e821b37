"""What pytest's options do to a run: workers have sessions of pytest's only where the user hands it something."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import pytest
from stub_home import make_stub_home

from farm.config.settings import load_config
from farm.errors import UsageError
from farm.request.choose import jobs_of, select
from farm.request.request import RunRequest

if TYPE_CHECKING:
    from pathlib import Path

    from farm_home import FarmHome

RUN = ("run", "--soc", "SM8650", "--virtual", "1", "--suite", "./mine")
SUITE = """
[suite]
name = "mine"
description = "jobs that all fail"
[suite.tolerance.8a8w.fp32]
sqnr_db = 500.0
"""
STUB_CASE = """
[case.{name}]
module = "stub:Stub"
kwargs = {{ words = "wrong 20" }}
inputs = [{{ shape = [16] }}]
"""
CASE = """
[case.add]
module = "torch.nn:Hardtanh"
kwargs = { min_val = -1.0, max_val = 1.0 }
inputs = [{ shape = [1, 3, 16, 16] }]
"""
PLUGIN = """
import os
def pytest_runtest_logreport(report):
    where = "worker" if "PYTEST_XDIST_WORKER" in os.environ else "controller"
    with open(os.environ["SEEN"], "a") as file:
        print(where, report.nodeid, report.when, file=file)
"""


def write_suite(home: FarmHome, cases: str) -> None:
    (home.cwd / "mine").mkdir()
    (home.cwd / "mine" / "suite.toml").write_text(SUITE + cases)


@pytest.mark.whole
def test_after_the_first_failure_nothing_begins(tmp_path: Path) -> None:
    home = make_stub_home(tmp_path / "stub")
    write_suite(home, "".join(STUB_CASE.format(name=name) for name in ("add", "mul", "sub")))
    done = home.farm(*RUN, "-x", "--json", timeout_s=240)
    assert done.returncode == 1, done.stderr
    verdicts = [attempt["verdict"] for job in json.loads(done.stdout)["jobs"] for attempt in job["attempts"]]
    assert verdicts == ["failed"]


@pytest.mark.whole
def test_a_plugin_that_the_user_names_sees_every_phase_of_every_job_here_and_in_the_worker(home: FarmHome) -> None:
    write_suite(home, CASE)
    (home.cwd / "looks.py").write_text(PLUGIN)
    seen = home.cwd / "seen.txt"
    env = {"PYTHONPATH": str(home.cwd), "SEEN": str(seen)}
    done = home.farm(*RUN, "-k", "add", "--", "-p", "looks", timeout_s=240, env=env)
    assert done.returncode == 1, done.stderr
    lines = [line for line in seen.read_text().splitlines() if "mine/add" in line]
    job = "mine/add[SM8650-htp-8a8w]"
    expected = [f"{where} {job} {when}" for where in ("controller", "worker") for when in ("call", "setup", "teardown")]
    assert sorted(lines) == expected


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--tb=long",), "--tb=long"),
        (("--tb", "long"), "--tb long"),
        pytest.param(("-k", "add", "-vv"), "-vv", marks=pytest.mark.whole),
        pytest.param(("-s",), "-s", marks=pytest.mark.whole),
        (("-xs",), "-xs"),
        pytest.param(("--durations=3",), "--durations=3", marks=pytest.mark.whole),
        pytest.param(("--collect-only",), "--collect-only", marks=pytest.mark.whole),
        (("--junitxml", "x.xml"), "--junitxml x.xml"),
        (("tests/test_mine.py",), "tests/test_mine.py"),
        pytest.param(("--sw",), "--sw", marks=pytest.mark.whole),
        (("-h",), "-h"),
    ],
)
def test_what_pytest_would_take_and_ignore_is_refused(
    home: FarmHome, capfd: pytest.CaptureFixture[str], arguments: tuple[str, ...], named: str
) -> None:
    request = RunRequest(socs=("SM8650",), suites=("smoke",), virtual=1, pytest_arguments=arguments)
    config = load_config(folder=home.cwd)
    with pytest.raises(UsageError, match=f"^{re.escape(named)} would have no effect: "):
        select(config, request, jobs_of(config, request))
    assert capfd.readouterr().out == ""


def test_what_chooses_jobs_and_what_a_plugin_knows_is_heeded(home: FarmHome, monkeypatch: pytest.MonkeyPatch) -> None:
    (home.cwd / "knows.py").write_text("def pytest_addoption(parser):\n    parser.addoption('--mine')\n")
    monkeypatch.syspath_prepend(str(home.cwd))
    config = load_config(folder=home.cwd)
    every = jobs_of(config, RunRequest(socs=("SM8650",), suites=("smoke",), virtual=1))
    for arguments, count in (
        (("-k", "conv2d", "-x", "--maxfail=3"), 1),
        ((f"--deselect={every[0].id}",), len(every) - 1),
        (("-p", "knows", "--mine", "x"), len(every)),
    ):
        request = RunRequest(socs=("SM8650",), suites=("smoke",), virtual=1, pytest_arguments=arguments)
        assert len(select(config, request, every)) == count, arguments
