"""The environment for tools outside farm: ExecuTorch's own tests and scripts, which compile and start a runner."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from farm.runtime.native.build import build_native
from farm.runtime.packages import package_folder
from farm.runtime.simulator import host_sdk
from farm.system.publish import published

if TYPE_CHECKING:
    from collections.abc import Callable

# Called by this name the runner writes an ETDump without being asked, as the tools that start it by this name expect.
_UPSTREAM_RUNNER = "qnn_executor_runner"


def outside_environment(
    cache_dir: Path, *, sdk_root: Path | None = None, log: Callable[[str], None] | None = None
) -> dict[str, str]:
    """Return QNN_SDK_ROOT, LD_LIBRARY_PATH and QNN_EXECUTOR_RUNNER; what is not built yet is built.

    A process must start with them. What LD_LIBRARY_PATH has now stays, behind. Raises MissingToolError, InfraError.
    """
    native = build_native(cache_dir, log=log)
    sdk = host_sdk(cache_dir, sdk_root=sdk_root, log=log)
    libraries = package_folder("executorch", "lib/libexecutorch.so", "build") / "lib"
    ours = [str(sdk.lib_dir), str(libraries)]
    # Whoever evaluates it a second time gets the same again.
    before = [path for path in os.environ.get("LD_LIBRARY_PATH", "").split(":") if path and path not in ours]
    return {
        "QNN_SDK_ROOT": str(sdk.root),
        "LD_LIBRARY_PATH": ":".join([*ours, *before]),
        "QNN_EXECUTOR_RUNNER": str(_standalone(cache_dir, native.runner, native.key, libraries)),
    }


def _standalone(cache_dir: Path, runner: Path, key: str, libraries: Path) -> Path:
    """Return a runner with ExecuTorch's libraries beside it.

    Upstream's tests replace LD_LIBRARY_PATH when they start it, and the runner looks beside itself.
    """
    where = hashlib.sha256(f"{_UPSTREAM_RUNNER}\0{key}\0{libraries}".encode()).hexdigest()[:32]

    def lay_out(folder: Path) -> None:
        # A copy: a link would make the runner look beside what it points at.
        shutil.copy2(runner, folder / _UPSTREAM_RUNNER)
        for library in libraries.glob("libexecutorch*.so"):
            (folder / library.name).symlink_to(library)

    return published(cache_dir / "outside" / where, lay_out) / _UPSTREAM_RUNNER
