"""Three figures of outputs: error in quantization steps, error as a share of the peak, loss against the reference."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy import Column

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    """Add columns for these figures to `comparison`."""
    for name in ("peak", "steps", "loss_db"):
        op.add_column("comparison", Column(name, sa.Float(precision=53), nullable=True))
