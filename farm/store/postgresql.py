"""PostgreSQL: its drivers, how they reach a server, and who signed in there."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlalchemy import Engine, create_engine, event, text
from sqlalchemy.exc import DBAPIError

from farm.base.errors import NoStoreError
from farm.base.user import user_name

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sqlalchemy import Connection, Row
    from sqlalchemy.engine import URL

DRIVER = "psycopg"

# A server that is cut off is noticed within some 15 s, however long queries may take; libpq alone waits for hours.
_LIFE_SIGNS = {
    "connect_timeout": "10",
    "keepalives_idle": "5",
    "keepalives_interval": "3",
    "keepalives_count": "3",
    "tcp_user_timeout": "15000",
}
# Who was stopped, or cut off, within a transaction keeps its locks, and all who want them waiting, no longer than this.
_STANDSTILL_S = 5
# Option of each session without an effect of its own: a pooler that drops options drops it as well.
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

    It has at most so many `connections` at once. `is_autocommit`: each statement is a transaction, and nobody looks
    before whether the connection is still there.
    """
    # What is asked for lies along an index; the server's own figure for that is of disks that turn.
    options = f"-c {_MARK}=1 -c random_page_cost=1.1 {url.query.get('options', '')}"
    if readonly:
        # Also of a second transaction, which a query of somebody's own could begin.
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
    """Raise NoStoreError where a pooler answers in place of the server, and has dropped the options of the session."""
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT current_setting('{_MARK}', true)")
        [found] = cursor.fetchone()
    connection.rollback()
    if found != "1":
        raise NoStoreError(f"{name}: {POOLED}")


def execute_at_once(engine: Engine, statement: Any, parameters: Mapping[str, Any]) -> Sequence[Row[Any]]:
    """Execute one statement and return its rows; once more where the connection was broken."""
    try:
        with engine.connect() as connection:
            return connection.execute(statement, parameters).all()
    except DBAPIError as error:
        if not error.connection_invalidated:
            raise
    with engine.connect() as connection:
        return connection.execute(statement, parameters).all()


def psycopg_arguments(url: URL) -> dict[str, Any]:
    """Return what psycopg's `connect` is called with to reach the same database in the same way."""
    _, arguments = url.set(drivername=f"postgresql+{DRIVER}").get_dialect()().create_connect_args(url)
    return {**_LIFE_SIGNS, **arguments}


def user_of(connection: Connection) -> str:
    """Return who writes and asks: on PostgreSQL the role that signed in, of a file of SQLite who runs this.

    The owner of PostgreSQL's tables is an account that people share, who are told apart as those of a file.
    """
    if connection.dialect.name != "sqlite":
        login, owner = connection.execute(text(_USER_QUERY)).one()
        if login != owner:
            return str(login)
    return user_name()


def how_to_install() -> str:
    """Return how PostgreSQL's driver gets into this environment."""
    # As farmw leaves it in the environment that it makes.
    if Path(sys.prefix, ".farmw").exists():
        return "FARM_EXTRAS=cluster ./farmw doctor installs it, once"
    return "install farm with its extra 'cluster': pip install 'snapdragon-farm[cluster]'"
