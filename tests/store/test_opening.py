"""Opening of stores: made, in files and over the network; messages for stores that do not open."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import psycopg
import pytest
from farm_home import FarmHome
from old_store import revision
from postgresql_server import running_cluster
from programs import run_program
from receivers import LOOPBACK, make_certificate
from sqlalchemy import Connection
from stores import drop_database, kill_before_statements, place_store
from waiting import Started, free_port, listens, until

from farm.base.config.settings import load_config
from farm.base.config.shared import shown_address
from farm.base.errors import (
    FIRST_RUN,
    ExitCode,
    MissingToolError,
    NoStoreError,
    RowRefusedError,
    StoreError,
    UsageError,
)
from farm.store import database
from farm.store.database import network_kind
from farm.store.problems import interruption_before
from farm.store.schema import REVISION, VERSION_TABLE, fingerprint
from farm.store.store import Store, open_store

from . import make

# Opening of stores, and messages for stores that do not open.


def _execute(path: Path, statement: str) -> list[tuple[object, ...]]:
    with sqlite3.connect(path) as connection:
        rows = connection.execute(statement).fetchall()
    connection.close()
    return rows


def _set_revision(path: Path, revision: str) -> None:
    place_store(path)
    _execute(path, f"UPDATE {VERSION_TABLE} SET version_num = '{revision}'")  # noqa: S608


PASSWORD = "s3cret/pass word"
QUOTED = "s3cret%2Fpass%20word"


def refusal(address: str | Path, *, readonly: bool = False) -> str:
    """Return the message for an address, after a check that it shows no password."""
    with pytest.raises((StoreError, UsageError)) as caught:
        open_store(address, readonly=readonly)
    text = str(caught.value)
    assert not any(part in text for part in (PASSWORD, QUOTED, "\n"))
    return text


def test_a_store_is_made_where_none_is_and_opened_again(tmp_path: Path) -> None:
    path = tmp_path / "folder to be made" / "with 100% ?#" / "farm.db"
    assert f"no store yet: '{FIRST_RUN}' makes one" in refusal(path, readonly=True)
    assert list(tmp_path.iterdir()) == []
    for _ in range(2):
        with open_store(path) as store:
            assert store.runs.latest_id() is None


def test_a_new_store_and_an_up_to_date_one_open_without_alembic_and_numpy(tmp_path: Path) -> None:
    code = (
        "import sys; from farm.store.store import open_store\n"
        "for _ in range(2): open_store(sys.argv[1]).runs.latest_id()\n"
        "print(sorted({'alembic', 'numpy', 'torch'} & set(sys.modules)))"
    )
    assert run_program([sys.executable, "-c", code, str(tmp_path / "farm.db")]).stdout == "[]\n"


@pytest.mark.parametrize("readonly", [False, True])
def test_a_file_without_a_way_to_this_schema_is_refused_and_left_alone(tmp_path: Path, readonly: bool) -> None:
    path = tmp_path / "farm.db"
    for schema, event, step in (
        ("9999", "newer farm (schema 9999", "update farm"),
        ("0014", "a farm before 0.2.0 (schema 0014): ", "): run 'farm devices' of farm 0.2.0 once"),
        ("no database", "is not a database: move it away", ""),
    ):
        if schema == "no database":
            path.write_bytes(b"shopping list\n" * 1000)
        else:
            path.unlink(missing_ok=True)
            _set_revision(path, schema)
        before = path.read_bytes()
        message = refusal(path, readonly=readonly)
        assert event in message
        assert step in message
        assert path.read_bytes() == before


def test_an_older_schema_is_not_brought_up_to_date_by_a_reader(tmp_path: Path) -> None:
    _set_revision(tmp_path / "farm.db", "0015")
    assert "older farm: 'farm devices' brings it up to date" in refusal(tmp_path / "farm.db", readonly=True)


def test_a_migration_that_fails_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "farm.db"
    # The tables have the columns of a newer revision already.
    _set_revision(path, "0017")
    rows = _execute(path, "SELECT * FROM sqlite_master")
    assert "no such column" in refusal(path)
    assert _execute(path, "SELECT * FROM sqlite_master") == rows


def test_files_that_are_no_store_are_refused(tmp_path: Path) -> None:
    other = tmp_path / "other.db"
    _execute(other, "CREATE TABLE bookmarks (url TEXT)")
    assert "database of another program" in refusal(other)
    assert _execute(other, "SELECT name FROM sqlite_master") == [("bookmarks",)]
    damaged = tmp_path / "damaged.db"
    place_store(damaged)
    content = damaged.read_bytes()
    damaged.write_bytes(content[:100] + b"\xff" * (len(content) - 100))
    assert "is damaged: restore it" in refusal(damaged)
    assert "cannot be opened" in refusal(tmp_path)
    message = refusal(other / "farm.db")
    assert "cannot be made: " in message
    assert "farm.toml" in message


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "locked"
    folder.mkdir()
    folder.chmod(0o555)
    if os.access(folder, os.W_OK):
        # Root may write everywhere except in file systems of the kernel.
        folder = Path("/proc/self")
    assert "farm.toml (store) or $FARM_STORE" in refusal(folder / "farm.db")


@pytest.mark.parametrize("address", ["mysql://host/db", "sqlite://", "sqlite:///:memory:", "x://", "://", "", "a\0b"])
def test_an_address_that_is_none_is_a_usage_error(address: str) -> None:
    with pytest.raises(UsageError, match="store"):
        open_store(address)


@pytest.mark.parametrize("readonly", [False, True])
def test_a_missing_driver_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, readonly: bool) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    with pytest.raises(MissingToolError, match=r"'psycopg': .* pip install 'snapdragon-farm\[cluster\]'"):
        open_store("postgresql://farm@localhost/farm", readonly=readonly)
    # In an environment that farmw has made.
    (tmp_path / ".farmw").touch()
    with pytest.raises(MissingToolError, match=r"'psycopg': FARM_EXTRAS=cluster ./farmw doctor installs it, once"):
        open_store("postgresql://farm@localhost/farm", readonly=readonly)


@pytest.mark.parametrize("command", [("status",), ("history", "smoke/relu")])
def test_ctrl_c_ends_waiting_for_a_server_that_does_not_answer(home: FarmHome, command: tuple[str, ...]) -> None:
    pytest.importorskip("psycopg", reason="the driver is not installed")
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"postgresql://farm@127.0.0.1:{server.getsockname()[1]}/farm?sslmode=disable"
        with home.running(*command, env={"FARM_STORE": address}) as process:
            connection, _ = server.accept()
            with connection:
                assert connection.recv(8)
                process.send_signal(signal.SIGINT)
                assert process.wait(timeout=20) == 130


def test_reading_writes_nothing(sqlite_store: Store, tmp_path: Path) -> None:
    job = make.job()
    run_id = make.begin(sqlite_store, job)
    sqlite_store.record_attempt(run_id, make.attempt(job))
    sqlite_store.close()
    path = tmp_path / "farm.db"
    before = path.read_bytes(), path.stat().st_mtime_ns

    with open_store(path, readonly=True) as store:
        assert store.runs.resolve("latest", own=False) == run_id
        assert len(store.runs.view(run_id).jobs[0].attempts) == 1
        with pytest.raises(StoreError, match="read only"):
            store.finish_run(run_id, 0)

    assert (path.read_bytes(), path.stat().st_mtime_ns) == before


_FILL = """
import sys
from farm.base.errors import StoreError
from farm.results.attempt import Attempt, Stage, Verdict
from farm.store.records import RunRecord
from farm.store.store import open_store
from farm.suites.suite import Case, InputSpec, Job, Target

job = Job(Case("s", "c", "torch.nn:ReLU", (InputSpec((1,)),)), Target("SM8650", "htp", "8a8w"))
store = open_store(sys.argv[1])
run_id = store.begin_run(RunRecord("c", "u", "h", {}))
store.plan_jobs(run_id, [job])
recorded = 0
try:
    while recorded < 1000:
        store.record_attempt(run_id, Attempt(job.id, Verdict.FAILED, Stage.EXECUTE, str(recorded), log="x" * 20_000))
        recorded += 1
except StoreError as error:
    print(error)
view = store.runs.view(run_id)
print(recorded == len(view.jobs[0].attempts), recorded > 0)
"""


def test_a_full_disk_is_said_so_and_loses_nothing(tmp_path: Path) -> None:
    # A file system of its own, in a mount namespace that ends with the process.
    unshare = shutil.which("unshare")
    if unshare is None or subprocess.run([unshare, "-rm", "true"], capture_output=True, check=False).returncode:
        pytest.skip("no mount namespace to make a small disk in")
    script = 'mount -t tmpfs -o size=1500k none "$1" && exec "$2" -c "$3" "$1/farm.db"'
    argv = ["sh", "-c", script, "sh", str(tmp_path), sys.executable, _FILL]
    done = run_program([unshare, "-rm", *argv], cwd=Path(__file__).parents[2])
    output, intact = done.stdout.splitlines()
    assert "the disk is full: make room" in output
    assert intact == "True True"


def test_a_refused_row_is_told_from_a_database_that_is_away(store: Store) -> None:
    """Waiting helps against an absent database, and not against a refused statement."""

    def twice(connection: Connection) -> None:
        for _ in range(2):
            connection.execute(fingerprint.insert().values(hash="one", facts={}))

    with pytest.raises(RowRefusedError, match="the database refuses a row"):
        store._database.write(twice)


# A store in a file belongs on a disk of the machine: the locks of SQLite do not reach further.


MOUNTS = r"""27 1 254:0 / / rw,relatime - ext4 /dev/vda rw,discard
30 27 0:25 / /dev/shm rw,relatime shared:3 - tmpfs tmpfs rw
40 27 0:50 / /home rw,relatime shared:9 master:2 - nfs4 nas:/home rw,vers=4.2
41 40 8:1 / /home/ada/disk rw,relatime - xfs /dev/sda1 rw
42 27 0:51 / /mnt/lab\040files rw - cifs //nas/lab rw
43 27 0:52 / /mnt/far rw - fuse.sshfs me@far:/ rw
45 27 0:54 / /srv rw - nfs nas:/srv rw
46 45 8:2 / /srv rw - ext4 /dev/sdc1 rw
47 27 0:55 / /mnt/c rw - 9p C:\134 rw
nonsense
49 27 0:57 / /mnt/object rw - fuse.s3fs s3fs rw
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/var/lib/farm/farm.db", ""),
        ("/home/ada/.local/state/farm/farm.db", "nfs4"),
        ("/homes/ada/farm.db", ""),
        ("/home/ada/disk/farm.db", ""),
        ("/mnt/lab files/farm.db", "cifs"),
        ("/mnt/far/farm.db", "fuse.sshfs"),
        ("/srv/farm.db", ""),
        ("/mnt/c/farm.db", "9p"),
        ("/mnt/object/farm.db", "fuse.s3fs"),
    ],
)
def test_the_mount_that_covers_a_path_decides(path: str, kind: str) -> None:
    assert network_kind(MOUNTS, path) == kind


def test_a_store_on_a_network_file_system_is_refused_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(f"{MOUNTS}50 27 0:58 / {tmp_path}/share rw - nfs4 nas:/x rw\n")
    monkeypatch.setattr(database, "_MOUNTS", mounts)
    (tmp_path / "share").mkdir()
    (tmp_path / "link").symlink_to("share")
    for folder in ("share/deep", "link"):
        with pytest.raises(NoStoreError, match=r"network file system \(nfs4\).*postgresql://"):
            open_store(tmp_path / folder / "farm.db")
    assert list((tmp_path / "share").iterdir()) == []
    open_store(tmp_path / "disk" / "farm.db").close()


# Stores on PostgreSQL over the network: passwords, TLS, and the message for a database without a store.


class Server(NamedTuple):
    """PostgreSQL that requires TLS and a password over the network."""

    port: int
    authority: Path
    """Authority of its certificate."""

    def url(self, database: str = "lab", user: str = "ann", password: str = QUOTED, **options: object) -> str:
        login = f"{user}:{password}" if password else user
        query = "&".join(f"{key}={value}" for key, value in options.items())
        return f"postgresql://{login}@{LOOPBACK}:{self.port}/{database}" + (f"?{query}" if query else "")

    @property
    def verified(self) -> str:
        return self.url(sslmode="verify-full", sslrootcert=self.authority)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    psycopg = pytest.importorskip("psycopg", reason="the driver is not installed")
    certificate = make_certificate(tmp_path_factory.mktemp("tls"))
    port = free_port()
    settings = (f"listen_addresses={LOOPBACK}", f"port={port}", "ssl=on", "ssl_cert_file={folder}/loopback.pem",
                "ssl_key_file={folder}/loopback.pem")  # fmt: skip
    hba = f"local all all trust\nhostssl all all {LOOPBACK}/32 scram-sha-256\n"
    with running_cluster(*settings, hba=hba, files=[certificate]) as folder:
        with psycopg.connect(f"host={folder} port={port} user=farm dbname=postgres", autocommit=True) as connection:
            for name in ("ann", "bob"):
                connection.execute(f"CREATE ROLE {name} LOGIN PASSWORD '{PASSWORD}'")
            connection.execute("CREATE DATABASE lab OWNER ann")
            connection.execute("CREATE DATABASE empty OWNER ann")
        yield Server(port, certificate)


def test_a_store_over_tls_with_the_server_checked(server: Server, tmp_path: Path) -> None:
    with open_store(server.verified) as store:
        with store._database.reading() as connection:
            query = "SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()"
            assert connection.exec_driver_sql(query).scalar() is True
        assert PASSWORD not in store._database.name
        assert "ann:***@" in store._database.name
    # A reading store connects as well.
    with open_store(server.verified, readonly=True) as store:
        assert store.runs.latest_id() is None
    # Neither a server with another certificate nor one with another name gets the password.
    url = server.url(sslmode="verify-full", sslrootcert=make_certificate(tmp_path))
    for readonly in (False, True):
        assert "certificate verify failed" in refusal(url, readonly=readonly)
        output = refusal(server.verified.replace(LOOPBACK, "localhost"), readonly=readonly)
        assert 'does not match host name "localhost"' in output


def test_passwords_come_from_a_file_and_are_never_shown(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_store(server.url()).close()
    for name in ("PGPASSWORD", "PGPASSFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    without = server.url(password="")
    for readonly in (False, True):
        assert "$PGPASSFILE" in refusal(without, readonly=readonly)
    passwords = tmp_path / "passwords"
    passwords.write_text(f"{LOOPBACK}:{server.port}:lab:ann:{PASSWORD}\n")
    passwords.chmod(0o600)
    open_store(f"{without}?passfile={passwords}").close()
    monkeypatch.setenv("PGPASSFILE", str(passwords))
    open_store(without, readonly=True).close()
    monkeypatch.delenv("PGPASSFILE")
    wrong = PASSWORD.replace("3", "4")
    output = refusal(server.url(password=wrong.replace("/", "%2F").replace(" ", "%20")))
    assert "password authentication failed" in output
    assert wrong not in output
    assert output.count("password authentication failed") == 1
    # libpq reads the password from the query as well.
    output = refusal(f"{without}?password={wrong.replace(' ', '%20')}")
    assert wrong not in output
    assert "password=***" in output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sslmode": "verify-ful"}, "unknown sslmode 'verify-ful': did you mean 'verify-full'?"),
        ({"sslmode": "verify-full", "sslrootcert": "/nowhere/ca.pem"}, "sslrootcert: there is no file /nowhere/ca.pem"),
        ({"sslrootcert": "/etc/hostname"}, "sslmode=prefer goes on without it: add sslmode=verify-full"),
        ({"passfile": "/nowhere/pass"}, "passfile: there is no file /nowhere/pass"),
    ],
)
def test_what_is_named_for_tls_is_used_or_refused(options: dict[str, str], message: str) -> None:
    assert message in refusal(Server(1, None).url(**options))  # type: ignore[arg-type]


def test_paths_in_an_address_are_beside_the_file_that_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FARM_STORE", raising=False)
    config = tmp_path / "farm.toml"
    config.write_text('store = "postgresql://ann@lab/farm?sslmode=verify-full&sslrootcert=ca.pem&passfile=p"\n')
    assert load_config(config).store_url == (
        f"postgresql://ann@lab/farm?sslmode=verify-full&sslrootcert={tmp_path}/ca.pem&passfile={tmp_path}/p"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FARM_STORE", "postgresql://ann@lab/farm?sslrootcert=system&sslcert=own.pem")
    assert load_config(config).store_url == (f"postgresql://ann@lab/farm?sslrootcert=system&sslcert={tmp_path}/own.pem")


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://ann:SECRET@lab:5432/farm", "postgresql://ann:***@lab:5432/farm"),
        ("postgresql://ann:SEC%40RET@lab/farm?sslmode=require", "postgresql://ann:***@lab/farm?sslmode=require"),
        ("postgresql://ann@/farm?host=/run/pg&password=SECRET", "postgresql://ann@/farm?host=/run/pg&password=***"),
        ("postgresql://lab/farm?sslpassword=SECRET", "postgresql://lab/farm?sslpassword=***"),
        ("postgresql://ann:SEC@RET@lab/farm", "postgresql://***"),
        ("postgresql://ann:SEC@RET/SEC@lab:5432/farm", "postgresql://***"),
        ("postgresql://ann:SEC/RET@lab:5432/farm", "postgresql://***"),
        ("sqlite:////data/a:b@c.db", "sqlite:////data/a:b@c.db"),
    ],
)
def test_an_address_is_shown_without_its_secrets(url: str, shown: str) -> None:
    assert shown_address(url) == shown


def test_a_password_that_cannot_be_told_from_the_rest_is_refused_and_not_shown(home: FarmHome) -> None:
    for password in ("SEC@RET", "SEC/RET"):
        address = f"postgresql://farm:{password}@{LOOPBACK}:1/farm"
        done = home.farm("status", env={"FARM_STORE": address}, code=2)
        assert "write %40 for @" in done.stderr
        assert not any(part in done.stdout + done.stderr for part in ("SEC", "RET"))


def test_an_empty_database_is_no_store_yet_and_becomes_one(server: Server, home: FarmHome) -> None:
    empty = server.url("empty")
    with pytest.raises(NoStoreError, match=f"there is no store yet: '{FIRST_RUN}' makes one in this database"):
        open_store(empty, readonly=True)
    done = home.farm("status", env={"FARM_STORE": empty})
    assert (done.returncode, "no store yet" in done.stderr, "older farm" in done.stderr) == (9, True, False)
    assert QUOTED not in done.stderr
    # A user without rights in the database may make no tables in it.
    assert "ALTER DATABASE ... OWNER TO this user" in refusal(server.url("empty", user="bob"))
    open_store(empty).close()
    with open_store(empty, readonly=True) as store:
        assert store.runs.latest_id() is None


# Messages of databases with the next step for the user.


def test_ctrl_c_while_a_connection_is_in_use_stays_ctrl_c() -> None:
    """SQLAlchemy sets back a connection whose question was broken off, and psycopg refuses that with another error."""
    raised = psycopg.ProgrammingError("can't change 'autocommit' now: connection in transaction status ACTIVE")
    raised.__context__ = KeyboardInterrupt()
    assert isinstance(interruption_before(raised), KeyboardInterrupt)
    assert interruption_before(ValueError("no such")) is None


# A process is killed at every step of making a store: nothing is left that the next one has to repair.


NO_STORE = f"there is no store yet: '{FIRST_RUN}' makes one"
# A process that reads the remains of the one before, and then makes the store.
_BORN = f"""
wanted, last = last, 0
try:
    open_store(address, readonly=True).close()
except Exception as error:
    assert {NO_STORE!r} in str(error) or "a process was killed while it made the store" in str(error), error
done, last = 0, wanted
open_store(address).close()
"""


@pytest.mark.parametrize("step", [9, pytest.param(2, marks=pytest.mark.whole)])
def test_a_store_whose_making_is_killed_is_none_or_whole_and_is_completed(empty_address: str, step: int) -> None:
    address, first = empty_address, f"{empty_address}.first"
    if "://" in address:
        with psycopg.connect(address, autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE first_{step}".encode())
        first = re.sub(r"@/\w+", f"@/first_{step}", address)
    with pytest.raises(StoreError, match=NO_STORE):
        open_store(address, readonly=True)
    assert kill_before_statements(address, _BORN, first, step) > 3
    with open_store(address) as store:
        assert store.runs.latest_id() is None
    assert revision(address) == REVISION
    if "://" in address:
        drop_database(first)


def test_what_was_killed_within_a_step_is_completed(tmp_path: Path) -> None:
    """The kill leaves the first page half written, and its old content in a journal."""
    path = tmp_path / "farm.db"
    code = """
import os, signal, sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.executescript("PRAGMA cache_size=1; BEGIN IMMEDIATE; CREATE TABLE half (x)")
for _ in range(100):
    connection.execute("INSERT INTO half VALUES (zeroblob(4000))")
os.kill(os.getpid(), signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", code, str(path)], check=False)
    assert Path(f"{path}-journal").exists()
    with pytest.raises(StoreError, match="a process was killed while it made the store: 'farm devices' completes it"):
        open_store(path, readonly=True)
    open_store(path).close()
    open_store(path, readonly=True).close()


def test_a_reader_of_an_empty_file_is_told_that_there_is_no_store(tmp_path: Path) -> None:
    (tmp_path / "farm.db").write_bytes(b"")
    with pytest.raises(StoreError, match=NO_STORE):
        open_store(tmp_path / "farm.db", readonly=True)
    open_store(tmp_path / "farm.db").close()
    open_store(tmp_path / "farm.db", readonly=True).close()


# A store behind PgBouncer in transaction mode is refused at the first connection.


PROGRAM = shutil.which("pgbouncer", path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin")
SETTINGS = {"plain": "", "options dropped": "ignore_startup_parameters = options,extra_float_digits\n"}


@pytest.fixture(params=SETTINGS)
def pooled(
    request: pytest.FixtureRequest, new_store: Callable[[str], str], postgresql_cluster: str, tmp_path: Path
) -> Iterator[str]:
    """Address of a store behind a pooler in transaction mode."""
    name = urlsplit(new_store("pooled")).path[1:]
    port = free_port()
    (tmp_path / "pgbouncer.ini").write_text(
        f"[databases]\n* = host={postgresql_cluster} user=farm\n[pgbouncer]\npool_mode = transaction\n"
        f"listen_addr = 127.0.0.1\nlisten_port = {port}\nunix_socket_dir =\nauth_type = any\n{SETTINGS[request.param]}"
    )
    for folder in (tmp_path, *tmp_path.parents[:3]):
        folder.chmod(folder.stat().st_mode | 0o055)
    # pgbouncer refuses to run as root.
    as_user = ["-u", "postgres"] if os.geteuid() == 0 else []
    assert PROGRAM is not None
    with Started(
        [PROGRAM, *as_user, str(tmp_path / "pgbouncer.ini")], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        until(lambda: process.poll() is not None or listens(port))
        assert process.poll() is None
        yield f"postgresql://farm@127.0.0.1:{port}/{name}"
        process.terminate()


@pytest.mark.skipif(PROGRAM is None, reason="pgbouncer is not installed")
def test_a_pooler_in_transaction_mode_is_refused_before_anything_is_written(pooled: str) -> None:
    for readonly in (False, True):
        with pytest.raises(NoStoreError, match="PgBouncer answers there.*name the address") as caught:
            open_store(pooled, readonly=readonly)
        assert caught.value.exit_code == ExitCode.NO_STORE
