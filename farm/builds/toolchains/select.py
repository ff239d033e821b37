"""`--toolchain NAME|PATH|VERSION` -> the configuration that a command works with."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from farm.base.config.toolchains import DEFAULT, ToolchainConfig, release_of
from farm.base.errors import MissingToolError, UnknownNameError, UsageError
from farm.base.paths import beside, is_path
from farm.base.trust import weakness
from farm.builds.toolchains.generations import generation_of
from farm.builds.toolchains.handover import checkout_link
from farm.builds.toolchains.interpreters import InterpreterFacts, inspect
from farm.builds.toolchains.sdks import native_fields, resolve_qnn

if TYPE_CHECKING:
    from farm.base.config.settings import Config

# Paths that exist in every source tree and in every wheel.
_MARKS = ("exir/__init__.py", "backends")
_VIRTUAL_ENVIRONMENTS = (".venv", "venv")
_QNN_VARIABLE = "QNN_SDK_ROOT"


def use_toolchain(config: Config, ref: str) -> Config:
    """Return `config` with the toolchain `ref` selected: its name in farm.toml, a path, or a version of ExecuTorch.

    "" and DEFAULT select the environment that farm runs in. A missing environment of a version is made. Raises
    UnknownNameError, UsageError, MissingToolError.
    """
    if not ref or ref == DEFAULT:
        return config
    return select(config, toolchain_of(config, ref))


def toolchain_of(config: Config, ref: str) -> ToolchainConfig:
    """Return the toolchain that `ref` names, without a look at its files. Raises UnknownNameError, UsageError."""
    if ref == DEFAULT:
        return ToolchainConfig()
    if ref in config.toolchains:
        return config.toolchains[ref]
    if is_path(ref):
        return _at_path(ref)
    if release := release_of(ref):
        generation_of(release)
        return ToolchainConfig(name=release, version=release)
    hint = f"the folder is ./{ref}" if Path(ref).exists() else "a path and a version of ExecuTorch will do as well"
    raise UnknownNameError("toolchain", ref, [*config.toolchains, DEFAULT], f"({hint})")


def absolute_ref(ref: str) -> str:
    """Return a ref that means the same in another folder. Raises UsageError."""
    return str(_path(ref)) if is_path(ref) else ref


def select(config: Config, toolchain: ToolchainConfig) -> Config:
    """Return `config` with `toolchain` selected, and with the toolchain's interpreter, code and QNN resolved.

    Raises UsageError for an invalid selection, MissingToolError for a missing part, UntrustedError.
    """
    fields = _qnn_fields(config, toolchain) | native_fields(toolchain)
    if toolchain.version:
        from farm.builds.toolchains.environments import made_environment

        environment = made_environment(config.cache_dir, toolchain.version)
        toolchain = msgspec.structs.replace(toolchain, python=environment / "bin" / "python")
    elif toolchain.checkout is not None:
        toolchain = _with_checkout(toolchain, toolchain.checkout)
    if toolchain.python is not None:
        facts = look_into(config, toolchain)
        toolchain = msgspec.structs.replace(toolchain, executorch=facts.folder("executorch"))
    return msgspec.structs.replace(config, toolchain=toolchain, **fields)


def look_into(config: Config, toolchain: ToolchainConfig) -> InterpreterFacts:
    """Return the facts of the interpreter of a selected toolchain.

    Raises MissingToolError for an interpreter without torch or ExecuTorch, or with another ExecuTorch than the named
    one; UsageError for an ExecuTorch that is too old.
    """
    python = toolchain.python or Path(sys.executable)
    facts = inspect(python, import_environment(config, toolchain))
    for package in ("torch", "executorch"):
        if package not in facts.packages:
            how = f"{python} -m pip install {package}"
            raise MissingToolError(f"toolchain {toolchain.name}: {python} has no {package}: {how}")
    generation_of(facts.version_of("executorch"))
    if (folder := facts.folder("executorch")) is not None:
        _require_named(toolchain, folder)
        require_libraries(toolchain, folder)
    return facts


def import_environment(config: Config, toolchain: ToolchainConfig) -> dict[str, str]:
    """Return the variables that select the packages of a toolchain's interpreter: PYTHONPATH for a checkout."""
    if toolchain.checkout is None:
        return {}
    link = checkout_link(config.cache_dir, package_in(toolchain.checkout))
    return {"PYTHONPATH": before("PYTHONPATH", str(link))}


def before(variable: str, *paths: str) -> str:
    """Return a variable of this process that lists folders, with `paths` in front."""
    return os.pathsep.join([*paths, *filter(None, [os.environ.get(variable)])])


def package_in(checkout: Path) -> Path:
    """Return the folder in a source tree whose content is the `executorch` package."""
    inside = checkout / "src" / "executorch"
    return inside if is_package(inside) else checkout


def is_package(folder: Path) -> bool:
    """Return whether `folder` holds the content of the `executorch` package."""
    return all((folder / mark).exists() for mark in _MARKS)


def require_libraries(toolchain: ToolchainConfig, folder: Path) -> None:
    """Raise MissingToolError for a source tree that has not been built: its Python code alone cannot compile."""
    library = folder / "backends" / "qualcomm" / "python"
    if toolchain.checkout is not None and not any(library.glob("PyQnnManagerAdaptor*.so")):
        raise MissingToolError(
            f"toolchain {toolchain.name}: {library} has no PyQnnManagerAdaptor*.so: build it with "
            f"{folder / 'backends/qualcomm/scripts/build.sh'} --skip_linux_android, which copies it there"
        )


def _path(ref: str) -> Path:
    return Path(os.path.normpath(beside(Path.cwd(), ref)))


def _at_path(ref: str) -> ToolchainConfig:
    path = _path(ref)
    if is_package(package_in(path)):
        return ToolchainConfig(name=str(path), checkout=path)
    if path.is_file() and os.access(path, os.X_OK):
        return ToolchainConfig(name=str(path), python=path)
    if (python := path / "bin" / "python").is_file():
        return ToolchainConfig(name=str(path), python=python)
    what = "is not there" if not path.exists() else "is none of them"
    raise UsageError(
        f"toolchain {ref}: expected a source tree of ExecuTorch (with exir and backends in it), a Python interpreter "
        f"or the folder of an environment (with bin/python): {path} {what}"
    )


def _qnn_fields(config: Config, toolchain: ToolchainConfig) -> dict[str, Path | None]:
    if not toolchain.qnn:
        return {}
    found = resolve_qnn(config, toolchain.qnn)
    given = os.environ.get(_QNN_VARIABLE)
    if given and (found is None or not _is_same(Path(given), found)):
        raise UsageError(
            f"toolchain {toolchain.name} has qnn = {toolchain.qnn!r}, and {_QNN_VARIABLE} is {given}: unset one"
        )
    return {"sdk_root": found}


def _is_same(one: Path, other: Path) -> bool:
    return os.path.realpath(one) == os.path.realpath(other)


def _with_checkout(toolchain: ToolchainConfig, checkout: Path) -> ToolchainConfig:
    """Return `toolchain` with the interpreter of its checkout. Raises UsageError, MissingToolError."""
    if not is_package(package_in(checkout)):
        what = "has no exir and backends in it" if checkout.is_dir() else "is not there"
        raise UsageError(f"toolchain {toolchain.name}: {checkout}: a source tree of ExecuTorch is expected, it {what}")
    if toolchain.python is not None:
        return toolchain
    for name in _VIRTUAL_ENVIRONMENTS:
        python = checkout / name / "bin" / "python"
        if python.is_file():
            if problem := weakness(python):
                raise MissingToolError(
                    f"toolchain {toolchain.name}: {python} is not started, as another user could have written it: "
                    f"{problem}; if you trust it, name it with python = in farm.toml"
                )
            return msgspec.structs.replace(toolchain, python=python)
    return msgspec.structs.replace(toolchain, python=Path(sys.executable))


def _require_named(toolchain: ToolchainConfig, folder: Path) -> None:
    """Raise MissingToolError if another ExecuTorch than the toolchain's would be imported."""
    if toolchain.checkout is not None:
        expected = package_in(toolchain.checkout)
    elif toolchain.version and toolchain.python is not None:
        expected = toolchain.python.parents[1]
        if folder.is_relative_to(expected):
            return
    else:
        return
    if not _is_same(folder, expected):
        raise MissingToolError(
            f"toolchain {toolchain.name}: its Python imports ExecuTorch from {folder}, not from {expected}: unset "
            f"PYTHONPATH ({os.environ.get('PYTHONPATH', '')})"
        )
