"""The toolchain that a command works with, found once."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from farm.bundles.key import toolchain_versions
from farm.runtime.native.build import build_native
from farm.runtime.simulator import host_sdk
from farm.toolchains.toolchain import Compiler, Toolchain

if TYPE_CHECKING:
    from collections.abc import Callable

    from farm.config.settings import Config


def prepare(config: Config, note: Callable[[str], None], *, virtual: bool = False) -> Toolchain:
    """Build what is missing and return the toolchain that `config` has selected, `virtual` as in `toolchain_versions`.

    Raises MissingToolError.
    """
    lines: list[str] = []

    def building(line: str) -> None:
        # What cmake and ninja print is in the build's log; here it is enough to know why it takes a while.
        if not lines:
            note("building the native runner, once for this compiler and ExecuTorch (half a minute)")
        lines.append(line)

    native = build_native(config.cache_dir, log=building)
    sdk = host_sdk(config.cache_dir, sdk_root=config.sdk_root)
    versions = toolchain_versions(sdk.qnn_version, virtual=virtual)
    return Toolchain(versions, Compiler(sys.executable, dict(sdk.env)), native.key)
