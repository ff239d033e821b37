"""Intervals of an agent."""

from __future__ import annotations

from typing import NamedTuple


class Timing(NamedTuple):
    """How often an agent does what it does again and again, in seconds."""

    ttl_s: float = 10.0
    """For how long it, and its leases, live without a heartbeat."""
    heartbeat_s: float = 3.0
    scan_s: float = 3.0
    """Between two looks at what is attached."""
    linger_s: float = 0.5
    """How long a device without work keeps its lease, and its session."""
    rest_s: float = 60.0
    """How long a device gets no work after a shard could not begin on it."""
    fetch_s: float = 15.0
    """How long a host waits for an artifacts' store that is away: then others, who may reach it, get the shard."""
