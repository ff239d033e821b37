"""Operators of a program that a backend built; indices for the newest results of a case."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy import Column

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    """Create the column and the indices."""
    op.add_column("run_job", Column("operators", sa.JSON(), nullable=True))
    op.create_index("ix_job_case_name", "job", ["case_name"])
    op.create_index("ix_run_job_job_id_id", "run_job", ["job_id", "id"])
    op.drop_index("ix_run_job_job_id", "run_job")
