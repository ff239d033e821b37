"""`farm jobs coverage` of a store with runs of a suite of one's own."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from farm_home import FarmHome
from programs import run_program

from farm.base.errors import FIRST_RUN, UsageError
from farm.base.socs import find_soc
from farm.base.user import user_name
from farm.devices.device import AdbAddress, Device
from farm.report.model.coverage.query import read_coverage
from farm.results.attempt import Attempt, Stage, Verdict
from farm.store.records import RunRecord
from farm.store.store import Store
from farm.suites.manifests import load_suite
from farm.suites.op_builders import installed_builders
from farm.suites.suite import Job, plan

PHONE = Device(serial="phone-1", soc="SM8650", kind="hardware", build="b", address=AdbAddress(5037), product="phone")
MANIFEST = """
[suite]
name = "mine"
description = "Two operators"
precisions = ["8a8w", "16a4w_block"]

[case.relu]
module = "torch.nn:ReLU"
inputs = [{ shape = [1, 3] }]

[case.conv]
module = "torch.nn:Conv2d"
args = [3, 4, 3]
inputs = [{ shape = [1, 3, 8, 8] }]
"""
SAID = {
    "cases": {"conv": ["aten.convolution.default", "aten.permute_copy.default"]},
    "without": {"op_rand": "it has no reference"},
    "aten": {"relu": ["relu"], "conv": ["conv2d"], "gone": ["acosh"]},
}
RELU, CONV = "mine/relu[SM8650-htp-8a8w]", "mine/conv[SM8650-htp-8a8w]"


@pytest.fixture
def suite(home: FarmHome) -> Path:
    folder = home.cwd / "mine"
    folder.mkdir()
    (folder / "suite.toml").write_text(MANIFEST)
    (folder / "operators.json").write_text(json.dumps(SAID))
    return folder


def record(store: Store, suite: Path, hour: int, verdicts: Mapping[str, Verdict], soc: str = "SM8650") -> str:
    """Record a run of the whole suite, in which only the jobs of `verdicts` were come to."""
    jobs = {job.id: job for job in plan([load_suite(suite / "suite.toml")], [find_soc(soc)], "htp")}
    started_ms = 1_790_000_000_000 + hour * 3_600_000
    run_id = store.begin_run(RunRecord("farm run", user_name(), "bench", {"qnn": "2.51"}, started_ms))
    store.plan_jobs(run_id, list(jobs.values()))
    for job_id, verdict in verdicts.items():
        built = {"aten.relu.default": 1} if job_id == RELU else None
        store.record_build(run_id, job_id, seconds=1, cached=False, bundle_key="b", operators=built)
        store.record_attempt(run_id, attempt(jobs[job_id], verdict, started_ms), PHONE)
    return run_id


def attempt(job: Job, verdict: Verdict, started_ms: int) -> Attempt:
    reason = "" if verdict is Verdict.PASSED else "sqnr 3 dB < 30 dB"
    return Attempt(job.id, verdict, Stage.NUMERICS, reason, device=PHONE.serial, started_ms=started_ms)


def rows(text: str) -> dict[str, list[str]]:
    return {line.split()[0]: line.split()[1:] for line in text.splitlines() if line[:1].isalpha()}


def test_the_table_has_every_builder_and_what_is_known_of_it(home: FarmHome, store: Store, suite: Path) -> None:
    with store:
        record(store, suite, 0, {RELU: Verdict.FAILED, CONV: Verdict.PASSED})
        newest = record(store, suite, 1, {RELU: Verdict.PASSED})
        done = home.farm("jobs", "coverage", "--soc", "sm8650", "--suite", "./mine", "--markdown", "docs/table.md")
        of_run = home.farm("jobs", "coverage", "--soc", "SM8650", "--run", newest, "--json")
    assert (done.returncode, done.stderr) == (0, "written: docs/table.md\n")
    assert max(map(len, done.stdout.splitlines())) <= 80
    found = rows(done.stdout)
    assert installed_builders().keys() <= found.keys()
    assert found["relu"] == ["✓", "1", "·", "1"]
    assert found["conv"] == ["◷", "1", "·", "1"]
    assert found["rand"] == ["n/a", "n/a"]
    assert "passed, but a newer run did not come to it" in done.stdout
    assert "2 results of 2 runs, on hardware, QNN 2.51" in done.stdout

    page = (home.cwd / "docs" / "table.md").read_text()
    assert page.startswith("<!-- Made by `farm jobs coverage --soc sm8650 --suite ./mine --markdown docs/table.md`")
    assert "| conv | ◷ 1 [^1] | · 1 |" in page
    assert "* rand: it has no reference" in page

    document = json.loads(of_run.stdout)
    assert document["schema"] == 3
    output = " ".join(done.stdout.split())
    count = len(document["aten"]["tested"])
    assert f"2 of {count} ATen operators that ExecuTorch's own tests name are in a case; not" in output
    assert document["counts"]["passed"] == 1
    (relu,) = (row for row in document["builders"] if row["name"] == "relu")
    assert relu["operators"] == ["aten.relu.default"]
    assert relu["cells"]["8a8w"] == {"state": "passed", "count": 1, "in_passing": False, "jobs": [RELU]}
    assert {job["job_id"]: job["state"] for job in document["jobs"]}[CONV] == "not_run"


def test_a_case_that_was_changed_is_skipped_until_it_has_run(home: FarmHome, store: Store, suite: Path) -> None:
    with store:
        run_id = record(store, suite, 0, {RELU: Verdict.PASSED})
        (suite / "suite.toml").write_text(MANIFEST.replace("shape = [1, 3] ", "shape = [1, 4] "))
        now = home.farm("jobs", "coverage", "--soc", "SM8650", "--suite", "./mine")
        then = home.farm("jobs", "coverage", "--soc", "SM8650", "--suite", "./mine", "--run", run_id)
    assert rows(now.stdout)["relu"][0] == "◷"
    assert "passed, but the case has changed since" in now.stdout
    assert rows(then.stdout)["relu"][0] == "✓"


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("--soc", "SM8650", "--backend", "npu"), 2, "unknown backend 'npu'"),
        (("--soc", "SM8650", "--backend", "lpai"), 2, "SM8650 has no lpai backend: legal are htp, gpu, xnnpack"),
        (("--soc", "SM8650", "--backend", "xnnpack"), 2, "xnnpack has none of the operators"),
        (("--soc", "SM8850", "--backend", "lpai"), 2, "no suite of operators is made for lpai: name one with --suite"),
        (("--soc", "SM8650", "--run", "2099"), 2, "unknown run '2099'"),
        (("--soc", "SM8750", "--run", "latest"), 2, "latest: no job for SM8750 and htp: name another run, SoC or"),
        (("--soc", "SM8650", "--suite", "./mine", "--markdown", "mine/suite.toml/x.md"), 2, "suite.toml is no folder"),
    ],
)
def test_what_cannot_be_is_one_line(
    home: FarmHome, store: Store, suite: Path, arguments: tuple[str, ...], code: int, says: str
) -> None:
    with store:
        record(store, suite, 0, {RELU: Verdict.PASSED})
    done = home.farm("jobs", "coverage", *arguments)
    assert (done.returncode, done.stdout) == (code, "")
    assert says in done.stderr.splitlines()[-1]


def test_the_soc_may_be_left_out_where_there_are_results_on_one_alone(store: Store, suite: Path) -> None:
    def soc(*runs: str) -> str:
        return read_coverage(store, [], None, "htp", [str(suite)], runs)[0].soc

    with store:
        with pytest.raises(UsageError, match="name the SoC with --soc: there is no result on any SoC"):
            soc()
        first = record(store, suite, 0, {RELU: Verdict.PASSED})
        assert (soc(), soc(first)) == ("SM8650", "SM8650")
        other = record(store, suite, 1, {}, soc="SM8750")
        assert (soc(first), soc(other)) == ("SM8650", "SM8750")
        with pytest.raises(UsageError, match="there are results on SM8650, SM8750"):
            soc()


def test_a_suite_that_says_nonsense_of_itself_is_named(home: FarmHome, store: Store, suite: Path) -> None:
    (suite / "operators.json").write_text('{"cases": []}')
    with store:
        done = home.farm("jobs", "coverage", "--soc", "SM8650", "--suite", "./mine")
    assert (done.returncode, done.stdout) == (2, "")
    assert "mine/operators.json: Expected `object`" in done.stderr


def test_without_a_store_it_says_how_to_make_one_and_makes_none(home: FarmHome) -> None:
    done = home.farm("jobs", "coverage", "--soc", "SM8650", code=9)
    assert f"there is no store yet: '{FIRST_RUN}' makes one" in done.stderr
    assert not home.state.exists()


def test_it_imports_neither_torch_nor_executorch(home: FarmHome, store: Store, suite: Path) -> None:
    with store:
        record(store, suite, 0, {RELU: Verdict.PASSED})
    code = (
        "import sys\nfrom farm.cli.main import main\n"
        "sys.argv = ['farm', 'jobs', 'coverage', '--soc', 'SM8650', '--suite', './mine']\n"
        "try:\n    main()\nexcept SystemExit as ended:\n    assert not ended.code, ended.code\n"
        "assert not {'torch', 'executorch', 'numpy'} & set(sys.modules)\n"
    )
    run_program([sys.executable, "-c", code], env=home.env, cwd=home.cwd)
