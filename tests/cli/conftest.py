"""Two virtual devices behind an adb server, as a user's own server has them: for tests of leases, shells and lists."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from attached import rack


@pytest.fixture(scope="session")
def bench_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the two devices."""
    return tmp_path_factory.mktemp("bench")


@pytest.fixture(scope="session")
def bench(bench_root: Path) -> Iterator[dict[str, str]]:
    """The environment that finds the two devices, `virtual-SM8650-0` and `virtual-SM8650-1`."""
    with rack(bench_root, "SM8650", "SM8650") as two:
        yield two.env
