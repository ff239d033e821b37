"""Hashes for selection of jobs, jobs skipped for lack of time, and the division of jobs among shards."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy import Column

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    """Create the columns and the table."""
    op.add_column("run_job", Column("judged_by", sa.String(length=64), nullable=True))
    op.add_column("run_job", Column("stale", sa.JSON(), nullable=True))
    op.create_table(
        "shard_weights",
        Column("selection", sa.String(length=64), nullable=False),
        Column("asked_ms", sa.BigInteger(), nullable=False),
        Column("seconds", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("selection", name="pk_shard_weights"),
    )
