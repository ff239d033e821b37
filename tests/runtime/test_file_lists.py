"""Files of devices for each backend and mode, each wrong file refused; what farm doctor finds on this machine."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from elf_maker import make_elf

from farm.base.config.settings import Config
from farm.base.errors import ConfigError, IllegalTargetError, MissingToolError, UsageError
from farm.base.hashes import sha256_of
from farm.base.socs import find_soc
from farm.builds.runtime import inventory, parts
from farm.builds.runtime import runtime as runtime_module
from farm.builds.runtime.inventory import Ability, Doctor, backends_of, inspect, list_tools, runnable
from farm.builds.runtime.native import TARGETS, Mode, build_native
from farm.builds.runtime.runtime import (
    Runtime,
    attached_runtime,
    device_command,
    device_parts,
    device_places,
    simulator_runtime,
    stage_into,
    staged_runtime,
    virtual_runtime,
)
from farm.builds.runtime.signing import adopt
from farm.results.analysis.history import side_of
from farm.store.rows import device_facts

# For each backend and mode: the complete and exact list, and each wrong file refused.


COMMON = {
    "qnn_executor_runner": "{build}/examples/qualcomm/executor_runner",
    "libqnn_executorch_backend.so": "{build}/backends/qualcomm",
    "libQnnSystem.so": "{lib}",
}
HTP = {**COMMON, "libQnnHtp.so": "{lib}", "libQnnHtpPrepare.so": "{lib}"}
DIRECT = {
    "qnn_executor_direct_runner": "{build}/examples/qualcomm/direct_executor_runner",
    "libqnn_executorch_stub.so": "{build}/examples/qualcomm/direct_executor_runner",
}
ON_DSP = (
    "libqnn_executorch_backend.so",
    "libqnn_executorch_skel.so",
    "libQnnSystem.so",
    "libc++.so.1",
    "libc++abi.so.1",
)
LISTS: dict[tuple[str, str, Mode], dict[str, str]] = {
    ("SM8650", "htp", "traditional"): {
        **HTP,
        "libQnnHtpV75Stub.so": "{lib}",
        "libQnnHtpV75Skel.so": "{sdk}/lib/hexagon-v75/unsigned",
    },
    ("SM8850", "htp", "traditional"): {
        **HTP,
        "libQnnHtpV81Stub.so": "{lib}",
        "libQnnHtpV81Skel.so": "{sdk}/lib/hexagon-v81/unsigned",
    },
    ("SM8650", "gpu", "traditional"): {**COMMON, "libQnnGpu.so": "{lib}"},
    ("SM8850", "lpai", "traditional"): {
        **COMMON,
        "libQnnLpai.so": "{lib}",
        "libQnnLpaiStub.so": "{lib}",
        "libQnnLpaiSkel.so": "{sdk}/lib/lpai-v6/signed",
    },
    ("SM8650", "xnnpack", "traditional"): {"qnn_executor_runner": COMMON["qnn_executor_runner"]},
    ("SM8650", "htp", "direct"): {
        **DIRECT,
        "libqnn_executorch_backend.so": "{direct}/backends/qualcomm",
        "libqnn_executorch_skel.so": "{direct}/backends/qualcomm/qnn_executorch/direct_mode",
        "libQnnHtpV75.so": "{sdk}/lib/hexagon-v75/unsigned",
        "libQnnSystem.so": "{sdk}/lib/hexagon-v75/unsigned",
        "libc++.so.1": "{tools}/Tools/target/hexagon/lib/v75/G0/pic",
        "libc++abi.so.1": "{tools}/Tools/target/hexagon/lib/v75/G0/pic",
    },
    ("SM8850", "lpai", "direct"): {
        **DIRECT,
        "libQnnLpai.so": "{sdk}/lib/lpai-v6/signed",
        **dict.fromkeys(ON_DSP, "{sdk}/lib/lpai-v6/signed"),
    },
}


def _staged(
    config: Config, soc: str = "SM8650", backend: str = "htp", mode: Mode = "traditional", target: str = "android-arm64"
) -> Runtime:
    return staged_runtime(config, find_soc(soc), backend, TARGETS[target], mode)


def _attached(config: Config, soc: str = "SM8650", backend: str = "htp", *words: Any, **options: Any) -> Runtime:
    return attached_runtime(config, find_soc(soc), backend, *words, **options)


def _sign_for_direct(config: Config) -> None:
    soc = find_soc("SM8850")
    for part in device_parts(soc, "lpai", device_places(config, TARGETS["android-arm64"]), "direct"):
        if part.unsigned and part.path:
            part.path.write_bytes(make_elf(164, _flags(part.unsigned), segments=((0, 7 << 24), (0, 2 << 24), (1, 5))))
            adopt(part.unsigned, part.path)


def _flags(path: Path) -> int:
    return int.from_bytes(path.read_bytes()[36:40], "little")


@pytest.mark.parametrize("key", LISTS, ids="-".join)
@pytest.mark.parametrize(("target", "build", "lib"), [
    ("android-arm64", "stub-build-android", "aarch64-android"),
    ("oe-linux-aarch64", "stub-build-linux", "aarch64-oe-linux-gcc11.2"),
])  # fmt: skip
def test_the_list_is_complete_and_exact(
    config: Config, tmp_path: Path, key: tuple[str, str, Mode], target: str, build: str, lib: str
) -> None:
    soc, backend, mode = key
    if target == "oe-linux-aarch64" and (mode == "direct" or backend == "xnnpack"):
        with pytest.raises(IllegalTargetError):
            inspect(config, find_soc(soc), backend, TARGETS[target], mode)
        return
    _sign_for_direct(config)
    runtime = _staged(config, soc, backend, mode, target)
    places = {
        "build": tmp_path / build,
        "lib": tmp_path / "stub-sdk" / "lib" / lib,
        "sdk": tmp_path / "stub-sdk",
        "direct": tmp_path / "stub-build-direct",
        "tools": tmp_path / "stub-tools",
    }
    expected = {name: Path(folder.format(**places)) / name for name, folder in LISTS[key].items()}
    assert runtime.files == expected
    assert runtime.runner == ("qnn_executor_direct_runner" if mode == "direct" else "qnn_executor_runner")
    assert runtime.needs_root == (backend == "lpai")
    assert runtime.kind == TARGETS[target].kind
    assert set(runtime.hashes) == set(expected)
    stage_into(runtime, tmp_path / "device")
    assert {path.name for path in (tmp_path / "device").iterdir()} == set(expected)
    domain = {"htp": "--domain_id 3 ", "lpai": "--domain_id 0 "}[backend] if mode == "direct" else "--model_path"
    assert f"./{runtime.runner} {domain}" in device_command(runtime)
    states = inspect(config, find_soc(soc), backend, TARGETS[target], mode)
    assert {state.name: state.state for state in states} == dict.fromkeys(expected, "ok")


@pytest.mark.parametrize("key", LISTS, ids="-".join)
def test_every_file_of_a_list_is_needed_and_must_be_for_its_processor(
    config: Config, key: tuple[str, str, Mode]
) -> None:
    soc, backend, mode = key
    _sign_for_direct(config)
    for name, path in _staged(config, soc, backend, mode).files.items():
        content = path.read_bytes()
        path.write_bytes(make_elf(62, wide=True))
        with pytest.raises(ConfigError, match=r"is made for x86-64, expected (AArch64|Hexagon DSP6)") as wrong:
            _staged(config, soc, backend, mode)
        assert str(path) in str(wrong.value)
        path.unlink()
        if name == "qnn_executor_runner":
            # Without this runner the message shows the way to farm's own.
            with pytest.raises(MissingToolError, match="farm_runner: set ANDROID_NDK_ROOT"):
                _staged(config, soc, backend, mode)
        else:
            with pytest.raises(MissingToolError, match=r"a file that is missing: ") as missing:
                _staged(config, soc, backend, mode)
            assert f"{name} (looked for {path})" in str(missing.value)
            assert "\n" not in str(missing.value)
        path.write_bytes(content)


@pytest.mark.parametrize(
    ("soc", "backend", "mode", "name", "arch", "says"),
    [
        ("SM8650", "htp", "traditional", "libQnnHtpV75Skel.so", 0x73, "is a skel for V73 .*, SM8650 needs V75$"),
        ("SM8650", "htp", "traditional", "libQnnHtpV75Skel.so", 0x81, "is a skel for V81"),
        ("SM8650", "htp", "direct", "libQnnHtpV75.so", 0x73, "is made for V73 .*, SM8650 needs V75$"),
        ("SM8650", "htp", "direct", "libqnn_executorch_skel.so", 0x79, "is made for V79 .*, SM8650 needs V75 or older"),
        ("SM8650", "htp", "direct", "libc++.so.1", 0x81, "is made for V81"),
    ],
)
def test_a_file_for_another_hexagon_is_refused(
    config: Config, soc: str, backend: str, mode: Mode, name: str, arch: int, says: str
) -> None:
    path = _staged(config, soc, backend, mode).files[name]
    path.write_bytes(make_elf(164, arch))
    (state,) = [
        one for one in inspect(config, find_soc(soc), backend, TARGETS["android-arm64"], mode) if one.state != "ok"
    ]
    assert (state.name, state.state) == (name, "wrong arch")
    with pytest.raises(ConfigError, match=says.removesuffix("$")):
        _staged(config, soc, backend, mode)


def test_a_file_that_may_not_be_read_is_named(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(_path: Path) -> None:
        raise PermissionError(13, "Permission denied")

    # Tests may run as root, which may read everything: so the error is planted.
    monkeypatch.setattr(parts, "read_elf", denied)
    with pytest.raises(ConfigError, match=r"cannot be read: Permission denied: make .* readable for you"):
        _staged(config, "SM8650", "gpu")


def test_a_runner_that_was_linked_with_qnn_gets_its_backend_also_for_the_cpu(config: Config) -> None:
    runner = _staged(config, "SM8650", "xnnpack").files["qnn_executor_runner"]
    runner.write_bytes(runner.read_bytes() + b"\0libqnn_executorch_backend.so\0")
    runtime = _staged(config, "SM8650", "xnnpack")
    assert set(runtime.files) == {"qnn_executor_runner", "libqnn_executorch_backend.so"}
    assert "qnn" not in runtime.versions


def test_only_farms_own_runner_takes_jobs(config: Config, tmp_path: Path) -> None:
    with pytest.raises(MissingToolError, match=r"qnn_executor_runner is not farm's runner .*farm setup runtime build"):
        _attached(config)
    runner = tmp_path / "stub-build-android/examples/qualcomm/executor_runner/qnn_executor_runner"
    ours = tmp_path / "farm_runner"
    ours.write_bytes(runner.read_bytes() + b"farm_runner: %s: ")
    runtime = _attached(msgspec.structs.replace(config, android_runner=ours))
    assert runtime.files[runtime.runner] == ours
    assert set(runtime.files) == {*LISTS["SM8650", "htp", "traditional"], "farm_runner"} - {"qnn_executor_runner"}


def test_libraries_that_farm_did_not_build_are_facts_of_a_runtime(config: Config, tmp_path: Path) -> None:
    """Another build of ExecuTorch's QNN backend is another side of a comparison, with the same runner and QNN."""
    ours = tmp_path / "farm_runner"
    ours.write_bytes(make_elf(183, wide=True) + b"farm_runner: %s: ")
    config = msgspec.structs.replace(config, android_runner=ours)
    before = _attached(config)
    for path in (
        tmp_path / "stub-build-android/backends/qualcomm/libqnn_executorch_backend.so",
        tmp_path / "stub-sdk/lib/aarch64-android/libQnnHtp.so",
    ):
        path.write_bytes(path.read_bytes() + b"another")
        after = _attached(config)
        assert side_of("bundle", device_facts(None, after.versions)) != side_of(
            "bundle", device_facts(None, before.versions)
        )
        before = after
    ours.write_bytes(ours.read_bytes() + b"another")
    assert _attached(config).versions == {
        **before.versions, "runner": sha256_of(ours)
    }  # fmt: skip


def test_the_backend_comes_from_the_executorch_that_the_runner_is_built_with(config: Config, tmp_path: Path) -> None:
    prefix = tmp_path / "stub-prefix"
    library = prefix / "lib/executorch/backends/qualcomm/libqnn_executorch_backend.so"
    library.parent.mkdir(parents=True)
    built = tmp_path / "stub-build-android/backends/qualcomm/libqnn_executorch_backend.so"
    shutil.copyfile(built, library)
    named = msgspec.structs.replace(config, android_executorch=prefix)
    assert _staged(named).files[library.name] == library
    library.unlink()
    with pytest.raises(MissingToolError, match="libqnn_executorch_backend.so"):
        _staged(named)
    assert _staged(config).files[library.name] == built


def test_direct_mode_runs_jobs_one_by_one(config: Config, tmp_path: Path) -> None:
    runtime = _attached(config, "SM8650", "htp", "direct")
    assert (runtime.one_shot, runtime.flags) == (True, {"domain_id": "3"})
    assert runtime.versions["skel"] == runtime.hashes["libqnn_executorch_skel.so"]
    assert runtime.versions["dsp_logs"] == "0x0C"
    # Code for an older Hexagon serves: the build is for V75, and this SoC has V81.
    assert "libqnn_executorch_skel.so" in _staged(config, "SM8850", "htp", "direct").files
    _sign_for_direct(config)
    lpai = _attached(config, "SM8850", "lpai", "direct")
    assert (lpai.one_shot, lpai.flags, lpai.needs_root) == (True, {"domain_id": "0"}, True)
    # The user built the library that runs on the DSP: another build is another runtime.
    library = tmp_path / "stub-build-direct/backends/qualcomm/libqnn_executorch_backend.so"
    library.write_bytes(library.read_bytes() + b"rebuilt")
    again = _attached(config, "SM8650", "htp", "direct")
    assert again.versions["runtime"] != runtime.versions["runtime"]
    library.unlink()
    with pytest.raises(MissingToolError, match=r"libqnn_executorch_backend\.so .*FARM_EXECUTORCH_DIRECT_BUILD"):
        _attached(config, "SM8650", "htp", "direct")
    with pytest.raises(IllegalTargetError, match="direct mode is for Android devices"):
        _attached(config, "SM8650", "htp", "direct", linux=True)


def test_what_a_dsp_logs_takes_part_in_what_a_runtime_with_a_skel_is(
    config: Config, farm_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A number of a DSP depends on it, and the files are the same."""

    def runtimes() -> list[Runtime]:
        phone = _staged(config)
        return [phone, simulator_runtime(farm_cache, find_soc("SM8650"), "htp")]

    phone, virtual = runtimes()
    monkeypatch.setattr(runtime_module, "_DSP_LOGS", "0x1F")
    other_phone, other_virtual = runtimes()
    assert (phone.versions["dsp_logs"], other_phone.versions["dsp_logs"]) == ("0x0C", "0x1F")
    assert phone.hashes == other_phone.hashes
    assert phone.digest != other_phone.digest
    # A virtual device has no skel.
    assert "dsp_logs" not in virtual.versions
    assert other_virtual == virtual


def test_qnn_on_arm_linux_runs_jobs_with_executorchs_runner(config: Config, tmp_path: Path) -> None:
    runtime = _attached(config, "QCS9100", "gpu", linux=True)
    assert (runtime.kind, runtime.runner, runtime.one_shot, runtime.flags) == (
        "oe-linux", "qnn_executor_runner", True, {},
    )  # fmt: skip
    # A user's own build of farm's runner accepts sessions there as well.
    runner = tmp_path / "stub-build-linux/examples/qualcomm/executor_runner/qnn_executor_runner"
    runner.write_bytes(runner.read_bytes() + b"farm_runner: %s: ")
    assert not _attached(config, "QCS9100", "gpu", linux=True).one_shot


def test_a_virtual_device_rehearses_direct_mode_with_a_stub(config: Config, farm_cache: Path) -> None:
    config = msgspec.structs.replace(config, cache_dir=farm_cache, sdk_root=None)
    plain, direct = (virtual_runtime(config, find_soc("SM8650"), "htp", mode=mode) for mode in get_args(Mode))
    assert set(direct.files) - set(plain.files) == {"qnn_executor_direct_runner_stub"} == {direct.runner}
    assert (direct.kind, direct.one_shot, direct.flags) == ("simulator", True, {"domain_id": "3"})
    assert direct.versions["runner"] == plain.versions["runner"]
    assert direct.digest != plain.digest
    with pytest.raises(IllegalTargetError, match="legal are htp and lpai, not xnnpack"):
        virtual_runtime(config, find_soc("SM8650"), "xnnpack", mode="direct")


def test_without_an_sdk_arm_linux_gets_qnn_from_the_wheel_and_never_from_both(
    config: Config, tmp_path: Path, qnn_wheel: Path, sdk: Path
) -> None:
    fetched = tmp_path / "own-cache" / "wheels"
    shutil.copytree(qnn_wheel.parent.parent, fetched, copy_function=lambda a, b: Path(b).symlink_to(a))
    for folder in (sdk / "lib").glob("aarch64-oe-linux-*"):
        shutil.rmtree(folder)
    # An SDK that is named is used or refused.
    with pytest.raises(MissingToolError, match=r"libQnnHtp\.so.*set QNN_SDK_ROOT .*aarch64-oe-linux"):
        _staged(config, "SM8650", "htp", target="oe-linux-aarch64")
    without = msgspec.structs.replace(config, sdk_root=None)
    runtime = _staged(without, "SM8650", "htp", target="oe-linux-aarch64")
    assert set(runtime.files) == set(LISTS["SM8650", "htp", "traditional"])
    qnn = {path.parent.name for name, path in runtime.files.items() if name.startswith("libQnn")}
    assert qnn == {"onnxruntime_qnn"}
    assert runtime.versions["qnn"].startswith("onnxruntime-qnn 2.")
    gpu = _staged(without, "SM8650", "gpu", target="oe-linux-aarch64")
    assert gpu.files["libQnnGpu.so"].is_file()
    # The wheel has no files for an LPAI, and none of its libraries are for Android.
    with pytest.raises(MissingToolError, match=r"libQnnLpai\.so.*set QNN_SDK_ROOT .*aarch64-oe-linux"):
        _staged(without, "SM8850", "lpai", target="oe-linux-aarch64")
    with pytest.raises(MissingToolError, match=r"libQnnHtp\.so.*set QNN_SDK_ROOT .*aarch64-android"):
        _staged(without)
    shutil.rmtree(fetched)
    with pytest.raises(MissingToolError, match="farm setup runtime build --target oe-linux-aarch64"):
        _staged(without, "SM8650", "htp", target="oe-linux-aarch64")


@pytest.mark.parametrize(("key", "target", "mode"), [
    ("sdk_root", "android-arm64", "traditional"),
    ("sdk_root", "oe-linux-aarch64", "traditional"),
    ("android_runner", "android-arm64", "traditional"),
    ("android_backend_library", "android-arm64", "traditional"),
    ("android_executorch", "android-arm64", "traditional"),
    ("executorch_build", "android-arm64", "traditional"),
    ("executorch_build", "android-arm64", "direct"),
    ("executorch_linux_build", "oe-linux-aarch64", "traditional"),
    ("executorch_direct_build", "android-arm64", "direct"),
    ("hexagon_tools_root", "android-arm64", "direct"),
])  # fmt: skip
def test_a_path_that_is_named_and_not_there_is_refused_whatever_else_there_is(
    config: Config, tmp_path: Path, key: str, target: str, mode: Mode
) -> None:
    # Either the build folder or its prefix would be enough, but a named path has to exist.
    config = msgspec.structs.replace(config, android_executorch=config.executorch_build)
    config = msgspec.structs.replace(config, file=tmp_path / "farm.toml", **{key: tmp_path / "nope"})
    with pytest.raises(UsageError, match=rf"farm\.toml: qnn\.{key}: there is no .*/nope: correct it, or leave it out"):
        _staged(config, mode=mode, target=target)


def test_an_sdk_that_is_too_old_for_an_lpai_is_refused(config: Config, sdk: Path) -> None:
    (sdk / "sdk.yaml").write_text("version: 2.38.0.1\n")
    with pytest.raises(MissingToolError, match=r"needs QNN 2\.39 or newer, not 2\.38\.0\.1"):
        _staged(config, "SM8850", "lpai")


def test_a_virtual_device_rehearses_an_lpai_with_the_files_of_an_sdk(sdk_for_host: Path, farm_cache: Path) -> None:
    soc = find_soc("SM8850")
    runtime = simulator_runtime(farm_cache, soc, "lpai", sdk_root=sdk_for_host)
    plain = simulator_runtime(farm_cache, soc, "xnnpack")
    host = sdk_for_host / "lib/x86_64-linux-clang"
    names = ("libQnnLpai.so", "libQnnLpaiPrepare_v6.so", "libQnnSystem.so", "libc++.so.1")
    skel = sdk_for_host / "lib/lpai-v6/signed/libQnnLpaiSkel.so"
    assert runtime.files == {**plain.files, **{name: host / name for name in names}, "libQnnLpaiSkel.so": skel}
    assert (runtime.kind, runtime.needs_root, runtime.versions["qnn"]) == ("simulator", True, "2.40.0.1")
    assert runtime.versions["skel"] == runtime.hashes["libQnnLpaiSkel.so"]


def test_a_virtual_device_gets_nothing_of_qnn_for_the_cpu(farm_cache: Path) -> None:
    runtime = simulator_runtime(farm_cache, backend="xnnpack")
    assert not [name for name in runtime.files if "Qnn" in name]
    assert set(runtime.versions) == {"executorch", "runner"}
    assert not runtime.needs_root


# farm doctor: targets that can be compiled, staged and run, and suggested steps that really help.


@pytest.fixture
def built(config: Config, farm_cache: Path, tmp_path: Path) -> Config:
    """The stubs of SDK and builds, and farm's runner built: for this machine a real one, for Android a stub."""
    build_native(farm_cache)
    runner = tmp_path / "stub-android-runner"
    runner.write_bytes(make_elf(183, wide=True) + b"farm_runner: %s: ")
    return msgspec.structs.replace(config, cache_dir=farm_cache, android_runner=runner)


def _examine(config: Config, soc: str, backend: str, attached: dict[str, list[str]] | None = None) -> Ability:
    return Doctor(config, attached).examine(find_soc(soc), backend)


def test_with_pip_alone_the_simulator_compiles_stages_and_runs(built: Config) -> None:
    bare = msgspec.structs.replace(
        built, sdk_root=None, executorch_build=None, executorch_linux_build=None, android_runner=None
    )
    for soc in map(find_soc, ("QCM6490", "SM8650", "SM8850")):
        for backend in backends_of(soc):
            assert runnable(Doctor(bare).examine(soc, backend)) == (backend in ("htp", "xnnpack"))
    htp = _examine(bare, "SM8650", "htp")
    assert (htp.compile.where, htp.compile.gaps) == (("here",), ())
    assert htp.stage.where == ("simulator",)
    assert (htp.run.where, htp.run.gaps) == (("simulator",), ())
    # The gaps for other devices are listed, and every gap has a next step.
    assert {"ANDROID_NDK_ROOT", "FARM_EXECUTORCH_BUILD", "QNN_SDK_ROOT", "FARM_EXECUTORCH_LINUX_BUILD"} <= {
        gap.repair.split()[1] for gap in htp.stage.gaps
    }
    lpai = _examine(bare, "SM8850", "lpai")
    assert (lpai.compile.where, lpai.stage.where, lpai.run.where) == ((), (), ())
    assert all(gap.repair for answer in (lpai.compile, lpai.stage, lpai.run) for gap in answer.gaps)


def test_with_sdk_builds_and_a_phone_there_is_nothing_to_repair(built: Config, sdk_for_host: Path) -> None:
    attached = {"SM8850": ["PHONE1", "PHONE2"]}
    assert sdk_for_host == built.sdk_root
    for backend in ("htp", "lpai"):
        ability = _examine(built, "SM8850", backend, attached)
        assert ability.compile.where == ("here",)
        assert ability.stage.where == ("simulator", "android", "oe-linux")
        assert ability.run.where == ("simulator", "PHONE1", "PHONE2")
        assert ability.compile.gaps + ability.stage.gaps + ability.run.gaps == ()
    assert Doctor(built).direct(find_soc("SM8850"), "htp") == ()
    assert "farm setup sign --lpai v6 --htp v81" in {
        gap.repair for gap in Doctor(built).direct(find_soc("SM8850"), "lpai")
    }


def test_gpu_runs_on_a_phone_only(built: Config, sdk: Path) -> None:
    (sdk / "lib/x86_64-linux-clang/libQnnGpu.so").touch()
    alone = _examine(built, "SM8650", "gpu")
    assert (alone.compile.where, alone.stage.where, alone.run.where) == (("here",), ("android", "oe-linux"), ())
    assert [gap.repair for gap in alone.run.gaps] == ["adb start-server"]
    other = _examine(built, "SM8650", "gpu", {"SM8850": ["PHONE"]})
    assert [gap.repair for gap in other.run.gaps] == ["attach one; 'adb devices' lists attached devices"]
    assert runnable(_examine(built, "SM8650", "gpu", {"SM8650": ["PHONE"]}))


def test_upstreams_runner_stages_and_runs_no_job(built: Config, sdk: Path) -> None:
    with_upstream = msgspec.structs.replace(built, android_runner=None)
    ability = _examine(with_upstream, "SM8650", "htp", {"SM8650": ["PHONE"]})
    assert "android" in ability.stage.where
    assert ability.run.where == ("simulator",)
    host = sdk / "lib/x86_64-linux-clang"
    (host / "libQnnGpu.so").touch()
    gpu = _examine(with_upstream, "SM8650", "gpu", {"SM8650": ["PHONE"]})
    assert gpu.run.where == ()
    (gap,) = gpu.run.gaps
    assert gap.what == "qnn_executor_runner: takes no jobs in a session"
    assert gap.repair == "farm setup runtime build --target android-arm64"


def test_a_repair_closes_its_gap(built: Config, sdk: Path) -> None:
    skel = sdk / "lib/lpai-v6/signed/libQnnLpaiSkel.so"
    record = skel.with_name(f"{skel.name}.farm-sign.json")
    kept = record.read_bytes()
    record.unlink()
    repairs = {gap.repair: gap.what for gap in _examine(built, "SM8850", "lpai").stage.gaps}
    assert repairs["farm setup sign --lpai v6 --adopt"] == "libQnnLpaiSkel.so (foreign)"
    record.write_bytes(kept)
    assert "android" in _examine(built, "SM8850", "lpai").stage.where
    shutil.rmtree(sdk / "lib/hexagon-v75")
    assert _examine(built, "SM8850", "htp").stage.gaps == ()
    assert {gap.what for gap in _examine(built, "SM8650", "htp").stage.gaps} == {"libQnnHtpV75Skel.so"}


def test_signing_is_the_repair_only_where_there_is_something_to_sign(built: Config, sdk: Path) -> None:
    lpai = sdk / "lib/lpai-v6"
    shutil.rmtree(lpai / "signed")
    assert "farm setup sign --lpai v6" in {gap.repair for gap in _examine(built, "SM8850", "lpai").stage.gaps}
    shutil.rmtree(lpai)
    repairs = {gap.what: gap.repair for gap in _examine(built, "SM8850", "lpai").stage.gaps}
    assert repairs["libQnnLpaiSkel.so"].startswith("set QNN_SDK_ROOT to a QNN SDK")
    assert repairs["libQnnLpaiSkel.so"].endswith(" with lib/lpai-v6/unsigned")
    direct = {gap.repair for gap in Doctor(built).direct(find_soc("SM8850"), "lpai")}
    assert "farm setup sign --lpai v6 --htp v81" in direct
    assert repairs["libQnnLpaiSkel.so"] in direct


def test_what_pip_would_bring_is_told(built: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inventory, "package_version", lambda _name: "")
    ability = _examine(built, "SM8650", "htp")
    assert ability.compile.where == ability.run.where == ()
    assert {gap.repair for gap in ability.compile.gaps} == {
        "pip install 'snapdragon-farm[build]'",
        "pip install 'snapdragon-farm[simulator]'",
    }
    assert "the Python package torch" in {gap.what for gap in ability.compile.gaps}

    def no_compiler(*_arguments: object, **_options: object) -> None:
        raise MissingToolError("a C++ compiler is needed: apt-get install g++")

    monkeypatch.undo()
    monkeypatch.setattr(inventory, "planned_runner", no_compiler)
    assert [gap.repair for gap in _examine(built, "SM8650", "htp").compile.gaps] == ["apt-get install g++"]


def test_the_tools_are_found_with_their_versions_and_what_is_wrong_with_them(built: Config, tmp_path: Path) -> None:
    tools = {tool.name: tool for tool in list_tools(built)}
    assert tools["executorch"].version.startswith("1.")
    assert tools["QNN SDK"].version == "2.40.0.1 (x86_64-linux-clang, aarch64-android, aarch64-oe-linux-gcc11.2)"
    assert tools["Hexagon SDK"].version == ""
    assert not any(tool.problem for tool in tools.values())
    ndk = tmp_path / "ndk"
    ndk.mkdir()
    (ndk / "source.properties").write_text("Pkg.Desc = stub\nPkg.Revision = 26.1.1\n")
    wrong = msgspec.structs.replace(built, android_ndk_root=ndk, hexagon_sdk_root=tmp_path / "5.5.0.1")
    tools = {tool.name: tool for tool in list_tools(wrong)}
    assert tools["Android NDK"].version == "26.1.1"
    assert tools["Android NDK"].problem == "has no build/cmake/android.toolchain.cmake"
    assert (tools["Hexagon SDK"].version, tools["Hexagon SDK"].problem) == (
        "5.5.0.1",
        "has no tools/elfsigner/elfsigner.py",
    )
    nowhere = msgspec.structs.replace(built, sdk_root=tmp_path / "nowhere")
    assert {tool.name: tool.problem for tool in list_tools(nowhere)}["QNN SDK"] == "does not exist"
