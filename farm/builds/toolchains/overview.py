"""Overview of the toolchains: the default, the entries of farm.toml, and environments that farm made."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from farm.base.config.settings import Config
from farm.base.config.toolchains import DEFAULT, ToolchainConfig
from farm.base.errors import FarmError
from farm.base.files import require_own, withdraw
from farm.builds.bundles.cache import folder_size
from farm.builds.toolchains.environments import about, environment_folder, environments_folder, used_ms
from farm.builds.toolchains.identity import identify, source_state
from farm.builds.toolchains.probe import PACKAGES
from farm.builds.toolchains.selection import import_environment, look_into, select
from farm.builds.toolchains.toolchain import SourceState

NOT_MADE = "not made"


class ToolchainRow(msgspec.Struct, frozen=True):
    """Facts of a toolchain that are known without installing or compiling."""

    name: str
    kind: str
    """Origin of the code: `default`, `checkout`, `python`, `version`, or `qnn` for an entry with QNN alone."""
    place: str
    """Named source tree, interpreter or folder, or the release."""
    python: str = ""
    """Path of the interpreter; empty if unknown."""
    python_version: str = ""
    executorch_folder: str = ""
    versions: dict[str, str] = {}
    """Versions of executorch, torch and torchao."""
    qnn: str = ""
    """QNN as named in the toolchain; empty for farm's default."""
    source: SourceState = SourceState()
    problem: str = ""
    """Reason against using the toolchain; NOT_MADE for a release without an environment yet."""


class EnvironmentRow(msgspec.Struct, frozen=True):
    """Environment in the cache."""

    folder: str
    executorch: str
    torch: str
    made_ms: int
    used_ms: int
    """Epoch milliseconds."""
    nbytes: int
    """Bytes on disk, without shared packages."""
    current: bool
    """True for the environment that `--toolchain VERSION` uses, with farm's present packages."""


def toolchain_rows(config: Config) -> list[ToolchainRow]:
    """Return the default toolchain and the toolchains of farm.toml, usable or not."""
    return [row_of(config, ToolchainConfig()), *(row_of(config, one) for one in config.toolchains.values())]


def row_of(config: Config, toolchain: ToolchainConfig) -> ToolchainRow:
    """Return the known facts of a toolchain, without installing or compiling; a problem is a field, not an error."""
    kind, place = _origin(toolchain)
    row = ToolchainRow(toolchain.name or DEFAULT, kind, place, qnn=toolchain.qnn)
    if toolchain.version and not environment_folder(config.cache_dir, toolchain.version).is_dir():
        return msgspec.structs.replace(row, problem=NOT_MADE)
    try:
        selected = select(config, toolchain).toolchain
        facts = look_into(config, selected)
        python, variables = selected.python or Path(sys.executable), import_environment(config, selected)
        trees = identify(config.cache_dir, python, facts, variables).trees
        source = source_state(config.cache_dir, trees)
    except FarmError as error:
        return msgspec.structs.replace(row, problem=str(error))
    missing = [name for name in PACKAGES if name not in facts.packages]
    return msgspec.structs.replace(
        row,
        python=str(python),
        python_version=".".join(map(str, facts.version)),
        executorch_folder=str(facts.folder("executorch") or ""),
        versions=facts.versions,
        source=source,
        problem=f"no {', '.join(missing)}: farm itself needs none, --toolchain names an environment" if missing else "",
    )


def _origin(toolchain: ToolchainConfig) -> tuple[str, str]:
    if toolchain.version:
        return "version", toolchain.version
    if toolchain.checkout is not None:
        return "checkout", str(toolchain.checkout)
    if toolchain.python is not None:
        return "python", str(toolchain.python)
    return ("qnn" if toolchain.qnn or toolchain.native else DEFAULT), sys.prefix


def environment_rows(cache_dir: Path) -> list[EnvironmentRow]:
    """Return the environments in the cache, the one used last first."""
    found = [
        EnvironmentRow(
            folder=str(folder),
            executorch=made.executorch,
            torch=made.torch,
            made_ms=made.made_ms,
            used_ms=used_ms(folder),
            nbytes=folder_size(folder)[1],
            current=folder == environment_folder(cache_dir, made.executorch),
        )
        for folder in environments_folder(cache_dir).glob("*")
        if (made := about(folder)) is not None
    ]
    return sorted(found, key=lambda row: -row.used_ms)


def remove_environment(row: EnvironmentRow) -> None:
    """Remove an environment; a command that works with it fails. Raises UntrustedError."""
    folder = Path(row.folder)
    require_own(folder)
    withdraw(folder)
