"""Opening of a database: address, file of SQLite, connection settings, schema revision, and translation of errors."""

from __future__ import annotations

import copy
import os
import re
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote

from sqlalchemy import Connection, Engine, Row, create_engine, event, inspect, text
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError, OperationalError, ProgrammingError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.pool import ConnectionPoolEntry, PoolProxiedConnection

from farm.base.config.shared import require_one_login, require_tls_files, secrets_of, shown_address
from farm.base.errors import FIRST_RUN, MissingToolError, NoStoreError, StoreError, StoreLostError, UsageError
from farm.base.interrupts import postponed
from farm.base.machine import user_name
from farm.base.text import redacted
from farm.store import postgresql
from farm.store.problems import ELSEWHERE, interruption_before, is_busy, is_contention, store_error
from farm.store.schema import REVISION, REVISIONS, VERSION_TABLE, make_tables

# Checks of an SQLite store's file: on a local disk, and still the opened file.
#
# SQLite itself would go on after the file is replaced or deleted.


# https://www.sqlite.org/fileformat2.html, "The Database Header"
_HEADER_BYTES = 100
_MAGIC = b"SQLite format 3\0"

_DELETED = (
    "was deleted or moved away while it was in use: put it back, or its results are lost and the next run "
    "makes a new store"
)
_REPLACED = "was replaced while it was in use: later results are not in the new file"
_LOG_DELETED = "its write-ahead log (-wal) was deleted or replaced while it was in use: the last results are lost"
_OVERWRITTEN = (
    "was overwritten or cut off while it was in use: restore it from a backup, or move it away and start a new one "
    "(sqlite3 STORE .recover saves what can be read)"
)


# File systems whose locks, and whose shared memory for SQLite's processes, do not work between machines:
# https://www.sqlite.org/useovernet.html
_NETWORKED = frozenset({
    "nfs", "nfs4", "cifs", "smb", "smb3", "smbfs", "9p", "afs", "ncpfs", "coda", "ceph", "glusterfs", "lustre",
    "beegfs", "gpfs", "pvfs2", "orangefs", "davfs", "moosefs", "juicefs",
})  # fmt: skip
_NETWORKED_BY_FUSE = frozenset({"sshfs", "s3fs", "rclone", "gcsfuse", "goofys", "curlftpfs", "cephfs", "mfs"})
_MOUNTS = Path("/proc/self/mountinfo")
_ESCAPE = re.compile(r"\\([0-7]{3})")


def network_kind(mountinfo: str, path: str) -> str:
    """Return the kind of the network file system of `path`, "" for a local file system. Pure.

    `mountinfo` is the text of /proc/self/mountinfo (proc_pid_mountinfo(5)), `path` is absolute and without links.
    """
    at, kind = "", ""
    for line in mountinfo.splitlines():
        before, mark, after = line.partition(" - ")
        fields = before.split(" ")
        if not mark or len(fields) < 5:
            continue
        place = _ESCAPE.sub(lambda match: chr(int(match[1], 8)), fields[4]).rstrip("/")
        # The last of several mounts at one place covers the others.
        if (path == place or path.startswith(f"{place}/")) and len(place) >= len(at):
            at, kind = place, after.split(" ")[0]
    return kind if kind.removeprefix("fuse.") in _NETWORKED | _NETWORKED_BY_FUSE else ""


def require_local(path: Path) -> None:
    """Raise NoStoreError if the file of a store, existing or new, is on a network file system."""
    try:
        mountinfo = _MOUNTS.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return  # macOS has none
    if kind := network_kind(mountinfo, os.path.realpath(path)):
        raise NoStoreError(
            f"{path}: is on a network file system ({kind}), where SQLite loses what several processes write: put it on "
            "a disk of this machine, or share a PostgreSQL: store = 'postgresql://user@host/database' "
            "(docs/explanation/leases.md)"
        )


class Identity(NamedTuple):
    """Device and inode: identity of a file independent of its name."""

    device: int
    inode: int


def identity(path: Path | str) -> Identity | None:
    """Return the identity of the file at a path, None for a missing file."""
    try:
        stat = os.stat(path)  # noqa: PTH116 - half the time, and every attempt asks
    except OSError:
        return None
    return Identity(stat.st_dev, stat.st_ino)


class StoreFile:
    """Opened SQLite file, with checks against replacement and damage."""

    def __init__(self, path: Path, *, content: bool) -> None:
        """Remember the identity of the file; with `content`, `check` also reads the header after each change."""
        self._path, self._content = str(path), content
        try:
            stat = path.stat()
        except OSError:
            raise self._lost(_DELETED) from None
        self._identity = Identity(stat.st_dev, stat.st_ino)
        self._seen = stat.st_mtime_ns, stat.st_size

    def check(self) -> None:
        """Raise StoreLostError if the file is deleted, replaced or, according to its header, damaged."""
        try:
            stat = os.stat(self._path)  # noqa: PTH116
        except OSError:
            raise self._lost(_DELETED) from None
        if (stat.st_dev, stat.st_ino) != self._identity:
            raise self._lost(_REPLACED)
        now = stat.st_mtime_ns, stat.st_size
        if self._content and now != self._seen:
            # A checkpoint changes the file once in a few hundred attempts.
            if not self._is_sound(stat.st_size):
                raise self._lost(_OVERWRITTEN)
            self._seen = now

    def check_log(self, opened: Identity | None) -> None:
        """Raise StoreLostError if the write-ahead log is another file than the one opened by a connection."""
        if opened is not None and identity(f"{self._path}-wal") != opened:
            # SQLite never removes an open log. If the whole store is gone, the file's own error comes first.
            self.check()
            raise self._lost(_LOG_DELETED)

    def _is_sound(self, size: int) -> bool:
        header = self._header()
        if header is None:
            return True
        if len(header) < _HEADER_BYTES or not header.startswith(_MAGIC):
            return False
        page = int.from_bytes(header[16:18], "big")
        needed = (65536 if page == 1 else page) * int.from_bytes(header[28:32], "big")
        # A running or killed checkpoint writes the header first: the missing pages are in the log then.
        return size >= needed or self._is_readable()

    def _is_readable(self) -> bool:
        connect = partial(sqlite3.connect, f"file:{quote(self._path)}?mode=ro", uri=True)
        with suppress(sqlite3.DatabaseError), closing(connect()) as connection:
            return bool(connection.execute("PRAGMA quick_check(1)").fetchone() == ("ok",))
        return False

    def _header(self) -> bytes | None:
        """Return the header of the file, None if it is unreadable."""
        try:
            return os.pread(_descriptor(self._path, self._identity), _HEADER_BYTES, 0)
        except OSError:
            return None

    def _lost(self, problem: str) -> StoreLostError:
        return StoreLostError(f"{self._path}: {problem}")


_lock = threading.Lock()
_descriptors: dict[Identity, int] = {}


def _descriptor(path: str, opened: Identity) -> int:
    """Return a descriptor of a store's file that stays open until this process ends.

    Closing any descriptor of a file drops all locks that the process has on it, SQLite's own among them: fcntl(2).
    """
    with _lock:
        if opened not in _descriptors:
            _descriptors[opened] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        return _descriptors[opened]


# Opening of a database: address, connection settings, schema revision, and translation of errors.


BUSY_TIMEOUT_MS = 5_000
# Longest wait for other writers in all. SQLite's own wait polls ever more rarely, so that the newest of many writers
# would win: repeated short waits are fair.
PATIENCE_S = 60.0
_ONE_WAIT_MS = 40

# Key of the `pg_advisory_xact_lock` that migrations hold: an arbitrary number, equal in every farm.
_MIGRATION_LOCK = 0x6661726D

_REVISION_QUERY = f"SELECT version_num FROM {VERSION_TABLE}"  # noqa: S608 - a constant
_WRITES = "farm_writes"
_LOG = "farm_log"
_NO_STORE = f"there is no store yet: '{FIRST_RUN}' makes one"
_T = TypeVar("_T")


class Database:
    """Database with the schema of this program; its guarantees are in `docs/reference/store.md`."""

    def __init__(
        self, address: str | Path, *, readonly: bool = False, existing: bool = False, connections: int | None = None
    ) -> None:
        if isinstance(address, str):
            require_one_login(address)
        self._url = _parse(address)
        self.readonly, self._connections = readonly, connections
        whole = self._url.render_as_string(hide_password=False)
        self.name = self._url.database or "" if self.is_sqlite else shown_address(whole)
        self._secrets = () if self.is_sqlite else secrets_of(whole)
        if not self.is_sqlite:
            require_tls_files(whole)
        if self.is_sqlite:
            self._check_file(existing=existing or readonly)
        with self._store_errors():
            self._engine = self._create_engine()
        self._file: StoreFile | None = None
        try:
            self._check_schema()
            if self.is_sqlite:
                self._file = StoreFile(Path(self.name).absolute(), content=not readonly)
        except BaseException:
            self.close()
            raise

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """Yield a connection in one consistent view of the data. Raises StoreError."""
        self._look()
        with self._store_errors(), self._engine.connect() as connection, connection.begin():
            yield connection

    @contextmanager
    def _writer(self) -> Iterator[Connection]:
        """Yield a connection whose next transaction writes."""
        with self._engine.connect() as connection:
            connection.info[_WRITES] = True
            yield connection

    def write(self, action: Callable[[Connection], _T]) -> _T:
        """Call `action` in one transaction and return its result; call it again after a conflict with another writer.

        Raises StoreError if the database refuses or stays busy for a minute; StoreLostError if it is deleted,
        replaced or damaged, also after it was opened.
        """
        if self.readonly:
            raise StoreError(f"{self.name}: the store was opened to read only")

        def once() -> _T:
            self._look()
            # Ctrl-C is postponed for SQLite alone: PostgreSQL may answer late, and ends an idle transaction itself.
            with postponed(self.is_sqlite), self._writer() as connection:
                with connection.begin():
                    answer = action(connection)
                # SQLite writes to a file deleted meanwhile without an error.
                self._look(connection)
            return answer

        return self._retry_conflicts(once)

    def at_once(self, statement: Any, parameters: Mapping[str, Any]) -> Sequence[Row[Any]]:
        """Execute one PostgreSQL statement as its own transaction, and return its rows. Raises StoreError.

        After a broken connection the statement may run twice. Its connection stays open, without further round trips.
        """
        with self._store_errors():
            return postgresql.execute_at_once(self._single, statement, parameters)

    @cached_property
    def _single(self) -> Engine:
        return postgresql.create_postgresql_engine(self._url, readonly=False, connections=1, is_autocommit=True)

    @property
    def is_sqlite(self) -> bool:
        """True for an SQLite file, False for PostgreSQL."""
        return self._url.get_backend_name() == "sqlite"

    @cached_property
    def user(self) -> str:
        """User of this process by the name that others see (`farm.store.postgresql.user_of`). Raises StoreError."""
        # The database refuses another name than the login's, except from the owner of its tables.
        if named := os.environ.get("FARM_USER"):
            return named
        if self.is_sqlite:
            return user_name()
        with self.reading() as connection:
            return postgresql.user_of(connection)

    def of_user(self, name: str) -> Database:
        """Return the same database for the reads of another user; it shares the connections."""
        other = copy.copy(self)
        other.__dict__["user"] = name
        return other

    def connection_arguments(self) -> dict[str, Any]:
        """Return the arguments of psycopg's `connect` for the same database and the same settings.

        A password of the address is included.
        """
        with self._store_errors():
            return postgresql.psycopg_arguments(self._url)

    def without_secrets(self, text: str) -> str:
        """Return the text of an error without the passwords of the address."""
        return redacted(text, self._secrets)

    def vacuum(self) -> None:
        """Rewrite an SQLite file without the space of removed rows; writers wait meanwhile. Raises StoreError."""

        def once() -> None:
            with self._writer() as connection:
                # Every connection begins a transaction by itself, and VACUUM runs only outside of one.
                connection.exec_driver_sql("COMMIT")
                connection.exec_driver_sql("VACUUM")
                connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)")

        self._retry_conflicts(once)

    def close(self) -> None:
        """Close every connection."""
        self._engine.dispose()
        if "_single" in self.__dict__:
            self._single.dispose()

    def _look(self, connection: Connection | None = None) -> None:
        """Raise StoreLostError if another file is in place of the opened one; with `connection`, check its log too."""
        if self._file is not None:
            self._file.check()
            if connection is not None:
                self._file.check_log(connection.info.get(_LOG))

    def _check_file(self, *, existing: bool) -> None:
        path = Path(self.name)
        require_local(path)
        if existing and not path.is_file():
            raise NoStoreError(f"{path.absolute()}: {_NO_STORE}")
        if self.readonly:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise NoStoreError(f"{path.parent}: cannot be made: {error.strerror}: {ELSEWHERE}") from None
        # The write-ahead log lies beside the file: the folder has to be writable, too.
        for place in (path.parent, path) if path.exists() else (path.parent,):
            if not os.access(place, os.W_OK):
                raise NoStoreError(f"{place}: cannot be written by this user: {ELSEWHERE}")

    def _create_engine(self) -> Engine:
        if not self.is_sqlite:
            return postgresql.create_postgresql_engine(self._url, readonly=self.readonly, connections=self._connections)
        url, uri = self._url, {}
        if self.readonly:
            # A read-only medium has no place for the shared memory of a write-ahead log.
            folder_writable = os.access(Path(self.name).absolute().parent, os.W_OK)
            frozen = not folder_writable and not Path(f"{self.name}-wal").exists()
            name = f"file:{quote(str(Path(self.name).absolute()))}"
            url = url.set(database=name)
            uri = {"uri": "true", "mode": "ro", **({"immutable": "1"} if frozen else {})}
        engine = create_engine(url.update_query_dict(uri), connect_args={"timeout": BUSY_TIMEOUT_MS / 1000})
        event.listen(engine, "connect", self._set_up)
        # The event of that name is not used, because with a listener every statement would look for its own listeners.
        engine.dialect.do_begin = _begin  # type: ignore[method-assign, assignment]
        return engine

    def _set_up(self, connection: sqlite3.Connection, record: ConnectionPoolEntry) -> None:
        # The sqlite3 module would begin transactions by itself, too late and never IMMEDIATE.
        connection.isolation_level = None
        connection.execute(f"PRAGMA busy_timeout={BUSY_TIMEOUT_MS}")
        connection.execute("PRAGMA foreign_keys=ON")
        if not self.readonly:
            connection.execute("PRAGMA synchronous=NORMAL")
            _write_ahead(connection)
            record.info[_LOG] = identity(f"{self.name}-wal")

    def _check_schema(self) -> None:
        if self._is_up_to_date():
            return
        with self.reading() as connection:
            revision = self._revision(connection)
        if revision == REVISION:
            return
        if self.readonly:
            if revision is None:
                # A process killed before it made the tables leaves this state too.
                where = "" if self.is_sqlite else " in this database"
                raise NoStoreError(f"{self.name}: {_NO_STORE}{where}")
            self._require_known(revision)
            raise StoreError(f"{self.name}: the store is of an older farm: 'farm devices' brings it up to date")
        self._retry_conflicts(self._migrate)

    def _is_up_to_date(self) -> bool:
        """Return whether the schema is this program's, by one query: the usual case."""
        with self.reading() as connection:
            try:
                return bool(connection.scalar(text(_REVISION_QUERY)) == REVISION)
            except (OperationalError, ProgrammingError):
                # The table is missing, or the database is damaged: the full check of the caller decides.
                return False

    def _revision(self, connection: Connection) -> str | None:
        """Return the revision of the schema, None for an empty database."""
        names = inspect(connection).get_table_names()
        if VERSION_TABLE in names:
            revision: str | None = connection.scalar(text(_REVISION_QUERY))
            return revision
        if names and self.is_sqlite:
            raise StoreError(f"{self.name}: is a database of another program: {ELSEWHERE}")
        return None

    def _require_known(self, revision: str) -> None:
        if revision in REVISIONS:
            return
        # Revisions are numbered, so that an older program recognizes a newer schema.
        if revision > REVISION:
            raise StoreError(
                f"{self.name}: the store is of a newer farm (schema {revision}, this one knows {REVISION}): "
                f"update farm, or {ELSEWHERE}"
            )
        raise StoreError(
            f"{self.name}: the store is of a farm before 0.2.0 (schema {revision}): "
            f"run 'farm devices' of farm 0.2.0 once, which brings it up to date for this one, or {ELSEWHERE}"
        )

    def _migrate(self) -> None:
        with self._writer() as connection:
            if self.is_sqlite:
                # A revision may copy a table and drop the original, whose referring rows must stay.
                connection.connection.driver_connection.execute("PRAGMA foreign_keys=OFF")  # type: ignore[union-attr]
            try:
                with connection.begin():
                    self._upgrade(connection)
            finally:
                connection.invalidate()

    def _upgrade(self, connection: Connection) -> None:
        if not self.is_sqlite:
            connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _MIGRATION_LOCK})
        # Another process may have been here while this one waited for the lock.
        revision = self._revision(connection)
        if revision == REVISION:
            return
        if revision is None:
            make_tables(connection)
            return
        self._require_known(revision)
        if not self.is_sqlite:
            from farm.store.rights import become_owner

            become_owner(connection)
        from alembic import command
        from alembic.config import Config

        config = Config()
        config.set_main_option("script_location", "farm.store:migrations")
        config.attributes["connection"] = connection
        command.upgrade(config, "head")
        if self.is_sqlite and connection.execute(text("PRAGMA foreign_key_check")).first():
            raise StoreError(f"{self.name}: could not be brought up to date: rows refer to others that are not there")

    def _retry_conflicts(self, once: Callable[[], _T]) -> _T:
        """Call `once`, and again after a conflict with another writer, for a minute."""
        deadline = time.monotonic() + PATIENCE_S
        with self._store_errors():
            while True:
                try:
                    return once()
                except DBAPIError as error:
                    if not is_contention(error) or time.monotonic() > deadline:
                        raise

    @contextmanager
    def _store_errors(self) -> Iterator[None]:
        try:
            yield
        except DBAPIError as error:
            self._look()
            raise interruption_before(error) or store_error(self.name, error, self._secrets) from error
        except PoolTimeoutError:
            raise StoreError(f"{self.name}: the database has answered on none of this process's connections") from None
        except ModuleNotFoundError as error:
            needed = f"the store needs the Python package {error.name!r}: {postgresql.how_to_install()}"
            raise MissingToolError(f"{self.name}: {needed}") from None


def _parse(address: str | Path) -> URL:
    if isinstance(address, Path) or "://" not in address:
        path = str(address)
        if not path or "\0" in path:
            raise UsageError(f"store: {path!r} is not a path")
        return URL.create("sqlite", database=path)
    try:
        url = make_url(address)
        backend = url.get_backend_name()
    except (ArgumentError, NoSuchModuleError, ValueError):
        raise UsageError(f"store: not a URL: {_EXPECTED}") from None
    if backend in ("postgres", "postgresql"):
        return url.set(drivername="postgresql")
    if backend != "sqlite" or not url.database or url.database == ":memory:":
        raise UsageError(f"store: {shown_address(address)!r} is no place for one: {_EXPECTED}")
    return url


_EXPECTED = "expected a path, sqlite:////absolute/path or postgresql://user@host/database"


def _begin(connection: PoolProxiedConnection) -> None:
    driver: Any = connection.driver_connection
    # A transaction that begins with a read cannot wait for another writer before its first write: it fails at once.
    if not connection.info.pop(_WRITES, False):
        driver.execute("BEGIN")
        return
    driver.execute(f"PRAGMA busy_timeout={_ONE_WAIT_MS}")
    try:
        driver.execute("BEGIN IMMEDIATE")
    finally:
        driver.execute(f"PRAGMA busy_timeout={BUSY_TIMEOUT_MS}")


def _write_ahead(connection: sqlite3.Connection) -> None:
    # SQLite does not wait for others when it changes the journal mode, which happens once in a store's life.
    deadline = time.monotonic() + BUSY_TIMEOUT_MS / 1000
    while connection.execute("PRAGMA journal_mode").fetchone()[0] != "wal":
        try:
            connection.execute("PRAGMA journal_mode=WAL")
        except sqlite3.OperationalError as error:
            if not is_busy(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.01)
