"""Tables of records: runs, jobs, attempts, and every number. Meanings: docs/reference/store.md."""

from __future__ import annotations

from typing import Any

from msgspec import Struct
from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Connection,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    String,
    Table,
    Text,
    UniqueConstraint,
    event,
    false,
    text,
    true,
)

from farm.results.attempt import Comparison, LayerComparison, OperatorProfile
from farm.store.attempt_fields import ATTEMPT_FIELDS, DETAIL_FIELDS
from farm.store.schema.base import RowId, metadata

fingerprint = Table(
    "fingerprint",
    metadata,
    Column("hash", String(64), primary_key=True),
    Column("facts", JSON, nullable=False),
)

run = Table(
    "run",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("command", Text, nullable=False),
    Column("user_name", Text, nullable=False),
    Column("host", Text, nullable=False),
    Column("fingerprint_hash", ForeignKey(fingerprint.c.hash), nullable=False),
    Column("started_ms", BigInteger, nullable=False, index=True),
    Column("finished_ms", BigInteger),
    Column("exit_code", Integer),
    Column("priority", String(16), nullable=False, server_default="person"),  # the default is for older farms
    # Value of `records.RunKind`. The prefix `run_` keeps users' older queries with joins unambiguous.
    Column("run_kind", String(16), nullable=False, server_default="suite"),
    # `virtual`, `hardware` or `mixed`: as requested, then from the run's devices; NULL equals no other kind.
    Column("run_device_kind", String(16)),
    # Name of the toolchain; empty for the default one and in runs of older farms.
    Column("run_toolchain", String(256), nullable=False, server_default=""),
    # Branch that the run belongs to, or that a local run (`run_private`) is compared with; empty for the default.
    Column("run_branch", String(256), nullable=False, server_default=""),
    Column("run_private", Boolean, nullable=False, server_default=false()),
    Column("run_commit", String(64), nullable=False, server_default=""),
    Column("run_dirty", Boolean, nullable=False, server_default=false()),
    # Further fields of `view.RunToolchain`, which no query selects by; NULL without any.
    Column("run_source", JSON(none_as_null=True)),
    # Name given by the user, or NIGHTLY/CELL, and the id of the nightly run of a cell; empty without.
    Column("run_name", String(256), nullable=False, server_default=""),
    Column("run_nightly", String(64), nullable=False, server_default=""),
    # False after an early end without an attempt, for example without a device: no status, diff or history has the run.
    Column("run_began", Boolean, nullable=False, server_default=true()),
)

device = Table(
    "device",
    metadata,
    Column("id", RowId, primary_key=True),
    Column("serial", String(256), nullable=False),
    Column("soc", String(64), nullable=False),
    Column("kind", String(16), nullable=False),
    Column("build", String(256), nullable=False),
    UniqueConstraint("serial", "soc", "kind", "build"),
)

run_device = Table(
    "run_device",
    metadata,
    Column("run_id", ForeignKey(run.c.id), primary_key=True),
    Column("device_id", ForeignKey(device.c.id), primary_key=True),
    # Versions of the device's runtime; NULL if unknown.
    Column("runtime", JSON(none_as_null=True)),
)

suite_case = Table(
    "suite_case",
    metadata,
    Column("id", RowId, primary_key=True),
    Column("suite", String(64), nullable=False),
    Column("case_name", String(64), nullable=False),
    Column("version", String(64), nullable=False),
    Column("module", Text, nullable=False),
    UniqueConstraint("suite", "case_name", "version"),
)

job = Table(
    "job",
    metadata,
    Column("id", RowId, primary_key=True),
    Column("name", String(512), nullable=False, unique=True),
    Column("suite", String(64), nullable=False),
    Column("case_name", String(64), nullable=False),
    Column("soc", String(64), nullable=False),
    Column("backend", String(16), nullable=False),
    Column("precision", String(32), nullable=False),
    Column("options", JSON, nullable=False),
    # Queries look for a case on other targets by its name, in all suites.
    Index("ix_job_case_name", "case_name"),
)

run_job = Table(
    "run_job",
    metadata,
    Column("id", RowId, primary_key=True),
    Column("run_id", ForeignKey(run.c.id), nullable=False),
    Column("job_id", ForeignKey(job.c.id), nullable=False),
    Column("case_id", ForeignKey(suite_case.c.id), nullable=False),
    Column("position", Integer, nullable=False),
    Column("build_seconds", Float(53)),
    Column("cached", Boolean),
    Column("bundle_key", String(128)),
    Column("fallback_ops", JSON),
    Column("operators", JSON),
    Column("judged_by", String(64)),
    Column("skipped", JSON(none_as_null=True)),
    # Deciding attempt and its verdict: the last attempt that judged the code, else the last; NULL without attempts.
    # Only the trigger `attempt_decides` writes both: no login can forge a decision. A foreign key would be circular, as
    # attempts refer to this table.
    Column("decisive_attempt_id", BigInteger),
    Column("decisive_verdict", String(16)),
    # Hash of the program without the timestamps of QNN; NULL if unknown.
    Column("program_hash", String(64)),
    UniqueConstraint("run_id", "job_id"),
    # Ids of runs sort by time, so that the newest run of a job is found at once; row ids of imported runs do not.
    Index("ix_run_job_job_id_run_id", "job_id", "run_id"),
)

# Durations by which the first shard of a login divided the jobs, so that its other shards divide them alike.
shard_weights = Table(
    "shard_weights",
    metadata,
    Column("user_name", String(256), primary_key=True),
    Column("selection", String(64), primary_key=True),
    Column("asked_ms", BigInteger, nullable=False),
    Column("seconds", JSON, nullable=False),
)

attempt = Table(
    "attempt",
    metadata,
    Column("id", RowId, primary_key=True),
    Column("run_job_id", ForeignKey(run_job.c.id), nullable=False),
    Column("digest", String(64)),
    Column("device_id", ForeignKey(device.c.id), index=True),
    Column("recorded_ms", BigInteger, nullable=False),
    *(field.column for field in ATTEMPT_FIELDS.values()),
    UniqueConstraint("run_job_id", "digest"),
)


@event.listens_for(attempt, "after_create")
def _make_trigger(_: Table, connection: Connection, **_options: Any) -> None:
    # A later infra attempt does not replace a verdict about the code.
    decide = """
        UPDATE run_job SET decisive_attempt_id = NEW.id, decisive_verdict = NEW.verdict
        WHERE id = NEW.run_job_id
        AND (decisive_verdict IS NULL OR decisive_verdict = 'infra' OR NEW.verdict <> 'infra');
    """
    if connection.dialect.name == "sqlite":
        connection.execute(text(f"CREATE TRIGGER attempt_decides AFTER INSERT ON attempt BEGIN {decide} END"))
        return
    schema = connection.scalar(text("SELECT quote_ident(current_schema())"))
    as_owner = f"LANGUAGE plpgsql SECURITY DEFINER SET search_path = {schema}, pg_temp"
    for statement in (
        f"CREATE FUNCTION attempt_decides() RETURNS trigger {as_owner} AS $$ BEGIN {decide} RETURN NULL; END $$",
        "REVOKE ALL ON FUNCTION attempt_decides() FROM PUBLIC",
        "CREATE TRIGGER attempt_decides AFTER INSERT ON attempt FOR EACH ROW EXECUTE FUNCTION attempt_decides()",
    ):
        connection.execute(text(statement))


def _of_attempts(name: str, kind: type[Struct], *more: Column[Any]) -> Table:
    """Return the table for a struct of details of attempts."""
    return Table(
        name,
        metadata,
        Column("attempt_id", ForeignKey(attempt.c.id), primary_key=True),
        Column("position", Integer, primary_key=True, autoincrement=False),
        *(field.column for field in DETAIL_FIELDS[kind].values()),
        *more,
    )


comparison = _of_attempts("comparison", Comparison, Column("nan_figures", JSON, nullable=False))
op_profile = _of_attempts("op_profile", OperatorProfile)
layer = _of_attempts("layer", LayerComparison, Column("nan_figures", JSON, nullable=False))

series = Table(
    "series",
    metadata,
    Column("id", RowId, primary_key=True),
    Column("job_id", ForeignKey(job.c.id), nullable=False),
    Column("metric", String(128), nullable=False),
    Column("unit", String(32), nullable=False),
    Column("direction", String(8), nullable=False),
    Column("exact", Boolean, nullable=False),
    UniqueConstraint("job_id", "metric", "unit", "direction", "exact"),
)

measurement = Table(
    "measurement",
    metadata,
    Column("attempt_id", ForeignKey(attempt.c.id), primary_key=True),
    Column("position", Integer, primary_key=True, autoincrement=False),
    Column("series_id", ForeignKey(series.c.id), nullable=False, index=True),
    Column("n", Integer, nullable=False),
    Column("min", Float(53)),
    Column("p10", Float(53)),
    Column("p50", Float(53)),
    Column("p90", Float(53)),
    Column("p99", Float(53)),
    Column("mean", Float(53)),
    Column("mad", Float(53)),
    Column("samples", LargeBinary, nullable=False),
)

counter = Table(
    "counter",
    metadata,
    Column("attempt_id", ForeignKey(attempt.c.id), primary_key=True),
    Column("position", Integer, primary_key=True, autoincrement=False),
    Column("series_id", ForeignKey(series.c.id), nullable=False, index=True),
    Column("n", Integer, nullable=False),
    Column("value", BigInteger, nullable=False),
    Column("max", BigInteger, nullable=False),
    Column("samples", LargeBinary, nullable=False),
)

# Runs are named by id without a foreign key: an alert outlives its run.
alert = Table(
    "alert",
    metadata,
    Column("id", RowId, primary_key=True),
    Column("series_id", ForeignKey(series.c.id), nullable=False),
    Column("device_kind", String(16), nullable=False),
    Column("run_id", String(64), nullable=False, index=True),
    Column("finding", String(16), nullable=False),
    Column("state", String(16), nullable=False),
    Column("last_good", String(64), nullable=False),
    Column("first_bad", String(64), nullable=False),
    # NULL stands for NaN in these columns.
    Column("change", Float(53)),
    Column("low", Float(53)),
    Column("high", Float(53)),
    Column("p_value", Float(53)),
    Column("reason", Text, nullable=False),
    Column("guilt", Text, nullable=False),
    Column("device", String(256), nullable=False),
    # Measured pairs, [[good, new], ...], for a later judgement.
    Column("pairs", JSON(none_as_null=True)),
    Column("found_ms", BigInteger, nullable=False),
    # Copies from the run, which may be removed.
    Column("alert_branch", String(256), nullable=False, server_default=""),
    Column("alert_private", Boolean, nullable=False, server_default=false()),
    UniqueConstraint("series_id", "device_kind", "run_id"),
    Index("ix_alert_state", "state"),
    # Numbers of removed alerts are not used again, because remarks name them.
    sqlite_autoincrement=True,
)

# Every remark stays; the newest of a subject counts.
triage = Table(
    "triage",
    metadata,
    Column("id", RowId, primary_key=True),
    # `alert:12`, or `job:` and the id of the job.
    Column("subject", String(576), nullable=False, index=True),
    Column("state", String(16), nullable=False),
    Column("user_name", String(256), nullable=False),
    Column("owner", String(256), nullable=False),
    Column("note", Text, nullable=False),
    Column("time_ms", BigInteger, nullable=False),
    Column("until_ms", BigInteger),
)

artifact = Table(
    "artifact",
    metadata,
    Column("id", RowId, primary_key=True),
    Column("attempt_id", ForeignKey(attempt.c.id), nullable=False),
    Column("sha256", String(64), nullable=False),
    Column("size", BigInteger, nullable=False),
    Column("kind", String(64), nullable=False),
    UniqueConstraint("attempt_id", "kind", "sha256"),
    Index("ix_artifact_sha256", "sha256"),
)
