"""Rights of groups in a store on PostgreSQL, as SQL; and statements as the owner of its tables."""

from __future__ import annotations

from importlib import resources

from sqlalchemy import Connection, text

KINDS = ("agent", "builder", "server", "reader")
"""Groups of a store."""
_FORMER = ("developer", "viewer")
"""Groups of persons that an earlier version created."""
_OWNER = text("SELECT pg_get_userbyid(relowner) FROM pg_class WHERE oid = to_regclass('run')")
# Not to_regclass, which within a transaction does not see tables that others create after its first call.
_IS_THERE = text("SELECT 1 FROM pg_class WHERE relname = 'farm_roles' AND pg_table_is_visible(oid)")
HAS_JOBS = text("SELECT to_regprocedure('farm_defer_builds(text[])') IS NOT NULL")
"""Query: True if the store has this farm's tables and functions for Procrastinate."""
_MARK = "CREATE TABLE IF NOT EXISTS farm_roles (prefix text PRIMARY KEY)"


def apply_again(connection: Connection) -> None:
    """Grant the rights of groups again after a change of tables or functions, if the store has groups."""
    if connection.scalar(_IS_THERE) is None:
        return
    prefix = connection.scalar(text("SELECT prefix FROM farm_roles"))
    if prefix is not None:
        for script in rights(connection, prefix):
            run_script(connection, script)


def become_owner(connection: Connection) -> None:
    """Act as the owner of the tables until the transaction ends, if this user is a member: new objects belong to it."""
    owner = connection.scalar(_OWNER)
    may = text("SELECT current_user <> :owner AND pg_has_role(:owner, 'MEMBER')")
    if owner is not None and connection.scalar(may, {"owner": owner}):
        connection.execute(text(f"SET LOCAL ROLE {connection.dialect.identifier_preparer.quote_identifier(owner)}"))


def run_script(connection: Connection, script: str) -> None:
    """Execute several statements with literal % characters, by the driver itself, as SQLAlchemy has no way for both.

    Raises ProgrammingError of SQLAlchemy.
    """
    driver = connection.connection.driver_connection
    assert driver is not None  # noqa: S101 - a connection that is open has one
    try:
        driver.execute(script)
    except driver.Error as error:  # psycopg's connections have their errors as attributes, as in PEP 249
        from sqlalchemy.exc import ProgrammingError

        raise ProgrammingError(script[:80], None, error) from error


def rights(connection: Connection, prefix: str) -> tuple[str, str]:
    """Return the SQL, for the owner of the tables, with the rights and guards of groups."""
    return _filled(connection, "grants", prefix), _filled(connection, "guards", prefix)


def marked(prefix: str) -> str:
    """Return the SQL that records the groups of a store and the prefix of their names."""
    return f"{_MARK};\nDELETE FROM farm_roles;\nINSERT INTO farm_roles VALUES ('{prefix}');\n"


def owner_of(connection: Connection) -> str:
    """Return the role that owns the tables."""
    return str(connection.scalar(_OWNER))


def groups(connection: Connection, prefix: str) -> str:
    """Return the SQL, for a superuser, that creates the groups."""
    return _filled(connection, "groups", prefix)


def _filled(connection: Connection, name: str, prefix: str) -> str:
    owner = owner_of(connection)
    names = text("SELECT quote_ident(current_schema()), quote_ident(:owner), quote_literal(:owner)")
    schema, tables_owner, tables_owner_text = connection.execute(names, {"owner": owner}).one()
    script = resources.files("farm.store.rights").joinpath(f"{name}.sql").read_text(encoding="utf-8")
    filled = {"schema": schema, "tables_owner": tables_owner, "tables_owner_text": tables_owner_text}
    for key, value in (filled | {kind: f"{prefix}_{kind}" for kind in (*KINDS, *_FORMER)}).items():
        script = script.replace(f"{{{key}}}", value)
    return script
