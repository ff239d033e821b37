"""Columns with the terms of the glossary: branch, nightly run, skipped job."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0017"

_RENAMED = (
    ("run", "run_line", "run_branch"),
    ("run", "run_night", "run_nightly"),
    ("run_job", "stale", "skipped"),
    ("alert", "alert_line", "alert_branch"),
)


def upgrade() -> None:
    """Rename the columns, the table of starts, and `branch` of `run_source`, the branch of git, to `git_branch`."""
    for table, old, new in _RENAMED:
        # Both databases rename a column in place; a batch would copy the table on SQLite.
        op.execute(f"ALTER TABLE {table} RENAME COLUMN {old} TO {new}")
    op.rename_table("night_start", "nightly_start")
    if op.get_bind().dialect.name == "postgresql":
        op.execute("ALTER TABLE nightly_start RENAME CONSTRAINT pk_night_start TO pk_nightly_start")
    run = sa.table("run", sa.column("id", sa.String()), sa.column("run_source", sa.JSON(none_as_null=True)))
    rows = op.get_bind().execute(sa.select(run.c.id, run.c.run_source).where(run.c.run_source.is_not(None))).all()
    for run_id, source in rows:
        if isinstance(source, dict) and "branch" in source:
            named = {"git_branch" if name == "branch" else name: value for name, value in source.items()}
            op.execute(run.update().where(run.c.id == run_id).values(run_source=named))
