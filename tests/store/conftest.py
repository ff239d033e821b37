"""Stores on each database: SQLite in a file, and PostgreSQL in a throw-away cluster where its server is installed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
from stores import drop_database, empty_store, place_store

from farm.store.store import Store, open_store

from . import make as make_module

HOUR_MS = 3_600_000


@pytest.fixture(autouse=True)
def _new_stores_are_copies() -> None:
    """Leave new stores as they are made."""


@pytest.fixture(params=["sqlite", "postgresql"])
def empty_address(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Address of a place without a store: no file yet, or an empty database."""
    if request.param == "sqlite":
        yield str(tmp_path / "farm.db")
        return
    new_database: Callable[[str], str] = request.getfixturevalue("new_database")
    address = new_database(f"t{abs(hash(request.node.nodeid))}")
    yield address
    drop_database(address)


@pytest.fixture(params=["sqlite", "postgresql"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Address of a store without a run."""
    if request.param == "postgresql":
        return str(request.getfixturevalue("shared_address"))
    place_store(tmp_path / "farm.db")
    return str(tmp_path / "farm.db")


@pytest.fixture(scope="session")
def _one_store(new_store: Callable[[str], str]) -> str:
    return new_store("one_store")


@pytest.fixture
def shared_address(_one_store: str) -> str:
    """Address of a store on PostgreSQL, which agents share, without a run."""
    empty_store(_one_store)
    return _one_store


@pytest.fixture
def sqlite_store(tmp_path: Path) -> Iterator[Store]:
    place_store(tmp_path / "farm.db")
    with open_store(tmp_path / "farm.db") as opened:
        yield opened


Make = ModuleType
"""Type of `make`."""


@pytest.fixture(scope="session")
def make() -> Make:
    return make_module
