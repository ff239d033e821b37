"""`farm run --backend lpai` as a user calls it, on a virtual device, with a stub of an SDK that has LPAI."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from farm_home import FarmHome, wait_for_no_process
from lpai_sdk_stub import StubSdk

SUITE = Path(__file__).with_name("lpai_cases")


def run(
    home: FarmHome, sdk: Path, *words: str, soc: str = "SM8850", suite: Path | str = SUITE
) -> subprocess.CompletedProcess[str]:
    arguments = ("run", "--soc", soc, "--suite", str(suite), "--backend", "lpai", "--virtual", "1", *words)
    return home.farm(*arguments, env={"QNN_SDK_ROOT": str(sdk)}, timeout_s=300)


@pytest.mark.whole
def test_two_option_sets_all_the_way(home: FarmHome, stub_sdk: StubSdk) -> None:
    stub_sdk.forget()
    done = run(home, stub_sdk.root, "--option", "lpai_fps=5,10", "--option", "core_selection=1", "--json")
    assert done.returncode == 1, done.stderr
    view = json.loads(done.stdout)
    assert (view["fingerprint"]["qnn_product"], view["summary"]["stub"], view["toolchain"]["branch"]) == ("stub",) * 3
    assert "STUB: " in done.stderr
    page = (home.state / "runs" / view["id"] / "report.html").read_text()
    assert "<strong>STUB.</strong>" in page
    assert "host time" not in page
    last = {job["id"]: job["attempts"][-1] for job in view["jobs"]}
    assert len(last) == 8
    for fps in ("5", "10"):
        options = f"[SM8850-lpai-8a8w-core_selection=1-lpai_fps={fps}]"
        block = last[f"lpai_cases/block{options}"]
        assert block["verdict"] == "passed"
        # HTP's simulator, for want of one for LPAI, executes the compiled program correctly.
        assert all(found["sqnr_db"] > 30 for found in block["comparisons"])
        counters = {found["metric"]: found["samples"] for found in block["measurements"] if found["exact"]}
        assert (counters["partitions"], counters["fallback_ops"]) == ([1], [2])
        # The case declares the part of a graph on the CPU.
        split = last[f"lpai_cases/split{options}"]
        assert split["verdict"] == "passed"
        assert all(found["sqnr_db"] > 30 for found in split["comparisons"])
        whole = (
            "2 partitions and aten.gelu.default x1 left to the CPU, expected 1 partition and nothing left to the CPU"
        )
        weights = (
            "DelegationError: the lpai backend does not take aten.prelu.default, and ExecuTorch leaves no operator "
            "with weights to the CPU (the build log has more): replace what it does not take, or run the case on "
            "another backend"
        )
        for case, reason in (("whole", whole), ("weights", weights)):
            refused = last[f"lpai_cases/{case}{options}"]
            assert (refused["verdict"], refused["stage"], refused["reason"]) == ("failed", "build", reason)
    # A process of the runner for each set of run-time options; the compiled options are the same for both.
    runner = stub_sdk.told("farm_runner")
    assert list(dict.fromkeys(line for line in runner if "fps" in line)) == [
        "graph_set_config fps=1 ftrt_ratio=10 client_perf_type=1",  # health check
        "graph_set_config fps=5 ftrt_ratio=10 client_perf_type=1",
        "graph_set_config fps=10 ftrt_ratio=10 client_perf_type=1",
    ]
    assert {line for line in runner if "affinity" in line} == {
        "graph_set_config affinity=1 core_selection=0",  # health check
        "graph_set_config affinity=1 core_selection=1",
    }
    # The device is this machine: x86 is 0, V6 is 6.
    assert {line for line in runner if "backend_create" in line} == {"backend_create target=0 hardware=6"}
    assert wait_for_no_process(home) == {}


def test_every_command_with_a_toolchain_names_the_stub(home: FarmHome, stub_sdk: StubSdk) -> None:
    done = home.farm(
        "setup", "toolchain", "show", "default", "--json", env={"QNN_SDK_ROOT": str(stub_sdk.root)}, timeout_s=300
    )
    assert json.loads(done.stdout)["branch"] == "stub"
    assert "STUB: QNN's libraries are a stub (stub); no number is a measurement of Qualcomm's products" in done.stderr


@pytest.mark.parametrize(
    ("soc", "words", "message"),
    [
        ("SM8650", (), "SM8650 has no lpai backend: legal are "),
        ("SM8850", ("--precision", "fp16"), "the lpai backend does not run fp16: legal are 8a8w, "),
        ("SM8850", ("--option", "fps=0"), "option fps=0: expected a number from 1"),
        (
            "SM8850",
            ("--option", "htp_performance_mode=burst"),
            "option htp_performance_mode is for htp, not for the lpai",
        ),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(
    home: FarmHome, stub_sdk: StubSdk, soc: str, words: tuple[str, ...], message: str
) -> None:
    done = run(home, stub_sdk.root, *words, soc=soc)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (home.state / "runs").exists()


def _without_library(sdk: Path) -> None:
    (sdk / "lib/x86_64-linux-clang/libQnnLpai.so").unlink()


def _with_unsigned_skel(sdk: Path) -> None:
    skels = sdk / "lib/lpai-v6"
    shutil.copy(skels / "unsigned/libQnnLpaiSkel.so", skels / "signed/libQnnLpaiSkel.so")


def _without_skel(sdk: Path) -> None:
    shutil.rmtree(sdk / "lib/lpai-v6/signed")


@pytest.mark.parametrize(
    ("spoil", "code", "message"),
    [
        (_without_library, 6, r"libQnnLpai\.so"),
        (_with_unsigned_skel, 2, r"signed/libQnnLpaiSkel\.so.*not signed"),
        (_without_skel, 6, r"signed/libQnnLpaiSkel\.so.*farm setup sign"),
    ],
)
def test_an_sdk_that_lacks_something_is_refused(
    home: FarmHome, stub_sdk: StubSdk, tmp_path: Path, spoil: Callable[[Path], None], code: int, message: str
) -> None:
    sdk = tmp_path / "spoilt-stub-sdk"
    shutil.copytree(stub_sdk.root, sdk, symlinks=True)
    spoil(sdk)
    done = run(home, sdk)
    assert (done.returncode, done.stdout) == (code, ""), done.stderr
    [line] = [line for line in done.stderr.splitlines() if "libQnnLpai" in line]
    assert re.search(message, line), line
    assert wait_for_no_process(home) == {}


@pytest.mark.whole
def test_a_sweep_is_one_command_and_its_page_a_matrix_of_feasible_and_infeasible_settings(
    home: FarmHome, stub_sdk: StubSdk
) -> None:
    # The stub keeps up to 20 frames a second with ftrt_ratio 10, on core 1 alone 10.
    sweep = ("--option", "lpai_fps=5,20,100", "--option", "lpai_ftrt_ratio=10,60", "--option", "core_selection=0,2")
    done = run(home, stub_sdk.root, "-k", "block", *sweep, "--json")
    assert done.returncode == 0, done.stderr
    view = json.loads(done.stdout)
    last = {tuple(int(job["options"][name]) for name in ("core_selection", "lpai_fps", "lpai_ftrt_ratio")): job
            for job in view["jobs"]}  # fmt: skip
    refused = {place for place, job in last.items() if job["attempts"][-1]["cause"] == "infeasible"}
    assert refused == {(0, 100, 10), (2, 20, 10), (2, 100, 10), (2, 100, 60)}
    assert {job["attempts"][-1]["verdict"] for place, job in last.items() if place not in refused} == {"passed"}
    assert all(len(last[place]["attempts"]) == 1 for place in refused)
    # Each refusal was proven: the runner loaded the same program without the demand for real time.
    assert stub_sdk.told("farm_runner").count("graph_set_config fps=20 ftrt_ratio=10 client_perf_type=2") == 1
    page = (home.state / "runs" / view["id"] / "report.html").read_text()
    section = page[page.index('<section id="frames"') :].partition("</section>")[0]
    assert (section.count("✗ infeasible"), section.count("✓ pass")) == (4, 8)
    assert "block[SM8850-lpai-8a8w]</strong>" in section
    assert "is a rule of the stub" in section
