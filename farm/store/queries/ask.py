"""Query of a user: one reading statement with a time limit and without a trace in the database."""

from __future__ import annotations

import re
import sqlite3
import time
from contextlib import contextmanager
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from sqlalchemy.exc import OperationalError

from farm.base.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from psycopg import Connection
    from sqlalchemy.engine import Engine

    from farm.store.database import Database

QueryResult = tuple[list[str], list[tuple[Any, ...]]]
"""The names of the columns, and the rows."""

_ONE_SELECT = "what is asked is one SELECT, with or without WITH, or VALUES"
_READS_ONLY = f"a query only reads here: {_ONE_SELECT}; what people decide is changed by commands"
_NO_ROWS = "that is no query: it has no rows"

# Allowed actions of a statement in SQLite. All others are refused, also future ones.
_ALLOWED = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE}
_REFUSED_FUNCTIONS = {"load_extension", "fts3_tokenizer"}
# Describing PRAGMAs; PRAGMAs of the second set change settings if they have an argument.
_DESCRIBING = {"table_info", "table_xinfo", "table_list", "index_list", "index_info", "index_xinfo", "foreign_key_list"}
_SETTINGS = {"database_list", "collation_list", "compile_options", "journal_mode", "user_version", "page_count"}
_SETTINGS |= {"page_size", "freelist_count"}
# Steps of SQLite's virtual machine between two looks at the clock: about a millisecond.
_STEPS = 20_000

# SQLSTATE classes that are about the server, not about the query: connection, resources, operator, system, internal.
_ILL = ("08", "53", "57", "58", "XX")
_CANCELED = "57014"
_READ_ONLY_TRANSACTION = "25006"
_SYNTAX = "42601"
_SQLITE_TABLE = re.compile(r"^no such table: (?:main\.)?(\w+)$")
_POSTGRESQL_TABLE = re.compile(r'^relation "(?:public\.)?(\w+)" does not exist$')
# A superuser's query runs as a role that may only read tables (PostgreSQL 14 and later). The snapshot of this statement
# also keeps the transaction from becoming a writing one.
_LIMITS = """
SELECT set_config('statement_timeout', %s, true),
       (SELECT set_config('role', rolname, true) FROM pg_roles
        WHERE rolname = 'pg_read_all_data' AND current_setting('is_superuser') = 'on')
"""


def ask(database: Database, query: str, limit: int, seconds: float) -> QueryResult:
    """Return the answer to a user's query; `Store.ask` has the errors."""
    if not database.readonly:
        raise UsageError(f"{database.name}: the store is open for writing: queries of users need a reader")
    if not database.is_sqlite:
        with database.psycopg_engine() as engine:
            return ask_postgresql(engine, query, limit, seconds)
    with database.reading() as connection:
        driver: Any = connection.connection.driver_connection
        return ask_sqlite(driver, query, limit, seconds)


def ask_sqlite(connection: sqlite3.Connection, query: str, limit: int, seconds: float) -> QueryResult:
    """Return what one statement answers, at most `limit` rows, within `seconds`.

    Raises UsageError for what does anything but read, does not end in time or has no rows, and OperationalError where
    the database is ill.
    """
    deadline = time.monotonic() + seconds
    # Also ends the query at Ctrl-C: SQLite stops at an exception in here, and the error below asks why.
    connection.set_progress_handler(lambda: time.monotonic() >= deadline, _STEPS)
    connection.set_authorizer(_authorize)
    connection.text_factory = lambda data: data.decode("utf-8", "backslashreplace")
    try:
        cursor = connection.execute(query)
        if cursor.description is None:
            raise UsageError(_NO_ROWS)
        names = [str(column[0]) for column in cursor.description]
        rows = cursor.fetchmany(limit)
        cursor.close()
    except (sqlite3.Error, sqlite3.Warning, ValueError) as error:
        raise _sqlite_error(query, error, seconds, late=time.monotonic() >= deadline) from None
    finally:
        connection.set_progress_handler(None, 0)
        connection.set_authorizer(None)
        connection.text_factory = str
    return names, rows


def _authorize(action: int, name: str | None, argument: str | None, *_: object) -> int:
    if action == sqlite3.SQLITE_PRAGMA:
        reads = name in _DESCRIBING or (name in _SETTINGS and argument is None)
    elif action == sqlite3.SQLITE_FUNCTION:
        reads = argument not in _REFUSED_FUNCTIONS
    elif action == sqlite3.SQLITE_UPDATE:
        # A table-valued function, such as json_each, declares its columns so. A real UPDATE of the schema is refused.
        reads = name == "sqlite_master"
    else:
        reads = action in _ALLOWED
    return sqlite3.SQLITE_OK if reads else sqlite3.SQLITE_DENY


def _sqlite_error(query: str, error: Exception, seconds: float, *, late: bool) -> BaseException:
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
    if code == sqlite3.SQLITE_INTERRUPT:
        return _too_long(seconds) if late else KeyboardInterrupt()
    if code in (sqlite3.SQLITE_AUTH, sqlite3.SQLITE_READONLY):
        return UsageError(_READS_ONLY)
    if code in (sqlite3.SQLITE_ERROR, sqlite3.SQLITE_TOOBIG, sqlite3.SQLITE_MISUSE, sqlite3.SQLITE_RANGE):
        return UsageError(f"the query: {_words(error)}{_tables(_SQLITE_TABLE.search(_words(error)))}")
    return OperationalError(query, None, error)


def ask_postgresql(engine: Engine, query: str, limit: int, seconds: float) -> QueryResult:
    """Return the answer to one statement, at most `limit` rows, within `seconds`; `engine` uses the driver psycopg.

    The statement becomes the query of a cursor by the extended protocol: the server accepts a single statement there,
    SELECT or VALUES, and makes only the fetched rows. Its transaction is read-only and rolled back. Errors as in
    `ask_sqlite`.
    """
    from psycopg import Error

    with _connection(engine) as connection:
        try:
            connection.execute(_LIMITS, (str(max(1, round(seconds * 1000))),))
            with connection.cursor(name="farm_sql") as cursor:
                cursor.execute(query.encode())
                names = [column.name for column in cursor.description or ()]
                return names, cursor.fetchmany(limit)
        except (Error, ValueError) as error:
            raise _postgresql_error(query, error, seconds) from None


@contextmanager
def _connection(engine: Engine) -> Iterator[Connection[Any]]:
    """Yield a connection with a read-only transaction, which is always rolled back and closed."""
    pooled = engine.raw_connection()
    connection: Any = pooled.driver_connection
    pooled.detach()
    try:
        connection.read_only = True
        yield connection
    finally:
        # The server rolls back the open transaction.
        pooled.close()


def _postgresql_error(query: str, error: Exception, seconds: float) -> Exception:
    from psycopg import Error
    from psycopg import OperationalError as ServerError

    code = getattr(error, "sqlstate", None)
    if code == _CANCELED:
        return _too_long(seconds)
    if code == _READ_ONLY_TRANSACTION:
        return UsageError(_READS_ONLY)
    # Without a code it is the driver that complains: of a connection that broke, or of a text that cannot be sent.
    if code.startswith(_ILL) if code else isinstance(error, ServerError):
        return OperationalError(query, None, error)
    words = (error.diag.message_primary if isinstance(error, Error) else None) or _words(error)
    more = f" ({_ONE_SELECT})" if code == _SYNTAX else ""
    return UsageError(f"the query: {words}{more or _tables(_POSTGRESQL_TABLE.search(words))}")


def _tables(missing: re.Match[str] | None) -> str:
    """Return what to add to an error about a table that is missing: the nearest that there is, or all of them."""
    if missing is None:
        return ""
    from farm.store.schema import metadata

    near = get_close_matches(missing[1].casefold(), metadata.tables, n=1, cutoff=0.5)
    return f": did you mean {near[0]}?" if near else f": tables are {', '.join(sorted(metadata.tables))}"


def _too_long(seconds: float) -> UsageError:
    return UsageError(f"the query took longer than {seconds:g} s and was ended: --timeout gives it more")


def _words(error: Exception) -> str:
    return " ".join(str(error).split())[:400]
