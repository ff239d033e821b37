"""`farm jobs coverage` of a store with runs of a suite of one's own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from farm_home import FarmHome
from made_runs import BEGAN_MS, HOUR_MS, record_run

from farm.base.errors import UsageError
from farm.base.socs import find_soc
from farm.report.model.coverage import read_coverage
from farm.results.attempt import Verdict
from farm.store.records import BuildRecord
from farm.store.store import Store
from farm.suites.manifests import load_suite
from farm.suites.op_builders import installed_builders
from farm.suites.suite import plan

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
    planned = plan([load_suite(suite / "suite.toml")], [find_soc(soc)], "htp")
    jobs = sorted(planned, key=lambda job: [*verdicts, job.id].index(job.id))
    started_ms = BEGAN_MS + hour * HOUR_MS
    run_id = record_run(
        store, jobs, list(verdicts.values()), started_ms=started_ms, exit_code=None, fingerprint={"qnn": "2.51"}
    )
    for job_id in verdicts:
        built = {"aten.relu.default": 1} if job_id == RELU else None
        store.record_builds(run_id, [BuildRecord(job_id, seconds=1, cached=False, bundle_key="b", operators=built)])
    return run_id


def test_the_table_has_every_builder_and_what_is_known_of_it(home: FarmHome, store: Store, suite: Path) -> None:
    with store:
        record(store, suite, 0, {RELU: Verdict.FAILED, CONV: Verdict.PASSED})
        newest = record(store, suite, 1, {RELU: Verdict.PASSED})
        done = home.farm("jobs", "coverage", "--soc", "sm8650", "--suite", "./mine", "--markdown", "docs/table.md")
        of_run = home.farm("jobs", "coverage", "--soc", "SM8650", "--run", newest, "--json")
    assert (done.returncode, done.stderr) == (0, "written: docs/table.md\n")
    assert max(map(len, done.stdout.splitlines())) <= 80
    found = {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines() if line[:1].isalpha()}
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
    (relu,) = (row for row in document["builders"] if row["name"] == "relu")
    assert relu["operators"] == ["aten.relu.default"]
    assert relu["cells"]["8a8w"] == {"state": "passed", "count": 1, "in_passing": False, "jobs": [RELU]}
    assert {job["job_id"]: job["state"] for job in document["jobs"]}[CONV] == "not_run"


def test_impossible_requests_are_one_line(home: FarmHome, store: Store, suite: Path) -> None:
    with store:
        record(store, suite, 0, {RELU: Verdict.PASSED})
    (home.cwd / "odd").mkdir()
    (home.cwd / "odd" / "suite.toml").write_text(MANIFEST.replace("mine", "odd"))
    (home.cwd / "odd" / "operators.json").write_text('{"cases": []}')
    for arguments, message in {
        ("--soc", "SM8650", "--backend", "xnnpack"): "xnnpack has none of the operators",
        ("--soc", "SM8850", "--backend", "lpai"): "no suite of operators is made for lpai: name one with --suite",
        ("--soc", "SM8650", "--run", "2099"): "unknown run '2099'",
        ("--soc", "SM8750", "--run", "latest"): "latest: no job for SM8750 and htp: name another run, SoC or",
        ("--soc", "SM8650", "--suite", "./mine", "--markdown", "mine/suite.toml/x.md"): "suite.toml is no folder",
        ("--soc", "SM8650", "--suite", "./odd"): "odd/operators.json: Expected `object`",
    }.items():
        done = home.farm("jobs", "coverage", *arguments, code=2)
        assert (done.stdout, message in done.stderr.splitlines()[-1]) == ("", True), done.stderr


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
