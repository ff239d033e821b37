"""Names of the outputs in comparisons: `aux`, `[1].0`, `input x as written`."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy import Column

revision = "0013"
down_revision = "0012"


def upgrade() -> None:
    """Make the column. Outputs of runs that are there have numbers alone."""
    op.add_column("comparison", Column("output_name", sa.String(length=128), nullable=False, server_default=""))
