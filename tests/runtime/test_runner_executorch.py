"""ExecuTorch for the build of the native runner: a toolchain's own C++ if it ships one, else farm's."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
import pytest

from farm.base.config.settings import Config, load_config
from farm.base.config.toolchains import ToolchainConfig
from farm.base.errors import MissingToolError, UsageError
from farm.builds.runtime.native import executorch as executorch_module
from farm.builds.runtime.native.build import build_native, planned_native
from farm.builds.runtime.native.executorch import default_executorch, runner_executorch
from farm.builds.runtime.runtime import virtual_runtime


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """The C++ of farm's own ExecuTorch in another environment: links to its libraries, copies of its headers."""
    root, source = tmp_path / "site-packages" / "executorch", default_executorch().root
    shutil.copytree(source / "include", root / "include")
    shutil.copytree(source / "share", root / "share")
    shutil.copytree(source / "lib", root / "lib", copy_function=lambda one, other: Path(other).symlink_to(one))
    (root / "version.py").write_text('__version__ = "1.6.0a0"\n')
    return root


def _with(executorch: Path | None, cache: Path, **fields: object) -> Config:
    toolchain = ToolchainConfig(name="main", executorch=executorch, **fields)  # type: ignore[arg-type]
    return msgspec.structs.replace(load_config(), cache_dir=cache, toolchain=toolchain)


def test_a_toolchain_that_ships_the_libraries_has_a_runner_of_its_own(farm_cache: Path, package: Path) -> None:
    config = _with(package, farm_cache)
    own = runner_executorch(config)
    assert (own.root, own.version, own.own) == (package, "1.6.0a0", True)
    # The same content is the same build, wherever it lies.
    first = build_native(farm_cache, executorch=own)
    assert first == build_native(farm_cache)
    files = virtual_runtime(config, backend="xnnpack").files
    assert files["farm_runner"] == first.runner
    assert files["libexecutorch.so"] == package / "lib" / "libexecutorch.so"
    assert virtual_runtime(config, backend="xnnpack").versions["executorch"] == "1.6.0a0"


@pytest.mark.parametrize("name", ["include/executorch/runtime/executor/method.h", "lib/libexecutorch.so"])
def test_a_rebuilt_checkout_makes_another_runner(farm_cache: Path, package: Path, name: str) -> None:
    before = planned_native(farm_cache, executorch=runner_executorch(_with(package, farm_cache)))
    file = package / name
    content = file.read_bytes()
    file.unlink()
    file.write_bytes(content + b"\n")
    after = planned_native(farm_cache, executorch=runner_executorch(_with(package, farm_cache)))
    assert after.key != before.key
    file.write_bytes(content)
    assert planned_native(farm_cache, executorch=runner_executorch(_with(package, farm_cache))).key == before.key


def test_a_toolchain_without_libraries_runs_on_the_default_runner_and_the_run_can_tell(
    farm_cache: Path, tmp_path: Path
) -> None:
    (tmp_path / "executorch").mkdir()
    borrowed = runner_executorch(_with(tmp_path / "executorch", farm_cache))
    default = default_executorch()
    assert borrowed == msgspec.structs.replace(default, own=False)
    assert runner_executorch(_with(None, farm_cache)) == default


def test_where_neither_has_libraries_it_says_what_is_missing(
    farm_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*_arguments: str) -> Path:
        raise MissingToolError("the Python package executorch is needed and it is not installed: pip install it")

    monkeypatch.setattr(executorch_module, "package_folder", missing)
    with pytest.raises(MissingToolError, match=r"^the toolchain main ships no C\+\+ .* own environment has none"):
        runner_executorch(_with(tmp_path, farm_cache))


def test_a_native_folder_of_this_machine_is_used_or_refused(farm_cache: Path, package: Path, tmp_path: Path) -> None:
    config = _with(tmp_path, farm_cache, native={"linux-x86_64": package})
    assert runner_executorch(config).root == package
    config = _with(tmp_path, farm_cache, native={"linux-x86_64": tmp_path})
    with pytest.raises(UsageError, match=r"^toolchain\.main: native\.linux-x86_64: there is no executorch-c"):
        runner_executorch(config)
