"""Tables of the store, the same in SQLite and PostgreSQL."""

from __future__ import annotations

from pathlib import Path

from farm.store.schema.base import metadata
from farm.store.schema.devices import device_state, health_event, lease, waiter
from farm.store.schema.recorded import (
    alert,
    artifact,
    attempt,
    comparison,
    counter,
    device,
    fingerprint,
    job,
    layer,
    measurement,
    op_profile,
    run,
    run_device,
    run_job,
    series,
    shard_weights,
    suite_case,
    triage,
)
from farm.store.schema.serving import account, audit
from farm.store.schema.sharing import (
    agent,
    agent_device,
    build,
    build_wanted,
    nightly_start,
    quota,
    run_order,
    shard,
    shard_jobs,
    soc_look,
)

# Read from file names, so that an up-to-date store is recognized without importing Alembic.
REVISION = max(file.name[4:8] for file in Path(__file__).parents[1].glob("migrations/versions/rev_*.py"))
"""Newest revision of the tables."""
# Not Alembic's default name, so that a PostgreSQL database can be shared with another program that uses Alembic.
VERSION_TABLE = "farm_schema"

__all__ = [
    "REVISION",
    "VERSION_TABLE",
    "account",
    "agent",
    "agent_device",
    "alert",
    "artifact",
    "attempt",
    "audit",
    "build",
    "build_wanted",
    "comparison",
    "counter",
    "device",
    "device_state",
    "fingerprint",
    "health_event",
    "job",
    "layer",
    "lease",
    "measurement",
    "metadata",
    "nightly_start",
    "op_profile",
    "quota",
    "run",
    "run_device",
    "run_job",
    "run_order",
    "series",
    "shard",
    "shard_jobs",
    "shard_weights",
    "soc_look",
    "suite_case",
    "triage",
    "waiter",
]
