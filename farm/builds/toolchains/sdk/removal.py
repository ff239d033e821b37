"""SDKs in the cache as `farm setup cache` sees them: how large, when used, and which may go."""

from __future__ import annotations

import contextlib
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from farm.base.errors import FarmError
from farm.base.publish import withdraw
from farm.builds.bundles.cache import folder_size
from farm.builds.runtime.qnn_sdk import ORIGIN
from farm.builds.runtime.simulator import LIBRARY, TARGET
from farm.builds.toolchains.sdks import installed_sdks, resolve_qnn, sdks_folder

if TYPE_CHECKING:
    from farm.base.config.settings import Config


class CachedSdk(msgspec.Struct, frozen=True):
    """SDK that farm fetched into the cache."""

    version: str
    root: Path
    nbytes: int
    used_ms: int
    """Time of the last use by a toolchain, or of the download, epoch milliseconds."""
    named: bool
    """True for an SDK that farm.toml names, so that it stays."""


def cached_sdks(config: Config) -> list[CachedSdk]:
    """Return the SDKs in the cache, newest version first."""
    named = set(_named(config))
    return [
        CachedSdk(sdk.version, sdk.root, folder_size(sdk.root)[1], _used_ms(sdk.root), sdk.root in named)
        for sdk in installed_sdks(config)
        if sdk.root is not None
    ]


def removable_sdks(config: Config, older_than_s: float | None) -> list[CachedSdk]:
    """Return the SDKs without use for `older_than_s`, none for None; SDKs that farm.toml names always stay."""
    if older_than_s is None:
        return []
    horizon_ms = (time.time() - older_than_s) * 1000
    return [sdk for sdk in cached_sdks(config) if not sdk.named and sdk.used_ms <= horizon_ms]


def remove_sdk(config: Config, sdk: CachedSdk) -> None:
    """Remove an SDK, and the layouts whose links lead to its libraries."""
    withdraw(sdk.root)
    (sdks_folder(config.cache_dir) / f"{sdk.root.name}.lock").unlink(missing_ok=True)
    for folder in (config.cache_dir / "sdk").glob(f"*/lib/{TARGET}/real"):
        if (folder / LIBRARY).is_symlink() and not (folder / LIBRARY).exists():
            shutil.rmtree(folder.parents[2], ignore_errors=True)


def _used_ms(root: Path) -> int:
    with contextlib.suppress(OSError):
        return int((root / ORIGIN).stat().st_mtime * 1000)
    return 0


def _named(config: Config) -> list[Path]:
    found = [root for root in (config.sdk_root, config.android_qnn) if root is not None]
    for toolchain in config.toolchains.values():
        if toolchain.qnn:
            with contextlib.suppress(FarmError):
                found += [root for root in [resolve_qnn(config, toolchain.qnn)] if root is not None]
    return found
