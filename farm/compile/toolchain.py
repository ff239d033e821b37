"""What compiling needs on this machine, found once a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from farm.bundles.key import LPAI_TARGET, toolchain_versions
from farm.runtime.native.build import build_native
from farm.runtime.simulator import host_sdk

if TYPE_CHECKING:
    from collections.abc import Callable

    from farm.config.settings import Config


class Toolchain(msgspec.Struct, frozen=True):
    """The compiler's versions and environment."""

    versions: dict[str, str]
    """What a bundle depends on besides its job: executorch, torch, torchao, qnn, and what LPAI compiles for."""
    env: dict[str, str]
    """Variables that a builder process must start with."""
    runner: str
    """Hash of the native build."""

    def fingerprint(self, *, virtual: bool) -> dict[str, str]:
        """Return what the numbers of a run depend on, as far as this machine knows it."""
        from farm import __version__

        kind = "virtual" if virtual else "hardware"
        versions = {name: version for name, version in self.versions.items() if name != LPAI_TARGET}
        return {"farm": __version__, **versions, "native_runner": self.runner[:16], "device_kind": kind}


def prepare(config: Config, note: Callable[[str], None], *, virtual: bool = False) -> Toolchain:
    """Build what is missing and return the toolchain, `virtual` as in `toolchain_versions`. Raises MissingToolError."""
    lines: list[str] = []

    def building(line: str) -> None:
        # What cmake and ninja print is in the build's log; here it is enough to know why it takes a while.
        if not lines:
            note("building the native runner, once for this compiler and ExecuTorch (half a minute)")
        lines.append(line)

    native = build_native(config.cache_dir, log=building)
    sdk = host_sdk(config.cache_dir, sdk_root=config.sdk_root)
    return Toolchain(toolchain_versions(sdk.qnn_version, virtual=virtual), dict(sdk.env), native.key)
