"""Closeness of outputs: in quantization steps, as a share of the peak, and to the quantized reference."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy import Column

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    """Make their columns."""
    for name in ("peak", "steps", "loss_db"):
        op.add_column("comparison", Column(name, sa.Float(precision=53), nullable=True))
