"""`--toolchain NAME|PATH|VERSION` -> the configuration that a command works with."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from farm.errors import UnknownNameError

if TYPE_CHECKING:
    from farm.config.settings import Config


def use_toolchain(config: Config, ref: str) -> Config:
    """Return `config` with the toolchain `ref` selected: its name in farm.toml, a path, or a version of ExecuTorch.

    Empty is the default. Raises UnknownNameError, UsageError, MissingToolError.
    """
    if not ref:
        return config
    if ref not in config.toolchains:
        raise UnknownNameError("toolchain", ref, config.toolchains)
    return msgspec.structs.replace(config, toolchain=config.toolchains[ref])
