"""The first tables: runs, jobs, attempts and their numbers, artifacts."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy import Column

revision = "0001"
down_revision = None

_ROW_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    """Make them."""
    op.create_table(
        "device",
        Column("id", _ROW_ID, nullable=False),
        Column("serial", sa.String(length=256), nullable=False),
        Column("soc", sa.String(length=64), nullable=False),
        Column("kind", sa.String(length=16), nullable=False),
        Column("build", sa.String(length=256), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_device"),
        sa.UniqueConstraint("serial", "soc", "kind", "build", name="uq_device_serial_soc_kind_build"),
    )
    op.create_table(
        "fingerprint",
        Column("hash", sa.String(length=64), nullable=False),
        Column("facts", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("hash", name="pk_fingerprint"),
    )
    op.create_table(
        "job",
        Column("id", _ROW_ID, nullable=False),
        Column("name", sa.String(length=512), nullable=False),
        Column("suite", sa.String(length=64), nullable=False),
        Column("case_name", sa.String(length=64), nullable=False),
        Column("soc", sa.String(length=64), nullable=False),
        Column("backend", sa.String(length=16), nullable=False),
        Column("precision", sa.String(length=32), nullable=False),
        Column("options", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_job"),
        sa.UniqueConstraint("name", name="uq_job_name"),
    )
    op.create_table(
        "suite_case",
        Column("id", _ROW_ID, nullable=False),
        Column("suite", sa.String(length=64), nullable=False),
        Column("case_name", sa.String(length=64), nullable=False),
        Column("version", sa.String(length=64), nullable=False),
        Column("module", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_suite_case"),
        sa.UniqueConstraint("suite", "case_name", "version", name="uq_suite_case_suite_case_name_version"),
    )
    op.create_table(
        "run",
        Column("id", sa.String(length=64), nullable=False),
        Column("command", sa.Text(), nullable=False),
        Column("user_name", sa.Text(), nullable=False),
        Column("host", sa.Text(), nullable=False),
        Column("fingerprint_hash", sa.String(length=64), nullable=False),
        Column("started_ms", sa.BigInteger(), nullable=False),
        Column("finished_ms", sa.BigInteger(), nullable=True),
        Column("exit_code", sa.Integer(), nullable=True),
        sa.ForeignKeyConstraint(["fingerprint_hash"], ["fingerprint.hash"], name="fk_run_fingerprint_hash"),
        sa.PrimaryKeyConstraint("id", name="pk_run"),
    )
    op.create_index("ix_run_started_ms", "run", ["started_ms"])
    op.create_table(
        "series",
        Column("id", _ROW_ID, nullable=False),
        Column("job_id", _ROW_ID, nullable=False),
        Column("metric", sa.String(length=128), nullable=False),
        Column("unit", sa.String(length=32), nullable=False),
        Column("direction", sa.String(length=8), nullable=False),
        Column("exact", sa.Boolean(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["job.id"], name="fk_series_job_id"),
        sa.PrimaryKeyConstraint("id", name="pk_series"),
        sa.UniqueConstraint(
            "job_id", "metric", "unit", "direction", "exact", name="uq_series_job_id_metric_unit_direction_exact"
        ),
    )
    op.create_table(
        "run_device",
        Column("run_id", sa.String(length=64), nullable=False),
        Column("device_id", _ROW_ID, nullable=False),
        sa.ForeignKeyConstraint(["device_id"], ["device.id"], name="fk_run_device_device_id"),
        sa.ForeignKeyConstraint(["run_id"], ["run.id"], name="fk_run_device_run_id"),
        sa.PrimaryKeyConstraint("run_id", "device_id", name="pk_run_device"),
    )
    op.create_table(
        "run_job",
        Column("id", _ROW_ID, nullable=False),
        Column("run_id", sa.String(length=64), nullable=False),
        Column("job_id", _ROW_ID, nullable=False),
        Column("case_id", _ROW_ID, nullable=False),
        Column("position", sa.Integer(), nullable=False),
        Column("build_seconds", sa.Float(precision=53), nullable=True),
        Column("cached", sa.Boolean(), nullable=True),
        Column("bundle_key", sa.String(length=128), nullable=True),
        Column("fallback_ops", sa.JSON(), nullable=True),
        sa.ForeignKeyConstraint(["case_id"], ["suite_case.id"], name="fk_run_job_case_id"),
        sa.ForeignKeyConstraint(["job_id"], ["job.id"], name="fk_run_job_job_id"),
        sa.ForeignKeyConstraint(["run_id"], ["run.id"], name="fk_run_job_run_id"),
        sa.PrimaryKeyConstraint("id", name="pk_run_job"),
        sa.UniqueConstraint("run_id", "job_id", name="uq_run_job_run_id_job_id"),
    )
    op.create_index("ix_run_job_job_id", "run_job", ["job_id"])
    op.create_table(
        "attempt",
        Column("id", _ROW_ID, nullable=False),
        Column("run_job_id", _ROW_ID, nullable=False),
        Column("digest", sa.String(length=64), nullable=True),
        Column("device_id", _ROW_ID, nullable=True),
        Column("verdict", sa.String(length=16), nullable=False),
        Column("stage", sa.String(length=16), nullable=False),
        Column("reason", sa.Text(), nullable=False),
        Column("started_ms", sa.BigInteger(), nullable=False),
        Column("recorded_ms", sa.BigInteger(), nullable=False),
        Column("seconds", sa.Float(precision=53), nullable=False),
        Column("bundle_key", sa.String(length=128), nullable=False),
        Column("known_issue", sa.Text(), nullable=False),
        Column("notes", sa.JSON(), nullable=False),
        Column("log", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["device_id"], ["device.id"], name="fk_attempt_device_id"),
        sa.ForeignKeyConstraint(["run_job_id"], ["run_job.id"], name="fk_attempt_run_job_id"),
        sa.PrimaryKeyConstraint("id", name="pk_attempt"),
        sa.UniqueConstraint("run_job_id", "digest", name="uq_attempt_run_job_id_digest"),
    )
    op.create_index("ix_attempt_device_id", "attempt", ["device_id"])
    op.create_table(
        "artifact",
        Column("id", _ROW_ID, nullable=False),
        Column("attempt_id", _ROW_ID, nullable=False),
        Column("sha256", sa.String(length=64), nullable=False),
        Column("size", sa.BigInteger(), nullable=False),
        Column("kind", sa.String(length=64), nullable=False),
        sa.ForeignKeyConstraint(["attempt_id"], ["attempt.id"], name="fk_artifact_attempt_id"),
        sa.PrimaryKeyConstraint("id", name="pk_artifact"),
        sa.UniqueConstraint("attempt_id", "kind", "sha256", name="uq_artifact_attempt_id_kind_sha256"),
    )
    op.create_index("ix_artifact_sha256", "artifact", ["sha256"])
    op.create_table(
        "comparison",
        Column("attempt_id", _ROW_ID, nullable=False),
        Column("position", sa.Integer(), autoincrement=False, nullable=False),
        Column("output", sa.Integer(), nullable=False),
        Column("reference", sa.String(length=16), nullable=False),
        Column("sqnr_db", sa.Float(precision=53), nullable=True),
        Column("cosine", sa.Float(precision=53), nullable=True),
        Column("max_abs", sa.Float(precision=53), nullable=True),
        Column("mismatch", sa.Float(precision=53), nullable=True),
        Column("nan_figures", sa.JSON(), nullable=False),
        Column("violations", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(["attempt_id"], ["attempt.id"], name="fk_comparison_attempt_id"),
        sa.PrimaryKeyConstraint("attempt_id", "position", name="pk_comparison"),
    )
    op.create_table(
        "counter",
        Column("attempt_id", _ROW_ID, nullable=False),
        Column("position", sa.Integer(), autoincrement=False, nullable=False),
        Column("series_id", _ROW_ID, nullable=False),
        Column("n", sa.Integer(), nullable=False),
        Column("value", sa.BigInteger(), nullable=False),
        Column("max", sa.BigInteger(), nullable=False),
        Column("samples", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(["attempt_id"], ["attempt.id"], name="fk_counter_attempt_id"),
        sa.ForeignKeyConstraint(["series_id"], ["series.id"], name="fk_counter_series_id"),
        sa.PrimaryKeyConstraint("attempt_id", "position", name="pk_counter"),
    )
    op.create_index("ix_counter_series_id", "counter", ["series_id"])
    op.create_table(
        "measurement",
        Column("attempt_id", _ROW_ID, nullable=False),
        Column("position", sa.Integer(), autoincrement=False, nullable=False),
        Column("series_id", _ROW_ID, nullable=False),
        Column("n", sa.Integer(), nullable=False),
        Column("min", sa.Float(precision=53), nullable=True),
        Column("p10", sa.Float(precision=53), nullable=True),
        Column("p50", sa.Float(precision=53), nullable=True),
        Column("p90", sa.Float(precision=53), nullable=True),
        Column("p99", sa.Float(precision=53), nullable=True),
        Column("mean", sa.Float(precision=53), nullable=True),
        Column("mad", sa.Float(precision=53), nullable=True),
        Column("samples", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(["attempt_id"], ["attempt.id"], name="fk_measurement_attempt_id"),
        sa.ForeignKeyConstraint(["series_id"], ["series.id"], name="fk_measurement_series_id"),
        sa.PrimaryKeyConstraint("attempt_id", "position", name="pk_measurement"),
    )
    op.create_index("ix_measurement_series_id", "measurement", ["series_id"])
