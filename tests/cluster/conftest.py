from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from chaos_store import Cluster
from farm_home import FarmHome
from postgresql_server import server_binaries
from stores import drop_database


@pytest.fixture(scope="session")
def compiled(farm_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Cache with every bundle of `smoke` for SM8650."""
    folder = tmp_path_factory.mktemp("compiled")
    home = FarmHome(farm_cache, folder / "state", folder)
    home.farm("run", "--soc", "SM8650", "--suite", "smoke", "--virtual", "1", timeout_s=300, code=0)
    return farm_cache


@pytest.fixture
def address(new_store: Callable[[str], str], request: pytest.FixtureRequest) -> Iterator[str]:
    """Address of a store on PostgreSQL of this test alone."""
    found = new_store(f"t{abs(hash(request.node.nodeid))}")
    yield found
    drop_database(found)


@pytest.fixture(scope="module")
def server() -> Iterator[Cluster]:
    """PostgreSQL server that a test may stop and start."""
    with contextlib.closing(Cluster(server_binaries())) as cluster:
        yield cluster
