"""Options of a submission on a shared farm, and impossible combinations."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from farm.base.errors import UsageError
from farm.dispatch.request.profiling import Profile

if TYPE_CHECKING:
    from collections.abc import Callable

    from farm.dispatch.cluster.client.follow import InterruptChoice
    from farm.dispatch.request.request import RunRequest


class SubmitOptions(NamedTuple):
    """Options of one command on a shared farm; a resumed run may have others."""

    detach: bool = False
    """Return after the submission instead of following the run."""
    build_here: bool = False
    """Compile missing bundles in this process."""
    wait: bool = False
    """Wait without limit for an SoC or a toolchain that no living host has."""
    ask: Callable[[], InterruptChoice] | None = None
    """Callable that asks the user for the meaning of Ctrl-C; None without a terminal."""


def require_possible(request: RunRequest, options: SubmitOptions) -> None:
    """Raise UsageError for combinations of options that a shared farm cannot execute."""
    if options.detach and options.build_here:
        raise UsageError("--build-on here compiles in this process, which --detach ends: leave one of them out")
    if options.detach and request.confirm:
        raise UsageError("--confirm measures again after the run: leave --detach out, or use 'farm perf confirm'")
    if request.profile is Profile.OPTRACE:
        raise UsageError(
            "--profile optrace needs the SDK of the program on the host of the device: run it on that host, without "
            "artifacts in farm.toml, or on the simulator with --virtual"
        )
