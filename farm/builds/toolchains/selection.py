"""Toolchain that a command works with: its selection by `--toolchain NAME|PATH|VERSION`, and its preparation."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from pathlib import Path

import msgspec

from farm.base.config.settings import Config
from farm.base.config.toolchains import DEFAULT, ToolchainConfig, release_of
from farm.base.errors import FarmError, MissingToolError, UnknownNameError, UsageError
from farm.base.files import weakness
from farm.base.hashes import let_the_clock_pass
from farm.base.paths import beside, is_path
from farm.builds.bundles.key import HOST_CPU, QNN_PRODUCT, forget_sources, stub_of
from farm.builds.runtime.native import build_native, runner_executorch
from farm.builds.runtime.qnn_sdk import LIBRARY, host_sdk, sdk_product
from farm.builds.toolchains.identity import developed_roots, identify, source_state
from farm.builds.toolchains.interpreters import (
    NEWEST,
    InterpreterFacts,
    checkout_link,
    generation_of,
    handover,
    inspect,
    newer_than_known,
    own_facts,
    packages_of,
    variables_of,
)
from farm.builds.toolchains.probe import PACKAGES
from farm.builds.toolchains.sdks import native_fields, resolve_qnn
from farm.builds.toolchains.toolchain import STUB_BRANCH, Compiler, Toolchain

# `--toolchain NAME|PATH|VERSION` -> the configuration that a command works with.


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
    """Return the facts of the interpreter of a selected toolchain, which has to be complete unless it is farm's own.

    Raises MissingToolError for an interpreter without torch or ExecuTorch, or with another ExecuTorch than the named
    one; UsageError for an ExecuTorch that is too old.
    """
    python = toolchain.python
    if python is None:
        return own_facts()
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
    """Return the variables that select the packages of a toolchain's interpreter: PYTHONPATH for a checkout or release.

    A release would be mixed with the ExecuTorch of farm's own environment, whose packages it shares.
    """
    package = _named_package(toolchain)
    if package is None:
        return {}
    return {"PYTHONPATH": before("PYTHONPATH", str(checkout_link(config.cache_dir, package)))}


def _named_package(toolchain: ToolchainConfig) -> Path | None:
    """Return the folder of ExecuTorch that a checkout or a release names; None for another toolchain."""
    if toolchain.checkout is not None:
        return package_in(toolchain.checkout)
    if toolchain.version and toolchain.python is not None:
        return packages_of(toolchain.python) / "executorch"
    return None


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
    expected = _named_package(toolchain)
    if expected is not None and not _is_same(folder, expected):
        raise MissingToolError(
            f"toolchain {toolchain.name}: its Python imports ExecuTorch from {folder}, not from {expected}: unset "
            f"PYTHONPATH ({os.environ.get('PYTHONPATH', '')})"
        )


# Preparation of the toolchain that a command works with.


logger = logging.getLogger(__name__)


def prepare(config: Config, *, virtual: bool = False) -> Toolchain:
    """Return the toolchain that `config` has selected, after building its missing parts.

    `virtual`: for virtual devices, whose HOST_CPU is different. Raises MissingToolError, and UsageError for a file that
    cannot be read.
    """
    forget_sources()
    executorch = runner_executorch(config)
    native = build_native(config.cache_dir, executorch=executorch)
    sdk = host_sdk(config.cache_dir, sdk_root=config.sdk_root, native=native)
    selected = config.toolchain
    facts = look_into(config, selected)
    packages = {name: facts.version_of(name) for name in PACKAGES}
    versions = {"qnn": sdk.qnn_version, HOST_CPU: "x86" if virtual else "arm", **packages}
    python = selected.python or Path(sys.executable)
    env = {**sdk.env, **_compiler_environment(config, selected, facts)}
    # The bridge may just have been written.
    let_the_clock_pass([sdk.lib_dir / LIBRARY])
    as_of_ns = time.time_ns()
    found = identify(config.cache_dir, python, facts, env, qnn=sdk.lib_dir)
    source = source_state(config.cache_dir, found.trees)
    developed = developed_roots(config.cache_dir, found, config.trace)
    if newer_than_known(versions["executorch"]):
        logger.info("ExecuTorch %s is newer than %s, the newest that farm was run with", versions["executorch"], NEWEST)
    product = sdk_product(config.sdk_root)
    if stub_of({QNN_PRODUCT: product}):
        # Some commands print no table in which a stub could be marked.
        logger.info("STUB: QNN's libraries are a stub (%s); no number is a measurement of Qualcomm's products", product)
    return Toolchain(
        versions | found.content,
        Compiler(str(python), env, developed, as_of_ns),
        native.key,
        runner_of="" if executorch.own else f"executorch {executorch.version}",
        name=selected.name,
        branch=branch_of(config),
        private=is_private(selected) or source.dirty,
        source=source,
        qnn_product=product,
    )


def _compiler_environment(config: Config, toolchain: ToolchainConfig, facts: InterpreterFacts) -> dict[str, str]:
    """Return the variables with which an interpreter imports farm's and the toolchain's code, without QNN's ones."""
    if toolchain.python is None:
        return variables_of(facts)
    code = handover(config.cache_dir, toolchain.python, facts)
    path = import_environment(config, toolchain).get("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(code), path])), **variables_of(facts)}


def branch_of(config: Config, toolchain: ToolchainConfig | None = None) -> str:
    """Return the branch of runs with a toolchain; a path on the command line has no branch of its own, "".

    Without `toolchain` it is the selected toolchain. Runs over a stub of QNN have their own branch.
    """
    selected, sdk_root = toolchain or config.toolchain, config.sdk_root
    if toolchain is not None and toolchain.qnn:
        with contextlib.suppress(FarmError):
            sdk_root = resolve_qnn(config, toolchain.qnn)
    branch = selected.name if selected.named or selected.version else ""
    return f"{branch} {STUB_BRANCH}".strip() if stub_of({QNN_PRODUCT: sdk_product(sdk_root)}) else branch


def is_private(toolchain: ToolchainConfig) -> bool:
    """Return whether runs with a toolchain are only compared with a branch and never belong to it, even unmodified."""
    return bool(toolchain.name) and not toolchain.named and not toolchain.version
