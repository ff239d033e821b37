"""Native parts of a commit, built by the user's own build command from its sources."""

from __future__ import annotations

import logging
import os
import sys
from typing import TYPE_CHECKING

from farm.base.errors import NativeBuildError, UsageError
from farm.base.processes import Supervisor, ending
from farm.builds.toolchains.commits import Checkout, Commit, export

if TYPE_CHECKING:
    from pathlib import Path

    from farm.base.config.toolchains import ToolchainConfig

logger = logging.getLogger(__name__)

BUILD_SECONDS = 2 * 3600.0
"""Time limit of a build."""

# Both streams of a build are in one file, in their order.
_INTO_ONE = "import os, sys; os.dup2(2, 1); os.execvp(sys.argv[1], sys.argv[1:])"


def build_native_parts(
    tree: Path,
    repository: Checkout,
    commit: Commit,
    toolchain: ToolchainConfig,
    log: Path,
) -> None:
    """Run the toolchain's build command in `tree` with the commit's submodules; its output goes to `log`.

    Raises NativeBuildError, which names the log.
    """
    fill_submodules(tree, repository, commit)
    logger.info("building the native parts of %s: %s (log: %s)", commit.short, " ".join(toolchain.build), log)
    environment = {**os.environ, "EXECUTORCH_ROOT": str(tree)}
    if toolchain.python is not None:
        environment["PATH"] = os.pathsep.join([str(toolchain.python.parent), os.environ.get("PATH", os.defpath)])
    argv = [sys.executable, "-c", _INTO_ONE, *toolchain.build]
    with Supervisor() as supervisor:
        child = supervisor.spawn(argv, name=toolchain.build[0], env=environment, cwd=tree, stderr=log)
        with child.limited(BUILD_SECONDS) as overdue:
            code = child.process.wait()
    if code:
        how = f"did not finish in {BUILD_SECONDS:g} s" if overdue.is_set() else f"ended with {ending(code)}"
        raise NativeBuildError(f"{commit.short} does not build: {toolchain.build[0]} {how}: see {log}")


def fill_submodules(tree: Path, repository: Checkout, commit: Commit) -> None:
    """Fill the submodules that the user's checkout has, and their submodules, with the pinned commits.

    Raises NativeBuildError for a pinned commit that the checkout lacks.
    """
    for one in repository.submodules(commit):
        here = repository.folder / one.path
        if not (here / ".git").exists():
            continue
        place = tree / one.path
        if not place.parent.resolve().is_relative_to(tree.resolve()):
            continue
        try:
            inner = Checkout(here)
            wanted = inner.commit(one.sha)
            if place.is_dir() and not any(place.iterdir()):
                place.rmdir()
            export(place, inner, wanted)
        except UsageError as error:
            raise NativeBuildError(
                f"{commit.short} does not build: it wants {one.sha[:10]} of the submodule {one.path}: {error}"
            ) from None
        fill_submodules(place, inner, wanted)
