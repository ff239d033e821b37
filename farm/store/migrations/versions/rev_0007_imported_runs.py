"""The newest result of a job is that of the newest run, in whatever order the store came to know the runs."""

from __future__ import annotations

from alembic import op

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    """Make the index that is in the order of time, in place of the one in the order of rows."""
    op.create_index("ix_run_job_job_id_run_id", "run_job", ["job_id", "run_id"])
    op.drop_index("ix_run_job_job_id_id", "run_job")
