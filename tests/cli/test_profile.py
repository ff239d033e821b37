"""`farm jobs profile` on a real run: rows, comparison, trace and files."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from farm_home import FarmHome

pytestmark = pytest.mark.whole

JOB = "smoke/conv2d[SM8650-htp-8a8w]"
RUN = ("run", "--soc", "SM8650", "--suite", "smoke", "--virtual", "1", "-k")


@pytest.fixture(scope="module")
def profiled(farm_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> FarmHome:
    """Home with two runs that kept profiles, and a newer run without profiles."""
    home = FarmHome.make(farm_cache, tmp_path_factory.mktemp("profiled"))
    for profile, cases in (("detailed", "conv2d or layer_norm"), ("detailed", "conv2d"), ("auto", "conv2d")):
        home.farm(*RUN, cases, "--profile", profile, "--iterations", "3", timeout_s=300, code=0)
    return home


def lines_of(done: subprocess.CompletedProcess[str]) -> list[str]:
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    return lines


def test_the_newest_profile_is_a_table(profiled: FarmHome) -> None:
    lines = lines_of(profiled.farm("jobs", "profile", "smoke/conv2d", "--limit", "3"))
    assert lines[0] == JOB
    assert "passed, 3 inferences" in lines[1]
    assert "virtual device virtual-SM8650-0" in lines[2]
    assert "VIRTUAL" in lines[3]
    text = "\n".join(lines)
    for word in ("cycles", "share", "QnnBackend[0]", "DELEGATE_CALL", "4 more", "all 7", "kept: etdump"):
        assert word in text
    assert "Traceback" not in text


def test_json_has_every_row_and_says_of_which_run(profiled: FarmHome) -> None:
    done = profiled.farm("jobs", "profile", "smoke/conv2d", "--run", "latest~2", "--json")
    document: dict[str, Any] = json.loads(done.stdout)
    assert document["schema"] == 1
    (profile,) = document["profiles"]
    assert (profile["job_id"], profile["device_kind"]) == (JOB, "virtual")
    nodes = [row for row in profile["operators"] if row["unit"] == "cycles" and "OpId" in row["node"]]
    assert sum(row["share"] for row in nodes) == pytest.approx(1)
    assert {row["n"] for row in nodes} == {3}
    newest = profiled.json("jobs", "profile", JOB)["profiles"][0]
    assert newest["run_id"] > profile["run_id"]


def test_a_node_says_its_module_and_source_line_and_modules_add_up(profiled: FarmHome) -> None:
    of_job = ("jobs", "profile", "smoke/layer_norm", "--run", "latest~2")
    (profile,) = profiled.json(*of_job, "--by", "module")["profiles"]
    [norm] = [row for row in profile["operators"] if "layer_norm" in row["node"]]
    assert norm["module"] == "layer"
    file, _, line = norm["source"].rpartition(":")
    assert file == "quantized_ops/operators.py"
    code = (Path(__file__).parents[2] / "test_suites" / file).read_text().splitlines()[int(line) - 1]
    assert "self.layer(" in code
    sums = {one["name"]: one for one in profile["sums"]}
    assert sums["layer"]["p50"] == norm["p50"]
    assert sum(one["share"] for one in sums.values()) == pytest.approx(1)
    [by_line] = [row for row in lines_of(profiled.farm(*of_job, "--by", "line")) if norm["source"] in row]
    assert by_line.split()[1] == "1"
    [shown] = [row for row in lines_of(profiled.farm(*of_job)) if "operators.py" in row]
    assert "layer" in shown.split()
    assert f"operators.py:{line}" in shown
    assert "OpId" not in shown


def test_two_runs_are_compared_node_by_node(profiled: FarmHome) -> None:
    text = "\n".join(lines_of(profiled.farm("jobs", "profile", "--diff", "latest~2", "latest~1")))
    assert JOB in text
    assert "before" in text
    assert "aten_convolution_default" in text
    assert "A run is one sample" in text.replace("\n  ", " ")
    assert "two runs of one program on the simulator often differ by half" in text
    assert "differs:" not in text
    document = profiled.json("jobs", "profile", "smoke", "--diff", "latest~2", "latest~1")
    (job,) = document["jobs"]
    assert job["refused"] == ""
    assert all(node["before"] and node["after"] for node in job["nodes"])


def test_impossible_requests_are_one_line_and_exit_code_2(profiled: FarmHome) -> None:
    for words, message in {
        "": "which JOB?",
        "smoke/conv3d": "did you mean 'smoke/conv2d'",
        "smoke/conv2d --run latest": "has no profile of smoke/conv2d: a run with --profile detailed",
        "smoke/conv2d --run nonsense": "unknown run 'nonsense'",
        "--diff latest~1 latest": "has no profile of any job",
        "--diff latest~2 latest~1 --by line": "--diff takes two runs",
        "smoke/conv2d --depth 2": "--depth is for --by module",
        f"{JOB} --by module": f"of {JOB} no module or line is known",
    }.items():
        done = profiled.farm("jobs", "profile", *words.split(), code=2)
        assert (message in done.stderr, len(done.stderr.splitlines())) == (True, 1), done.stderr
