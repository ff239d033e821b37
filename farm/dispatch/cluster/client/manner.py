"""How a run is handed in: what only somebody at a shared farm decides, and what cannot be."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from farm.base.errors import UsageError
from farm.dispatch.request.profiling import Profile

if TYPE_CHECKING:
    from collections.abc import Callable

    from farm.dispatch.cluster.client.follow import Meaning
    from farm.dispatch.request.request import RunRequest


class Manner(NamedTuple):
    """Of one command; a run that is resumed may have another."""

    detach: bool = False
    """Nobody follows it."""
    build_here: bool = False
    """What is not compiled yet is compiled in this process."""
    wait: bool = False
    """An SoC or a toolchain that no living host has is waited for, however long."""
    ask: Callable[[], Meaning] | None = None
    """Asks a person what Ctrl-C means; None where nobody can answer."""


def require_possible(request: RunRequest, manner: Manner) -> None:
    """Raise UsageError for what a shared farm cannot do."""
    if manner.detach and manner.build_here:
        raise UsageError("--build here compiles in this process, which --detach ends: leave one of them out")
    if manner.detach and request.confirm:
        raise UsageError(
            "--confirm measures again once the run is over: leave --detach out, or use 'farm perf confirm'"
        )
    if request.profile is Profile.OPTRACE:
        raise UsageError(
            "--profile optrace needs the SDK that made the program beside the device: run it on the machine that the "
            "device hangs on, without artifacts in farm.toml, or on the simulator with --virtual"
        )
