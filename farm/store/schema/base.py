"""Common parts of all tables."""

from __future__ import annotations

from sqlalchemy import BigInteger, Integer, MetaData

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
