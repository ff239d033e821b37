"""Measurements of a run besides latency, on the simulator: options, profiles."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from farm_home import FarmHome
from in_process import refusal

from farm.builds.runtime.simulator import package_libraries

RUN = ("run", "--soc", "SM8650", "--suite", "smoke", "-k", "conv2d and 8a8w", "--virtual", "1")


@pytest.fixture(scope="module")
def home(farm_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> FarmHome:
    home = FarmHome.make(farm_cache, tmp_path_factory.mktemp("measurements"))
    home.use_one_builder()
    return home


def view_of(home: FarmHome, *arguments: str) -> dict[str, Any]:
    view: dict[str, Any] = home.json(*RUN, *arguments, timeout_s=300)
    return view


def test_each_option_set_is_a_series_of_its_own_and_a_detailed_profile_is_kept(home: FarmHome) -> None:
    asked = ("--option", "htp_performance_mode=burst,balanced", "--profile", "detailed")
    jobs = sorted(view_of(home, *asked)["jobs"], key=lambda job: job["id"])
    modes = [job["id"].partition("-8a8w-htp_performance_mode=")[2] for job in jobs]
    assert modes == ["balanced]", "burst]"]
    attempts = [job["attempts"][0] for job in jobs]
    assert len({attempt["bundle_key"] for attempt in attempts}) == 1, "an option of the runner needs no other bundle"
    points = home.json("history", jobs[0]["id"], "--metric", "latency")["points"]
    assert {point["job_id"] for point in points} == {jobs[0]["id"]}
    for rows in (attempt["operators"] for attempt in attempts):
        assert any("convolution" in row["node"] for row in rows)
        assert sum(row["share"] for row in rows if row["unit"] == "cycles") == pytest.approx(1.0)
    kept = [path for path in (home.state / "artifacts").glob("*/*/*") if path.is_file()]
    assert [b"ED00" in path.read_bytes()[:12] for path in kept] == [True, True]
    assert "profile" not in home.json("report")["fingerprint"], "it costs nothing here"


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
def test_options_that_do_not_go_together_are_refused(arguments: tuple[str, ...], message: str) -> None:
    code, said = refusal(*RUN, *arguments)
    assert (code, message in said) == (2, True), said


@pytest.mark.whole
def test_a_timeline_of_the_sdk_is_kept_as_its_tools_wrote_it(home: FarmHome, tmp_path: Path) -> None:
    """With stubs of the tools, which only an SDK has: the compiler, its schematic and the graph are real."""
    refused = home.farm(*RUN, "--profile", "optrace", code=6)
    assert "needs the tools of a QNN SDK" in refused.stderr
    tools, libraries = (tmp_path / folder / "x86_64-linux-clang" for folder in ("bin", "lib"))
    tools.mkdir(parents=True)
    libraries.mkdir(parents=True)
    for name in ("qnn-net-run", "qnn-profile-viewer"):
        shutil.copy2(Path(__file__).with_name(f"{name.replace('-', '_')}_stub.py"), tools / name)
    for name in ("libQnnHtpOptraceProfilingReader.so", "libQnnHtpNetRunExtensions.so"):
        (libraries / name).write_text("a stub")
    for folder in package_libraries(None):
        for library in folder.glob("*.so*"):
            if not (libraries / library.name).exists():
                (libraries / library.name).symlink_to(library)
    [job] = home.json(*RUN, "--profile", "optrace", env={"QNN_SDK_ROOT": str(tmp_path)}, timeout_s=300)["jobs"]
    assert job["id"].endswith("-8a8w-profile_level=optrace]")
    assert not [note for note in job["attempts"][0]["notes"] if "optrace" in note]
    files = home.cwd / "files"
    home.farm("jobs", "profile", job["id"], "--files", str(files), code=0)
    [timeline] = files.glob("*optrace_0.json")
    assert "forward_0.bin of" in json.loads(timeline.read_text())["log"]
    assert json.loads(timeline.read_text())["log"].endswith("SoC 57, 1 inputs, optrace")
    assert {path.name for path in files.iterdir()} == {
        "etdump.etdp", "forward_schematic.bin", "qnn-profiling-data_0.log", "optrace_0.json",
        "optrace_0_qnn_htp_analysis_summary.json",
    }  # fmt: skip
