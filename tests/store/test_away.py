"""A database that is away for a while under a run on devices of its own: nothing is lost, nothing has to be resumed."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from stub_home import make_stub_home, write_stub_suite
from waiting import until

from farm.devices.transport import SILENCE_SECONDS

psycopg = pytest.importorskip("psycopg")


RUN = ("run", "--soc", "SM8650", "--suite", "./mine", "--virtual", "2", "--json")


def attempts(address: str) -> int:
    with psycopg.connect(address) as connection:
        try:
            return connection.execute("select count(*) from attempt").fetchone()[0]
        except psycopg.errors.UndefinedTable:
            return 0


def allow(server: str, name: str, *, connections: bool) -> None:
    """Allow or refuse connections to a database, and end existing ones on refusal."""
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute(f"alter database {name} allow_connections {connections}")
        if not connections:
            connection.execute("select pg_terminate_backend(pid) from pg_stat_activity where datname = %s", [name])


@pytest.mark.whole
def test_a_run_outlasts_a_database_that_is_away(tmp_path: Path, new_database: Callable[[str], str]) -> None:
    address = new_database("away")
    home = make_stub_home(tmp_path / "stub")
    write_stub_suite(home, "mine", {f"case{number}": 600 for number in range(8)})
    host = address.partition("host=")[2]
    [name] = re.findall(r"@/(\w+)", address)
    server = f"host={host} user=farm dbname=postgres"
    with home.running(*RUN, env={"FARM_STORE": address}) as process:
        until(lambda: attempts(address), "a first job")
        allow(server, name, connections=False)
        # Longer than a device may be silent, or a program stall.
        time.sleep(SILENCE_SECONDS + 3)
        allow(server, name, connections=True)
        out = process.communicate(timeout=240)[0]
    assert process.returncode == 0, out
    view = json.loads(out[out.index("\n{") :])
    assert [[a["verdict"] for a in job["attempts"]] for job in view["jobs"]] == [["passed"]] * 8
