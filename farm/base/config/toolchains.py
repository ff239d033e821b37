"""The [toolchain.NAME] tables of farm.toml."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from farm.base.errors import ConfigError
from farm.base.paths import is_path
from farm.base.toml_tables import convert_table

# Part of names of files, and not to be taken for a version or a path.
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")

_RELEASE = re.compile(r"v?(\d{1,4}(?:\.\d{1,9}){1,3})((?:[a-z.+]{1,5}\d{0,12})?)")

DEFAULT = "default"
"""Name of the environment that farm itself runs in."""


class ToolchainTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Table of a toolchain as written."""

    checkout: str | None = None
    """Source tree of ExecuTorch, built."""
    python: str | None = None
    """Interpreter with torch and, without `checkout`, ExecuTorch."""
    version: str | None = None
    """Release of ExecuTorch that farm installs, such as `1.5.0`."""
    qnn: str | None = None
    """Version of QNN, such as `2.49`, or a path; default: as `[qnn]` has it."""
    native: dict[str, str] = {}
    """Build folders of ExecuTorch by target; they replace the folders of `[qnn]`."""
    build: tuple[str, ...] = ()
    """Command that builds the native parts of a commit."""
    commit_url: str = ""
    """Address of a commit for reports, with `{commit}` in it."""


class ToolchainConfig(msgspec.Struct, frozen=True):
    """A toolchain as the user named it. Every path is absolute; all fields empty are the environment farm runs in."""

    name: str = ""
    """Empty for the default."""
    named: bool = False
    """True for a table of farm.toml, which has its own branch in the history; False for a command's path or version."""
    checkout: Path | None = None
    """A source tree of ExecuTorch."""
    python: Path | None = None
    """An interpreter with torch and, unless there is a checkout, ExecuTorch."""
    version: str = ""
    """A release of ExecuTorch, whose environment farm makes in its cache."""
    qnn: str = ""
    """A version of QNN such as `2.49`, or an absolute path; empty for `sdk_root` of the [qnn] table."""
    executorch: Path | None = None
    """Folder of its `executorch` package, known after selection; None for the package in farm's environment."""
    native: dict[str, Path] = {}
    """Build folders of ExecuTorch by target, as `farm.builds.runtime.native` names them."""
    build: tuple[str, ...] = ()
    """Command that builds the native parts of a checkout, in its folder."""
    commit_url: str = ""
    """Address of a commit, with `{commit}` in it."""


def release_of(text: str) -> str:
    """Return the release of ExecuTorch in `text`, always with three numbers; empty for other text.

    A release is one environment and one branch in every spelling: `1.5`, `v1.5.0` and `1.5.0` are equal.
    """
    found = _RELEASE.fullmatch(text)
    if found is None:
        return ""
    numbers = found[1].split(".")
    return ".".join([*numbers, *["0"] * (3 - len(numbers))]) + found[2]


def read_toolchains(
    file: Path, tables: Mapping[str, Any], beside: Callable[[str], Path | None]
) -> dict[str, ToolchainConfig]:
    """Return the toolchains by name; `beside` makes a path absolute. Raises ConfigError."""
    found = {}
    for name, content in tables.items():
        table = _table(file, name, content)
        if name == DEFAULT or not _NAME.fullmatch(name):
            problem = f"is no name of a toolchain: a letter, then letters, digits and _ . -, and not {DEFAULT!r}"
            raise ConfigError(file, f"toolchain.{name}", problem)
        if not any((table.checkout, table.python, table.version, table.qnn, table.native)):
            problem = "is empty: expected checkout, python, version, qnn or native"
            raise ConfigError(file, f"toolchain.{name}", problem)
        sources = [key for key in ("checkout", "version") if getattr(table, key)]
        if len(sources) > 1 or (table.version and table.python):
            problem = "has more than one of checkout, version and python: keep one of them"
            raise ConfigError(file, f"toolchain.{name}", problem)
        if table.version and not release_of(table.version):
            problem = f"is {table.version!r}, which is no release of ExecuTorch: expected one such as 1.5.0"
            raise ConfigError(file, f"toolchain.{name}.version", problem)
        _require_commit_url(file, name, table.commit_url)
        qnn = table.qnn or ""
        if is_path(qnn):
            qnn = str(beside(qnn))
        found[name] = ToolchainConfig(
            name=name,
            named=True,
            checkout=beside(table.checkout) if table.checkout else None,
            python=beside(table.python) if table.python else None,
            version=release_of(table.version or ""),
            qnn=qnn,
            native={target: path for target, text in table.native.items() if (path := beside(text)) is not None},
            build=table.build,
            commit_url=table.commit_url,
        )
    return found


def _table(file: Path, name: str, content: object) -> ToolchainTable:
    keys = ", ".join(ToolchainTable.__struct_fields__)
    if not isinstance(content, dict):
        problem = f"is no table: each toolchain has a name, as in [toolchain.main], and its keys are {keys}"
        raise ConfigError(file, f"toolchain.{name}", problem)
    return convert_table(file, content, ToolchainTable, f"toolchain.{name}")


def _require_commit_url(file: Path, name: str, template: str) -> None:
    """Raise ConfigError for what leads nowhere, or would put a password into the store and its pages."""
    if not template:
        return
    try:
        address = urlsplit(template)
    except ValueError:
        address = urlsplit("")
    fields = set(re.findall(r"[{}][^{}]*[{}]?", template))
    if address.scheme not in ("http", "https") or not address.netloc or "@" in address.netloc or fields != {"{commit}"}:
        problem = "is no address of a commit: expected http(s)://HOST/..{commit}.. without a password"
        raise ConfigError(file, f"toolchain.{name}.commit_url", problem)
