"""Values with the terms of the glossary: health checks and suspected changes."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"

_RENAMED = (
    ("health_event", "event", "canary_ok", "check_passed"),
    ("health_event", "event", "canary_failed", "check_failed"),
    ("alert", "state", "candidate", "suspected"),
)


def upgrade() -> None:
    """Rename values in place; no table and no column changes."""
    for table, column, old, new in _RENAMED:
        rows = sa.table(table, sa.column(column, sa.String()))
        op.execute(rows.update().where(rows.c[column] == old).values({column: new}))
