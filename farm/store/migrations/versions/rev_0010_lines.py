"""Which toolchain a run had, which line it belongs to or is only compared with, and what its programs are."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy import Column

revision = "0010"
down_revision = "0009"


def upgrade() -> None:
    """Make the columns. Every run that is there is of the default line, as is what an older farm still records."""
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
