"""Tables of the store, the same in SQLite and PostgreSQL."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy import text

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

if TYPE_CHECKING:
    from sqlalchemy import Connection

# Read from file names, so that an up-to-date store is recognized without importing Alembic.
REVISIONS = sorted(file.name[4:8] for file in Path(__file__).parents[1].glob("migrations/versions/rev_*.py"))
"""Revisions that this farm opens or upgrades, from farm 0.2.0 on."""
REVISION = REVISIONS[-1]
# Not Alembic's default name, so that a PostgreSQL database can be shared with another program that uses Alembic.
VERSION_TABLE = "farm_schema"


def make_tables(connection: Connection) -> None:
    """Make the tables of a new store."""
    metadata.create_all(connection, checkfirst=False)
    key = f"CONSTRAINT {VERSION_TABLE}_pkc PRIMARY KEY (version_num)"
    connection.execute(text(f"CREATE TABLE {VERSION_TABLE} (version_num VARCHAR(32) NOT NULL, {key})"))
    connection.execute(text(f"INSERT INTO {VERSION_TABLE} VALUES (:revision)"), {"revision": REVISION})  # noqa: S608


__all__ = [
    "REVISION",
    "REVISIONS",
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
    "make_tables",
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
