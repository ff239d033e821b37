"""Detection of commits since an earlier look, on both databases."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from farm.store.records import RunRecord
from farm.store.store import Store, open_store

if TYPE_CHECKING:
    from conftest import Make

_ANOTHER_PROCESS = """
import sys
from farm.store.records import RunRecord
from farm.store.store import open_store
with open_store(sys.argv[1]) as store:
    store.begin_run(RunRecord("farm run", "ada", "bench", {}))
"""


@pytest.fixture
def reader(store: Store, address: str) -> Iterator[Store]:
    store.begin_run(RunRecord("farm run", "ada", "bench", {}))
    with open_store(address, readonly=True) as opened:
        yield opened


def test_it_stays_while_nothing_is_committed(reader: Store) -> None:
    before = reader.browse.version()
    for _ in range(3):
        assert reader.browse.progress()
        assert reader.browse.version() == before


def test_every_commit_changes_it(reader: Store, store: Store, make: type[Make], address: str) -> None:
    seen = [reader.browse.version()]
    job = make.job()
    run_id = make.begin(store, job)
    seen.append(reader.browse.version())
    store.record_attempt(run_id, make.attempt(job))
    seen.append(reader.browse.version())
    store.finish_run(run_id, 0)
    seen.append(reader.browse.version())
    subprocess.run([sys.executable, "-c", _ANOTHER_PROCESS, address], check=True, timeout=120)
    seen.append(reader.browse.version())
    assert len(set(seen)) == len(seen)


def test_what_is_not_committed_yet_does_not_count_until_it_is(reader: Store, store: Store) -> None:
    runs = len(reader.transfer.runs())

    def begin(connection: object) -> object:
        store_run(connection)
        # The transaction is still open: no other connection sees the run.
        assert len(reader.transfer.runs()) == runs
        return reader.browse.version()

    def store_run(connection: object) -> None:
        from sqlalchemy import text

        connection.execute(text("UPDATE run SET host = 'another'"))  # type: ignore[attr-defined]

    before = store._database.write(begin)
    assert reader.browse.version() != before
