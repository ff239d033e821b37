"""Toolchain and branch of a run, whether it is only compared with the branch, and hashes of its programs."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy import Column

revision = "0010"
down_revision = "0009"


def upgrade() -> None:
    """Create the columns. Existing runs belong to the default branch, and so do further runs of an older farm."""
    no = sa.false()
    op.add_column("run", Column("run_toolchain", sa.String(length=256), nullable=False, server_default=""))
    op.add_column("run", Column("run_line", sa.String(length=256), nullable=False, server_default=""))
    op.add_column("run", Column("run_private", sa.Boolean(), nullable=False, server_default=no))
    op.add_column("run", Column("run_commit", sa.String(length=64), nullable=False, server_default=""))
    op.add_column("run", Column("run_dirty", sa.Boolean(), nullable=False, server_default=no))
    op.add_column("run", Column("run_source", sa.JSON(none_as_null=True), nullable=True))
    op.add_column("run_job", Column("program_hash", sa.String(length=64), nullable=True))
    op.add_column("alert", Column("alert_line", sa.String(length=256), nullable=False, server_default=""))
    op.add_column("alert", Column("alert_private", sa.Boolean(), nullable=False, server_default=no))
