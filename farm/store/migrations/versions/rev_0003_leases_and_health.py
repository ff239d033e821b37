"""Leases, waiters and the registry of devices; causes of attempts and priorities of runs."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy import Column

revision = "0003"
down_revision = "0002"

_ROW_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    """Create the tables and columns."""
    # Plain ALTER TABLE, which both databases support without a copy of the table.
    op.add_column("run", Column("priority", sa.String(length=16), nullable=False, server_default="person"))
    op.add_column("attempt", Column("cause", sa.String(length=16), nullable=False, server_default=""))
    op.create_table(
        "device_state",
        Column("id", sa.String(length=256), nullable=False),
        Column("serial", sa.String(length=256), nullable=False),
        Column("host", sa.String(length=256), nullable=False),
        Column("soc", sa.String(length=64), nullable=False),
        Column("kind", sa.String(length=16), nullable=False),
        Column("os", sa.String(length=16), nullable=False),
        Column("product", sa.String(length=256), nullable=False),
        Column("name", sa.String(length=256), nullable=False),
        Column("labels", sa.JSON(), nullable=False),
        Column("in_service", sa.Boolean(), nullable=False),
        Column("service_note", sa.Text(), nullable=False),
        Column("service_user", sa.String(length=256), nullable=False),
        Column("health", sa.String(length=16), nullable=False),
        Column("health_reason", sa.Text(), nullable=False),
        Column("status", sa.JSON(), nullable=True),
        Column("state", sa.String(length=64), nullable=False),
        Column("last_seen_ms", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_device_state"),
    )
    op.create_table(
        "health_event",
        Column("id", _ROW_ID, nullable=False),
        Column("device", sa.String(length=256), nullable=False),
        Column("time_ms", sa.BigInteger(), nullable=False),
        Column("event", sa.String(length=64), nullable=False),
        Column("state", sa.String(length=16), nullable=False),
        Column("reason", sa.Text(), nullable=False),
        Column("detail", sa.JSON(), nullable=False),
        Column("latency_ns", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(["device"], ["device_state.id"], name="fk_health_event_device"),
        sa.PrimaryKeyConstraint("id", name="pk_health_event"),
    )
    op.create_index("ix_health_event_device", "health_event", ["device"])
    op.create_table(
        "lease",
        Column("device", sa.String(length=256), nullable=False),
        Column("fence", sa.BigInteger(), nullable=False),
        Column("token", sa.String(length=64), nullable=False),
        Column("user_name", sa.String(length=256), nullable=False),
        Column("host", sa.String(length=256), nullable=False),
        Column("pid", sa.BigInteger(), nullable=False),
        Column("purpose", sa.Text(), nullable=False),
        Column("priority", sa.Integer(), nullable=False),
        Column("acquired_ms", sa.BigInteger(), nullable=False),
        Column("expires_ms", sa.BigInteger(), nullable=False),
        Column("reserved_for", sa.String(length=256), nullable=False),
        Column("reserved_until_ms", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("device", name="pk_lease"),
    )
    op.create_table(
        "waiter",
        Column("id", sa.String(length=64), nullable=False),
        Column("devices", sa.Text(), nullable=False),
        Column("wanted", sa.Integer(), nullable=False),
        Column("user_name", sa.String(length=256), nullable=False),
        Column("host", sa.String(length=256), nullable=False),
        Column("pid", sa.BigInteger(), nullable=False),
        Column("purpose", sa.Text(), nullable=False),
        Column("priority", sa.Integer(), nullable=False),
        Column("since_ms", sa.BigInteger(), nullable=False),
        Column("expires_ms", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_waiter"),
    )
