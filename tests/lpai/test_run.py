"""LPAI from the command line: runs, direct mode, generated operators, and ExecuTorch's own tests."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from executorch_checkout import installed
from farm_home import FarmHome, wait_for_no_process
from lpai_sdk_stub import StubSdk
from programs import run_program

from farm.base.socs import find_soc
from farm.builds.runtime.qnn_sdk import ANDROID_FOLDER as TARGET
from farm.devices.virtual.tree import SU
from farm.dispatch.pytest_plugin.upstream import lay_out_sdk, runner_script
from farm.suites.manifests import find_suites, load_suite

# `farm run --backend lpai` as a user calls it, on a virtual device, with a stub of an SDK that has LPAI.


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


# LPAI in direct mode, on a virtual device: the stub of its runner in front of the stub of its library.


WORDS = ("--soc", "SM8850", "--suite", str(SUITE), "--backend", "lpai", "--virtual", "1", "-k", "block")


@pytest.mark.whole
def test_a_job_runs_in_the_signed_process_domain_as_root(home: FarmHome, stub_sdk: StubSdk) -> None:
    words = (*WORDS, "--option", "direct_mode=true", "--option", "fps=9", "--json")
    done = home.farm("run", *words, env={"QNN_SDK_ROOT": str(stub_sdk.root)}, timeout_s=300, code=0)
    [job] = json.loads(done.stdout)["jobs"]
    assert job["id"] == "lpai_cases/block[SM8850-lpai-8a8w-direct_mode=true-fps=9]"
    [attempt] = job["attempts"]
    assert "STUB of direct mode, domain 0" in attempt["log"]
    assert all(found["sqnr_db"] > 30 for found in attempt["comparisons"])
    # Options that are compiled in count; this machine has x86's library, where a device would have the audio DSP's.
    assert "graph_set_config fps=9 ftrt_ratio=10 client_perf_type=1" in stub_sdk.told("farm_runner")


@pytest.mark.whole
def test_one_command_runs_a_case_in_both_modes_and_compares_latency_and_bytes(
    home: FarmHome, stub_sdk: StubSdk
) -> None:
    modes = ("--options", "direct_mode=false", "--options", "direct_mode=true")
    done = home.farm(
        "perf", "compare", *WORDS, *modes, "--json", env={"QNN_SDK_ROOT": str(stub_sdk.root)}, timeout_s=400
    )
    assert done.returncode == 0, done.stderr
    [job] = json.loads(done.stdout)["jobs"]
    assert [job[side]["job_id"] for side in "ab"] == [
        f"lpai_cases/block[SM8850-lpai-8a8w-direct_mode={mode}]" for mode in ("false", "true")
    ]
    equal, total = job["outputs"]
    assert equal == total > 0
    assert job["modes_alone"]
    latency = next(one for one in job["metrics"] if one["metric"] == "latency")
    assert latency["pairs"] >= 6
    assert "STUB" in done.stderr


# The suite `lpai_ops`: the operators with rules in the installed ExecuTorch, and their results over the stub.


TOOL = Path(__file__).parents[2] / "tools" / "generate_lpai_ops.py"
SIXTEEN_BITS = """
[suite]
name = "sixteen"
description = "activations of 16 bits on LPAI"
backends = ["lpai"]
precisions = ["16a8w"]
[suite.tolerance.16a8w]
quantized = { sqnr_db = 40.0 }
[case.full]
module = "torch.nn:ReLU"
inputs = [{ shape = [8, 16] }]
"""


def ruled_operators() -> set[str]:
    """Return what LPAI's rules are registered for in the installed quantizer, whose import takes torch."""
    rules = ast.parse((installed() / "backends/qualcomm/quantizer/annotators/lpai_rules.py").read_text()).body
    calls = [one for node in rules if isinstance(node, ast.ClassDef) for one in node.decorator_list]
    names = {
        ast.unparse(one)
        for call in calls
        if isinstance(call, ast.Call)
        for one in ast.walk(call.args[0])
        if isinstance(one, ast.Attribute)
    }
    return {name.removeprefix("torch.ops.") for name in names}


def test_the_suite_has_every_case_whose_operators_have_a_rule_and_no_other() -> None:
    suites = find_suites()
    found: dict[str, dict[str, list[str]]] = json.loads((suites["lpai_ops"].parent / "rules.json").read_bytes())
    written = {case.name: case.precisions for case in load_suite(suites["quantized_ops"]).cases}
    assert set(found) == set(written), f"run {TOOL.name}"
    ruled = ruled_operators() | {"<built-in function getitem>"}
    assert len(ruled) > 100
    expected = {
        # Activations of 16 bits do not reach LPAI's delegate whole: docs/reference/backends.md, and the last test.
        name: tuple(precision for precision in written[name] if not precision.startswith("16a"))
        for name, one in found.items()
        if ruled.issuperset(one["operators"])
    }
    suite = load_suite(suites["lpai_ops"])
    assert {case.name: case.precisions for case in suite.cases} == {
        name: precisions for name, precisions in expected.items() if precisions
    }, f"run {TOOL.name}"
    assert {precision for case in suite.cases for precision in case.precisions} == {"8a8w", "8a4w", "fp16a8w"}
    # Cases of the suite that `lpai_ops` has replaced.
    assert {"conv2d", "linear", "add", "relu", "max_pool2d"} <= expected.keys()


def test_a_listing_has_the_known_issues_of_the_suites_backends_alone(home: FarmHome) -> None:
    lines = {line.split()[0]: line for line in home.farm("suites", "lpai_ops").stdout.splitlines() if line}
    # HTP's known issue of the same case is not one here.
    assert lines["cast_to_int32"].endswith("8a8w  (known issue: 8a8w)")
    assert lines["relu"].endswith("8a8w")


# Another ExecuTorch or another case changes them: the first test finds a case without entry.
@pytest.mark.soak
def test_the_operators_of_each_case_are_as_written(home: FarmHome) -> None:
    run_program(
        [sys.executable, str(TOOL), "--check"],
        env={**home.env, "PYTHONPATH": os.environ.get("PYTHONPATH", "")},
        timeout_s=900,
    )


@pytest.mark.whole
def test_defects_of_executorch_and_of_the_stub_are_known_and_sixteen_bits_are_refused(
    home: FarmHome, stub_sdk: StubSdk, tmp_path: Path
) -> None:
    sixteen = tmp_path / "sixteen" / "suite.toml"
    sixteen.parent.mkdir()
    sixteen.write_text(SIXTEEN_BITS)
    suites = ("--suite", "lpai_ops", "--suite", str(sixteen.parent))
    devices = ("--soc", "SM8850", "--backend", "lpai", "--virtual", "1")
    # In the numbers by ExecuTorch's program and by the stub, in the build, and as it should be.
    chosen = ("-k", "index_put_accumulate or cast_from_bool or full or scatter_src")
    done = home.farm(
        "run", *suites, *devices, *chosen, "--json", env={"QNN_SDK_ROOT": str(stub_sdk.root)}, timeout_s=400, code=1
    )
    last = {job["id"].partition("[")[0]: job["attempts"][-1] for job in json.loads(done.stdout)["jobs"]}
    known = {name.rpartition("/")[2]: one["known_issue"] for name, one in last.items() if one["verdict"] == "failed"}
    assert known.pop("full") == ""
    assert known.keys() == {"index_put_accumulate", "cast_from_bool", "full_like"}
    assert all("LPAI" in issue for issue in known.values())
    assert {name for name, one in last.items() if one["verdict"] == "passed"} == {
        "lpai_ops/full", "lpai_ops/scatter_src",
    }  # fmt: skip
    # QNN would read two codes of 16 bits in place of a code of 32.
    assert last["sixteen/full"]["stage"] == "build"
    assert last["sixteen/full"]["reason"].startswith(
        "MisreadCodesError: activations of 16a8w do not reach the lpai backend with this ExecuTorch: the CPU has them "
        "in int32, and QNN reads and writes uint16: "
    )


# ExecuTorch's own LPAI tests under `farm pytest`: the SDK that their `SimpleADB` reads, and one test.


CASES = Path(__file__).with_name("lpai_cases")
STUBS = Path(__file__).parents[1] / "conformance" / "model_stubs"
CONFORMANCE = Path(__file__).parents[2] / "tools" / "conformance.py"


def test_what_the_sdk_has_for_a_phone_stays_visible_beside_the_stubs(tmp_path: Path) -> None:
    sdk = tmp_path / "sdk"
    files = ("sdk.yaml", f"lib/{TARGET}/libQnnLpai.so", f"lib/{TARGET}/libQnnNew.so", "lib/lpai-v6/unsigned/a.so",
             "lib/lpai-v6/signed/libQnnLpaiSkel.so", "lib/hexagon-v81/unsigned/libQnnSystem.so",
             "lib/x86_64-linux-clang/libQnnLpai.so")  # fmt: skip
    for name in files:
        (sdk / name).parent.mkdir(parents=True, exist_ok=True)
        (sdk / name).write_text(name)
    laid_out = lay_out_sdk(tmp_path / "laid-out", sdk, find_soc("SM8850"))
    assert {name: (laid_out / name).read_text() for name in files} == {name: name for name in files}
    for name in (f"{TARGET}/libQnnLpaiStub.so", f"{TARGET}/libQnnHtp.so", "hexagon-v81/unsigned/libQnnHtpV81Skel.so"):
        assert "stub" in (laid_out / "lib" / name).read_text()
    # The SDK itself is as it was.
    assert {str(path.relative_to(sdk)) for path in sdk.rglob("*") if path.is_file()} == set(files)


@pytest.mark.parametrize(
    ("build", "elevation"), [("", ()), ("rooted-by-su", ("su", "0", "sh", "-c")), ("rooted-by-magisk", ("su", "-c"))]
)
def test_the_runner_that_simpleadb_calls_gets_every_word_as_it_was(
    tmp_path: Path, build: str, elevation: tuple[str, ...]
) -> None:
    runner, su = tmp_path / "runner", tmp_path / "su"
    su.write_text(SU.get(build, ""))
    su.chmod(0o755)
    prefix = [str(su), *elevation[1:]] if elevation else []
    runner.write_text(runner_script("env NAME=value printf %s@", prefix))
    words = ["--model_path", "it's", "a  b", "$(id)", '"', "`id`", "\\n", ""]
    done = subprocess.run(["sh", str(runner), *words], capture_output=True, text=True, check=True, timeout=30)
    assert done.stdout == "".join(f"{word}@" for word in words)


@pytest.mark.whole
def test_upstreams_tests_and_layers_on_a_device_that_su_makes_root(home: FarmHome, stub_sdk: StubSdk) -> None:
    paths = (str(STUBS), os.environ.get("PYTHONPATH", ""))
    sdk = {"QNN_SDK_ROOT": str(stub_sdk.root), "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    up = ("virtual", "up", "--soc", "SM8850", "--build-type", "rooted-by-su", "--own-server")
    with home.running(*up, env=sdk) as devices:
        assert devices.stdout is not None
        lines = (devices.stdout.readline() for _ in range(20))
        port = next(line for line in lines if "ANDROID_ADB_SERVER_PORT=" in line).strip().rpartition("=")[2]
        attached = {**sdk, "ANDROID_ADB_SERVER_PORT": port}
        stub_sdk.forget()
        tests = "executorch.backends.qualcomm.tests.test_qnn_delegate"
        chosen = ("--pyargs", tests, "-k", "TestQNNQuantizedOperator and (backend_relu6 or backend_sign)")
        done = home.farm(
            "pytest", "--soc", "SM8850", "--backend", "lpai", "--json", "--", *chosen, env=attached, timeout_s=600
        )
        assert done.returncode == 1, done.stderr
        last = {job["id"]: job["attempts"][-1] for job in json.loads(done.stdout)["jobs"]}
        assert {name.rpartition("::")[2]: one["verdict"] for name, one in last.items()} == {
            "test_qnn_backend_relu6[SM8850-lpai]": "passed",
            # LPAI's rules have no sign.
            "test_qnn_backend_sign[SM8850-lpai]": "failed",
        }
        # Compiled for a phone's processor, and executed by LPAI's library.
        assert "backend_create target=1 hardware=6" in stub_sdk.told("qnn_executor_ru")
        view = home.json("debug", f"{CASES}/split[SM8850-lpai-8a8w]", env=attached, timeout_s=600)
        assert list(view["devices"]) == ["device"]
        assert [layer["operator"] for layer in view["layers"] if layer["compiler"]] == [
            "aten.relu.default", "aten.gelu.default", "aten.add.Tensor", "aten.relu.default",
        ]  # fmt: skip
        here = home.farm("debug", f"{CASES}/split[SM8850-lpai-8a8w]", "--virtual", "--json", env=sdk, timeout_s=600)
        assert (here.returncode, list(json.loads(here.stdout)["devices"])) == (0, ["simulator"])
    assert wait_for_no_process(home) == {}


@pytest.mark.soak
def test_one_command_makes_the_stub_and_prints_what_came_out(home: FarmHome) -> None:
    chosen = ("--only", "newer", "--", "-k", "test_lpai_partition_fallback_support")
    done = subprocess.run(
        [sys.executable, str(CONFORMANCE), "--lpai", *chosen],
        env={**home.env, "PYTHONPATH": os.environ.get("PYTHONPATH", "")},
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert "| `rework/passes/test.py` | 1 | 1 | 0 | 0 | 0 | 0 | 0 |" in done.stdout
    assert wait_for_no_process(home) == {}
