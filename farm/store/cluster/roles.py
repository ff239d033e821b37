"""Roles of a store on PostgreSQL: printed for the server's administrator, or applied."""

from __future__ import annotations

import re

from sqlalchemy import Connection

from farm.base.errors import UsageError
from farm.store.clock import Clock
from farm.store.database import Database
from farm.store.rights import become_owner, marked, owner_of, rights, run_script
from farm.store.rights import groups as groups_sql
from farm.store.statements import Group

PREFIX = "farm"
_PREFIX = re.compile(r"[a-z][a-z0-9_]{0,40}")


class Roles(Group):
    """Groups of a store, with a common prefix of their names. Every method raises StoreError."""

    def __init__(self, database: Database, clock: Clock) -> None:
        super().__init__(database, clock)
        if database.is_sqlite:
            raise UsageError(f"{database.name}: a file has no roles: who may write it may do everything")

    def script(self, prefix: str = PREFIX) -> str:
        """Return the SQL that makes the groups and grants their rights. Raises UsageError for an invalid prefix."""
        _require_prefix(prefix)
        with self._database.reading() as connection:
            # The functions have to belong to the owner of the tables, also if another role runs the script.
            become = f"SET ROLE {connection.dialect.identifier_preparer.quote_identifier(owner_of(connection))};\n"
            granted = rights(connection, prefix)
            return "\n".join((groups_sql(connection, prefix), become + marked(prefix), *granted, "RESET ROLE;"))

    def apply(self, prefix: str = PREFIX) -> None:
        """Make missing groups and grant their rights; repeated calls do no harm.

        Raises UsageError for an invalid prefix.
        """
        _require_prefix(prefix)

        def change(connection: Connection) -> None:
            run_script(connection, groups_sql(connection, prefix))
            become_owner(connection)
            run_script(connection, marked(prefix))
            for script in rights(connection, prefix):
                run_script(connection, script)

        self._database.write(change)


def _require_prefix(prefix: str) -> None:
    if not _PREFIX.fullmatch(prefix):
        raise UsageError(f"--prefix: {prefix!r}: expected small letters, digits and _")
