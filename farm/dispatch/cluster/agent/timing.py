"""Intervals of an agent; the intervals of leases are in `[leases]` of farm.toml."""

from __future__ import annotations

from typing import NamedTuple


class Timing(NamedTuple):
    """Intervals and patience, in seconds."""

    scan_s: float = 3.0
    """Interval between two scans of attached devices."""
    linger_s: float = 0.5
    """Time for which a device without work keeps its lease and its session."""
    rest_s: float = 60.0
    """Time without work for a device on which a shard could not begin."""
    fetch_s: float = 15.0
    """Patience with an unreachable artifact store; afterwards hosts that reach it get the shard."""
