"""`farm setup runtime` and `farm setup sign`: states match the files, and printed values can be used."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path

import pytest
from elf_maker import make_elf
from farm_home import FarmHome
from hexagon_sdk_stub import make_hexagon_sdk, processes, starts
from programs import run_program

from farm.builds.runtime.native import build_native
from farm.builds.runtime.parts import AARCH64, HEXAGON, X86_64
from farm.builds.runtime.runtime import linux_runtime, simulator_runtime

# `farm setup runtime`: states match the files, and the printed values can be used.


NO_NDK = {"ANDROID_NDK_ROOT": "", "QNN_SDK_ROOT": ""}
CHECK = ("setup", "runtime", "check", "--soc", "SM8650")
CHECK_ANDROID = (*CHECK, "--target", "android-arm64")
STAGE = ("setup", "runtime", "stage", "--soc", "SM8650")


@pytest.fixture
def empty(tmp_path: Path) -> dict[str, str]:
    """A cache in which nothing is built."""
    return {**NO_NDK, "FARM_CACHE_DIR": str(tmp_path / "empty-cache")}


def _table(text: str) -> list[str]:
    """The lines of the table that a text begins with; folders, which are as long as they are, are no part of it."""
    lines = [line for line in text.partition("\n\n")[0].splitlines() if not line.startswith("/")]
    assert max(map(len, lines)) <= 80
    return lines


def test_a_runtime_that_is_not_built_says_how_to_build_it(home: FarmHome, empty: dict[str, str]) -> None:
    checked = home.farm(*CHECK, env=empty, code=6)
    assert not (Path(empty["FARM_CACHE_DIR"]) / "native").exists()
    states = {words[0]: words[-1] for line in _table(checked.stdout) if (words := line.split())}
    assert [states[name] for name in ("farm_runner", "libQnnHtp.so", "libexecutorch.so")] == ["built", "built", "ok"]
    assert "farm_runner, libQnnHtp.so:\n  farm setup runtime build\n" in checked.stdout


def test_a_complete_runtime_is_the_one_of_virtual_devices(home: FarmHome, farm_cache: Path) -> None:
    runtime = simulator_runtime(farm_cache)
    answer = home.json(*CHECK)
    assert (answer["ok"], answer["target"]) == (True, "linux-x86_64")
    found = {one["name"]: (one["source"], one["state"], one["made_for"], one["sha256"]) for one in answer["files"]}
    assert found == {
        name: (str(path.resolve()), "ok", "x86-64", runtime.hashes[name]) for name, path in runtime.files.items()
    }
    native = build_native(farm_cache)
    built = home.farm("setup", "runtime", "build", code=0)
    assert (built.stdout, built.stderr) == (f"{native.runner}\n", "")


@pytest.fixture
def android(home: FarmHome) -> Path:
    """A farm.toml that names a stub of an SDK for SM8650, a runner and a backend library."""
    sdk = home.cwd / "stub-sdk"
    skel = sdk / "lib" / "hexagon-v75" / "unsigned" / "libQnnHtpV75Skel.so"
    libraries = sdk / "lib" / "aarch64-android"
    for folder in (skel.parent, libraries):
        folder.mkdir(parents=True)
    skel.write_bytes(make_elf(HEXAGON, 0x75))
    for name in ("System", "Htp", "HtpPrepare", "HtpV75Stub"):
        (libraries / f"libQnn{name}.so").write_bytes(make_elf(AARCH64))
    for name in ("farm_runner", "libqnn_executorch_backend.so"):
        (home.cwd / name).write_bytes(make_elf(AARCH64))
    (home.cwd / "farm.toml").write_text(
        '[qnn]\nsdk_root = "stub-sdk"\nandroid_runner = "farm_runner"\n'
        'android_backend_library = "libqnn_executorch_backend.so"\n'
    )
    return sdk


def test_a_fault_of_a_file_is_told_with_its_repair(home: FarmHome, android: Path) -> None:
    checked = home.farm(*CHECK_ANDROID, env=NO_NDK, code=0).stdout
    assert "Hexagon V75" in next(line for line in checked.splitlines() if "libQnnHtpV75Skel.so" in line)
    (android / "lib/hexagon-v75/unsigned/libQnnHtpV75Skel.so").write_bytes(make_elf(HEXAGON, 0x73))
    (android / "lib/aarch64-android/libQnnHtp.so").write_bytes(make_elf(X86_64))
    (android / "lib/aarch64-android/libQnnHtpV75Stub.so").write_bytes(b"no ELF")
    (android / "lib/aarch64-android/libQnnSystem.so").unlink()
    answer = home.json(*CHECK_ANDROID, env=NO_NDK, code=6)
    bad = {one["name"]: one for one in answer["files"] if one["state"] != "ok"}
    assert {name: one["state"] for name, one in bad.items()} == {
        "libQnnHtpV75Skel.so": "wrong arch",
        "libQnnHtp.so": "wrong CPU",
        "libQnnHtpV75Stub.so": "damaged",
        "libQnnSystem.so": "missing",
    }
    assert "V73" in bad["libQnnHtpV75Skel.so"]["problem"]
    assert all(one["repair"] for one in bad.values())


def test_a_runtime_is_staged_into_a_folder_with_the_command_that_runs_it(home: FarmHome, android: Path) -> None:
    done = home.farm(*STAGE, "device", env=NO_NDK, code=0)
    checked = home.json(*CHECK_ANDROID, env=NO_NDK)
    staged = {path.name: path.read_bytes() for path in (home.cwd / "device").iterdir()}
    assert staged == {one["name"]: Path(one["source"]).read_bytes() for one in checked["files"]}
    assert (home.cwd / "device" / "farm_runner").stat().st_mode & 0o111
    assert "  LD_LIBRARY_PATH=. ADSP_LIBRARY_PATH=. ./farm_runner --model_path model.pte" in done.stdout
    again = home.farm(*STAGE, "device", env=NO_NDK, code=2)
    assert "device is not empty: name a folder that is not there yet" in again.stderr
    (android / "lib/aarch64-android/libQnnHtp.so").unlink()
    for words, code, message in (
        (["other"], 6, "a file that is missing: libQnnHtp.so"),
        (["--backend", "gpu", "--direct", "other"], 2, "direct mode runs on a DSP: legal are htp and lpai, not gpu"),
        (["--target", "linux-x86_64", "other"], 2, "there is nothing to stage of htp for linux-x86_64"),
    ):
        assert message in home.farm(*STAGE, *words, env=NO_NDK, code=code).stderr
    assert not (home.cwd / "other").exists()


def test_the_environment_can_be_evaluated_once_and_twice_and_starts_the_runner(
    home: FarmHome, farm_cache: Path
) -> None:
    simulator_runtime(farm_cache)
    show = 'printf "%s\\n" "$QNN_SDK_ROOT" "$LD_LIBRARY_PATH" "$QNN_EXECUTOR_RUNNER"; '
    first, again = (
        f'eval "$({sys.executable} -m farm.cli.main setup runtime env{words})"; ' for words in (" --soc SM8650", "")
    )
    # Upstream's tests replace LD_LIBRARY_PATH when they start the runner.
    start = 'unset LD_LIBRARY_PATH; "$QNN_EXECUTOR_RUNNER" --version'
    script = ["sh", "-euc", first + show + again + show + start]
    done = run_program(script, env={**home.env, "LD_LIBRARY_PATH": "/opt/it's mine"}, cwd=home.cwd)
    *shown, version = done.stdout.splitlines()
    assert version.startswith("farm_runner ")
    assert shown[:3] == shown[3:]
    root, path, runner = shown[:3]
    assert (Path(root) / "lib" / "x86_64-linux-clang" / "libQnnHtp.so").is_file()
    libraries, executorch, mine = path.split(":")
    assert (libraries, mine) == (f"{root}/lib/x86_64-linux-clang", "/opt/it's mine")
    assert (Path(executorch) / "libexecutorch.so").is_file()
    assert Path(runner).name == "qnn_executor_runner"


@pytest.mark.whole
@pytest.mark.skipif(not shutil.which("aarch64-linux-gnu-g++"), reason="apt-get install g++-aarch64-linux-gnu")
def test_a_runtime_for_arm_linux_says_what_its_device_needs(home: FarmHome, farm_cache: Path) -> None:
    runtime = linux_runtime(farm_cache)
    target = ("--target", "linux-aarch64")
    done = home.farm("setup", "runtime", "check", "--soc", "QCM6490", "--backend", "xnnpack", *target, code=0)
    assert done.stdout.count("AArch64") == len(runtime.files)
    assert "the device needs GLIBC 2." in done.stdout
    assert home.farm("setup", "runtime", "build", *target).stdout == f"{runtime.files['farm_runner']}\n"


# `farm setup sign` as a user calls it, with a stub of elfsigner.


NOTHING = {"QNN_SDK_ROOT": "", "HEXAGON_SDK_ROOT": "", "HEXAGON_TOOLS_ROOT": ""}
SIGN = ("setup", "sign", "--lpai", "v6")


@pytest.fixture
def sdk(home: FarmHome) -> Path:
    """A stub of an SDK with the unsigned skel of LPAI v6."""
    root = home.cwd / "stub-sdk"
    skel = root / "lib/lpai-v6/unsigned/libQnnLpaiSkel.so"
    skel.parent.mkdir(parents=True)
    skel.write_bytes(make_elf(164, 0x81))
    return root


@pytest.fixture
def roots(home: FarmHome, sdk: Path) -> dict[str, str]:
    hexagon = make_hexagon_sdk(home.cwd / "stub-hexagon-sdk")
    return {**NOTHING, "QNN_SDK_ROOT": str(sdk), "HEXAGON_SDK_ROOT": str(hexagon)}


def test_it_signs_once_and_says_what_it_did(home: FarmHome, sdk: Path, roots: dict[str, str]) -> None:
    signed, hexagon = sdk / "lib/lpai-v6/signed", home.cwd / "stub-hexagon-sdk"
    done = home.farm(*SIGN, env=roots, code=0)
    assert done.stdout == f"{signed}\n  {'libQnnLpaiSkel.so':<36}signed\n"
    assert f"farm: signing {sdk}/lib/lpai-v6/unsigned/libQnnLpaiSkel.so" in done.stderr
    assert "  elfsigner:         Agree? [y/n]:" in done.stderr
    again = home.json("setup", "sign", "--lpai", "6", env=roots)
    assert again["files"] == [{"file": str(signed / "libQnnLpaiSkel.so"), "state": "is signed already"}]
    assert starts(hexagon) == 1
    checked = home.json("setup", "runtime", "check", "--soc", "SM8850", "--backend", "lpai", env=roots, code=None)
    assert {one["name"]: one["state"] for one in checked["files"]}["libQnnLpaiSkel.so"] == "ok"


def test_a_file_that_others_signed_is_neither_replaced_nor_trusted_unless_told(
    home: FarmHome, sdk: Path, roots: dict[str, str]
) -> None:
    skel = sdk / "lib/lpai-v6/signed/libQnnLpaiSkel.so"
    skel.parent.mkdir()
    skel.write_bytes(by_others := make_elf(164, 0x81, segments=((0, 2 << 24), (1, 5))))
    refused = home.farm(*SIGN, env=roots, code=2)
    assert "signed, but not by this command: --adopt vouches for it as it is, --force signs anew" in refused.stderr
    adopted = home.farm(*SIGN, "--adopt", env={**roots, "HEXAGON_SDK_ROOT": ""}, code=0)
    assert (adopted.stdout.split()[-1], skel.read_bytes()) == ("adopted", by_others)
    home.farm(*SIGN, "--force", env=roots, code=0)
    assert skel.read_bytes() != by_others


def test_bad_input_is_one_line(home: FarmHome, roots: dict[str, str]) -> None:
    bad: list[tuple[str, dict[str, str], int, str]] = [
        ("--lpai v6", {"HEXAGON_SDK_ROOT": ""}, 6, "set HEXAGON_SDK_ROOT to a Hexagon SDK from Qualcomm"),
        ("--lpai six", {}, 2, "--lpai: 'six' is no version: expected something like v6"),
        ("--lpai v5", {}, 2, "no SoC has LPAI v5: known are v6"),
        ("--lpai v6 --adopt", {}, 2, "/lib/lpai-v6/signed: put signed files there, as libQnnLpaiSkel.so"),
        ("--adopt", {}, 2, "name the version of the LPAI: --lpai v6"),
        ("--lpai v6 --adopt --force", {}, 2, "--adopt signs nothing: leave --force out"),
        ("--lpai v6", {"QNN_SDK_ROOT": "/nonexistent"}, 6, "the QNN SDK folder /nonexistent does not exist"),
    ]
    for words, changes, code, message in bad:
        assert message in home.refused("setup", "sign", *words.split(), env={**roots, **changes}, code=code), words
    assert starts(home.cwd / "stub-hexagon-sdk") == 0


def test_an_interrupted_signing_leaves_nothing(home: FarmHome, sdk: Path, roots: dict[str, str]) -> None:
    make_hexagon_sdk(home.cwd / "stub-hexagon-sdk", "hangs")
    farm = home.start_alone(*SIGN, env={**roots, "FARM_CACHE_DIR": str(home.cwd / "cache")})
    while b"red" not in (line := farm.stderr.readline()):
        assert line
    os.kill(farm.pid, signal.SIGINT)
    farm.communicate(timeout=60)
    assert farm.returncode == 130
    assert processes(home.cwd / "stub-hexagon-sdk") == []
    assert [path for path in (home.cwd / "cache").rglob("*") if path.is_file()] == []
    assert not (sdk / "lib/lpai-v6/signed").exists()
