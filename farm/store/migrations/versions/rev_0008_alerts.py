"""Alerts, their confirmations and their triage; runtimes with which devices executed programs."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy import Column

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    """Create both tables and the column."""
    op.add_column("run_device", Column("runtime", sa.JSON(none_as_null=True), nullable=True))
    row_id = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
    op.create_table(
        "alert",
        Column("id", row_id, nullable=False),
        Column("series_id", row_id, nullable=False),
        Column("device_kind", sa.String(length=16), nullable=False),
        Column("run_id", sa.String(length=64), nullable=False),
        Column("finding", sa.String(length=16), nullable=False),
        Column("state", sa.String(length=16), nullable=False),
        Column("last_good", sa.String(length=64), nullable=False),
        Column("first_bad", sa.String(length=64), nullable=False),
        Column("change", sa.Float(precision=53), nullable=True),
        Column("low", sa.Float(precision=53), nullable=True),
        Column("high", sa.Float(precision=53), nullable=True),
        Column("p_value", sa.Float(precision=53), nullable=True),
        Column("reason", sa.Text(), nullable=False),
        Column("guilt", sa.Text(), nullable=False),
        Column("device", sa.String(length=256), nullable=False),
        Column("pairs", sa.JSON(none_as_null=True), nullable=True),
        Column("found_ms", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["series_id"], ["series.id"], name="fk_alert_series_id"),
        sa.PrimaryKeyConstraint("id", name="pk_alert"),
        sa.UniqueConstraint("series_id", "device_kind", "run_id", name="uq_alert_series_id_device_kind_run_id"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_alert_run_id", "alert", ["run_id"])
    op.create_index("ix_alert_state", "alert", ["state"])
    op.create_table(
        "triage",
        Column("id", row_id, nullable=False),
        Column("subject", sa.String(length=576), nullable=False),
        Column("state", sa.String(length=16), nullable=False),
        Column("user_name", sa.String(length=256), nullable=False),
        Column("owner", sa.String(length=256), nullable=False),
        Column("note", sa.Text(), nullable=False),
        Column("time_ms", sa.BigInteger(), nullable=False),
        Column("until_ms", sa.BigInteger(), nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_triage"),
    )
    op.create_index("ix_triage_subject", "triage", ["subject"])
