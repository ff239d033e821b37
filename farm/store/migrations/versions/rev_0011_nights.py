"""Name of a run, its nightly run if it is a cell of one, and whether it began; forgotten devices."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy import Column

revision = "0011"
down_revision = "0010"


def upgrade() -> None:
    """Create the columns, and correct existing runs, series and alerts by the rules for new ones."""
    op.add_column("run", Column("run_name", sa.String(length=256), nullable=False, server_default=""))
    op.add_column("run", Column("run_night", sa.String(length=64), nullable=False, server_default=""))
    op.add_column("run", Column("run_began", sa.Boolean(), nullable=False, server_default=sa.true()))
    op.add_column("device_state", Column("forgotten_ms", sa.BigInteger(), nullable=False, server_default="0"))
    op.add_column("op_profile", Column("module", sa.String(length=256), nullable=False, server_default=""))
    op.add_column("op_profile", Column("source", sa.String(length=256), nullable=False, server_default=""))
    # Runs that ended by a usage error, infrastructure or an interrupt before their first execution did not begin.
    op.execute("""
        UPDATE run SET run_began = false
        WHERE exit_code IN (2, 4, 130) AND NOT EXISTS (
            SELECT 1 FROM run_job WHERE run_job.run_id = run.id AND run_job.decisive_attempt_id IS NOT NULL
        )
    """)
    # The kind of a run is the kind of its devices: lasting virtual devices were recorded as hardware.
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
    # Neither direction is an improvement for operators that a fusion removes, or for the heap before a program.
    op.execute("""
        UPDATE series SET direction = 'none'
        WHERE exact AND metric IN ('delegated_ops', 'partitions', 'dsp_heap_before', 'dsp_heap_after')
    """)
    op.execute("""
        UPDATE alert SET finding = 'changed'
        WHERE finding IN ('regression', 'improvement')
        AND series_id IN (SELECT id FROM series WHERE direction = 'none')
    """)
