"""Tables of `farm serve`: accounts, and the record of their actions."""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, Index, String, Table, Text

from farm.store.schema.base import RowId, metadata

account = Table(
    "account",
    metadata,
    Column("name", String(256), primary_key=True),
    # `viewer`, `developer` or `operator`.
    Column("role", String(16), nullable=False),
    # SHA-256 of the token, which has 256 random bits: a slow hash would protect nothing more.
    Column("token_hash", String(64), nullable=False, unique=True),
    Column("created_ms", BigInteger, nullable=False),
)

audit = Table(
    "audit",
    metadata,
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
