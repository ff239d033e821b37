"""Tables of a shared farm: submitted runs, shards, builds, agents. Only PostgreSQL has rows."""

from __future__ import annotations

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    String,
    Table,
    Text,
    false,
)

from farm.store.schema.base import RowId, metadata
from farm.store.schema.recorded import run

# Submitted run. Columns with JSON as text are decoded by programs, never by a query.
run_order = Table(
    "run_order",
    metadata,
    Column("run_id", ForeignKey(run.c.id), primary_key=True),
    Column("user_name", String(256), nullable=False),
    Column("priority", Integer, nullable=False),
    Column("purpose", Text, nullable=False),
    Column("protocol", Integer, nullable=False),
    Column("terms", Text, nullable=False),
    Column("devices", JSON, nullable=False),
    Column("labels", JSON, nullable=False),
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

shard = Table(
    "shard",
    metadata,
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
soc_look = Table(
    "soc_look",
    metadata,
    Column("soc", String(64), primary_key=True),
    Column("looked_ms", BigInteger, nullable=False),
)

# Jobs of a shard, in a table of their own: each decision reads all waiting rows of `shard`, which stay small.
shard_jobs = Table(
    "shard_jobs",
    metadata,
    Column("shard", ForeignKey(shard.c.id), primary_key=True),
    # JSON with the names of all jobs, and of the jobs with a result; name of the first job without one; all jobs with
    # the keys of their bundles, compressed by zlib because a job has kilobytes of tolerances.
    Column("names", Text, nullable=False),
    Column("done", Text, nullable=False),
    Column("next_job", String(512), nullable=False),
    Column("jobs", LargeBinary, nullable=False),
)

# Row for each bundle requested from build hosts, shared by all runs.
build = Table(
    "build",
    metadata,
    Column("key", String(128), primary_key=True),
    Column("toolchain", String(128), nullable=False),
    Column("task", Text, nullable=False),
    # User and priority of the most urgent run that requests the bundle, and its place there.
    Column("user_name", String(256), nullable=False),
    Column("priority", Integer, nullable=False),
    Column("position", Integer, nullable=False),
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
build_wanted = Table(
    "build_wanted",
    metadata,
    Column("shard", ForeignKey(shard.c.id), primary_key=True),
    Column("job", String(512), primary_key=True),
    Column("key", String(128), nullable=False, index=True),
    Column("run_id", String(64), nullable=False, index=True),
    # JSON of `farm.store.cluster.records.Build`, as it failed for this run; NULL while the job waits.
    Column("failure", Text),
)

agent = Table(
    "agent",
    metadata,
    Column("name", String(256), primary_key=True),
    # Token of this registration and of its leases.
    Column("token", String(64), nullable=False),
    Column("user_name", String(256), nullable=False),
    Column("facts", Text, nullable=False),
    Column("started_ms", BigInteger, nullable=False),
    Column("heartbeat_ms", BigInteger, nullable=False),
    Column("expires_ms", BigInteger, nullable=False),
    Column("has_left", Boolean, nullable=False),
    # True for an agent that has to take no new work.
    Column("is_draining", Boolean, nullable=False),
)

agent_device = Table(
    "agent_device",
    metadata,
    Column("device", String(256), primary_key=True),
    Column("agent", ForeignKey(agent.c.name), nullable=False, index=True),
    Column("soc", String(64), nullable=False, index=True),
    Column("kind", String(16), nullable=False),
    Column("os", String(16), nullable=False),
    Column("serial", String(256), nullable=False),
    Column("name", String(256), nullable=False),
    Column("labels", JSON, nullable=False),
    # Reason why the agent cannot use the device now; empty for a usable device.
    Column("refused", Text, nullable=False),
)

# Most devices at once for `user:ada` or `label:camera`.
quota = Table(
    "quota",
    metadata,
    Column("subject", String(320), primary_key=True),
    Column("most", Integer, nullable=False),
    Column("set_by", String(256), nullable=False),
    Column("set_ms", BigInteger, nullable=False),
)

# Start of a nightly run: the row decides which of several agents starts it, once for each due time.
nightly_start = Table(
    "nightly_start",
    metadata,
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
