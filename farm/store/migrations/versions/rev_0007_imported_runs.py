"""Newest result of a job by the time of runs, for any order in which the store received them."""

from __future__ import annotations

from alembic import op

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    """Replace the index in the order of rows by an index in the order of time."""
    op.create_index("ix_run_job_job_id_run_id", "run_job", ["job_id", "run_id"])
    op.drop_index("ix_run_job_job_id_id", "run_job")
