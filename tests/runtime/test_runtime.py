"""Runtimes: their files and digest, and copies in the cache."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import pytest

from farm.base.errors import MissingToolError
from farm.base.socs import find_soc
from farm.builds.runtime.device_files import Places
from farm.builds.runtime.kept import find_kept, keep
from farm.builds.runtime.parts import library as part
from farm.builds.runtime.qnn_sdk import android_files
from farm.builds.runtime.runtime import Runtime, device_runtime, require_backend, simulator_runtime


def _android(sdk: Path, soc: str, backend: str, cache: Path) -> Runtime:
    runner, library = sdk / "qnn_executor_runner", sdk / "libqnn_executorch_backend.so"
    places = Places(android_files(sdk), part(runner.name, runner, "build it"), part(library.name, library, "build it"))
    return device_runtime(find_soc(soc), backend, places, "android", cache)


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
    # Files that only compiling needs are 100 MB large, and are not staged.
    assert "libHtpPrepare.so" not in runtime.files


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


@pytest.mark.parametrize(
    ("soc", "backend", "library", "wrong"),
    [
        ("SM8650", "gpu", "libQnnGpu.so", "QNN 2.51 is newer than 2.46"),
        ("SM8850", "lpai", "libQnnLpai.so", "QNN 2.31 is older than 2.39"),
    ],
)
def test_gpu_and_lpai_say_in_one_line_what_they_need(
    sdk: Path, soc: str, backend: str, library: str, wrong: str
) -> None:
    def refused(root: Path | None) -> str:
        with pytest.raises(MissingToolError, match=f"the {backend} backend of {soc} needs") as raised:
            require_backend(find_soc(soc), backend, root)
        assert "\n" not in str(raised.value)
        assert ": set QNN_SDK_ROOT to a QNN SDK" in str(raised.value)
        return str(raised.value)

    require_backend(find_soc(soc), "htp", None)
    refused(None)
    host = sdk / "lib" / "x86_64-linux-clang"
    assert f"(looked for {host / library})" in refused(sdk)
    (host / library).touch()
    require_backend(find_soc(soc), backend, sdk)
    (sdk / "sdk.yaml").write_text(f"version: {wrong.split()[1]}.0.1\n")
    assert wrong in refused(sdk)
    (host / library).unlink()
    assert wrong in refused(sdk)
    assert f"the QNN SDK folder {sdk / 'nowhere'} does not exist" in refused(sdk / "nowhere")


VERSIONS = {"qnn": "2.50", "runner": "1"}


def runtime(folder: Path, digest: str, **versions: str) -> Runtime:
    folder.mkdir(exist_ok=True)
    files = {name: folder / name for name in ("farm_runner", "libQnnHtp.so")}
    for name, path in files.items():
        path.write_bytes(f"content of {name}".encode())
    hashes = {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.items()}
    return Runtime(files, digest * 64, "farm_runner", VERSIONS | versions, "android", False, hashes)


@pytest.mark.parametrize("damage", ["record", "changed", "lost"])
def test_a_damaged_runtime_is_kept_anew(tmp_path: Path, damage: str) -> None:
    cache = tmp_path / "cache"
    cache.mkdir(mode=0o755)
    mine, other = runtime(tmp_path / "files", "a"), runtime(tmp_path / "files", "b", qnn="2.51")
    keep(cache, mine)
    found = find_kept(cache, mine.versions)
    assert found is not None
    file = found.files["libQnnHtp.so"]
    if damage == "record":
        (file.parent.parent / "runtime.json").write_text("{")
    elif damage == "lost":
        file.unlink()
    else:
        file.write_bytes(b"something else")
    assert find_kept(cache, mine.versions) is None
    # Equal files are links to one file, unless it is damaged.
    for one in (other, mine):
        keep(cache, one)
        found = find_kept(cache, one.versions)
        assert found is not None
        assert {name: path.read_bytes() for name, path in found.files.items()} == {
            name: path.read_bytes() for name, path in one.files.items()
        }
