"""Tables of the store, the same in SQLite and PostgreSQL. Meanings: docs/reference/store.md."""

from __future__ import annotations

from pathlib import Path
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
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
    event,
    false,
    text,
    true,
)
from sqlalchemy.schema import SchemaItem
from sqlalchemy.types import TypeEngine

from farm.results.attempt import Comparison, LayerComparison, OperatorProfile
from farm.store import values
from farm.store.attempt_fields import ATTEMPT_FIELDS, DETAIL_FIELDS

# Read from file names, so that an up-to-date store is recognized without importing Alembic.
REVISIONS = sorted(file.name[4:8] for file in Path(__file__).parent.glob("migrations/versions/rev_*.py"))
"""Revisions that this farm opens or upgrades, from farm 0.2.0 on."""
REVISION = REVISIONS[-1]
# Not Alembic's default name, so that a PostgreSQL database can be shared with another program that uses Alembic.
VERSION_TABLE = "farm_schema"

# Constraints have names, so that a later revision can change them.
metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
        "pk": "pk_%(table_name)s",
    }
)

# SQLite numbers rows by itself only for a key of type INTEGER, which holds 64 bits there.
RowId = BigInteger().with_variant(Integer(), "sqlite")


def _table(name: str, *content: SchemaItem, **options: Any) -> Table:
    return Table(name, metadata, *content, **options)


def _required(kind: TypeEngine[Any], *names: str) -> list[Column[Any]]:
    """Return columns of one type, none of which may be NULL."""
    return [Column(name, kind, nullable=False) for name in names]


# Records: runs, jobs, attempts, and every number.

fingerprint = _table(
    "fingerprint",
    Column("hash", String(64), primary_key=True),
    Column("facts", JSON, nullable=False),
)

run = _table(
    "run",
    Column("id", String(64), primary_key=True),
    *_required(Text(), "command", "user_name", "host"),
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

device = _table(
    "device",
    Column("id", RowId, primary_key=True),
    Column("serial", String(256), nullable=False),
    Column("soc", String(64), nullable=False),
    Column("kind", String(16), nullable=False),
    Column("build", String(256), nullable=False),
    UniqueConstraint("serial", "soc", "kind", "build"),
)

run_device = _table(
    "run_device",
    Column("run_id", ForeignKey(run.c.id), primary_key=True),
    Column("device_id", ForeignKey(device.c.id), primary_key=True),
    # Versions of the device's runtime; NULL if unknown.
    Column("runtime", JSON(none_as_null=True)),
)

suite_case = _table(
    "suite_case",
    Column("id", RowId, primary_key=True),
    *_required(String(64), "suite", "case_name", "version"),
    Column("module", Text, nullable=False),
    UniqueConstraint("suite", "case_name", "version"),
)

job = _table(
    "job",
    Column("id", RowId, primary_key=True),
    Column("name", String(512), nullable=False, unique=True),
    *_required(String(64), "suite", "case_name", "soc"),
    Column("backend", String(16), nullable=False),
    Column("precision", String(32), nullable=False),
    Column("options", JSON, nullable=False),
    # Queries look for a case on other targets by its name, in all suites.
    Index("ix_job_case_name", "case_name"),
)

run_job = _table(
    "run_job",
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
shard_weights = _table(
    "shard_weights",
    Column("user_name", String(256), primary_key=True),
    Column("selection", String(64), primary_key=True),
    Column("asked_ms", BigInteger, nullable=False),
    Column("seconds", JSON, nullable=False),
)

attempt = _table(
    "attempt",
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


def _of_attempts(name: str, *columns: Column[Any]) -> Table:
    """Return the table for details of attempts, in their order."""
    return _table(
        name,
        Column("attempt_id", ForeignKey(attempt.c.id), primary_key=True),
        Column("position", Integer, primary_key=True, autoincrement=False),
        *columns,
    )


def _fields(kind: type[Struct]) -> list[Column[Any]]:
    return [field.column for field in DETAIL_FIELDS[kind].values()]


comparison = _of_attempts("comparison", *_fields(Comparison), Column("nan_figures", JSON, nullable=False))
op_profile = _of_attempts("op_profile", *_fields(OperatorProfile))
layer = _of_attempts("layer", *_fields(LayerComparison), Column("nan_figures", JSON, nullable=False))

series = _table(
    "series",
    Column("id", RowId, primary_key=True),
    Column("job_id", ForeignKey(job.c.id), nullable=False),
    Column("metric", String(128), nullable=False),
    Column("unit", String(32), nullable=False),
    Column("direction", String(8), nullable=False),
    Column("exact", Boolean, nullable=False),
    UniqueConstraint("job_id", "metric", "unit", "direction", "exact"),
)

measurement = _of_attempts(
    "measurement",
    Column("series_id", ForeignKey(series.c.id), nullable=False, index=True),
    Column("n", Integer, nullable=False),
    *(Column(statistic, Float(53)) for statistic in values.STATISTICS),
    Column("samples", LargeBinary, nullable=False),
)

counter = _of_attempts(
    "counter",
    Column("series_id", ForeignKey(series.c.id), nullable=False, index=True),
    Column("n", Integer, nullable=False),
    *_required(BigInteger(), "value", "max"),
    Column("samples", LargeBinary, nullable=False),
)

# Runs are named by id without a foreign key: an alert outlives its run.
alert = _table(
    "alert",
    Column("id", RowId, primary_key=True),
    Column("series_id", ForeignKey(series.c.id), nullable=False),
    Column("device_kind", String(16), nullable=False),
    Column("run_id", String(64), nullable=False, index=True),
    *_required(String(16), "finding", "state"),
    *_required(String(64), "last_good", "first_bad"),
    # NULL stands for NaN in these columns.
    Column("change", Float(53)),
    Column("low", Float(53)),
    Column("high", Float(53)),
    Column("p_value", Float(53)),
    *_required(Text(), "reason", "guilt"),
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
triage = _table(
    "triage",
    Column("id", RowId, primary_key=True),
    # `alert:12`, or `job:` and the id of the job.
    Column("subject", String(576), nullable=False, index=True),
    Column("state", String(16), nullable=False),
    *_required(String(256), "user_name", "owner"),
    Column("note", Text, nullable=False),
    Column("time_ms", BigInteger, nullable=False),
    Column("until_ms", BigInteger),
)

artifact = _table(
    "artifact",
    Column("id", RowId, primary_key=True),
    Column("attempt_id", ForeignKey(attempt.c.id), nullable=False),
    Column("sha256", String(64), nullable=False),
    Column("size", BigInteger, nullable=False),
    Column("kind", String(64), nullable=False),
    UniqueConstraint("attempt_id", "kind", "sha256"),
    Index("ix_artifact_sha256", "sha256"),
)

# Devices between runs: health, leases and waiting processes.

device_state = _table(
    "device_state",
    Column("id", String(256), primary_key=True),
    *_required(String(256), "serial", "host"),
    Column("soc", String(64), nullable=False),
    *_required(String(16), "kind", "os"),
    *_required(String(256), "product", "name"),
    Column("labels", JSON, nullable=False),
    Column("in_service", Boolean, nullable=False),
    Column("service_note", Text, nullable=False),
    Column("service_user", String(256), nullable=False),
    Column("health", String(16), nullable=False),
    Column("health_reason", Text, nullable=False),
    Column("status", JSON(none_as_null=True)),
    Column("state", String(64), nullable=False),
    Column("last_seen_ms", BigInteger, nullable=False),
    Column("forgotten_ms", BigInteger, nullable=False, server_default="0"),  # 0: never, or seen again since
)

health_event = _table(
    "health_event",
    Column("id", RowId, primary_key=True),
    Column("device", ForeignKey(device_state.c.id), nullable=False, index=True),
    Column("time_ms", BigInteger, nullable=False),
    Column("event", String(64), nullable=False),
    Column("state", String(16), nullable=False),
    Column("reason", Text, nullable=False),
    Column("detail", JSON, nullable=False),
    Column("latency_ns", LargeBinary, nullable=False),
)

# The row of a free device stays, because its fence has to keep counting up.
lease = _table(
    "lease",
    Column("device", String(256), primary_key=True),
    Column("fence", BigInteger, nullable=False),
    Column("token", String(64), nullable=False),
    *_required(String(256), "user_name", "host"),
    Column("pid", BigInteger, nullable=False),
    Column("purpose", Text, nullable=False),
    Column("priority", Integer, nullable=False),
    *_required(BigInteger(), "acquired_ms", "expires_ms"),
    Column("reserved_for", String(256), nullable=False),
    Column("reserved_until_ms", BigInteger, nullable=False),
    # Start of the reservation; 0 for a reservation that begins at once.
    Column("reserved_from_ms", BigInteger, nullable=False, server_default="0"),
    # User with a better right than the holding agent, which hands the device over after the running job; else empty.
    Column("wanted_by", String(256), nullable=False, server_default=""),
    Index("ix_lease_token", "token"),
)

waiter = _table(
    "waiter",
    Column("id", String(64), primary_key=True),
    # JSON as text: many waiters have the same list, which is then decoded once.
    Column("devices", Text, nullable=False),
    Column("wanted", Integer, nullable=False),
    *_required(String(256), "user_name", "host"),
    Column("pid", BigInteger, nullable=False),
    Column("purpose", Text, nullable=False),
    Column("priority", Integer, nullable=False),
    *_required(BigInteger(), "since_ms", "expires_ms"),
)

# Accounts of `farm serve`, and the record of their actions.

account = _table(
    "account",
    Column("name", String(256), primary_key=True),
    # `viewer`, `developer` or `operator`.
    Column("role", String(16), nullable=False),
    # SHA-256 of the token, which has 256 random bits: a slow hash would protect nothing more.
    Column("token_hash", String(64), nullable=False, unique=True),
    Column("created_ms", BigInteger, nullable=False),
)

audit = _table(
    "audit",
    Column("id", RowId, primary_key=True),
    Column("time_ms", BigInteger, nullable=False),
    Column("user_name", String(256), nullable=False),
    Column("action", String(32), nullable=False),
    # Fields of the request, as JSON without secrets.
    Column("asked", Text, nullable=False),
    # `not ended` in the row that an action begins with; `done`, or the reason of the refusal.
    Column("outcome", Text, nullable=False),
    # Row of the begin, in a row with the end: rows are never changed.
    Column("begin_id", BigInteger, nullable=True),
    Index("ix_audit_begin_id", "begin_id", unique=True),
)

# Shared farm: submitted runs, shards, builds, agents. Only PostgreSQL has rows.

# Submitted run. Columns with JSON as text are decoded by programs, never by a query.
run_order = _table(
    "run_order",
    Column("run_id", ForeignKey(run.c.id), primary_key=True),
    Column("user_name", String(256), nullable=False),
    Column("priority", Integer, nullable=False),
    Column("purpose", Text, nullable=False),
    Column("protocol", Integer, nullable=False),
    Column("terms", Text, nullable=False),
    *_required(JSON(), "devices", "labels"),
    # "SOC/KIND/OS" of the devices that the run has a runtime for; empty for all devices.
    Column("classes", JSON, nullable=False),
    Column("most_devices", Integer),
    Column("most_failures", Integer),
    Column("failures", Integer, nullable=False),
    # Number of bundles that were missing at the submission.
    Column("bundles", Integer, nullable=False),
    Column("until_ms", BigInteger),
    Column("state", String(16), nullable=False, index=True),
    Column("cancelled_by", String(256), nullable=False),
    Column("submitted_ms", BigInteger, nullable=False),
    Column("ended_ms", BigInteger),
)

shard = _table(
    "shard",
    Column("id", RowId, primary_key=True),
    Column("run_id", ForeignKey(run_order.c.run_id), nullable=False),
    Column("soc", String(64), nullable=False),
    Column("position", Integer, nullable=False),
    Column("expected_s", Float(53), nullable=False),
    # Number of bundles that are not built yet: equals the rows of `build_wanted` without a failure.
    Column("lacking", Integer, nullable=False),
    Column("avoid", JSON, nullable=False),
    Column("retry", Boolean, nullable=False, server_default=false()),
    Column("state", String(16), nullable=False),
    # Device and fence of the lease that holds the shard, with agent and the agent's token.
    Column("device", String(256), nullable=False),
    Column("fence", BigInteger, nullable=False),
    Column("agent", String(256), nullable=False),
    Column("token", String(64), nullable=False),
    Column("held_ms", BigInteger, nullable=False),
    # Number of agents that died with the shard.
    Column("tries", Integer, nullable=False),
    Column("why", Text, nullable=False),
    # Number of jobs without a result.
    Column("remaining", Integer, nullable=False),
    Index("ix_shard_run_id_state", "run_id", "state"),
    # Shards that could begin, in their order. No other index may begin with the SoC: without statistics of a run
    # submitted just now, PostgreSQL would choose a shorter index.
    Index("ix_shard_soc_state", "soc", "state", "run_id", "retry", "lacking", "position"),
    Index("ix_shard_token", "token"),
)

# Time of the last look for devices of a SoC that others have a better right to.
soc_look = _table(
    "soc_look",
    Column("soc", String(64), primary_key=True),
    Column("looked_ms", BigInteger, nullable=False),
)

# Jobs of a shard, in a table of their own: each decision reads all waiting rows of `shard`, which stay small.
shard_jobs = _table(
    "shard_jobs",
    Column("shard", ForeignKey(shard.c.id), primary_key=True),
    # JSON with the names of all jobs, and of the jobs with a result; name of the first job without one; all jobs with
    # the keys of their bundles, compressed by zlib because a job has kilobytes of tolerances.
    *_required(Text(), "names", "done"),
    Column("next_job", String(512), nullable=False),
    Column("jobs", LargeBinary, nullable=False),
)

# Row for each bundle requested from build hosts, shared by all runs.
build = _table(
    "build",
    Column("key", String(128), primary_key=True),
    Column("toolchain", String(128), nullable=False),
    Column("task", Text, nullable=False),
    # User and priority of the most urgent run that requests the bundle, and its place there.
    Column("user_name", String(256), nullable=False),
    *_required(Integer(), "priority", "position"),
    Column("state", String(16), nullable=False),
    # Reasons of the agents that put the build back, by host: they do not get it again.
    Column("put_back", JSON, nullable=False),
    # SHA-256 of the archive of the bundle, in the artifacts' store.
    Column("archive", String(64), nullable=False),
    Column("nbytes", BigInteger, nullable=False),
    # Facts recorded with the requesting runs: seconds, fallback_ops, operators, program.
    Column("manifest", JSON(none_as_null=True)),
    Column("reply", Text),
    Column("log", Text, nullable=False),
    Column("asked_ms", BigInteger, nullable=False),
    Index("ix_build_state", "state"),
)

# Jobs of shards that wait for a bundle, or whose bundle could not be built.
build_wanted = _table(
    "build_wanted",
    Column("shard", ForeignKey(shard.c.id), primary_key=True),
    Column("job", String(512), primary_key=True),
    Column("key", String(128), nullable=False, index=True),
    Column("run_id", String(64), nullable=False, index=True),
    # JSON of `farm.store.cluster.records.Build`, as it failed for this run; NULL while the job waits.
    Column("failure", Text),
)

agent = _table(
    "agent",
    Column("name", String(256), primary_key=True),
    # Token of this registration and of its leases.
    Column("token", String(64), nullable=False),
    Column("user_name", String(256), nullable=False),
    Column("facts", Text, nullable=False),
    *_required(BigInteger(), "started_ms", "heartbeat_ms", "expires_ms"),
    Column("has_left", Boolean, nullable=False),
    # True for an agent that has to take no new work.
    Column("is_draining", Boolean, nullable=False),
)

agent_device = _table(
    "agent_device",
    Column("device", String(256), primary_key=True),
    Column("agent", ForeignKey(agent.c.name), nullable=False, index=True),
    Column("soc", String(64), nullable=False, index=True),
    *_required(String(16), "kind", "os"),
    *_required(String(256), "serial", "name"),
    Column("labels", JSON, nullable=False),
    # Reason why the agent cannot use the device now; empty for a usable device.
    Column("refused", Text, nullable=False),
)

# Most devices at once for `user:ada` or `label:camera`.
quota = _table(
    "quota",
    Column("subject", String(320), primary_key=True),
    Column("most", Integer, nullable=False),
    Column("set_by", String(256), nullable=False),
    Column("set_ms", BigInteger, nullable=False),
)

# Start of a nightly run: the row decides which of several agents starts it, once for each due time.
nightly_start = _table(
    "nightly_start",
    Column("name", String(128), primary_key=True),
    Column("due_ms", BigInteger, primary_key=True),
    Column("state", String(16), nullable=False),
    Column("agent", String(256), nullable=False),
    Column("token", String(64), nullable=False),
    Column("started_ms", BigInteger, nullable=False),
    Column("ended_ms", BigInteger),
    Column("exit_code", Integer),
    # Reason why it was not started, or its last message.
    Column("why", Text, nullable=False),
)


def make_tables(connection: Connection) -> None:
    """Make the tables of a new store."""
    metadata.create_all(connection, checkfirst=False)
    key = f"CONSTRAINT {VERSION_TABLE}_pkc PRIMARY KEY (version_num)"
    connection.execute(text(f"CREATE TABLE {VERSION_TABLE} (version_num VARCHAR(32) NOT NULL, {key})"))
    connection.execute(text(f"INSERT INTO {VERSION_TABLE} VALUES (:revision)"), {"revision": REVISION})  # noqa: S608
