"""Opening of stores, and messages for stores that do not open."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from alembic.config import Config
from alembic.script import ScriptDirectory
from farm_home import FarmHome
from programs import run_program
from sqlalchemy import Connection

from farm.base.errors import FIRST_RUN, MissingToolError, RowRefusedError, StoreError, UsageError
from farm.store.schema import REVISION, VERSION_TABLE, fingerprint
from farm.store.store import Store, open_store

if TYPE_CHECKING:
    from conftest import Make


def _set_revision(path: Path, revision: str) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute(f"UPDATE {VERSION_TABLE} SET version_num = ?", (revision,))  # noqa: S608
    connection.close()


def _one_line(caught: pytest.ExceptionInfo[StoreError]) -> str:
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_store_is_made_where_none_is_and_opened_again(tmp_path: Path) -> None:
    path = tmp_path / "folder to be made" / "with 100% ?#" / "farm.db"
    for _ in range(2):
        with open_store(path) as store:
            assert store.runs.latest_id() is None


def test_the_newest_revision_is_the_one_the_program_knows() -> None:
    config = Config()
    config.set_main_option("script_location", "farm.store:migrations")
    assert ScriptDirectory.from_config(config).get_current_head() == REVISION


def test_a_new_store_and_an_up_to_date_one_open_without_alembic_and_numpy(sqlite_store: Store, tmp_path: Path) -> None:
    assert sqlite_store.runs.latest_id() is None
    code = (
        "import sys; from farm.store.store import open_store\n"
        "for address in sys.argv[1:]: open_store(address).runs.latest_id()\n"
        "print(sorted({'alembic', 'numpy', 'torch'} & set(sys.modules)))"
    )
    done = run_program([sys.executable, "-c", code, str(tmp_path / "farm.db"), str(tmp_path / "new.db")])
    assert done.stdout == "[]\n"


def test_sqlite_settings_hold_for_every_connection(sqlite_store: Store, tmp_path: Path) -> None:
    names = ("journal_mode", "busy_timeout", "synchronous", "foreign_keys")
    with sqlite_store._database.reading() as connection:
        found = {name: connection.exec_driver_sql(f"PRAGMA {name}").scalar() for name in names}
    assert found == {"journal_mode": "wal", "busy_timeout": 5000, "synchronous": 1, "foreign_keys": 1}
    assert (tmp_path / "farm.db").exists()


@pytest.mark.parametrize("readonly", [False, True])
@pytest.mark.parametrize(
    ("revision", "event", "step"),
    [
        ("9999", "newer farm (schema 9999", "update farm"),
        ("0014", "a farm before 0.2.0 (schema 0014): ", "): run 'farm devices' of farm 0.2.0 once"),
    ],
)
def test_a_schema_without_a_way_to_this_one_is_refused_and_left_alone(
    tmp_path: Path, readonly: bool, revision: str, event: str, step: str
) -> None:
    path = tmp_path / "farm.db"
    open_store(path).close()
    _set_revision(path, revision)
    before = path.read_bytes()

    with pytest.raises(StoreError) as caught:
        open_store(path, readonly=readonly)

    assert event in _one_line(caught)
    assert step in str(caught.value)
    assert path.read_bytes() == before


def test_an_older_schema_is_not_brought_up_to_date_by_a_reader(tmp_path: Path) -> None:
    path = tmp_path / "farm.db"
    open_store(path).close()
    _set_revision(path, "0015")
    with pytest.raises(StoreError, match="older farm: 'farm devices' brings it up to date"):
        open_store(path, readonly=True)


def test_a_migration_that_fails_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "farm.db"
    open_store(path).close()
    # The tables have the columns of a newer revision already.
    _set_revision(path, "0017")
    before = sqlite3.connect(path)
    rows = list(before.execute("SELECT * FROM sqlite_master"))
    before.close()

    with pytest.raises(StoreError, match="no such column"):
        open_store(path)

    after = sqlite3.connect(path)
    assert list(after.execute("SELECT * FROM sqlite_master")) == rows
    after.close()


@pytest.mark.parametrize("readonly", [False, True])
def test_a_file_that_is_no_database_is_refused_and_left_alone(tmp_path: Path, readonly: bool) -> None:
    path = tmp_path / "farm.db"
    path.write_bytes(b"shopping list\n" * 1000)
    with pytest.raises(StoreError) as caught:
        open_store(path, readonly=readonly)
    assert "is not a database: move it away" in _one_line(caught)
    assert path.read_bytes() == b"shopping list\n" * 1000


def test_the_database_of_another_program_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.db"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE bookmarks (url TEXT)")
    connection.close()
    with pytest.raises(StoreError, match="database of another program"):
        open_store(path)
    with sqlite3.connect(path) as connection:
        assert [name for (name,) in connection.execute("SELECT name FROM sqlite_master")] == ["bookmarks"]
    connection.close()


def test_a_damaged_store_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "farm.db"
    open_store(path).close()
    content = bytearray(path.read_bytes())
    content[100:] = b"\xff" * (len(content) - 100)
    path.write_bytes(content)
    with pytest.raises(StoreError) as caught:
        open_store(path)
    assert "is damaged: restore it" in _one_line(caught)


def test_a_folder_that_cannot_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError) as caught:
        open_store(tmp_path / "file" / "farm.db")
    assert "cannot be made: " in _one_line(caught)
    assert "farm.toml" in str(caught.value)


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "locked"
    folder.mkdir()
    folder.chmod(0o555)
    if os.access(folder, os.W_OK):
        # Root may write everywhere except in file systems of the kernel.
        folder = Path("/proc/self")
    with pytest.raises(StoreError) as caught:
        open_store(folder / "farm.db")
    assert "farm.toml (store) or $FARM_STORE" in _one_line(caught)


def test_a_folder_in_place_of_the_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError) as caught:
        open_store(tmp_path)
    assert "cannot be opened" in _one_line(caught)


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


def test_a_password_is_not_shown() -> None:
    pytest.importorskip("psycopg", reason="the driver is not installed")
    with pytest.raises(StoreError) as caught:
        open_store("postgresql://farm:hunter2@127.0.0.1:1/farm")
    assert "***" in str(caught.value)
    assert "hunter2" not in _one_line(caught)


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


def test_reading_writes_nothing(sqlite_store: Store, make: type[Make], tmp_path: Path) -> None:
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


def test_a_reader_sees_what_a_living_writer_recorded(sqlite_store: Store, make: type[Make], tmp_path: Path) -> None:
    job = make.job()
    run_id = make.begin(sqlite_store, job)
    with open_store(tmp_path / "farm.db", readonly=True) as reader:
        assert reader.runs.view(run_id).jobs[0].attempts == ()
        sqlite_store.record_attempt(run_id, make.attempt(job))
        assert len(reader.runs.view(run_id).jobs[0].attempts) == 1


def test_reading_a_store_that_is_not_there_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=f"no store yet: '{FIRST_RUN}' makes one"):
        open_store(tmp_path / "folder" / "farm.db", readonly=True)
    assert list(tmp_path.iterdir()) == []


_FILL = """
import sys
sys.path[:0] = [sys.argv[2]]
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
    script = 'mount -t tmpfs -o size=1500k none "$1" && exec "$2" -c "$3" "$1/farm.db" "$4"'
    argv = ["sh", "-c", script, "sh", str(tmp_path), sys.executable, _FILL, str(Path(__file__).parents[2])]
    done = run_program([unshare, "-rm", *argv])
    output, intact = done.stdout.splitlines()
    assert "the disk is full: make room" in output
    assert intact == "True True"


def test_what_the_database_does_not_take_is_told_from_a_database_that_is_away(store: Store) -> None:
    """Waiting helps against an absent database, and not against a refused statement."""

    def twice(connection: Connection) -> None:
        for _ in range(2):
            connection.execute(fingerprint.insert().values(hash="one", facts={}))

    with pytest.raises(RowRefusedError, match="refuses what is to be written"):
        store._database.write(twice)
