"""Builds are jobs of Procrastinate: the columns of claims leave their rows."""

from __future__ import annotations

from alembic import op

revision = "0014"
down_revision = "0013"

_CLAIMS = ("agent", "token", "fence", "held_ms", "tries")


def upgrade() -> None:
    """Remove the columns of claims. A build that an agent makes is made anew."""
    op.execute("UPDATE build SET state = 'waiting' WHERE state = 'held'")
    op.drop_index("ix_build_token", "build")
    op.drop_index("ix_build_waiting", "build")
    for column in _CLAIMS:
        op.drop_column("build", column)
    op.create_index("ix_build_state", "build", ["state"])
