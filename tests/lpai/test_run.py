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


def run(home: FarmHome, sdk: Path, *words: str) -> subprocess.CompletedProcess[str]:
    arguments = ("run", "--soc", "SM8850", "--suite", str(SUITE), "--backend", "lpai", "--virtual", "1", *words)
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
    reasons = {
        "whole": "2 partitions and aten.gelu.default x1 left to the CPU, expected 1 partition and nothing left",
        "weights": "DelegationError: the lpai backend does not take aten.prelu.default, and ExecuTorch leaves",
    }
    for fps in ("5", "10"):
        options = f"[SM8850-lpai-8a8w-core_selection=1-lpai_fps={fps}]"
        block = last[f"lpai_cases/block{options}"]
        counters = {found["metric"]: found["samples"] for found in block["measurements"] if found["exact"]}
        assert (counters["partitions"], counters["fallback_ops"]) == ([1], [2])
        # The case `split` declares the part of a graph on the CPU.
        for passed in (block, last[f"lpai_cases/split{options}"]):
            assert passed["verdict"] == "passed"
            # HTP's simulator, for want of one for LPAI, executes the compiled program correctly.
            assert all(found["sqnr_db"] > 30 for found in passed["comparisons"])
        for case, reason in reasons.items():
            refused = last[f"lpai_cases/{case}{options}"]
            assert (refused["verdict"], refused["stage"]) == ("failed", "build")
            assert refused["reason"].startswith(reason)
    # A process of the runner for each set of run-time options, after the health check; the compiled options are the
    # same for both. The device is this machine: x86 is 0, V6 is 6.
    runner = stub_sdk.told("farm_runner")
    for word, expected in (
        ("fps", [f"graph_set_config fps={fps} ftrt_ratio=10 client_perf_type=1" for fps in (1, 5, 10)]),
        ("affinity", [f"graph_set_config affinity=1 core_selection={core}" for core in (0, 1)]),
        ("backend_create", ["backend_create target=0 hardware=6"]),
    ):
        assert list(dict.fromkeys(line for line in runner if word in line)) == expected
    assert wait_for_no_process(home) == {}


def test_every_command_with_a_toolchain_names_the_stub(home: FarmHome, stub_sdk: StubSdk) -> None:
    done = home.farm(
        "setup", "toolchain", "show", "default", "--json", env={"QNN_SDK_ROOT": str(stub_sdk.root)}, timeout_s=300
    )
    assert json.loads(done.stdout)["branch"] == "stub"
    assert "STUB: QNN's libraries are a stub (stub); no number is a measurement of Qualcomm's products" in done.stderr


SKELS, SKEL = "lib/lpai-v6", "libQnnLpaiSkel.so"


@pytest.mark.parametrize(
    ("spoil", "code", "message"),
    [
        (lambda sdk: (sdk / "lib/x86_64-linux-clang/libQnnLpai.so").unlink(), 6, r"libQnnLpai\.so"),
        (
            lambda sdk: shutil.copy(sdk / SKELS / "unsigned" / SKEL, sdk / SKELS / "signed" / SKEL),
            2, r"signed/libQnnLpaiSkel\.so.*not signed",
        ),
        (lambda sdk: shutil.rmtree(sdk / SKELS / "signed"), 6, r"signed/libQnnLpaiSkel\.so.*farm setup sign"),
    ],
)  # fmt: skip
def test_an_sdk_that_lacks_something_is_refused(
    home: FarmHome, stub_sdk: StubSdk, tmp_path: Path, spoil: Callable[[Path], object], code: int, message: str
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
