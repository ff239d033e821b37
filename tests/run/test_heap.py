"""The DSP's heap from ExecuTorch's file to the report, over a stub of a DSP; and devices that measure none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from attached import attach
from farm_home import FarmHome
from forked_command import call
from hardware_stub import WITH_HARDWARE
from heap_sdk_stub import IDLE_BYTES, make_heap_sdk
from programs import require_code

from farm.store.store import open_store

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
