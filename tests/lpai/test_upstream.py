"""ExecuTorch's own LPAI tests under `farm pytest`: the SDK that their `SimpleADB` reads, and one test."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from farm_home import FarmHome, wait_for_no_process
from lpai_sdk_stub import StubSdk

from farm.base.socs import find_soc
from farm.builds.runtime.qnn_sdk import ANDROID_FOLDER as TARGET
from farm.devices.virtual.tools import SU
from farm.dispatch.pytest_plugin.upstream import lay_out_sdk, runner_script

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
