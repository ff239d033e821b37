from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from log_lines import LogLines
from programs import run_program

from farm.base.errors import InfraError, MissingToolError
from farm.builds.runtime import packages
from farm.builds.runtime.native import build as native
from farm.builds.runtime.native.build import build_native

ROOT = Path(__file__).resolve().parent.parent.parent


def test_it_is_built_once_and_without_a_warning(farm_cache: Path) -> None:
    first = build_native(farm_cache)
    lines = LogLines()
    assert build_native(farm_cache) == first
    assert lines == []
    assert {"build.log", "farm_runner", "libQnnHtp.so"} <= {path.name for path in first.folder.iterdir()}
    log = (first.folder / "build.log").read_text()
    assert "Linking CXX executable farm_runner" in log
    assert "warning" not in log.lower()


def test_another_compiler_or_flag_is_another_build(farm_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = set()

    def remember(folder: Path, _fill: object) -> Path:
        keys.add(folder.name)
        return folder

    monkeypatch.setattr(native, "published", remember)
    build_native(farm_cache)
    monkeypatch.setenv("CXXFLAGS", "-O1")
    build_native(farm_cache)
    monkeypatch.setenv("CXX", "/bin/true")
    build_native(farm_cache)
    assert len(keys) == 3


def test_a_compiler_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(MissingToolError, match=r"C\+\+ compiler .* apt-get install g\+\+"):
        build_native(tmp_path / "cache")
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(MissingToolError, match="CXX is 'no-such-compiler'"):
        build_native(tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(("module", "extra"), [("executorch", "build"), ("cmake", "simulator"), ("ninja", "simulator")])
def test_a_package_that_is_not_there_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, extra: str
) -> None:
    find, describe = packages.importlib.util.find_spec, packages.importlib.metadata.distribution

    def describe_others(name: str) -> object:
        if name == module:
            raise packages.importlib.metadata.PackageNotFoundError(name)
        return describe(name)

    monkeypatch.setattr(packages.importlib.util, "find_spec", lambda name: None if name == module else find(name))
    monkeypatch.setattr(packages.importlib.metadata, "distribution", describe_others)
    with pytest.raises(MissingToolError, match=rf"{module} .*pip install 'snapdragon-farm\[{extra}\]'"):
        build_native(tmp_path / "cache")


def test_sources_that_do_not_build_say_why_and_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sources = tmp_path / "native_runner"
    shutil.copytree(ROOT / "native_runner", sources)
    (sources / "bridge" / "qnn_bridge.cpp").write_text("#error this does not compile\n")
    for source in (sources / "src").glob("*.cpp"):
        source.write_text("#error nor does this\n")
    monkeypatch.setattr(native, "data_folder", lambda _name: sources)
    with caplog.at_level("DEBUG", "farm"), pytest.raises(InfraError, match=r"this does not compile|nor does this"):
        build_native(tmp_path / "cache")
    assert caplog.messages[0].startswith("building the native runner for linux-x86_64, once")
    assert any("error" in line for line in caplog.messages)
    assert [path.suffix for path in (tmp_path / "cache" / "native").iterdir()] == [".lock"]


def test_the_bridge_builds_without_executorch_and_from_read_only_sources(tmp_path: Path) -> None:
    sources, tree = tmp_path / "native_runner", tmp_path / "tree"
    shutil.copytree(ROOT / "native_runner", sources)
    for path in [sources, *sources.rglob("*")]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    ninja = packages.packaged_tool("ninja", "simulator")
    options = ["-DFARM_BUILD_RUNNER=OFF", "-DCMAKE_DISABLE_FIND_PACKAGE_executorch=ON", f"-DCMAKE_MAKE_PROGRAM={ninja}"]
    for argv in (
        [packages.packaged_tool("cmake", "simulator"), "-G", "Ninja", "-S", sources, "-B", tree, *options],
        [ninja, "-C", tree],
    ):
        subprocess.run(argv, check=True, capture_output=True, timeout=300)
    assert (tree / "libQnnHtp.so").is_file()
    assert not (tree / "farm_runner").exists()
    for path in [sources, *sources.rglob("*")]:
        path.chmod(0o755)


def test_nothing_heavy_is_imported(farm_cache: Path) -> None:
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "from farm.builds.runtime.runtime import simulator_runtime\n"
        "simulator_runtime(Path(sys.argv[1]))\n"
        "heavy = {'torch', 'executorch', 'onnxruntime_qnn', 'numpy', 'cmake', 'sqlalchemy'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)\n"
    )
    build_native(farm_cache)
    run_program([sys.executable, "-c", program, str(farm_cache)], timeout_s=120)
