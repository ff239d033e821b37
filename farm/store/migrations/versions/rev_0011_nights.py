"""What a run is called, the night that it is a cell of, and whether it began; a device that was forgotten."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy import Column

revision = "0011"
down_revision = "0010"


def upgrade() -> None:
    """Make the columns, and say of runs, series and alerts that are there what is said of new ones."""
    op.add_column("run", Column("run_name", sa.String(length=256), nullable=False, server_default=""))
    op.add_column("run", Column("run_night", sa.String(length=64), nullable=False, server_default=""))
    op.add_column("run", Column("run_began", sa.Boolean(), nullable=False, server_default=sa.true()))
    op.add_column("device_state", Column("forgotten_ms", sa.BigInteger(), nullable=False, server_default="0"))
    op.add_column("op_profile", Column("module", sa.String(length=256), nullable=False, server_default=""))
    op.add_column("op_profile", Column("source", sa.String(length=256), nullable=False, server_default=""))
    # Usage, infrastructure and an interrupt, before anything was executed.
    op.execute("""
        UPDATE run SET run_began = false
        WHERE exit_code IN (2, 4, 130) AND NOT EXISTS (
            SELECT 1 FROM run_job WHERE run_job.run_id = run.id AND run_job.decisive_attempt_id IS NOT NULL
        )
    """)
    # The kind of a run is that of its devices: virtual ones that stay were recorded as hardware.
    op.execute("""
        UPDATE run SET run_device_kind = (
            SELECT CASE WHEN min(device.kind) = max(device.kind) THEN min(device.kind) ELSE 'mixed' END
            FROM run_device JOIN device ON device.id = run_device.device_id
            WHERE run_device.run_id = run.id AND device.kind IN ('virtual', 'hardware')
        )
        WHERE run_device_kind IS NOT NULL AND EXISTS (
            SELECT 1 FROM run_device JOIN device ON device.id = run_device.device_id
            WHERE run_device.run_id = run.id AND device.kind IN ('virtual', 'hardware')
        )
    """)
    # Neither way is better of what a fusion takes out, or of what the heap is before a program.
    op.execute("""
        UPDATE series SET direction = 'none'
        WHERE exact AND metric IN ('delegated_ops', 'partitions', 'dsp_heap_before', 'dsp_heap_after')
    """)
    op.execute("""
        UPDATE alert SET finding = 'changed'
        WHERE finding IN ('regression', 'improvement')
        AND series_id IN (SELECT id FROM series WHERE direction = 'none')
    """)
