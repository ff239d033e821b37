"""Submitted runs with their shards and missing bundles, agents, and quotas."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy import Column

revision = "0012"
down_revision = "0011"

_ROW_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    """Create the tables, and the column of a lease for the user who gets its device next."""
    op.add_column("lease", Column("wanted_by", sa.String(length=256), nullable=False, server_default=""))
    op.create_index("ix_lease_token", "lease", ["token"])
    op.create_table(
        "run_order",
        Column("run_id", sa.String(length=64), nullable=False),
        Column("user_name", sa.String(length=256), nullable=False),
        Column("priority", sa.Integer(), nullable=False),
        Column("purpose", sa.Text(), nullable=False),
        Column("protocol", sa.Integer(), nullable=False),
        Column("terms", sa.Text(), nullable=False),
        Column("devices", sa.JSON(), nullable=False),
        Column("labels", sa.JSON(), nullable=False),
        Column("classes", sa.JSON(), nullable=False),
        Column("most_devices", sa.Integer(), nullable=True),
        Column("most_failures", sa.Integer(), nullable=True),
        Column("failures", sa.Integer(), nullable=False),
        Column("bundles", sa.Integer(), nullable=False),
        Column("until_ms", sa.BigInteger(), nullable=True),
        Column("state", sa.String(length=16), nullable=False),
        Column("cancelled_by", sa.String(length=256), nullable=False),
        Column("submitted_ms", sa.BigInteger(), nullable=False),
        Column("ended_ms", sa.BigInteger(), nullable=True),
        sa.ForeignKeyConstraint(["run_id"], ["run.id"], name="fk_run_order_run_id"),
        sa.PrimaryKeyConstraint("run_id", name="pk_run_order"),
    )
    op.create_index("ix_run_order_state", "run_order", ["state"])
    op.create_table(
        "shard",
        Column("id", _ROW_ID, nullable=False),
        Column("run_id", sa.String(length=64), nullable=False),
        Column("soc", sa.String(length=64), nullable=False),
        Column("position", sa.Integer(), nullable=False),
        Column("expected_s", sa.Float(53), nullable=False),
        Column("lacking", sa.Integer(), nullable=False),
        Column("avoid", sa.JSON(), nullable=False),
        Column("retry", sa.Boolean(), nullable=False, server_default=sa.false()),
        Column("state", sa.String(length=16), nullable=False),
        Column("device", sa.String(length=256), nullable=False),
        Column("fence", sa.BigInteger(), nullable=False),
        Column("agent", sa.String(length=256), nullable=False),
        Column("token", sa.String(length=64), nullable=False),
        Column("held_ms", sa.BigInteger(), nullable=False),
        Column("tries", sa.Integer(), nullable=False),
        Column("why", sa.Text(), nullable=False),
        Column("remaining", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["run_order.run_id"], name="fk_shard_run_id"),
        sa.PrimaryKeyConstraint("id", name="pk_shard"),
    )
    op.create_index("ix_shard_run_id_state", "shard", ["run_id", "state"])
    op.create_index("ix_shard_soc_state", "shard", ["soc", "state", "run_id", "retry", "lacking", "position"])
    op.create_index("ix_shard_token", "shard", ["token"])
    op.create_table(
        "shard_jobs",
        Column("shard", _ROW_ID, nullable=False),
        Column("names", sa.Text(), nullable=False),
        Column("done", sa.Text(), nullable=False),
        Column("next_job", sa.String(length=512), nullable=False),
        Column("jobs", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(["shard"], ["shard.id"], name="fk_shard_jobs_shard"),
        sa.PrimaryKeyConstraint("shard", name="pk_shard_jobs"),
    )
    op.create_table(
        "soc_look",
        Column("soc", sa.String(length=64), nullable=False),
        Column("looked_ms", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("soc", name="pk_soc_look"),
    )
    op.create_table(
        "build",
        Column("key", sa.String(length=128), nullable=False),
        Column("toolchain", sa.String(length=128), nullable=False),
        Column("task", sa.Text(), nullable=False),
        Column("user_name", sa.String(length=256), nullable=False),
        Column("priority", sa.Integer(), nullable=False),
        Column("position", sa.Integer(), nullable=False),
        Column("state", sa.String(length=16), nullable=False),
        Column("agent", sa.String(length=256), nullable=False),
        Column("token", sa.String(length=64), nullable=False),
        Column("fence", sa.BigInteger(), nullable=False),
        Column("held_ms", sa.BigInteger(), nullable=False),
        Column("tries", sa.Integer(), nullable=False),
        Column("put_back", sa.JSON(), nullable=False),
        Column("archive", sa.String(length=64), nullable=False),
        Column("nbytes", sa.BigInteger(), nullable=False),
        Column("manifest", sa.JSON(), nullable=True),
        Column("reply", sa.Text(), nullable=True),
        Column("log", sa.Text(), nullable=False),
        Column("asked_ms", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("key", name="pk_build"),
    )
    op.create_index("ix_build_token", "build", ["token"])
    op.create_index("ix_build_waiting", "build", ["toolchain", "state", "user_name", "priority", "position"])
    op.create_table(
        "build_wanted",
        Column("shard", _ROW_ID, nullable=False),
        Column("job", sa.String(length=512), nullable=False),
        Column("key", sa.String(length=128), nullable=False),
        Column("run_id", sa.String(length=64), nullable=False),
        Column("failure", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(["shard"], ["shard.id"], name="fk_build_wanted_shard"),
        sa.PrimaryKeyConstraint("shard", "job", name="pk_build_wanted"),
    )
    op.create_index("ix_build_wanted_key", "build_wanted", ["key"])
    op.create_index("ix_build_wanted_run_id", "build_wanted", ["run_id"])
    op.create_table(
        "agent",
        Column("name", sa.String(length=256), nullable=False),
        Column("token", sa.String(length=64), nullable=False),
        Column("user_name", sa.String(length=256), nullable=False),
        Column("facts", sa.Text(), nullable=False),
        Column("started_ms", sa.BigInteger(), nullable=False),
        Column("heartbeat_ms", sa.BigInteger(), nullable=False),
        Column("expires_ms", sa.BigInteger(), nullable=False),
        Column("has_left", sa.Boolean(), nullable=False),
        Column("is_draining", sa.Boolean(), nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_agent"),
    )
    op.create_table(
        "agent_device",
        Column("device", sa.String(length=256), nullable=False),
        Column("agent", sa.String(length=256), nullable=False),
        Column("soc", sa.String(length=64), nullable=False),
        Column("kind", sa.String(length=16), nullable=False),
        Column("os", sa.String(length=16), nullable=False),
        Column("serial", sa.String(length=256), nullable=False),
        Column("name", sa.String(length=256), nullable=False),
        Column("labels", sa.JSON(), nullable=False),
        Column("refused", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["agent"], ["agent.name"], name="fk_agent_device_agent"),
        sa.PrimaryKeyConstraint("device", name="pk_agent_device"),
    )
    op.create_index("ix_agent_device_agent", "agent_device", ["agent"])
    op.create_index("ix_agent_device_soc", "agent_device", ["soc"])
    op.create_table(
        "quota",
        Column("subject", sa.String(length=320), nullable=False),
        Column("most", sa.Integer(), nullable=False),
        Column("set_by", sa.String(length=256), nullable=False),
        Column("set_ms", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("subject", name="pk_quota"),
    )
    op.create_table(
        "night_start",
        Column("name", sa.String(length=128), nullable=False),
        Column("due_ms", sa.BigInteger(), nullable=False),
        Column("state", sa.String(length=16), nullable=False),
        Column("agent", sa.String(length=256), nullable=False),
        Column("token", sa.String(length=64), nullable=False),
        Column("started_ms", sa.BigInteger(), nullable=False),
        Column("ended_ms", sa.BigInteger(), nullable=True),
        Column("exit_code", sa.Integer(), nullable=True),
        Column("why", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("name", "due_ms", name="pk_night_start"),
    )
