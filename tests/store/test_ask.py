"""Queries of users only read, end and leave nothing behind; named statements of farm/store/sql work in psql and
sqlite3.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from farm_home import FarmHome
from stores import place_store
from waiting import until

from farm.base.errors import StoreError, UsageError
from farm.store.records import RunRecord
from farm.store.statements import statement
from farm.store.store import Store, open_store

# Users' queries, on both databases: they only read, they end, and they leave nothing behind.


ENDLESS = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT count(*) FROM n"


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def address(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Address of a store with three runs, which no test may change."""
    if request.param == "sqlite":
        found = str(tmp_path_factory.mktemp("ask") / "farm.db")
        place_store(Path(found))
    else:
        new_store: Callable[[str], str] = request.getfixturevalue("new_store")
        found = new_store(f"ask{uuid.uuid4().hex}")
    with open_store(found) as store:
        for number in range(3):
            store.begin_run(RunRecord("farm run", f"user{number}", "50%", {}, 1_795_225_501_000))
    if request.param == "postgresql":
        execute(
            found,
            "CREATE FUNCTION write_a_row() RETURNS void LANGUAGE sql AS $$ UPDATE run SET host = 'x' $$",
            "CREATE PROCEDURE write_and_commit() LANGUAGE plpgsql "
            "AS $$ BEGIN COMMIT; SET TRANSACTION READ WRITE; UPDATE run SET host = 'x'; COMMIT; END $$",
        )
    return found


@pytest.fixture(scope="module")
def reader(address: str) -> Iterator[Store]:
    with open_store(address, readonly=True) as opened:
        yield opened


of_sqlite = pytest.mark.parametrize("address", ["sqlite"], indirect=True)
of_postgresql = pytest.mark.parametrize("address", ["postgresql"], indirect=True)


def execute(address: str, *statements: str) -> list[tuple[object, ...]]:
    """Run statements as a superuser, each in a transaction of its own, and return the rows of the last."""
    import psycopg

    with psycopg.connect(address, autocommit=True) as connection:
        for statement in statements:
            cursor = connection.execute(statement.encode())
        return cursor.fetchall() if cursor.description else []


def test_a_query_has_columns_and_at_most_so_many_rows(reader: Store) -> None:
    asked = reader.ask("SELECT user_name, '1:2 :x %s' AS odd FROM run WHERE host LIKE '50%' ORDER BY user_name", 2)
    assert asked == (["user_name", "odd"], [("user0", "1:2 :x %s"), ("user1", "1:2 :x %s")])
    for query in (
        "SELECT 1 AS one;",
        "-- why\nSELECT 1 AS one -- because",
        "/* a; b */ WITH o AS (SELECT 1 AS one) SELECT one FROM o",
        "VALUES (1)",
    ):
        assert reader.ask(query, 5)[1] == [(1,)]
    for query, says in (
        ("SELECT nope FROM runs", ": did you mean run?"),
        ("SELECT nope FROM zzz", ": tables are account, agent, agent_device, alert, "),
        ("SELECT nope FROM run", "nope"),
    ):
        with pytest.raises(UsageError) as caught:
            reader.ask(query, 5)
        assert says in str(caught.value)


WRITING = (
    "DELETE FROM run",
    "UPDATE run SET host = 'x' RETURNING id",
    "INSERT INTO shard_weights SELECT 'a', '[]', 1 WHERE false RETURNING 1",
    "CREATE TABLE mine (x integer)",
    "CREATE TEMP TABLE mine (x integer)",
    "CREATE TABLE mine AS SELECT * FROM run",
    "DROP TABLE run",
    "SELECT 1; DELETE FROM run",
    "SELECT 1; SELECT 2",
    "COMMIT; DELETE FROM run",
    "COMMIT; BEGIN; UPDATE run SET host = 'x'; COMMIT",
    "ROLLBACK; UPDATE run SET host = 'x'",
    "COMMIT",
    "BEGIN",
    "ROLLBACK",
    "SAVEPOINT a",
    "VACUUM",
    "ANALYZE",
    "REINDEX",
    "selct",
    "-- nothing",
    "SELECT '\0'",
)


def test_a_query_that_would_write_is_refused_and_nothing_is_lost(reader: Store) -> None:
    for query in WRITING:
        with pytest.raises(UsageError) as caught:
            reader.ask(query, 5)
        assert "\n" not in str(caught.value)
        assert reader.ask("SELECT count(*) FROM run WHERE host = '50%'", 1)[1] == [(3,)], query


def test_a_query_that_does_not_end_is_ended_at_its_time_limit_and_the_next_one_answers(reader: Store) -> None:
    with pytest.raises(UsageError, match=r"took longer than 0\.2 s.*--timeout"):
        reader.ask(ENDLESS, 5, seconds=0.2)
    assert reader.ask("SELECT 1", 1)[1] == [(1,)]


def test_a_store_that_is_open_to_write_is_not_asked(store: Store) -> None:
    with pytest.raises(UsageError):
        store.ask("SELECT 1", 1)


@of_sqlite
def test_sqlite_touches_no_other_file_and_no_setting(reader: Store, address: str) -> None:
    folder = Path(address).parent
    before = {path.name for path in folder.iterdir()}
    for query in (
        f"ATTACH '{folder}/made.db' AS other",
        "ATTACH ':memory:' AS other",
        f"VACUUM INTO '{folder}/made.db'",
        "DETACH main",
        "PRAGMA journal_mode=DELETE",
        "PRAGMA user_version=7",
        "PRAGMA query_only=0",
        "PRAGMA wal_checkpoint(TRUNCATE)",
        f"PRAGMA temp_store_directory='{folder}'",
        "PRAGMA optimize",
        "SELECT * FROM pragma_wal_checkpoint",
        f"SELECT load_extension('{folder}/x.so')",
        f"SELECT writefile('{folder}/made.db', 'x')",
        "WITH x AS (SELECT 1) INSERT INTO shard_weights SELECT 'a', '[]', 1 FROM x",
        "CREATE VIRTUAL TABLE temp.v USING fts5(x)",
        "EXPLAIN DELETE FROM run",
        "UPDATE sqlite_master SET sql = ''",
        "PRAGMA writable_schema=1",
    ):
        with pytest.raises(UsageError):
            reader.ask(query, 5)
        assert {path.name for path in folder.iterdir()} == before, query
        assert reader.ask("PRAGMA user_version", 1)[1] == [(0,)], query
        assert reader.ask("PRAGMA journal_mode", 1)[1] == [("wal",)], query


@of_sqlite
def test_sqlite_still_says_how_its_tables_are(reader: Store) -> None:
    assert "user_name" in [row[1] for row in reader.ask("PRAGMA table_info(run)", 99)[1]]
    assert ("lease",) in reader.ask("SELECT name FROM sqlite_master", 99)[1]
    assert reader.ask("SELECT name FROM pragma_table_info('run') WHERE name = 'host'", 9)[1] == [("host",)]
    assert reader.ask("EXPLAIN QUERY PLAN SELECT * FROM run", 9)[1]
    assert reader.ask("SELECT value FROM json_each('[1, 2]')", 9)[1] == [(1,), (2,)]
    # Text that is no text is shown.
    assert reader.ask("SELECT CAST(x'61ff62' AS TEXT)", 1)[1] == [("a\\xffb",)]


@of_postgresql
def test_postgresql_is_not_left_written_or_reached_through(address: str, reader: Store) -> None:
    # A folder in which the server, which another user runs, could write.
    with tempfile.TemporaryDirectory(prefix="farm-ask-", dir="/tmp") as shared:
        Path(shared).chmod(0o777)
        for query in (
            "COMMIT; BEGIN READ WRITE; UPDATE run SET host = 'x'; COMMIT",
            "END; SET default_transaction_read_only = off; UPDATE run SET host = 'x'",
            "SET TRANSACTION READ WRITE",
            "SET default_transaction_read_only = off",
            "DO $$ BEGIN SET TRANSACTION READ WRITE; UPDATE run SET host = 'x'; COMMIT; END $$",
            "SELECT set_config('transaction_read_only', 'off', true), write_a_row()",
            "SELECT set_config('default_transaction_read_only', 'off', false), write_a_row()",
            "SELECT write_a_row()",
            "CALL write_and_commit()",
            "WITH x AS (INSERT INTO shard_weights VALUES ('a', '[]', 1) RETURNING 1) SELECT * FROM x",
            "WITH x AS (UPDATE run SET host = 'x' RETURNING 1) SELECT * FROM x",
            "SELECT * INTO mine FROM run",
            "SELECT * FROM run FOR UPDATE",
            "EXPLAIN ANALYZE UPDATE run SET host = 'x'",
            "PREPARE a AS DELETE FROM run",
            "LISTEN a",
            "LOCK TABLE run",
            f"COPY run TO PROGRAM 'touch {shared}/made'",
            f"COPY run TO '{shared}/made'",
            "COPY (SELECT 1) TO STDOUT",
            "COPY run FROM STDIN",
            "SELECT pg_read_file('PG_VERSION')",
            "SELECT pg_ls_dir('.')",
            f"SELECT lo_export(lo_from_bytea(0, 'x'), '{shared}/made')",
            "SELECT lo_import('/etc/hostname')",
            "SELECT pg_reload_conf()",
            "SELECT pg_terminate_backend(pg_backend_pid())",
            "SELECT nextval('run_job_id_seq')",
            "SELECT dblink('', '')",
        ):
            with pytest.raises(UsageError) as caught:
                reader.ask(query, 5)
            assert "\n" not in str(caught.value), query
            assert not list(Path(shared).iterdir()), query
            left = "SELECT (SELECT count(*) FROM run WHERE host = '50%'), (SELECT count(*) FROM shard_weights)"
            assert execute(address, left) == [(3, 0)], query
            assert reader.ask("SELECT 1", 1)[1] == [(1,)], query
    for query in ("SELECT lo_create(4711)", "SELECT lo_from_bytea(4711, 'x')", "SELECT lo_creat(-1)"):
        # PostgreSQL 16 and later refuse it by themselves.
        with contextlib.suppress(UsageError):
            reader.ask(query, 5)
        assert execute(address, "SELECT count(*) FROM pg_largeobject_metadata") == [(0,)], query


@of_postgresql
def test_no_lock_and_no_setting_stays(address: str, reader: Store) -> None:
    before = reader.ask("SELECT current_setting('work_mem')", 1)
    reader.ask("SELECT pg_advisory_lock(4711), set_config('work_mem', '1234kB', false)", 1)
    # The server ends the session of a closed connection a moment later.
    locks = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND objid = 4711"
    until(lambda: execute(address, locks) == [(0,)])
    assert reader.ask("SELECT current_setting('work_mem')", 1) == before


@of_postgresql
@pytest.mark.parametrize(
    "query",
    [
        "SELECT set_config('statement_timeout', '0', false), pg_sleep(600) AS farm_marker",
        ENDLESS.replace("count(*)", "count(*) AS farm_marker"),
    ],
)
def test_the_time_limit_ends_the_query_on_the_server_too(address: str, reader: Store, query: str) -> None:
    with pytest.raises(UsageError, match=r"took longer than 0\.5 s"):
        reader.ask(query, 5, seconds=0.5)
    assert not _running_on(address, "farm_marker")
    # Only the rows that are asked for are made.
    assert len(reader.ask("SELECT generate_series(1, 2000000000)", 10)[1]) == 10


@of_postgresql
def test_a_server_that_goes_away_is_no_fault_of_the_query(address: str, reader: Store) -> None:
    end = (
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
        "WHERE query LIKE 'FETCH%' AND state = 'active' AND pid <> pg_backend_pid()"
    )
    thread = threading.Thread(target=lambda: until(lambda: execute(address, end)))
    thread.start()
    try:
        with pytest.raises(StoreError, match="terminating connection"):
            reader.ask("SELECT pg_sleep(600)", 5, seconds=60)
    finally:
        thread.join()


def _running_on(address: str, marker: str) -> list[tuple[object, ...]]:
    """Return the statements of a query that the server still executes."""
    query = "SELECT query FROM pg_stat_activity WHERE state = 'active' AND pid <> pg_backend_pid()"
    return [row for row in execute(address, query) if marker in str(row[0]) or str(row[0]).startswith("FETCH")]


@of_sqlite
def test_the_command_ends_at_its_limit_with_one_line(home: FarmHome, address: str) -> None:
    env = {"FARM_STORE": address}
    done = home.farm("data", "sql", "--timeout", "1", ENDLESS, env=env, code=2)
    assert done.stdout == ""
    assert done.stderr == "farm: the query took longer than 1 s and was ended: --timeout gives it more\n"
    done = home.farm("data", "sql", "COMMIT; BEGIN; UPDATE run SET host = 'x'", env=env, code=2)
    assert (done.stdout, len(done.stderr.splitlines())) == ("", 1)


def test_the_command_shows_times_and_numbers_in_each_form(home: FarmHome, address: str) -> None:
    odd = "SELECT CURRENT_TIMESTAMP AS now, CAST(1.5 AS numeric) AS number"
    for form in ("--json", "--csv", "--limit=1"):
        assert "1.5" in home.farm("data", "sql", odd, form, env={"FARM_STORE": address}).stdout


@of_postgresql
def test_a_user_who_may_only_read_asks_as_well(home: FarmHome, address: str) -> None:
    execute(
        address,
        "DROP ROLE IF EXISTS onlooker",
        "CREATE ROLE onlooker LOGIN",
        "GRANT SELECT ON ALL TABLES IN SCHEMA public TO onlooker",
    )
    try:
        env = {"FARM_STORE": address.replace("farm@", "onlooker@")}
        assert home.farm("data", "sql", "--csv", "SELECT current_user, count(*) FROM run", env=env).stdout == (
            "current_user,count\nonlooker,3\n"
        )
        assert home.farm("data", "sql", "SELECT pg_read_file('PG_VERSION')", env=env).returncode == 2
    finally:
        execute(address, "DROP OWNED BY onlooker", "DROP ROLE onlooker")


def test_ctrl_c_ends_a_query_on_the_server_too(home: FarmHome, address: str) -> None:
    query = ENDLESS.replace("count(*)", "count(*) AS farm_marker")
    with home.running("data", "sql", query, env={"FARM_STORE": address}) as process:
        if address.startswith("postgresql"):
            until(lambda: _running_on(address, "farm_marker"))
        else:
            # So much processor time shows that the process is past its imports and in the query.
            until(lambda: _cpu_seconds(process.pid) > 3)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 130
    if address.startswith("postgresql"):
        until(lambda: not _running_on(address, "farm_marker"))


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# Named statements of farm/store/sql: they work unchanged in psql and sqlite3.


_ROOT = Path(__file__).parents[2]
_BLOCKS = {
    f"{path.stem}.{name}": sql
    for path in sorted((_ROOT / "farm/store/sql").glob("*.sql"))
    for name, sql in re.findall(r"^-- name: (\w+)\n(.*?;)$", path.read_text(), re.MULTILINE | re.DOTALL)
}


def _lists(sql: str) -> set[str]:
    return set(re.findall(r"\bIN :(\w+)", sql))


def test_psql_takes_every_statement(new_database: Callable[[str], str], postgresql_cluster: str) -> None:
    psql = shutil.which("psql")
    if psql is None:
        pytest.skip("psql is not installed")
    open_store(new_database("statements")).close()
    script = "".join(
        "".join(f"\\set {name} {'(NULL)' if name in _lists(sql) else 'NULL'}\n" for name in re.findall(r":(\w+)", sql))
        + f"EXPLAIN {sql}\n"
        for sql in _BLOCKS.values()
    )
    argv = [psql, "-qX", "-v", "ON_ERROR_STOP=1", "-h", postgresql_cluster, "-U", "farm", "statements"]
    done = subprocess.run(argv, input=script, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_sqlite_takes_every_statement(tmp_path: Path) -> None:
    open_store(tmp_path / "farm.db").close()
    connection = sqlite3.connect(tmp_path / "farm.db")
    for name, sql in _BLOCKS.items():
        assert statement(name) is statement(name)
        parameters = dict.fromkeys(re.findall(r":(\w+)", sql))
        written = re.sub(r"\bIN :\w+", "IN (NULL)", sql)
        assert connection.execute(f"EXPLAIN QUERY PLAN {written}", parameters).fetchall() is not None, name
    connection.close()
