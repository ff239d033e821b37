from __future__ import annotations

from collections.abc import Iterator

import pytest
from attached import Rack, rack


@pytest.fixture(scope="session")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rack]:
    """A private adb server with two virtual devices behind it."""
    with rack(tmp_path_factory.mktemp("bench"), "SM8650", "sm8750") as bench:
        yield bench
