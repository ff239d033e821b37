"""Measurements of a run besides latency: options, profiles, text over `--seconds`, and the DSP's heap."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from attached import attach
from farm_home import FarmHome
from forked_command import call
from hardware_stub import WITH_HARDWARE
from heap_sdk_stub import IDLE_BYTES, make_heap_sdk
from in_process import refusal
from programs import require_code

from farm.base.config.settings import load_config
from farm.base.errors import UsageError
from farm.builds.runtime.qnn_sdk import package_libraries
from farm.dispatch.device_run.device_run import DeviceRun
from farm.dispatch.request.choose import jobs_of, select
from farm.dispatch.request.request import RunPlan, RunRequest
from farm.replay.stored_result import StoredResult
from farm.results.analysis.history import Point, split
from farm.results.attempt import Attempt, Stage, Verdict
from farm.store.records import JobView, RunView
from farm.store.store import open_store
from farm.suites.generate import Generate
from farm.suites.suite import Job

# Measurements of a run besides latency, on the simulator: options, profiles.


RUN = ("run", "--soc", "SM8650", "--suite", "smoke", "-k", "conv2d and 8a8w", "--virtual", "1")


@pytest.fixture(scope="module")
def measured_home(farm_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> FarmHome:
    measured_home = FarmHome.make(farm_cache, tmp_path_factory.mktemp("measurements"))
    measured_home.use_one_builder()
    return measured_home


def view_of(measured_home: FarmHome, *arguments: str) -> dict[str, Any]:
    view: dict[str, Any] = measured_home.json(*RUN, *arguments, timeout_s=300)
    return view


def test_each_option_set_is_a_series_of_its_own_and_a_detailed_profile_is_kept(measured_home: FarmHome) -> None:
    asked = ("--option", "htp_performance_mode=burst,balanced", "--profile", "detailed")
    jobs = sorted(view_of(measured_home, *asked)["jobs"], key=lambda job: job["id"])
    modes = [job["id"].partition("-8a8w-htp_performance_mode=")[2] for job in jobs]
    assert modes == ["balanced]", "burst]"]
    attempts = [job["attempts"][0] for job in jobs]
    assert len({attempt["bundle_key"] for attempt in attempts}) == 1, "an option of the runner needs no other bundle"
    points = measured_home.json("history", jobs[0]["id"], "--metric", "latency")["points"]
    assert {point["job_id"] for point in points} == {jobs[0]["id"]}
    for rows in (attempt["operators"] for attempt in attempts):
        assert any("convolution" in row["node"] for row in rows)
        assert sum(row["share"] for row in rows if row["unit"] == "cycles") == pytest.approx(1.0)
    kept = [path for path in (measured_home.state / "artifacts").glob("*/*/*") if path.is_file()]
    assert [b"ED00" in path.read_bytes()[:12] for path in kept] == [True, True]
    assert "profile" not in measured_home.json("report")["fingerprint"], "it costs nothing here"


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
def test_a_timeline_of_the_sdk_is_kept_as_its_tools_wrote_it(measured_home: FarmHome, tmp_path: Path) -> None:
    """With stubs of the tools, which only an SDK has: the compiler, its schematic and the graph are real."""
    refused = measured_home.farm(*RUN, "--profile", "optrace", code=6)
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
    [job] = measured_home.json(*RUN, "--profile", "optrace", env={"QNN_SDK_ROOT": str(tmp_path)}, timeout_s=300)["jobs"]
    assert job["id"].endswith("-8a8w-profile_level=optrace]")
    assert not [note for note in job["attempts"][0]["notes"] if "optrace" in note]
    files = measured_home.cwd / "files"
    measured_home.farm("show", job["id"], "--files", str(files), code=0)
    kept = {path.name: path for path in files.rglob("*") if path.is_file()}
    timeline = json.loads(kept["optrace_0.json"].read_text())
    assert "forward_0.bin of" in timeline["log"]
    assert timeline["log"].endswith("SoC 57, 1 inputs, optrace")
    assert kept.keys() == {
        "etdump.etdp", "forward_schematic.bin", "qnn-profiling-data_0.log", "optrace_0.json",
        "optrace_0_qnn_htp_analysis_summary.json",
    }  # fmt: skip


# `farm run --seconds`: accepted jobs, limits, and the runs whose numbers are compared with it.


STORY = """
[suite]
name = "stories"
description = "A stub of a decoder"
precisions = ["fp32"]
[case.story]
pte = "hybrid.pte"
[case.story.generate]
prompts = [[1, 2, 3], [7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17]]
new = 12
"""
SUSTAINED = RunRequest(socs=("SM8650",), suites=("smoke",), seconds=60)


def jobs(tmp_path: Path) -> list[Job]:
    """Return a job that generates text, and an ordinary job."""
    one, *_ = jobs_of(load_config(folder=tmp_path), SUSTAINED)
    case = msgspec.structs.replace(one.case, name="story", generate=Generate(prompt_lengths=(8,)))
    return [msgspec.structs.replace(one, case=case), one]


def test_it_is_refused_where_nothing_is_generated(tmp_path: Path) -> None:
    story, other = jobs(tmp_path)
    config = load_config(folder=tmp_path)
    assert select(SUSTAINED, [story], judged=False) == (story,)
    with pytest.raises(UsageError, match=r"--seconds is for programs that generate text: smoke/.* does not"):
        select(SUSTAINED, [story, other], judged=False)
    with pytest.raises(UsageError, match="nor 1 more"):
        select(SUSTAINED, [other, other], judged=False)
    with pytest.raises(UsageError, match="--heap runs every job once: leave --seconds out"):
        jobs_of(config, msgspec.structs.replace(SUSTAINED, heap=True))


def test_what_a_program_is_asked_to_go_on_for_is_no_delay(tmp_path: Path) -> None:
    plan = RunPlan("r", tmp_path, tmp_path, (), (), {}, tmp_path, seconds=60)
    assert plan.most_silence_s == msgspec.structs.replace(plan, seconds=None).most_silence_s + 120
    story, other = jobs(tmp_path)
    run: Any = SimpleNamespace(flags=lambda *_: {})
    asked = [DeviceRun.options(run, job, plan) for job in (story, other)]
    assert [one.seconds for one in asked] == [60, None], "a health check generates nothing"
    assert asked[0].timeout_s == 300, "the time to go on comes to that where the runner is asked"


def test_a_simulator_executes_a_sample_once_after_its_warm_up(tmp_path: Path) -> None:
    _, other = jobs(tmp_path)
    certain = msgspec.structs.replace(other, case=msgspec.structs.replace(other.case, deterministic=True))
    plan = RunPlan("r", tmp_path, tmp_path, (), (), {}, tmp_path, reducible=True)
    named = msgspec.structs.replace(plan, iterations=5, reducible=False)
    counts = {}
    for kind in ("virtual", "hardware"):
        run: Any = SimpleNamespace(flags=lambda *_: {}, device=SimpleNamespace(kind=kind))
        asked = [DeviceRun.options(run, *one) for one in ((other, plan), (certain, plan), (other, named))]
        counts[kind] = [(one.warm_up, one.iterations) for one in asked]
    assert counts == {"virtual": [(1, 1), (1, 3), (1, 5)], "hardware": [(1, 3), (1, 3), (1, 5)]}


def test_runs_of_another_length_are_no_history_of_it() -> None:
    lengths = (None, 60, 60, 600, None, 60)
    points = [
        Point(f"run-{n}", n, {} if seconds is None else {"seconds": str(seconds)}, "hardware", "v")
        for n, seconds in enumerate(lengths)
    ]
    history = split(points)
    assert [point.run_id for point in history.comparable()] == ["run-1", "run-2", "run-5"]
    assert [event.text for event in history.events if event.parts] == [
        "seconds 60", "seconds 60 -> 600", "without seconds 600", "seconds 60",
    ]  # fmt: skip


def test_it_is_measured_again_for_as_long() -> None:
    attempt = Attempt("j", Verdict.PASSED, Stage.DONE, "")
    view = JobView("j", "suite", "case", "SM8650", "htp", "16a8w", (attempt,), decisive_attempt=1)
    for fact, seconds in (("60", 60), ("", None), ("-1", None), ("9" * 400, None), ("x", None)):
        facts = {"seconds": fact} if fact else {}
        run = RunView("run", "farm run", 0, None, None, "", "", facts, (), (view,))
        assert StoredResult(run, view, attempt, 1, "hardware", {}).seconds == seconds


@pytest.mark.whole
def test_what_it_measured_is_a_series_like_others(home: FarmHome, decoders: Path) -> None:
    folder = home.cwd / "stories"
    folder.mkdir()
    (folder / "suite.toml").write_text(STORY)
    shutil.copy(decoders / "hybrid.pte", folder)
    asked = ("--soc", "SM8650", "--backend", "xnnpack", "--suite", "./stories/", "--virtual", "1")
    done = home.farm("run", *asked, "--seconds", "1", timeout_s=300, code=0)
    assert "generated, simulated: stories/story[SM8650-xnnpack-ready]" in done.stdout
    assert "% after 1 s" in done.stdout

    metrics = ("first_token_time[3]", "first_token_time[11]", "sustained_rate", "temperature")
    named = [word for metric in metrics for word in ("--metric", metric)]
    points = home.json("history", "stories/story", *named)["points"]
    assert {one["metric"]: (one["unit"], one["n"]) for one in points} == {
        "first_token_time[3]": ("ns", 1), "first_token_time[11]": ("ns", 1), "sustained_rate": ("tokens/s", 12),
        "temperature": ("C", 2),
    }  # fmt: skip
    [celsius] = [one["value"] for one in points if one["metric"] == "temperature"]
    assert celsius == 25.0, "what a virtual device has"
    for form in ("jsonl", "hud"):
        assert "first_token_time[11]" in home.farm("data", "export", "--format", form).stdout
    again = home.farm("perf", "confirm", "stories/story", "--pairs", "5", "--metric", "first_token_time[11]", code=7)
    assert "first_token_time" not in again.stderr, again.stderr


# The DSP's heap from ExecuTorch's file to the report, over a stub of a DSP; and devices that measure none.


SMOKE = ("run", "--soc", "SM8650", "--suite", "smoke", "-k", "add or conv2d", "--heap")
CASES = ("run", "--soc", "SM8650", "--suite", str(Path(__file__).parent / "heap_cases"), "--virtual", "1")
PAGE = 4096
LEAK = 9 << 20


def test_devices_without_a_heap_skip_every_job_after_one_probe_and_stay_healthy(home: FarmHome, tmp_path: Path) -> None:
    with attach(home, tmp_path, ["SM8650", "SM8650"]) as attached:
        env = {**home.env, **attached.env}
        done = call([*WITH_HARDWARE, *SMOKE, "--json"], env=env, cwd=home.cwd, timeout_s=300)
        require_code(done, 5)
        view = json.loads(done.stdout)
        attempts = [attempt for job in view["jobs"] for attempt in job["attempts"]]
        reason = "no DSP heap: ExecuTorch wrote no profile of it; it does on Android and QNX"
        assert {one["verdict"] for one in attempts} == {"skipped"}
        assert len(attempts) == len(view["jobs"]) == 2, "no other device was asked"
        assert all(one["reason"].startswith(reason) for one in attempts)
        assert {one["seconds"] for one in attempts} == {0.0}, "the probe has the answer for all of them"
        with open_store(f"sqlite:///{home.state / 'farm.db'}") as store:
            assert {one.health for one in store.devices.all()} == {"healthy"}
    shown = " ".join(home.farm("report", "latest").stdout.split())
    assert shown.count("no DSP heap") == 1


@pytest.fixture(scope="module")
def stub_home(farm_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> FarmHome:
    home = FarmHome.make(farm_cache, tmp_path_factory.mktemp("heap"))
    home.use_one_builder()
    return home


@pytest.fixture(scope="module")
def page_env(farm_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment with a stub of an SDK whose contexts keep 4,096 bytes each."""
    sdk = make_heap_sdk(tmp_path_factory.mktemp("sdk") / "heap", farm_cache, f"keep={PAGE}")
    return {"QNN_SDK_ROOT": str(sdk)}


@pytest.fixture(scope="module")
def measured(stub_home: FarmHome, page_env: dict[str, str]) -> dict[str, Any]:
    """The JSON of a run over the stub, in two processes a job."""
    view: dict[str, Any] = stub_home.json(
        *CASES, "--heap", "--iterations", "2", "--confirm", env=page_env, timeout_s=580
    )
    return view


def samples_of(attempt: dict[str, Any]) -> dict[str, list[float]]:
    return {row["metric"]: row["samples"] for row in attempt["measurements"]}


@pytest.mark.whole
def test_the_first_context_and_the_last_are_around_all_of_them(measured: dict[str, Any]) -> None:
    attempts = {job["case"]: job["attempts"][-1] for job in measured["jobs"]}
    for case, contexts in (("one", 1), ("two", 2), ("four", 4)):
        kept = contexts * PAGE
        assert samples_of(attempts[case]) == {
            "dsp_heap_before": [IDLE_BYTES] * 2,
            "dsp_heap_after": [IDLE_BYTES + kept] * 2,
            "dsp_heap_difference": [kept] * 2,
            "partitions": [contexts],
        }
        lines = attempts[case]["log"].splitlines()
        told = [line.removeprefix("heap stub: ") for line in lines if line.startswith("heap stub: ")]
        assert (told[0], told[-1]) == ("1 contexts, creation profiled", "0 contexts, free profiled")
        assert len(told) == 2 * contexts
        assert not any("profiled" in line for line in told[1:-1])


@pytest.mark.whole
def test_history_and_report_have_the_numbers(stub_home: FarmHome, measured: dict[str, Any]) -> None:
    history = stub_home.json("history", "heap_cases/four", "--metric", "dsp_heap_difference")
    assert [point["value"] for point in history["points"]] == [4 * PAGE]
    shown = " ".join(stub_home.farm("report", measured["id"], "--html", "report.html").stdout.split())
    assert "DSP heap: 4,096 to 16,384 bytes kept, of 3 jobs" in shown
    section = heap_section(stub_home, "report.html")
    assert section.count("<tr>") == 1 + 3
    assert "16,384, 16,384" in section
    assert "-heap_stub" in section


def heap_section(home: FarmHome, report: str) -> str:
    return (home.cwd / report).read_text().partition('<section id="heap"')[2].partition("</section>")[0]


@pytest.mark.whole
def test_the_heap_is_confirmed_by_runs_for_the_heap(
    stub_home: FarmHome, measured: dict[str, Any], page_env: dict[str, str]
) -> None:
    [job] = [job["id"] for job in measured["jobs"] if job["case"] == "one"]
    again = stub_home.json(*CASES, "-k", "one", "--heap", env=page_env, timeout_s=300)
    told = stub_home.json(
        *("perf", "confirm", job, "--good", measured["id"], "--bad", again["id"], "--metric", "dsp_heap_difference"),
        env=page_env,
        timeout_s=300,
    )
    [one] = told["metrics"]
    assert (one["confirmation"]["answer"], one["confirmation"]["pairs"] >= 10) == ("refuted", True)
    assert one["pairs"] == [[[PAGE], [PAGE]]] * one["confirmation"]["pairs"]
    of_turns = {row["metric"] for turn in told["turns"] for row in turn["measurements"]}
    assert of_turns == {"dsp_heap_before", "dsp_heap_after", "dsp_heap_difference"}, "no time of such a run is measured"


@pytest.mark.whole
def test_a_leak_fails_the_job_and_stands_in_history_and_report(
    stub_home: FarmHome, measured: dict[str, Any], farm_cache: Path, tmp_path: Path
) -> None:
    env = {"QNN_SDK_ROOT": str(make_heap_sdk(tmp_path / "leaking", farm_cache, f"keep={LEAK}"))}
    leaking = stub_home.json(*CASES, "-k", "one", "--heap", env=env, timeout_s=500, code=1)
    [attempt] = leaking["jobs"][0]["attempts"]
    reason = "DSP heap: 9,437,184 bytes kept, expected 4,096 or less"
    assert (attempt["verdict"], attempt["reason"]) == ("failed", reason)
    assert samples_of(attempt)["dsp_heap_after"] == [IDLE_BYTES + LEAK]
    points = stub_home.json("history", "heap_cases/one", "--metric", "dsp_heap_difference")["points"]
    assert measured["id"] in [point["run_id"] for point in points]
    assert points[-1]["value"] == LEAK
    stub_home.farm("report", leaking["id"], "--html", "leak.html")
    assert "9,437,184" in heap_section(stub_home, "leak.html")
    assert reason in (stub_home.cwd / "leak.html").read_text()


def test_farm_exec_measures_the_heap(home: FarmHome, models: Path, farm_cache: Path, tmp_path: Path) -> None:
    sdk = make_heap_sdk(tmp_path / "sdk", farm_cache, f"keep={PAGE}")
    command = ("exec", str(models / "conv.pte"), "--inputs", str(models / "conv_input_0.raw"), "--virtual", "--heap")
    attempt = home.json(*command, env={"QNN_SDK_ROOT": str(sdk)}, timeout_s=300)["attempt"]
    assert samples_of(attempt)["dsp_heap_difference"] == [PAGE]
    assert "latency" not in samples_of(attempt)
    refused = home.farm(*command)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "the simulator has none: attach a device" in refused.stderr
