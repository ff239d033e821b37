"""Execution of revisions, on the connection and in the transaction of `farm.store.database`."""

from __future__ import annotations

from alembic import context

from farm.store.messages.messages import upgrade_messages
from farm.store.schema import VERSION_TABLE, metadata

connection = context.config.attributes["connection"]
context.configure(
    connection=connection,
    target_metadata=metadata,
    version_table=VERSION_TABLE,
    # SQLite cannot alter most of a table: Alembic copies it instead.
    render_as_batch=True,
)
with context.begin_transaction():
    context.run_migrations()
    if connection.dialect.name == "postgresql":
        upgrade_messages(connection)
