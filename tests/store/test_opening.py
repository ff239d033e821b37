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
from farm_home import FarmHome
from programs import run_program
from sqlalchemy import Connection
from store_template import place_store

from farm.base.errors import FIRST_RUN, MissingToolError, RowRefusedError, StoreError, UsageError
from farm.store.schema import VERSION_TABLE, fingerprint
from farm.store.store import Store, open_store

if TYPE_CHECKING:
    from conftest import Make


def _execute(path: Path, statement: str) -> list[tuple[object, ...]]:
    with sqlite3.connect(path) as connection:
        rows = connection.execute(statement).fetchall()
    connection.close()
    return rows


def _set_revision(path: Path, revision: str) -> None:
    place_store(path)
    _execute(path, f"UPDATE {VERSION_TABLE} SET version_num = '{revision}'")  # noqa: S608


def _refusal(address: str | Path, *, readonly: bool = False) -> str:
    with pytest.raises(StoreError) as caught:
        open_store(address, readonly=readonly)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_store_is_made_where_none_is_and_opened_again(tmp_path: Path) -> None:
    path = tmp_path / "folder to be made" / "with 100% ?#" / "farm.db"
    assert f"no store yet: '{FIRST_RUN}' makes one" in _refusal(path, readonly=True)
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
    for revision, event, step in (
        ("9999", "newer farm (schema 9999", "update farm"),
        ("0014", "a farm before 0.2.0 (schema 0014): ", "): run 'farm devices' of farm 0.2.0 once"),
        ("no database", "is not a database: move it away", ""),
    ):
        if revision == "no database":
            path.write_bytes(b"shopping list\n" * 1000)
        else:
            path.unlink(missing_ok=True)
            _set_revision(path, revision)
        before = path.read_bytes()
        message = _refusal(path, readonly=readonly)
        assert event in message
        assert step in message
        assert path.read_bytes() == before


def test_an_older_schema_is_not_brought_up_to_date_by_a_reader(tmp_path: Path) -> None:
    _set_revision(tmp_path / "farm.db", "0015")
    assert "older farm: 'farm devices' brings it up to date" in _refusal(tmp_path / "farm.db", readonly=True)


def test_a_migration_that_fails_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "farm.db"
    # The tables have the columns of a newer revision already.
    _set_revision(path, "0017")
    rows = _execute(path, "SELECT * FROM sqlite_master")
    assert "no such column" in _refusal(path)
    assert _execute(path, "SELECT * FROM sqlite_master") == rows


def test_files_that_are_no_store_are_refused(tmp_path: Path) -> None:
    other = tmp_path / "other.db"
    _execute(other, "CREATE TABLE bookmarks (url TEXT)")
    assert "database of another program" in _refusal(other)
    assert _execute(other, "SELECT name FROM sqlite_master") == [("bookmarks",)]
    damaged = tmp_path / "damaged.db"
    place_store(damaged)
    content = damaged.read_bytes()
    damaged.write_bytes(content[:100] + b"\xff" * (len(content) - 100))
    assert "is damaged: restore it" in _refusal(damaged)
    assert "cannot be opened" in _refusal(tmp_path)
    message = _refusal(other / "farm.db")
    assert "cannot be made: " in message
    assert "farm.toml" in message


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "locked"
    folder.mkdir()
    folder.chmod(0o555)
    if os.access(folder, os.W_OK):
        # Root may write everywhere except in file systems of the kernel.
        folder = Path("/proc/self")
    assert "farm.toml (store) or $FARM_STORE" in _refusal(folder / "farm.db")


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
