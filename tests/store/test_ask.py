"""Queries of somebody's own, on both databases."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from farm.errors import UsageError
from farm.store.records import RunRecord
from farm.store.store import open_store

if TYPE_CHECKING:
    from collections.abc import Iterator

    from farm.store.store import Store


@pytest.fixture
def reader(store: Store, address: str) -> Iterator[Store]:
    for number in range(3):
        store.begin_run(RunRecord("farm run", f"user{number}", "50%", {}, 1_795_225_501_000))
    with open_store(address, readonly=True) as opened:
        yield opened


def test_a_query_has_columns_and_at_most_so_many_rows(reader: Store) -> None:
    asked = reader.ask("SELECT user_name, '1:2 :x %s' AS odd FROM run WHERE host LIKE '50%' ORDER BY user_name", 2)
    assert asked == (["user_name", "odd"], [("user0", "1:2 :x %s"), ("user1", "1:2 :x %s")])


@pytest.mark.parametrize(
    "query",
    [
        "DELETE FROM run",
        "UPDATE run SET host = 'x'",
        "CREATE TABLE mine (x integer)",
        "SELECT 1; DELETE FROM run",
        "COMMIT; DELETE FROM run",
        "selct",
    ],
)
def test_what_would_write_is_refused_and_nothing_is_lost(reader: Store, query: str) -> None:
    with pytest.raises(UsageError):
        reader.ask(query, 5)
    assert reader.ask("SELECT count(*) FROM run WHERE host = '50%'", 1)[1] == [(3,)]


def test_a_store_that_is_open_to_write_is_not_asked(store: Store) -> None:
    with pytest.raises(UsageError):
        store.ask("SELECT 1", 1)
