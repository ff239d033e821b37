"""The tables of a farm of many hosts: what was submitted, in shards, and who works on it. Only PostgreSQL has rows."""

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

# A run that is submitted. What is JSON as text is decoded where it is needed, and by no query.
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
    # "SOC/KIND/OS" of the devices that it has a runtime for; empty is for all.
    Column("classes", JSON, nullable=False),
    Column("most_devices", Integer),
    Column("most_failures", Integer),
    Column("failures", Integer, nullable=False),
    # That were not there when it was submitted.
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
    # Of its bundles, those that are not made yet: as many rows of `build_wanted` without a failure.
    Column("lacking", Integer, nullable=False),
    Column("avoid", JSON, nullable=False),
    Column("retry", Boolean, nullable=False, server_default=false()),
    Column("state", String(16), nullable=False),
    # Of the lease that it is held under; the token is its agent's.
    Column("device", String(256), nullable=False),
    Column("fence", BigInteger, nullable=False),
    Column("agent", String(256), nullable=False),
    Column("token", String(64), nullable=False),
    Column("held_ms", BigInteger, nullable=False),
    # How often its agent died.
    Column("tries", Integer, nullable=False),
    Column("why", Text, nullable=False),
    # Jobs that have no result yet.
    Column("remaining", Integer, nullable=False),
    Index("ix_shard_run_id_state", "run_id", "state"),
    # What could begin, in the order in which it does. The only one that begins with the SoC: PostgreSQL, which has no
    # statistics of a run that has just been submitted, would take a shorter one.
    Index("ix_shard_soc_state", "soc", "state", "run_id", "retry", "lacking", "position"),
    Index("ix_shard_token", "token"),
)

# When it was last looked for devices of a SoC that others have a better right to.
soc_look = Table(
    "soc_look",
    metadata,
    Column("soc", String(64), primary_key=True),
    Column("looked_ms", BigInteger, nullable=False),
)

# Beside its shard, of which rows are small: whoever decides looks at all that wait.
shard_jobs = Table(
    "shard_jobs",
    metadata,
    Column("shard", ForeignKey(shard.c.id), primary_key=True),
    # JSON: the names of all jobs, and of those that have their result. The first that has none. All jobs with the keys
    # of their bundles, by zlib: a job has kilobytes of tolerances.
    Column("names", Text, nullable=False),
    Column("done", Text, nullable=False),
    Column("next_job", String(512), nullable=False),
    Column("jobs", LargeBinary, nullable=False),
)

# One for each bundle that a build host was asked for, by whatever run.
build = Table(
    "build",
    metadata,
    Column("key", String(128), primary_key=True),
    Column("toolchain", String(128), nullable=False),
    Column("task", Text, nullable=False),
    # Of the most urgent run that wants it, and its place there.
    Column("user_name", String(256), nullable=False),
    Column("priority", Integer, nullable=False),
    Column("position", Integer, nullable=False),
    Column("state", String(16), nullable=False),
    # Why agents put it back, by their names: they do not get it again.
    Column("put_back", JSON, nullable=False),
    # SHA-256 of the archive of the bundle, in the artifacts' store.
    Column("archive", String(64), nullable=False),
    Column("nbytes", BigInteger, nullable=False),
    # What is recorded with the runs that asked for it: seconds, fallback_ops, operators, program.
    Column("manifest", JSON(none_as_null=True)),
    Column("reply", Text),
    Column("log", Text, nullable=False),
    Column("asked_ms", BigInteger, nullable=False),
    Index("ix_build_state", "state"),
)

# Which jobs of which shards wait for a bundle, or were told that there will be none.
build_wanted = Table(
    "build_wanted",
    metadata,
    Column("shard", ForeignKey(shard.c.id), primary_key=True),
    Column("job", String(512), primary_key=True),
    Column("key", String(128), nullable=False, index=True),
    Column("run_id", String(64), nullable=False, index=True),
    # JSON of `farm.store.cluster.records.Build`, as it failed for this run; NULL while it is waited for.
    Column("failure", Text),
)

agent = Table(
    "agent",
    metadata,
    Column("name", String(256), primary_key=True),
    # Of its life, and of its leases.
    Column("token", String(64), nullable=False),
    Column("user_name", String(256), nullable=False),
    Column("facts", Text, nullable=False),
    Column("started_ms", BigInteger, nullable=False),
    Column("heartbeat_ms", BigInteger, nullable=False),
    Column("expires_ms", BigInteger, nullable=False),
    Column("has_left", Boolean, nullable=False),
    # It is to take no more work.
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
    # Why its agent cannot use it now; empty where it can.
    Column("refused", Text, nullable=False),
)

# `user:ada` or `label:camera`: how many devices at once.
quota = Table(
    "quota",
    metadata,
    Column("subject", String(320), primary_key=True),
    Column("most", Integer, nullable=False),
    Column("set_by", String(256), nullable=False),
    Column("set_ms", BigInteger, nullable=False),
)

# A night that one of the agents which have it began: the row decides which, once for each time that it is due.
night_start = Table(
    "night_start",
    metadata,
    Column("name", String(128), primary_key=True),
    Column("due_ms", BigInteger, primary_key=True),
    Column("state", String(16), nullable=False),
    Column("agent", String(256), nullable=False),
    Column("token", String(64), nullable=False),
    Column("started_ms", BigInteger, nullable=False),
    Column("ended_ms", BigInteger),
    Column("exit_code", Integer),
    # Why it was left out, or what it said at its end.
    Column("why", Text, nullable=False),
)
