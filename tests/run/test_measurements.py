"""Measurements of a run besides latency, on the simulator: options, profiles."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from farm_home import FarmHome

from farm.builds.runtime.simulator import package_libraries

RUN = ("run", "--soc", "SM8650", "--suite", "smoke", "-k", "conv2d and 8a8w", "--virtual", "1", "--json")


@pytest.fixture(scope="module")
def home(farm_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> FarmHome:
    home = FarmHome.make(farm_cache, tmp_path_factory.mktemp("measurements"))
    home.use_one_builder()
    return home


def view_of(home: FarmHome, *arguments: str) -> dict[str, Any]:
    done = home.farm(*RUN, *arguments, timeout_s=300, code=0)
    view: dict[str, Any] = json.loads(done.stdout)
    return view


def test_each_option_set_is_a_target_and_a_series_of_its_own(home: FarmHome) -> None:
    view = view_of(home, "--option", "htp_performance_mode=burst,balanced")
    [one, two] = sorted(job["id"] for job in view["jobs"])
    assert one.endswith("-8a8w-htp_performance_mode=balanced]")
    assert two.endswith("-8a8w-htp_performance_mode=burst]")
    keys = {job["attempts"][0]["bundle_key"] for job in view["jobs"]}
    assert len(keys) == 1, "an option of the runner needs no other bundle"
    history = json.loads(home.farm("history", one, "--metric", "latency", "--json").stdout)
    assert {point["job_id"] for point in history["points"]} == {one}


def test_a_detailed_profile_is_kept_with_every_node_and_its_etdump(home: FarmHome) -> None:
    [job] = view_of(home, "--profile", "detailed")["jobs"]
    [attempt] = job["attempts"]
    rows = attempt["operators"]
    assert any("convolution" in row["node"] for row in rows)
    shares = [row["share"] for row in rows if row["unit"] == "cycles"]
    assert sum(shares) == pytest.approx(1.0)
    kept = [path for path in (home.state / "artifacts").glob("*/*/*") if path.is_file()]
    assert [b"ED00" in path.read_bytes()[:12] for path in kept] == [True]
    assert "profile" not in json.loads(home.farm("report", "--json").stdout)["fingerprint"], "it costs nothing here"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--option", "htp_performance_mode=fast"), "unknown value of option htp_performance_mode 'fast'"),
        (("--option", "lpai_fps=5"), "option lpai_fps is for lpai, not for the htp backend"),
        (("--heap", "--backend", "xnnpack"), "--heap is for the htp backend"),
        (("--heap", "--profile", "detailed"), "--heap measures nothing else"),
        (("--heap",), "--heap measures the heap of a DSP, and the simulator has none: attach a device"),
        (("--heap", "--warm-up", "5"), "--heap times nothing: leave --warm-up out"),
        (("--option", "profile_level=optrace"), "is set by --profile optrace"),
        (("--profile", "optrace", "--backend", "xnnpack"), "--profile optrace is for the htp backend"),
    ],
)
def test_what_does_not_go_together_is_refused_before_anything_runs(
    home: FarmHome, arguments: tuple[str, ...], message: str
) -> None:
    done = home.farm(*RUN, *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr


@pytest.mark.whole
def test_a_timeline_of_the_sdk_is_kept_as_its_tools_wrote_it(home: FarmHome, tmp_path: Path) -> None:
    """With stubs of the tools, which only an SDK has: the compiler, its schematic and the graph are real."""
    refused = home.farm(*RUN, "--profile", "optrace", code=6)
    assert "needs the tools of a QNN SDK" in refused.stderr
    stubs = Path(__file__).parent
    for name, stub in {
        "bin/x86_64-linux-clang/qnn-net-run": stubs / "qnn_net_run_stub.py",
        "bin/x86_64-linux-clang/qnn-profile-viewer": stubs / "qnn_profile_viewer_stub.py",
        "lib/x86_64-linux-clang/libQnnHtpOptraceProfilingReader.so": stubs / "qnn_profile_viewer_stub.py",
        "lib/x86_64-linux-clang/libQnnHtpNetRunExtensions.so": stubs / "qnn_profile_viewer_stub.py",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(stub, tmp_path / name)
    for folder in package_libraries(None):
        for library in folder.glob("*.so*"):
            if not (link := tmp_path / "lib/x86_64-linux-clang" / library.name).exists():
                link.symlink_to(library)
    done = home.farm(*RUN, "--profile", "optrace", env={"QNN_SDK_ROOT": str(tmp_path)}, timeout_s=300, code=0)
    [job] = json.loads(done.stdout)["jobs"]
    assert job["id"].endswith("-8a8w-profile_level=optrace]")
    assert not [note for note in job["attempts"][0]["notes"] if "optrace" in note]
    files = home.cwd / "files"
    home.farm("jobs", "profile", job["id"], "--artifacts", str(files), code=0)
    [timeline] = files.glob("*optrace_0.json")
    assert "forward_0.bin of" in json.loads(timeline.read_text())["log"]
    assert json.loads(timeline.read_text())["log"].endswith("SoC 57, 1 inputs, optrace")
    assert {path.name for path in files.iterdir()} == {
        "etdump.etdp", "forward_schematic.bin", "qnn-profiling-data_0.log", "optrace_0.json",
        "optrace_0_qnn_htp_analysis_summary.json",
    }  # fmt: skip
