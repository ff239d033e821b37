"""Rights of rows: only a trigger writes the decisive verdict, and agreed durations belong to a user."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy import Column

revision = "0015"
down_revision = "0014"


def upgrade() -> None:
    """Make anew the table of agreed durations, which hold for hours, and let the trigger run as the tables' owner."""
    op.drop_table("shard_weights")
    op.create_table(
        "shard_weights",
        Column("user_name", sa.String(length=256), nullable=False),
        Column("selection", sa.String(length=64), nullable=False),
        Column("asked_ms", sa.BigInteger(), nullable=False),
        Column("seconds", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("user_name", "selection", name="pk_shard_weights"),
    )
    if op.get_bind().dialect.name == "sqlite":
        return
    schema = op.get_bind().scalar(sa.text("SELECT quote_ident(current_schema())"))
    op.execute(f"ALTER FUNCTION attempt_decides() SECURITY DEFINER SET search_path = {schema}, pg_temp")
    op.execute("REVOKE ALL ON FUNCTION attempt_decides() FROM PUBLIC")
