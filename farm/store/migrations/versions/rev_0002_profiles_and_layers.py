"""Profiles of a program's nodes, and comparisons of its layers."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy import Column

revision = "0002"
down_revision = "0001"

_ROW_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    """Create the tables."""
    op.create_table(
        "op_profile",
        Column("attempt_id", _ROW_ID, nullable=False),
        Column("position", sa.Integer(), autoincrement=False, nullable=False),
        Column("node", sa.String(length=256), nullable=False),
        Column("delegate", sa.String(length=256), nullable=False),
        Column("unit", sa.String(length=32), nullable=False),
        Column("n", sa.Integer(), nullable=False),
        Column("p50", sa.Float(precision=53), nullable=True),
        Column("least", sa.Float(precision=53), nullable=True),
        Column("greatest", sa.Float(precision=53), nullable=True),
        Column("share", sa.Float(precision=53), nullable=True),
        sa.ForeignKeyConstraint(["attempt_id"], ["attempt.id"], name="fk_op_profile_attempt_id"),
        sa.PrimaryKeyConstraint("attempt_id", "position", name="pk_op_profile"),
    )
    op.create_table(
        "layer",
        Column("attempt_id", _ROW_ID, nullable=False),
        Column("position", sa.Integer(), autoincrement=False, nullable=False),
        Column("layer", sa.String(length=256), nullable=False),
        Column("operator", sa.String(length=256), nullable=False),
        Column("step", sa.String(length=16), nullable=False),
        Column("mse", sa.Float(precision=53), nullable=True),
        Column("sqnr_db", sa.Float(precision=53), nullable=True),
        Column("cosine", sa.Float(precision=53), nullable=True),
        Column("nan_figures", sa.JSON(), nullable=False),
        Column("diverges", sa.Boolean(), nullable=False),
        sa.ForeignKeyConstraint(["attempt_id"], ["attempt.id"], name="fk_layer_attempt_id"),
        sa.PrimaryKeyConstraint("attempt_id", "position", name="pk_layer"),
    )
