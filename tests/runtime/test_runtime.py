from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from farm.errors import ConfigError, IllegalTargetError, MissingToolError
from farm.profiles import find_soc
from farm.runtime.runtime import Runtime, android_runtime, require_backend, simulator_runtime


def _android(sdk: Path, soc: str, backend: str, cache: Path) -> Runtime:
    runner, library = sdk / "qnn_executor_runner", sdk / "libqnn_executorch_backend.so"
    return android_runtime(find_soc(soc), backend, sdk, runner, library, cache)


def test_the_simulator_runtime_is_the_same_each_time_and_complete(farm_cache: Path) -> None:
    runtime = simulator_runtime(farm_cache)
    assert runtime == simulator_runtime(farm_cache)
    assert runtime.kind == "simulator"
    assert runtime.runner in runtime.files
    assert {"executorch", "qnn", "runner"} == set(runtime.versions)
    for name, path in runtime.files.items():
        assert path.is_file()
        assert not name.startswith("/")
        assert ".." not in name
    # What is only for compiling weighs 100 MB and stays here.
    assert "libHtpPrepare.so" not in runtime.files


COMMON = {"qnn_executor_runner", "libqnn_executorch_backend.so", "libQnnSystem.so"}


@pytest.mark.parametrize(
    ("soc", "backend", "libraries"),
    [
        ("SM8650", "htp", {"libQnnHtp.so", "libQnnHtpV75Stub.so", "libQnnHtpPrepare.so", "libQnnHtpV75Skel.so"}),
        ("SM8850", "htp", {"libQnnHtp.so", "libQnnHtpV81Stub.so", "libQnnHtpPrepare.so", "libQnnHtpV81Skel.so"}),
        ("SM8650", "gpu", {"libQnnGpu.so"}),
        ("SM8650", "xnnpack", set()),
        ("SM8850", "lpai", {"libQnnLpai.so", "libQnnLpaiStub.so", "libQnnLpaiSkel.so"}),
    ],
)
def test_android_gets_what_its_backend_needs(
    sdk: Path, tmp_path: Path, soc: str, backend: str, libraries: set[str]
) -> None:
    runtime = _android(sdk, soc, backend, tmp_path / "cache")
    common = COMMON - {"libQnnSystem.so"} if backend == "xnnpack" else COMMON
    assert set(runtime.files) == common | libraries
    assert runtime.runner == "qnn_executor_runner"
    assert runtime.kind == "android"
    assert runtime.versions.get("qnn") == ("2.40.0.1" if backend != "xnnpack" else None)
    assert ("skel" in runtime.versions) == (backend in ("htp", "lpai"))
    assert runtime.needs_root == (backend == "lpai")
    if backend == "lpai":
        assert runtime.files["libQnnLpaiSkel.so"].parent.name == "signed"


def test_the_digest_follows_names_and_contents(sdk: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    first = _android(sdk, "SM8650", "htp", cache)
    copy = tmp_path / "copy"
    shutil.copytree(sdk, copy)
    assert _android(copy, "SM8650", "htp", cache).digest == first.digest
    assert _android(sdk, "SM8650", "gpu", cache).digest != first.digest
    library = sdk / "lib" / "aarch64-android" / "libQnnHtp.so"
    library.write_bytes(library.read_bytes() + b"newer")
    assert _android(sdk, "SM8650", "htp", cache).digest != first.digest


def test_every_missing_file_is_named_at_once(sdk: Path, tmp_path: Path) -> None:
    libraries = sdk / "lib" / "aarch64-android"
    missing = [libraries / "libQnnHtp.so", libraries / "libQnnHtpV75Stub.so", sdk / "qnn_executor_runner"]
    for path in missing:
        path.unlink()
    with pytest.raises(MissingToolError) as raised:
        _android(sdk, "SM8650", "htp", tmp_path / "cache")
    message = str(raised.value)
    assert all(str(path) in message for path in missing)
    assert "libQnnSystem.so" not in message
    assert "3 files" in message
    assert "QNN_SDK_ROOT" in message
    assert "\n" not in message


def test_a_skel_for_another_soc_is_refused(sdk: Path, tmp_path: Path, elf: Any) -> None:
    skel = sdk / "lib" / "hexagon-v75" / "unsigned" / "libQnnHtpV75Skel.so"
    skel.write_bytes(elf(164, 0x73))
    with pytest.raises(ConfigError, match=r"is a skel for V73 .*, SM8650 needs V75"):
        _android(sdk, "SM8650", "htp", tmp_path / "cache")


def test_a_skel_that_is_for_no_hexagon_is_refused(sdk: Path, tmp_path: Path, elf: Any) -> None:
    (sdk / "lib" / "hexagon-v75" / "unsigned" / "libQnnHtpV75Skel.so").write_bytes(elf(183, wide=True))
    with pytest.raises(ConfigError, match="is made for AArch64, expected Hexagon DSP6"):
        _android(sdk, "SM8650", "htp", tmp_path / "cache")


def test_a_runner_for_another_machine_is_refused(sdk: Path, tmp_path: Path, elf: Any) -> None:
    (sdk / "qnn_executor_runner").write_bytes(elf(62, wide=True))
    with pytest.raises(ConfigError, match="is made for x86-64, expected AArch64"):
        _android(sdk, "SM8650", "htp", tmp_path / "cache")


def test_an_unsigned_lpai_skel_is_refused_with_the_way_to_sign_it(sdk: Path, tmp_path: Path) -> None:
    folder = sdk / "lib" / "lpai-v6"
    shutil.copy(folder / "unsigned" / "libQnnLpaiSkel.so", folder / "signed" / "libQnnLpaiSkel.so")
    with pytest.raises(ConfigError, match=r"is not signed.*elfsigner\.py -i "):
        _android(sdk, "SM8850", "lpai", tmp_path / "cache")
    (folder / "signed" / "libQnnLpaiSkel.so").unlink()
    with pytest.raises(MissingToolError, match=r"a file that is missing: libQnnLpaiSkel\.so .*elfsigner\.py -i "):
        _android(sdk, "SM8850", "lpai", tmp_path / "cache")


def test_a_backend_that_the_soc_does_not_have_is_refused(sdk: Path, tmp_path: Path) -> None:
    with pytest.raises(IllegalTargetError):
        _android(sdk, "SM8650", "lpai", tmp_path / "cache")
    with pytest.raises(IllegalTargetError):
        require_backend(find_soc("SM8650"), "lpai", None)


def test_gpu_and_lpai_say_in_one_line_what_they_need(sdk: Path) -> None:
    require_backend(find_soc("SM8650"), "htp", None)
    for soc, backend, library in (("SM8650", "gpu", "libQnnGpu.so"), ("SM8850", "lpai", "libQnnLpai.so")):
        with pytest.raises(MissingToolError, match="set QNN_SDK_ROOT") as raised:
            require_backend(find_soc(soc), backend, None)
        assert "\n" not in str(raised.value)
        with pytest.raises(MissingToolError, match=library):
            require_backend(find_soc(soc), backend, sdk)
        host = sdk / "lib" / "x86_64-linux-clang"
        host.mkdir(exist_ok=True)
        (host / library).touch()
        require_backend(find_soc(soc), backend, sdk)
