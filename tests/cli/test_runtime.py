"""`farm setup runtime`: the list matches the files, and the printed values can be used."""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from farm_home import FarmHome
from programs import run_program

from farm.builds.runtime.native.build import build_native
from farm.builds.runtime.runtime import simulator_runtime

NO_NDK = {"ANDROID_NDK_ROOT": "", "QNN_SDK_ROOT": ""}
BAD_INPUT = [
    (("check", "--soc", "SM8651"), "unknown SoC 'SM8651': did you mean 'SM8650'?"),
    (("check", "--soc", "SM8650", "--backend", "hpt"), "unknown backend 'hpt': did you mean 'htp'?"),
    (("check", "--soc", "SM8650", "--target", "linux-x86"), "did you mean 'linux-x86_64'?"),
    (("check", "--soc", "SM8650", "--backend", "lpai"), "SM8650 has no lpai backend"),
    (("check", "--soc", "SM8650", "--backend", "gpu", "--target", "linux-x86_64"), "there is no gpu simulator"),
    (("check", "--soc", "SM8650", "--target", "linux-aarch64"), "use --target linux-x86_64 or android-arm64"),
    (("list", "--soc", "SM865"), "did you mean 'SM8650'?"),
    (("list", "--backend", "dsp"), "unknown backend 'dsp'"),
    (("build", "--target", "android-arm"), "did you mean 'android-arm64'?"),
    (("build", "--target", "android-arm64"), "ANDROID_NDK_ROOT is not set: set ANDROID_NDK_ROOT"),
    (("env", "--soc", "SM8651"), "did you mean 'SM8650'?"),
    (("chek",), "unknown command 'chek': did you mean 'check'?"),
]


@pytest.mark.parametrize(("arguments", "says"), BAD_INPUT)
def test_bad_input_is_one_line(home: FarmHome, arguments: tuple[str, ...], says: str) -> None:
    done = home.farm("setup", "runtime", *arguments, env=NO_NDK)
    assert (done.returncode, done.stdout) == (6 if "NDK" in says else 2, "")
    assert len(done.stderr.splitlines()) == 1
    assert says in done.stderr


@pytest.fixture
def empty(tmp_path: Path) -> dict[str, str]:
    """A cache in which nothing is built."""
    return {**NO_NDK, "FARM_CACHE_DIR": str(tmp_path / "empty-cache")}


def _table(text: str) -> list[str]:
    """The lines of the table that a text begins with; folders, which are as long as they are, are no part of it."""
    return [line for line in text.partition("\n\n")[0].splitlines() if not line.startswith("/")]


def test_listing_says_what_is_ready_what_is_not_built_and_what_is_missing(
    home: FarmHome, empty: dict[str, str]
) -> None:
    listed = home.farm("setup", "runtime", "list", "--soc", "SM8650", env=empty)
    assert (listed.returncode, listed.stderr) == (0, "")
    table = _table(listed.stdout)
    assert [line.split()[0] for line in table] == [
        "runtime", "simulator", "linux-aarch64", "android-htp-v75", "android-gpu", "android-xnnpack",
        "oe-linux-htp-v75", "oe-linux-gpu",
    ]  # fmt: skip
    assert table[1].endswith("not built")
    assert table[3].endswith("lacks 7 files")
    assert all(len(line) <= 80 for line in listed.stdout.splitlines())
    assert "  farm setup runtime build\n" in listed.stdout
    assert "set QNN_SDK_ROOT to a QNN SDK" in listed.stdout
    assert not (Path(empty["FARM_CACHE_DIR"]) / "native").exists()


def test_without_an_soc_there_is_one_runtime_for_each_architecture(home: FarmHome, empty: dict[str, str]) -> None:
    answer = json.loads(home.farm("setup", "runtime", "list", "--json", env=empty).stdout)
    assert answer["schema"] == 1
    names = [one["name"] for one in answer["runtimes"]]
    assert len(names) == len(set(names))
    archs = (68, 69, 73, 75, 79, 81)
    assert [name for name in names if "htp" in name] == [
        f"{kind}-htp-v{arch}" for kind in ("android", "oe-linux") for arch in archs
    ]
    direct = json.loads(home.farm("setup", "runtime", "list", "--direct", "--json", env=empty).stdout)
    assert [one["name"] for one in direct["runtimes"]] == [
        *(f"android-htp-v{arch}-direct" for arch in archs),
        "android-lpai-v6-direct",
    ]
    only = json.loads(home.farm("setup", "runtime", "list", "--backend", "lpai", "--json", env=empty).stdout)
    assert [one["name"] for one in only["runtimes"]] == [
        "simulator-lpai-v6",
        "android-lpai-v6",
        "oe-linux-lpai-v6",
    ]


def test_checking_names_every_file_and_the_command_that_builds(home: FarmHome, empty: dict[str, str]) -> None:
    done = home.farm("setup", "runtime", "check", "--soc", "SM8650", env=empty)
    assert (done.returncode, done.stderr) == (6, "")
    states = {words[0]: words for line in _table(done.stdout) if (words := line.split())}
    assert states["farm_runner"][-2:] == ["not", "built"]
    assert states["libQnnHtp.so"][-2:] == ["not", "built"]
    assert states["libexecutorch.so"][-1] == "ok"
    assert "farm_runner, libQnnHtp.so:\n  farm setup runtime build\n" in done.stdout
    assert all(len(line) <= 80 for line in _table(done.stdout))


def test_a_runtime_that_is_complete_is_what_a_virtual_device_gets(home: FarmHome, farm_cache: Path) -> None:
    runtime = simulator_runtime(farm_cache)
    answer = home.json("setup", "runtime", "check", "--soc", "SM8650")
    assert (answer["schema"], answer["ok"], answer["target"]) == (1, True, "linux-x86_64")
    files = {one["name"]: one for one in answer["files"]}
    assert set(files) == set(runtime.files)
    for name, path in runtime.files.items():
        assert files[name]["source"] == str(path.resolve())
        assert files[name]["nbytes"] == path.stat().st_size
        assert (files[name]["state"], files[name]["made_for"]) == ("ok", "x86-64")
        assert files[name]["sha256"] == runtime.hashes[name]
    text = home.farm("setup", "runtime", "check", "--soc", "SM8650", code=0)
    assert all(len(line) <= 80 for line in _table(text.stdout))
    assert text.stdout.count("\n/") >= 3
    listed = home.farm("setup", "runtime", "list", "--backend", "htp").stdout
    assert next(line for line in listed.splitlines() if line.startswith("simulator")).endswith("ready")


def _stub_elf(machine: int, flags: int = 0) -> bytes:
    ident = b"\x7fELF\x02\x01\x01" + bytes(9)
    return ident + struct.pack("<HHIQQQIHHHHHH", 3, machine, 1, 0, 64, 0, flags, 64, 56, 0, 0, 0, 0)


@pytest.fixture
def android(home: FarmHome) -> Path:
    """A farm.toml that names a stub of an SDK for SM8650, a runner and a backend library."""
    sdk = home.cwd / "stub-sdk"
    skel = sdk / "lib" / "hexagon-v75" / "unsigned" / "libQnnHtpV75Skel.so"
    libraries = sdk / "lib" / "aarch64-android"
    for folder in (skel.parent, libraries):
        folder.mkdir(parents=True)
    skel.write_bytes(_stub_elf(164, 0x75))
    for name in ("System", "Htp", "HtpPrepare", "HtpV75Stub"):
        (libraries / f"libQnn{name}.so").write_bytes(_stub_elf(183))
    for name in ("farm_runner", "libqnn_executorch_backend.so"):
        (home.cwd / name).write_bytes(_stub_elf(183))
    (home.cwd / "farm.toml").write_text(
        '[qnn]\nsdk_root = "stub-sdk"\nandroid_runner = "farm_runner"\n'
        'android_backend_library = "libqnn_executorch_backend.so"\n'
    )
    return sdk


CHECK_ANDROID = ("setup", "runtime", "check", "--soc", "SM8650", "--target", "android-arm64")


def test_an_android_runtime_is_checked_file_by_file(home: FarmHome, android: Path) -> None:
    done = home.farm(*CHECK_ANDROID, env=NO_NDK, code=0)
    skel = next(line for line in done.stdout.splitlines() if "libQnnHtpV75Skel.so" in line)
    assert "Hexagon V75" in skel
    assert f"{android}/lib/hexagon-v75/unsigned\n" in done.stdout
    assert home.farm("setup", "runtime", "list", "--soc", "SM8650", env=NO_NDK).stdout.count("ready\n") >= 2


def test_what_is_wrong_with_a_file_is_told_with_what_to_do(home: FarmHome, android: Path) -> None:
    (android / "lib/hexagon-v75/unsigned/libQnnHtpV75Skel.so").write_bytes(_stub_elf(164, 0x73))
    (android / "lib/aarch64-android/libQnnHtp.so").write_bytes(_stub_elf(62))
    (android / "lib/aarch64-android/libQnnHtpV75Stub.so").write_bytes(b"no ELF")
    (android / "lib/aarch64-android/libQnnSystem.so").unlink()
    done = home.farm(*CHECK_ANDROID, "--json", env=NO_NDK, code=6)
    answer = json.loads(done.stdout)
    assert answer["ok"] is False
    bad = {one["name"]: one for one in answer["files"] if one["state"] != "ok"}
    assert {name: one["state"] for name, one in bad.items()} == {
        "libQnnHtpV75Skel.so": "wrong arch",
        "libQnnHtp.so": "wrong CPU",
        "libQnnHtpV75Stub.so": "damaged",
        "libQnnSystem.so": "missing",
    }
    assert "V73" in bad["libQnnHtpV75Skel.so"]["problem"]
    assert all(one["repair"] for one in bad.values())
    text = home.farm(*CHECK_ANDROID, env=NO_NDK, code=6)
    assert "wrong CPU" in text.stdout


def test_what_a_prefix_installs_is_found_and_what_is_missing_is_told(home: FarmHome, android: Path) -> None:
    (home.cwd / "farm.toml").write_text('[qnn]\nsdk_root = "stub-sdk"\nandroid_ndk_root = "ndk"\n')
    prefix = android.parent / "stub-prefix"
    library = prefix / "lib" / "executorch" / "backends" / "qualcomm" / "libqnn_executorch_backend.so"
    library.parent.mkdir(parents=True)
    library.write_bytes(_stub_elf(183))
    done = home.farm(*CHECK_ANDROID, env={**NO_NDK, "FARM_ANDROID_EXECUTORCH": str(prefix)}, code=6)
    output = " ".join(done.stdout.split())
    assert f"{library.parent} libqnn_executorch_backend.so" in output
    assert "farm_runner: set ANDROID_NDK_ROOT to the folder" in output
    refused = home.farm("setup", "runtime", "build", "--target", "android-arm64", env=NO_NDK)
    assert f"{home.cwd / 'ndk/build/cmake/android.toolchain.cmake'} is not there" in refused.stderr


def test_a_runtime_is_staged_into_a_folder_with_the_command_that_runs_it(home: FarmHome, android: Path) -> None:
    done = home.farm("setup", "runtime", "stage", "--soc", "SM8650", "device", env=NO_NDK)
    assert (done.returncode, done.stderr) == (0, "")
    checked = json.loads(home.farm(*CHECK_ANDROID, "--json", env=NO_NDK).stdout)
    staged = {path.name: path.read_bytes() for path in (home.cwd / "device").iterdir()}
    assert staged == {one["name"]: Path(one["source"]).read_bytes() for one in checked["files"]}
    assert (home.cwd / "device" / "farm_runner").stat().st_mode & 0o111
    assert "  LD_LIBRARY_PATH=. ADSP_LIBRARY_PATH=. ./farm_runner --model_path model.pte" in done.stdout
    again = home.farm("setup", "runtime", "stage", "--soc", "SM8650", "device", env=NO_NDK)
    assert (again.returncode, again.stderr) == (2, "farm: device is not empty: name a folder that is not there yet\n")
    (android / "lib/aarch64-android/libQnnHtp.so").unlink()
    refused = home.farm("setup", "runtime", "stage", "--soc", "SM8650", "other", env=NO_NDK, code=6)
    assert "a file that is missing: libQnnHtp.so" in refused.stderr
    assert not (home.cwd / "other").exists()
    direct = home.farm(
        "setup", "runtime", "stage", "--soc", "SM8650", "--backend", "gpu", "--direct", "other", env=NO_NDK
    )
    assert "direct mode runs on a DSP: legal are htp and lpai, not gpu" in direct.stderr
    simulator = home.farm(
        "setup", "runtime", "stage", "--soc", "SM8650", "--target", "linux-x86_64", "other", env=NO_NDK
    )
    assert "there is nothing to stage of htp for linux-x86_64: use --target android-arm64" in simulator.stderr


def test_building_prints_the_runner_and_nothing_else(home: FarmHome, farm_cache: Path) -> None:
    native = build_native(farm_cache)
    done = home.farm("setup", "runtime", "build")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{native.runner}\n", "")
    answer = json.loads(home.farm("setup", "runtime", "build", "--json").stdout)
    assert answer["runner"] == str(native.runner)
    assert Path(answer["log"]).is_file()


def _evaluated(home: FarmHome, extra: dict[str, str], then: str) -> subprocess.CompletedProcess[str]:
    farm = f"{sys.executable} -m farm.cli.main"
    return subprocess.run(
        ["sh", "-euc", f'eval "$({farm} setup runtime env --soc SM8650)"; {then}'],
        env={**home.env, **extra}, cwd=home.cwd, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip


def test_the_environment_can_be_evaluated_once_and_twice(home: FarmHome, farm_cache: Path) -> None:
    simulator_runtime(farm_cache)
    printed = home.farm("setup", "runtime", "env", "--soc", "SM8650")
    assert (printed.returncode, printed.stderr) == (0, "")
    names = [line.removeprefix("export ").partition("='")[0] for line in printed.stdout.splitlines()]
    assert names == ["QNN_SDK_ROOT", "LD_LIBRARY_PATH", "QNN_EXECUTOR_RUNNER"]
    show = 'printf "%s\\n" "$QNN_SDK_ROOT" "$LD_LIBRARY_PATH" "$QNN_EXECUTOR_RUNNER"'
    once = _evaluated(home, {"LD_LIBRARY_PATH": "/opt/it's mine"}, show)
    again = 'eval "$(' + f"{sys.executable} -m farm.cli.main setup runtime env)" + '"; '
    twice = _evaluated(home, {"LD_LIBRARY_PATH": "/opt/it's mine"}, again + show)
    assert once.returncode == 0, once.stderr
    assert once.stdout == twice.stdout
    root, path, runner = once.stdout.splitlines()
    assert (Path(root) / "lib" / "x86_64-linux-clang" / "libQnnHtp.so").is_file()
    folders = path.split(":")
    assert folders[0] == f"{root}/lib/x86_64-linux-clang"
    assert (Path(folders[1]) / "libexecutorch.so").is_file()
    assert folders[2] == "/opt/it's mine"
    assert Path(runner).is_file()
    assert Path(runner).name == "qnn_executor_runner"


def test_the_runner_of_the_environment_starts_whatever_the_library_path_is(home: FarmHome, farm_cache: Path) -> None:
    # Upstream's tests replace LD_LIBRARY_PATH when they start it.
    simulator_runtime(farm_cache)
    done = _evaluated(home, {}, 'unset LD_LIBRARY_PATH; "$QNN_EXECUTOR_RUNNER" --version')
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("farm_runner ")


@pytest.mark.whole
@pytest.mark.skipif(not shutil.which("aarch64-linux-gnu-g++"), reason="apt-get install g++-aarch64-linux-gnu")
def test_a_runtime_for_arm_linux_says_what_its_device_needs(home: FarmHome, farm_cache: Path) -> None:
    from farm.builds.runtime.runtime import linux_runtime

    runtime = linux_runtime(farm_cache)
    done = home.farm(
        "setup", "runtime", "check", "--soc", "QCM6490", "--backend", "xnnpack", "--target", "linux-aarch64"
    )
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("AArch64") == len(runtime.files)
    assert "the device needs GLIBC 2." in done.stdout
    built = home.farm("setup", "runtime", "build", "--target", "linux-aarch64")
    assert built.stdout == f"{runtime.files['farm_runner']}\n"


def test_listing_imports_nothing_heavy(home: FarmHome, empty: dict[str, str]) -> None:
    code = (
        "import sys\nfrom farm.cli.main import main\nsys.argv = ['farm', 'setup', 'runtime', 'list']\n"
        "try:\n    main()\nexcept SystemExit as ended:\n    assert not ended.code, ended.code\n"
        "heavy = {'torch', 'executorch', 'numpy', 'sqlalchemy', 'adbutils', 'pytest'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    run_program([sys.executable, "-c", code], env={**home.env, **empty}, timeout_s=60)
