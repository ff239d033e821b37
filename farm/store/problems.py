"""Errors of a database -> errors of farm with the next step for the user."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Sequence
from typing import Any

from sqlalchemy.exc import DataError, DBAPIError, IntegrityError, OperationalError

from farm.base.errors import (
    NoRightError,
    NoStoreError,
    RowRefusedError,
    StoreError,
    StoreLostError,
    StoreUnreachableError,
)
from farm.base.text import redacted
from farm.store.postgresql import POOLED

ELSEWHERE = "name another place in farm.toml (store) or $FARM_STORE"

_OVERWRITTEN = (
    "restore it from a backup, or move it away and start a new one (sqlite3 STORE .recover saves what can be read)"
)
# SQLite's primary result codes.
_PROBLEMS = {
    sqlite3.SQLITE_FULL: "the disk is full: make room and run again; recorded results are safe",
    sqlite3.SQLITE_IOERR: "the disk cannot be read or written (is it full, or gone?); recorded results are safe",
    sqlite3.SQLITE_READONLY: f"cannot be written: {ELSEWHERE}",
    sqlite3.SQLITE_CANTOPEN: f"cannot be opened: may this user write in its folder? Else {ELSEWHERE}",
    sqlite3.SQLITE_PERM: f"cannot be opened by this user: {ELSEWHERE}",
    sqlite3.SQLITE_BUSY: "another process has locked it for too long: is that process stopped, or the disk very slow?",
}
# Result codes for which waiting does not help.
_LOSSES = {
    sqlite3.SQLITE_NOTADB: f"is not a database: move it away, or {ELSEWHERE}",
    sqlite3.SQLITE_CORRUPT: f"is damaged: {_OVERWRITTEN}",
}
_NO_TABLES = f"its tables are gone: was it emptied, or made anew? Restore it from a backup, or {ELSEWHERE}"
_NO_DATABASE = f"there is no such database: create it, restore it from a backup, or {ELSEWHERE}"
# A read-only connection cannot roll back the unfinished write of a killed process.
_LEFT_HALF_DONE = "a process was killed while it made the store: 'farm devices' completes it"

# SQLSTATE codes. For a refused connection the driver has no code, only the server's message.
_UNDEFINED_TABLE, _INVALID_CATALOG, _NO_RIGHT = "42P01", "3D000", "42501"
_NO_SUCH_DATABASE = re.compile(r'database "[^"]*" does not exist')
_REMEDIES = (
    (
        re.compile("password authentication failed|no password supplied"),
        "its password belongs into ~/.pgpass, or the file that $PGPASSFILE names (docs/explanation/leases.md)",
    ),
    (
        re.compile("permission denied for (table|sequence|function|relation|view|type)|must be owner of"),
        "no right: set FARM_SERVER and FARM_TOKEN to act through the server (docs/guides/three_hosts.md, 'Roles')",
    ),
    (
        re.compile("permission denied for schema"),
        "this user may make no tables: ALTER DATABASE ... OWNER TO this user, or GRANT CREATE ON SCHEMA public TO it",
    ),
)


def is_busy(error: BaseException | None) -> bool:
    """Return whether SQLite refused because of another process."""
    return _primary(error) in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


def is_contention(error: DBAPIError) -> bool:
    """Return whether a transaction may be repeated: rolled back for another transaction, or ended while idle."""
    # PostgreSQL: serialization failure, deadlock, and a session that was idle in its transaction for too long.
    return is_busy(error.orig) or _sqlstate(error.orig) in ("40001", "40P01", "25P03")


def interruption_before(error: BaseException) -> BaseException | None:
    """Return the KeyboardInterrupt or SystemExit hidden behind an error; None without one.

    SQLAlchemy 2.1 pings a connection before use; after an interrupted ping its cleanup fails with another error.
    """
    found: BaseException | None = error
    while found is not None and not isinstance(found, KeyboardInterrupt | SystemExit):
        found = found.__cause__ or found.__context__
    return found


def store_error(name: str, error: DBAPIError, secrets: Sequence[str] = ()) -> StoreError:
    """Return the error to raise for a refusal of the database `name`; StoreLostError if waiting does not help.

    Messages never contain `secrets`.
    """
    original: Any = error.orig
    code, state = _primary(original), _sqlstate(original)
    words = _words(str(original), secrets)
    if "unsupported startup parameter" in words or "unsupported options startup parameter" in words:
        return NoStoreError(f"{name}: {POOLED}")
    if code in _LOSSES:
        return StoreLostError(f"{name}: {_LOSSES[code]}")
    if state == _UNDEFINED_TABLE or (code == sqlite3.SQLITE_ERROR and words.startswith("no such table")):
        return StoreLostError(f"{name}: {_NO_TABLES}")
    if state == _INVALID_CATALOG or (state is None and code < 0 and _NO_SUCH_DATABASE.search(words)):
        return StoreLostError(f"{name}: {_NO_DATABASE}")
    if isinstance(error, DataError | IntegrityError):
        return RowRefusedError(f"{name}: the database refuses a row: {words}")
    remedy = next((f": {remedy}" for pattern, remedy in _REMEDIES if pattern.search(words)), "")
    half_done = getattr(original, "sqlite_errorcode", None) == sqlite3.SQLITE_READONLY_ROLLBACK
    problem = _LEFT_HALF_DONE if half_done else _PROBLEMS.get(code, f"the database refuses: {words}{remedy}")
    # psycopg gives no code for a connection that failed or was lost.
    is_unreachable = state is None and code < 0 and not remedy and isinstance(error, OperationalError)
    kind = StoreUnreachableError if is_unreachable else NoRightError if state == _NO_RIGHT else StoreError
    return kind(f"{name}: {problem}")


def _words(text: str, secrets: Sequence[str]) -> str:
    """Return the message of a database as one line, without repeated lines and passwords."""
    text = redacted(text, secrets)
    # The statement and the function are of no use to a user.
    text = text.partition("\nLINE ")[0].partition("\nCONTEXT: ")[0]
    lines = [line.strip().removeprefix("connection failed: ") for line in text.splitlines()]
    # libpq connects with TLS and then without, so that the same message comes twice.
    once = {line.rpartition(" failed: ")[2]: line for line in reversed(lines)}
    return " ".join(" ".join(reversed(once.values())).split())[:400]


def _primary(error: BaseException | None) -> int:
    """Return SQLite's primary result code, the low byte of an extended code; -1 for other errors."""
    code = getattr(error, "sqlite_errorcode", None)
    return -1 if code is None else code & 0xFF


def _sqlstate(error: BaseException | None) -> str | None:
    return getattr(error, "sqlstate", None)
