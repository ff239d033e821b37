"""PostgreSQL: driver, connection settings, and the signed-in user."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, Row, create_engine, event, text
from sqlalchemy.engine import URL
from sqlalchemy.exc import DBAPIError

from farm.base.errors import NoStoreError
from farm.base.machine import user_name

DRIVER = "psycopg"

# A server that is cut off is noticed within some 15 s, however long queries may take; libpq alone waits for hours.
_LIFE_SIGNS = {
    "connect_timeout": "10",
    "keepalives_idle": "5",
    "keepalives_interval": "3",
    "keepalives_count": "3",
    "tcp_user_timeout": "15000",
}
# Longest time that a stopped or disconnected process within a transaction keeps its locks, and others waiting for them.
_STANDSTILL_S = 5
# Session option without an effect: a pooler that drops options drops it too, and is recognized by that.
_MARK = "farm.session"
POOLED = (
    "a connection pooler such as PgBouncer answers there, and it keeps no sessions: name the address and port of "
    "PostgreSQL itself"
)
_USER_QUERY = "SELECT session_user, pg_get_userbyid(relowner) FROM pg_class WHERE oid = to_regclass('run')"


def create_postgresql_engine(
    url: URL, *, readonly: bool, connections: int | None = None, is_autocommit: bool = False
) -> Engine:
    """Return an engine; a `readonly` engine cannot write.

    `connections` limits the open connections. With `is_autocommit` each statement is a transaction, and a connection
    is used without a check that it still works.
    """
    # Queries read along indexes; the server's default cost of that is for rotating disks.
    options = f"-c {_MARK}=1 -c random_page_cost=1.1 {url.query.get('options', '')}"
    if readonly:
        # Covers a second transaction as well, which a user's query could begin.
        options += " -c default_transaction_read_only=on"
    else:
        options = f"-c idle_in_transaction_session_timeout={_STANDSTILL_S}s {options}"
    arguments = {name: value for name, value in _LIFE_SIGNS.items() if name not in url.query}
    arguments["options"] = options
    url = url.set(drivername=f"postgresql+{DRIVER}")
    settings: dict[str, Any] = {} if connections is None else {"pool_size": connections, "max_overflow": 0}
    settings |= {"isolation_level": "AUTOCOMMIT"} if is_autocommit else {"pool_pre_ping": True}
    engine = create_engine(url, connect_args=arguments, use_native_hstore=False, **settings)
    event.listen(engine, "connect", partial(_require_server, url.render_as_string()))
    return engine


def _require_server(name: str, connection: Any, _record: object) -> None:
    """Raise NoStoreError if a pooler answers in place of the server, as the dropped session option shows."""
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT current_setting('{_MARK}', true)")
        [found] = cursor.fetchone()
    connection.rollback()
    if found != "1":
        raise NoStoreError(f"{name}: {POOLED}")


def execute_at_once(engine: Engine, statement: Any, parameters: Mapping[str, Any]) -> Sequence[Row[Any]]:
    """Execute one statement and return its rows; repeat it once after a broken connection."""
    try:
        with engine.connect() as connection:
            return connection.execute(statement, parameters).all()
    except DBAPIError as error:
        if not error.connection_invalidated:
            raise
    with engine.connect() as connection:
        return connection.execute(statement, parameters).all()


def psycopg_arguments(url: URL) -> dict[str, Any]:
    """Return the arguments of psycopg's `connect` for the same database and the same settings."""
    _, arguments = url.set(drivername=f"postgresql+{DRIVER}").get_dialect()().create_connect_args(url)
    return {**_LIFE_SIGNS, **arguments}


def user_of(connection: Connection) -> str:
    """Return the user of a connection: the signed-in role of PostgreSQL, or for SQLite the user of this process.

    The owner of PostgreSQL's tables is an account shared by several users: for it the user of this process counts too.
    """
    if connection.dialect.name != "sqlite":
        login, owner = connection.execute(text(_USER_QUERY)).one()
        if login != owner:
            return str(login)
    return user_name()


def how_to_install() -> str:
    """Return the instruction to install PostgreSQL's driver in this environment."""
    # farmw leaves this file in the environment that it makes.
    if Path(sys.prefix, ".farmw").exists():
        return "FARM_EXTRAS=cluster ./farmw doctor installs it, once"
    return "install farm with its extra 'cluster': pip install 'snapdragon-farm[cluster]'"
