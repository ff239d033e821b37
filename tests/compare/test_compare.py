"""`farm perf compare` on real bundles and the simulator."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from executorch_checkout import commit, make_checkout
from farm_home import FarmHome, wait_for_no_process

SMOKE = ("--suite", "smoke", "--soc", "SM8650")


@pytest.mark.whole
def test_options_of_the_runner_are_measured_on_one_program(home: FarmHome, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    options = ("--options", "", "--options", "htp_performance_mode=burst")
    answer = home.farm(
        "perf", "compare", *SMOKE, "-k", "smoke/add", *options, "--virtual", "1", "--html", str(page), timeout_s=300
    )
    assert answer.returncode in (0, 3), answer.stderr
    [folder] = (home.state / "compares").iterdir()
    data = json.loads((folder / "compare.json").read_bytes())
    [job] = data["jobs"]
    assert (job["name"], job["same"], job["executed"]) == ("smoke/add[SM8650-htp-8a8w]", True, True)
    assert job["b"]["job_id"] == "smoke/add[SM8650-htp-8a8w-htp_performance_mode=burst]"
    metrics = {one["metric"]: one for one in job["metrics"]}
    assert metrics["htp_cycles"]["pairs"] >= 6
    assert metrics["htp_cycles"]["decides"]
    assert not metrics["latency"]["decides"]
    assert metrics["sqnr_fp32[0]"]["a"] == metrics["sqnr_fp32[0]"]["b"]
    assert page.read_text() == (folder / "compare.html").read_text()
    assert "htp_performance_mode=burst" in page.read_text()
    # A comparison is no run.
    assert home.farm("data", "sql", "select count(*) as runs from run").stdout.split()[-1] == "0"
    assert wait_for_no_process(home) == {}


@pytest.mark.whole
def test_a_pull_request_is_stopped_by_a_pass_that_raises_and_by_nothing_else(home: FarmHome, tmp_path: Path) -> None:
    home.use_one_builder()
    checkout = tmp_path / "executorch"
    make_checkout(checkout)
    commit(checkout, "Say what it is", {"README.md": "a checkout\n"})
    arguments = ("perf", "compare", *SMOKE, "-k", "smoke/add or smoke/softmax", "--checkout", str(checkout), "--json")
    arguments += ("--programs-only", "--base")

    answer = home.farm(*arguments, "HEAD~1", timeout_s=500, code=0)
    assert json.loads(answer.stdout)["sentence"] == "B changes no program of these 2 jobs"

    builder = checkout / "backends/qualcomm/builders/op_softmax.py"
    text = builder.read_text()
    assert text.count("def define_node(") == 1
    head, _, tail = text.partition("        input_node = ")
    builder.write_text(f'{head}        raise RuntimeError("planted")\n        input_node = {tail}')
    answer = home.farm(*arguments, "HEAD", timeout_s=500, code=3)
    data = json.loads(answer.stdout)
    groups = {job["name"].partition("[")[0]: (job["group"], job["text"]) for job in data["jobs"]}
    assert groups["smoke/add"] == ("same", "")
    assert groups["smoke/softmax"][0] == "newly_failing"
    assert "planted" in groups["smoke/softmax"][1]
    assert data["sides"][1]["facts"]["dirty"] == "yes"

    # Taken back, nothing is compiled again.
    builder.write_text(text)
    answer = home.farm(*arguments, "HEAD", timeout_s=500, code=0)
    assert "compiling" not in answer.stderr
