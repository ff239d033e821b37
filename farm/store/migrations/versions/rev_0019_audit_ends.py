"""Ends of actions in the audit."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0019"
down_revision = "0018"


def upgrade() -> None:
    """Add the column; entries of earlier versions have no end of their own."""
    op.add_column("audit", sa.Column("begin_id", sa.BigInteger(), nullable=True))
    op.create_index("ix_audit_begin_id", "audit", ["begin_id"], unique=True)
