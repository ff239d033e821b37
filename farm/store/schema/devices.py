"""Tables of devices between runs: health, leases and waiting processes."""

from __future__ import annotations

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    String,
    Table,
    Text,
)

from farm.store.schema.base import RowId, metadata

device_state = Table(
    "device_state",
    metadata,
    Column("id", String(256), primary_key=True),
    Column("serial", String(256), nullable=False),
    Column("host", String(256), nullable=False),
    Column("soc", String(64), nullable=False),
    Column("kind", String(16), nullable=False),
    Column("os", String(16), nullable=False),
    Column("product", String(256), nullable=False),
    Column("name", String(256), nullable=False),
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

health_event = Table(
    "health_event",
    metadata,
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
lease = Table(
    "lease",
    metadata,
    Column("device", String(256), primary_key=True),
    Column("fence", BigInteger, nullable=False),
    Column("token", String(64), nullable=False),
    Column("user_name", String(256), nullable=False),
    Column("host", String(256), nullable=False),
    Column("pid", BigInteger, nullable=False),
    Column("purpose", Text, nullable=False),
    Column("priority", Integer, nullable=False),
    Column("acquired_ms", BigInteger, nullable=False),
    Column("expires_ms", BigInteger, nullable=False),
    Column("reserved_for", String(256), nullable=False),
    Column("reserved_until_ms", BigInteger, nullable=False),
    # Start of the reservation; 0 for a reservation that begins at once.
    Column("reserved_from_ms", BigInteger, nullable=False, server_default="0"),
    # User with a better right than the holding agent, which hands the device over after the running job; else empty.
    Column("wanted_by", String(256), nullable=False, server_default=""),
    Index("ix_lease_token", "token"),
)

waiter = Table(
    "waiter",
    metadata,
    Column("id", String(64), primary_key=True),
    # JSON as text: many waiters have the same list, which is then decoded once.
    Column("devices", Text, nullable=False),
    Column("wanted", Integer, nullable=False),
    Column("user_name", String(256), nullable=False),
    Column("host", String(256), nullable=False),
    Column("pid", BigInteger, nullable=False),
    Column("purpose", Text, nullable=False),
    Column("priority", Integer, nullable=False),
    Column("since_ms", BigInteger, nullable=False),
    Column("expires_ms", BigInteger, nullable=False),
)
