"""Tables of the store, the same in SQLite and PostgreSQL. Meanings: docs/reference/store.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import sqlalchemy as sa
from msgspec import Struct
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
metadata = sa.MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
        "pk": "pk_%(table_name)s",
    }
)

# SQLite numbers rows by itself only for a key of type INTEGER, which holds 64 bits there.
RowId = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def _table(name: str, *content: SchemaItem, **options: Any) -> sa.Table:
    return sa.Table(name, metadata, *content, **options)


def _required(**columns: type[TypeEngine[Any]] | TypeEngine[Any]) -> list[sa.Column[Any]]:
    """Return columns by name with their types, none of which may be NULL."""
    return [sa.Column(name, kind, nullable=False) for name, kind in columns.items()]


_NAME, _WORD, _KIND = map(sa.String, (values.NAME_LIMIT, values.SOC_LIMIT, values.KIND_LIMIT))


# Records: runs, jobs, attempts, and every number.

fingerprint = _table(
    "fingerprint",
    sa.Column("hash", sa.String(64), primary_key=True),
    sa.Column("facts", sa.JSON, nullable=False),
)

run = _table(
    "run",
    sa.Column("id", sa.String(64), primary_key=True),
    *_required(command=sa.Text, user_name=sa.Text, host=sa.Text),
    sa.Column("fingerprint_hash", sa.ForeignKey(fingerprint.c.hash), nullable=False),
    sa.Column("started_ms", sa.BigInteger, nullable=False, index=True),
    sa.Column("finished_ms", sa.BigInteger),
    sa.Column("exit_code", sa.Integer),
    sa.Column("priority", sa.String(16), nullable=False, server_default="person"),  # the default is for older farms
    # Value of `records.RunKind`. The prefix `run_` keeps users' older queries with joins unambiguous.
    sa.Column("run_kind", sa.String(16), nullable=False, server_default="suite"),
    # `virtual`, `hardware` or `mixed`: as requested, then from the run's devices; NULL equals no other kind.
    sa.Column("run_device_kind", sa.String(16)),
    # Name of the toolchain; empty for the default one and in runs of older farms.
    sa.Column("run_toolchain", sa.String(256), nullable=False, server_default=""),
    # Branch that the run belongs to, or that a local run (`run_private`) is compared with; empty for the default.
    sa.Column("run_branch", sa.String(256), nullable=False, server_default=""),
    sa.Column("run_private", sa.Boolean, nullable=False, server_default=sa.false()),
    sa.Column("run_commit", sa.String(64), nullable=False, server_default=""),
    sa.Column("run_dirty", sa.Boolean, nullable=False, server_default=sa.false()),
    # Further fields of `view.RunToolchain`, which no query selects by; NULL without any.
    sa.Column("run_source", sa.JSON(none_as_null=True)),
    # Name given by the user, or NIGHTLY/CELL, and the id of the nightly run of a cell; empty without.
    sa.Column("run_name", sa.String(256), nullable=False, server_default=""),
    sa.Column("run_nightly", sa.String(64), nullable=False, server_default=""),
    # False after an early end without an attempt, for example without a device: no status, diff or history has the run.
    sa.Column("run_began", sa.Boolean, nullable=False, server_default=sa.true()),
)

device = _table(
    "device",
    sa.Column("id", RowId, primary_key=True),
    *_required(serial=_NAME, soc=_WORD, kind=_KIND, build=_NAME),
    sa.UniqueConstraint("serial", "soc", "kind", "build"),
)

run_device = _table(
    "run_device",
    sa.Column("run_id", sa.ForeignKey(run.c.id), primary_key=True),
    sa.Column("device_id", sa.ForeignKey(device.c.id), primary_key=True),
    # Versions of the device's runtime; NULL if unknown.
    sa.Column("runtime", sa.JSON(none_as_null=True)),
)

suite_case = _table(
    "suite_case",
    sa.Column("id", RowId, primary_key=True),
    *_required(suite=_WORD, case_name=_WORD, version=_WORD, module=sa.Text),
    sa.UniqueConstraint("suite", "case_name", "version"),
)

job = _table(
    "job",
    sa.Column("id", RowId, primary_key=True),
    sa.Column("name", sa.String(512), nullable=False, unique=True),
    *_required(suite=_WORD, case_name=_WORD, soc=_WORD, backend=_KIND, precision=sa.String(32), options=sa.JSON),
    # Queries look for a case on other targets by its name, in all suites.
    sa.Index("ix_job_case_name", "case_name"),
)

run_job = _table(
    "run_job",
    sa.Column("id", RowId, primary_key=True),
    sa.Column("run_id", sa.ForeignKey(run.c.id), nullable=False),
    sa.Column("job_id", sa.ForeignKey(job.c.id), nullable=False),
    sa.Column("case_id", sa.ForeignKey(suite_case.c.id), nullable=False),
    sa.Column("position", sa.Integer, nullable=False),
    sa.Column("build_seconds", sa.Float(53)),
    sa.Column("cached", sa.Boolean),
    sa.Column("bundle_key", sa.String(128)),
    sa.Column("fallback_ops", sa.JSON),
    sa.Column("operators", sa.JSON),
    sa.Column("judged_by", sa.String(64)),
    sa.Column("skipped", sa.JSON(none_as_null=True)),
    # Deciding attempt and its verdict: the last attempt that judged the code, else the last; NULL without attempts.
    # Only the trigger `attempt_decides` writes both: no login can forge a decision. A foreign key would be circular, as
    # attempts refer to this table.
    sa.Column("decisive_attempt_id", sa.BigInteger),
    sa.Column("decisive_verdict", sa.String(16)),
    # Hash of the program without the timestamps of QNN; NULL if unknown.
    sa.Column("program_hash", sa.String(64)),
    sa.UniqueConstraint("run_id", "job_id"),
    # Ids of runs sort by time, so that the newest run of a job is found at once; row ids of imported runs do not.
    sa.Index("ix_run_job_job_id_run_id", "job_id", "run_id"),
)

# Durations by which the first shard of a login divided the jobs, so that its other shards divide them alike.
shard_weights = _table(
    "shard_weights",
    sa.Column("user_name", sa.String(256), primary_key=True),
    sa.Column("selection", sa.String(64), primary_key=True),
    *_required(asked_ms=sa.BigInteger, seconds=sa.JSON),
)

attempt = _table(
    "attempt",
    sa.Column("id", RowId, primary_key=True),
    sa.Column("run_job_id", sa.ForeignKey(run_job.c.id), nullable=False),
    sa.Column("digest", sa.String(64)),
    sa.Column("device_id", sa.ForeignKey(device.c.id), index=True),
    sa.Column("recorded_ms", sa.BigInteger, nullable=False),
    *(field.column for field in ATTEMPT_FIELDS.values()),
    sa.UniqueConstraint("run_job_id", "digest"),
)


@sa.event.listens_for(attempt, "after_create")
def _make_trigger(_: sa.Table, connection: sa.Connection, **_options: Any) -> None:
    # A later infra attempt does not replace a verdict about the code.
    decide = """
        UPDATE run_job SET decisive_attempt_id = NEW.id, decisive_verdict = NEW.verdict
        WHERE id = NEW.run_job_id
        AND (decisive_verdict IS NULL OR decisive_verdict = 'infra' OR NEW.verdict <> 'infra');
    """
    if connection.dialect.name == "sqlite":
        connection.execute(sa.text(f"CREATE TRIGGER attempt_decides AFTER INSERT ON attempt BEGIN {decide} END"))
        return
    schema = connection.scalar(sa.text("SELECT quote_ident(current_schema())"))
    as_owner = f"LANGUAGE plpgsql SECURITY DEFINER SET search_path = {schema}, pg_temp"
    for statement in (
        f"CREATE FUNCTION attempt_decides() RETURNS trigger {as_owner} AS $$ BEGIN {decide} RETURN NULL; END $$",
        "REVOKE ALL ON FUNCTION attempt_decides() FROM PUBLIC",
        "CREATE TRIGGER attempt_decides AFTER INSERT ON attempt FOR EACH ROW EXECUTE FUNCTION attempt_decides()",
    ):
        connection.execute(sa.text(statement))


def _of_attempts(name: str, *columns: sa.Column[Any]) -> sa.Table:
    """Return the table for details of attempts, in their order."""
    return _table(
        name,
        sa.Column("attempt_id", sa.ForeignKey(attempt.c.id), primary_key=True),
        sa.Column("position", sa.Integer, primary_key=True, autoincrement=False),
        *columns,
    )


def _fields(kind: type[Struct]) -> list[sa.Column[Any]]:
    return [field.column for field in DETAIL_FIELDS[kind].values()]


comparison = _of_attempts("comparison", *_fields(Comparison), sa.Column("nan_figures", sa.JSON, nullable=False))
op_profile = _of_attempts("op_profile", *_fields(OperatorProfile))
layer = _of_attempts("layer", *_fields(LayerComparison), sa.Column("nan_figures", sa.JSON, nullable=False))

series = _table(
    "series",
    sa.Column("id", RowId, primary_key=True),
    sa.Column("job_id", sa.ForeignKey(job.c.id), nullable=False),
    *_required(metric=sa.String(128), unit=sa.String(32), direction=sa.String(8), exact=sa.Boolean),
    sa.UniqueConstraint("job_id", "metric", "unit", "direction", "exact"),
)

measurement = _of_attempts(
    "measurement",
    sa.Column("series_id", sa.ForeignKey(series.c.id), nullable=False, index=True),
    sa.Column("n", sa.Integer, nullable=False),
    *(sa.Column(statistic, sa.Float(53)) for statistic in values.STATISTICS),
    sa.Column("samples", sa.LargeBinary, nullable=False),
)

counter = _of_attempts(
    "counter",
    sa.Column("series_id", sa.ForeignKey(series.c.id), nullable=False, index=True),
    *_required(n=sa.Integer, value=sa.BigInteger, max=sa.BigInteger, samples=sa.LargeBinary),
)

# Runs are named by id without a foreign key: an alert outlives its run.
alert = _table(
    "alert",
    sa.Column("id", RowId, primary_key=True),
    sa.Column("series_id", sa.ForeignKey(series.c.id), nullable=False),
    sa.Column("device_kind", sa.String(16), nullable=False),
    sa.Column("run_id", sa.String(64), nullable=False, index=True),
    *_required(finding=_KIND, state=_KIND, last_good=_WORD, first_bad=_WORD),
    # NULL stands for NaN in these columns.
    *(sa.Column(name, sa.Float(53)) for name in ("change", "low", "high", "p_value")),
    *_required(reason=sa.Text, guilt=sa.Text, device=_NAME),
    # Measured pairs, [[good, new], ...], for a later judgement.
    sa.Column("pairs", sa.JSON(none_as_null=True)),
    sa.Column("found_ms", sa.BigInteger, nullable=False),
    # Copies from the run, which may be removed.
    sa.Column("alert_branch", sa.String(256), nullable=False, server_default=""),
    sa.Column("alert_private", sa.Boolean, nullable=False, server_default=sa.false()),
    sa.UniqueConstraint("series_id", "device_kind", "run_id"),
    sa.Index("ix_alert_state", "state"),
    # Numbers of removed alerts are not used again, because remarks name them.
    sqlite_autoincrement=True,
)

# Every remark stays; the newest of a subject counts.
triage = _table(
    "triage",
    sa.Column("id", RowId, primary_key=True),
    # `alert:12`, or `job:` and the id of the job.
    sa.Column("subject", sa.String(576), nullable=False, index=True),
    *_required(state=_KIND, user_name=_NAME, owner=_NAME, note=sa.Text, time_ms=sa.BigInteger),
    sa.Column("until_ms", sa.BigInteger),
)

artifact = _table(
    "artifact",
    sa.Column("id", RowId, primary_key=True),
    sa.Column("attempt_id", sa.ForeignKey(attempt.c.id), nullable=False),
    *_required(sha256=_WORD, size=sa.BigInteger, kind=_WORD),
    sa.UniqueConstraint("attempt_id", "kind", "sha256"),
    sa.Index("ix_artifact_sha256", "sha256"),
)

# Devices between runs: health, leases and waiting processes.

device_state = _table(
    "device_state",
    sa.Column("id", sa.String(256), primary_key=True),
    *_required(
        serial=_NAME,
        host=_NAME,
        soc=_WORD,
        kind=_KIND,
        os=_KIND,
        product=_NAME,
        name=_NAME,
        labels=sa.JSON,
        in_service=sa.Boolean,
        service_note=sa.Text,
        service_user=_NAME,
        health=_KIND,
        health_reason=sa.Text,
    ),
    sa.Column("status", sa.JSON(none_as_null=True)),
    *_required(state=_WORD, last_seen_ms=sa.BigInteger),
    sa.Column("forgotten_ms", sa.BigInteger, nullable=False, server_default="0"),  # 0: never, or seen again since
)

health_event = _table(
    "health_event",
    sa.Column("id", RowId, primary_key=True),
    sa.Column("device", sa.ForeignKey(device_state.c.id), nullable=False, index=True),
    *_required(
        time_ms=sa.BigInteger, event=_WORD, state=_KIND, reason=sa.Text, detail=sa.JSON, latency_ns=sa.LargeBinary
    ),
)

# The row of a free device stays, because its fence has to keep counting up.
lease = _table(
    "lease",
    sa.Column("device", sa.String(256), primary_key=True),
    *_required(
        fence=sa.BigInteger,
        token=_WORD,
        user_name=_NAME,
        host=_NAME,
        pid=sa.BigInteger,
        purpose=sa.Text,
        priority=sa.Integer,
        acquired_ms=sa.BigInteger,
        expires_ms=sa.BigInteger,
        reserved_for=_NAME,
        reserved_until_ms=sa.BigInteger,
    ),
    # Start of the reservation; 0 for a reservation that begins at once.
    sa.Column("reserved_from_ms", sa.BigInteger, nullable=False, server_default="0"),
    # User with a better right than the holding agent, which hands the device over after the running job; else empty.
    sa.Column("wanted_by", sa.String(256), nullable=False, server_default=""),
    sa.Index("ix_lease_token", "token"),
)

waiter = _table(
    "waiter",
    sa.Column("id", sa.String(64), primary_key=True),
    # JSON as text: many waiters have the same list, which is then decoded once.
    *_required(
        devices=sa.Text,
        wanted=sa.Integer,
        user_name=_NAME,
        host=_NAME,
        pid=sa.BigInteger,
        purpose=sa.Text,
        priority=sa.Integer,
        since_ms=sa.BigInteger,
        expires_ms=sa.BigInteger,
    ),
)

# Accounts of `farm serve`, and the record of their actions.

account = _table(
    "account",
    sa.Column("name", sa.String(256), primary_key=True),
    # `viewer`, `developer` or `operator`.
    sa.Column("role", sa.String(16), nullable=False),
    # SHA-256 of the token, which has 256 random bits: a slow hash would protect nothing more.
    sa.Column("token_hash", sa.String(64), nullable=False, unique=True),
    sa.Column("created_ms", sa.BigInteger, nullable=False),
)

audit = _table(
    "audit",
    sa.Column("id", RowId, primary_key=True),
    *_required(time_ms=sa.BigInteger, user_name=_NAME, action=sa.String(32)),
    # Fields of the request, as JSON without secrets.
    sa.Column("asked", sa.Text, nullable=False),
    # `not ended` in the row that an action begins with; `done`, or the reason of the refusal.
    sa.Column("outcome", sa.Text, nullable=False),
    # Row of the begin, in a row with the end: rows are never changed.
    sa.Column("begin_id", sa.BigInteger, nullable=True),
    sa.Index("ix_audit_begin_id", "begin_id", unique=True),
)

# Shared farm: submitted runs, shards, builds, agents. Only PostgreSQL has rows.

# Submitted run. Columns with JSON as text are decoded by programs, never by a query.
run_order = _table(
    "run_order",
    sa.Column("run_id", sa.ForeignKey(run.c.id), primary_key=True),
    *_required(
        user_name=_NAME,
        priority=sa.Integer,
        purpose=sa.Text,
        protocol=sa.Integer,
        terms=sa.Text,
        devices=sa.JSON,
        labels=sa.JSON,
    ),
    # "SOC/KIND/OS" of the devices that the run has a runtime for; empty for all devices.
    sa.Column("classes", sa.JSON, nullable=False),
    sa.Column("most_devices", sa.Integer),
    sa.Column("most_failures", sa.Integer),
    sa.Column("failures", sa.Integer, nullable=False),
    # Number of bundles that were missing at the submission.
    sa.Column("bundles", sa.Integer, nullable=False),
    sa.Column("until_ms", sa.BigInteger),
    sa.Column("state", sa.String(16), nullable=False, index=True),
    *_required(cancelled_by=_NAME, submitted_ms=sa.BigInteger),
    sa.Column("ended_ms", sa.BigInteger),
)

shard = _table(
    "shard",
    sa.Column("id", RowId, primary_key=True),
    sa.Column("run_id", sa.ForeignKey(run_order.c.run_id), nullable=False),
    *_required(soc=_WORD, position=sa.Integer, expected_s=sa.Float(53)),
    # Number of bundles that are not built yet: equals the rows of `build_wanted` without a failure.
    *_required(lacking=sa.Integer, avoid=sa.JSON),
    sa.Column("retry", sa.Boolean, nullable=False, server_default=sa.false()),
    sa.Column("state", sa.String(16), nullable=False),
    # Device and fence of the lease that holds the shard, with agent and the agent's token.
    *_required(device=_NAME, fence=sa.BigInteger, agent=_NAME, token=_WORD, held_ms=sa.BigInteger),
    # Number of agents that died with the shard.
    *_required(tries=sa.Integer, why=sa.Text),
    # Number of jobs without a result.
    sa.Column("remaining", sa.Integer, nullable=False),
    sa.Index("ix_shard_run_id_state", "run_id", "state"),
    # Shards that could begin, in their order. No other index may begin with the SoC: without statistics of a run
    # submitted just now, PostgreSQL would choose a shorter index.
    sa.Index("ix_shard_soc_state", "soc", "state", "run_id", "retry", "lacking", "position"),
    sa.Index("ix_shard_token", "token"),
)

# Time of the last look for devices of a SoC that others have a better right to.
soc_look = _table(
    "soc_look",
    sa.Column("soc", sa.String(64), primary_key=True),
    sa.Column("looked_ms", sa.BigInteger, nullable=False),
)

# Jobs of a shard, in a table of their own: each decision reads all waiting rows of `shard`, which stay small.
shard_jobs = _table(
    "shard_jobs",
    sa.Column("shard", sa.ForeignKey(shard.c.id), primary_key=True),
    # JSON with the names of all jobs, and of the jobs with a result; name of the first job without one; all jobs with
    # the keys of their bundles, compressed by zlib because a job has kilobytes of tolerances.
    *_required(names=sa.Text, done=sa.Text, next_job=sa.String(512), jobs=sa.LargeBinary),
)

# Row for each bundle requested from build hosts, shared by all runs.
build = _table(
    "build",
    sa.Column("key", sa.String(128), primary_key=True),
    *_required(toolchain=sa.String(128), task=sa.Text),
    # User and priority of the most urgent run that requests the bundle, and its place there.
    *_required(user_name=_NAME, priority=sa.Integer, position=sa.Integer, state=_KIND),
    # Reasons of the agents that put the build back, by host: they do not get it again.
    sa.Column("put_back", sa.JSON, nullable=False),
    # SHA-256 of the archive of the bundle, in the artifacts' store.
    *_required(archive=_WORD, nbytes=sa.BigInteger),
    # Facts recorded with the requesting runs: seconds, fallback_ops, operators, program.
    sa.Column("manifest", sa.JSON(none_as_null=True)),
    sa.Column("reply", sa.Text),
    *_required(log=sa.Text, asked_ms=sa.BigInteger),
    sa.Index("ix_build_state", "state"),
)

# Jobs of shards that wait for a bundle, or whose bundle could not be built.
build_wanted = _table(
    "build_wanted",
    sa.Column("shard", sa.ForeignKey(shard.c.id), primary_key=True),
    sa.Column("job", sa.String(512), primary_key=True),
    sa.Column("key", sa.String(128), nullable=False, index=True),
    sa.Column("run_id", sa.String(64), nullable=False, index=True),
    # JSON of `farm.store.cluster.records.Build`, as it failed for this run; NULL while the job waits.
    sa.Column("failure", sa.Text),
)

agent = _table(
    "agent",
    sa.Column("name", sa.String(256), primary_key=True),
    # Token of this registration and of its leases.
    *_required(
        token=_WORD,
        user_name=_NAME,
        facts=sa.Text,
        started_ms=sa.BigInteger,
        heartbeat_ms=sa.BigInteger,
        expires_ms=sa.BigInteger,
        has_left=sa.Boolean,
    ),
    # True for an agent that has to take no new work.
    sa.Column("is_draining", sa.Boolean, nullable=False),
)

agent_device = _table(
    "agent_device",
    sa.Column("device", sa.String(256), primary_key=True),
    sa.Column("agent", sa.ForeignKey(agent.c.name), nullable=False, index=True),
    sa.Column("soc", sa.String(64), nullable=False, index=True),
    *_required(kind=_KIND, os=_KIND, serial=_NAME, name=_NAME, labels=sa.JSON),
    # Reason why the agent cannot use the device now; empty for a usable device.
    sa.Column("refused", sa.Text, nullable=False),
)

# Most devices at once for `user:ada` or `label:camera`.
quota = _table(
    "quota",
    sa.Column("subject", sa.String(320), primary_key=True),
    *_required(most=sa.Integer, set_by=_NAME, set_ms=sa.BigInteger),
)

# Start of a nightly run: the row decides which of several agents starts it, once for each due time.
nightly_start = _table(
    "nightly_start",
    sa.Column("name", sa.String(128), primary_key=True),
    sa.Column("due_ms", sa.BigInteger, primary_key=True),
    *_required(state=_KIND, agent=_NAME, token=_WORD, started_ms=sa.BigInteger),
    sa.Column("ended_ms", sa.BigInteger),
    sa.Column("exit_code", sa.Integer),
    # Reason why it was not started, or its last message.
    sa.Column("why", sa.Text, nullable=False),
)


def make_tables(connection: sa.Connection) -> None:
    """Make the tables of a new store."""
    metadata.create_all(connection, checkfirst=False)
    key = f"CONSTRAINT {VERSION_TABLE}_pkc PRIMARY KEY (version_num)"
    connection.execute(sa.text(f"CREATE TABLE {VERSION_TABLE} (version_num VARCHAR(32) NOT NULL, {key})"))
    connection.execute(sa.text(f"INSERT INTO {VERSION_TABLE} VALUES (:revision)"), {"revision": REVISION})  # noqa: S608
