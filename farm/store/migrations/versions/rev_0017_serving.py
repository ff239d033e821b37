"""Accounts and actions of `farm serve`, and reservations that begin later."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy import Column

from farm.store.schema import RowId

revision = "0017"
down_revision = "0016"


def upgrade() -> None:
    """Add the tables and the column; present reservations have begun."""
    op.create_table(
        "account",
        Column("name", sa.String(length=256), nullable=False),
        Column("role", sa.String(length=16), nullable=False),
        Column("token_hash", sa.String(length=64), nullable=False),
        Column("created_ms", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_account"),
        sa.UniqueConstraint("token_hash", name="uq_account_token_hash"),
    )
    op.create_table(
        "audit",
        Column("id", RowId, nullable=False),
        Column("time_ms", sa.BigInteger(), nullable=False),
        Column("user_name", sa.String(length=256), nullable=False),
        Column("action", sa.String(length=32), nullable=False),
        Column("asked", sa.Text(), nullable=False),
        Column("outcome", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_audit"),
    )
    op.add_column("lease", Column("reserved_from_ms", sa.BigInteger(), nullable=False, server_default="0"))
