"""How a run is handed in: what only somebody at a shared farm decides."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

    from farm.cluster.client.follow import Answer


class Manner(NamedTuple):
    """Of one command; a run that is resumed may have another."""

    detach: bool = False
    """Nobody follows it."""
    build_here: bool = False
    """What is not compiled yet is compiled in this process."""
    wait: bool = False
    """An SoC or a toolchain that no living host has is waited for, however long."""
    ask: Callable[[], Answer] | None = None
    """Asks a person what Ctrl-C means; None where nobody can answer."""
