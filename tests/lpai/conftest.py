"""The stub of an SDK that has LPAI, once for all tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from lpai_sdk_stub import StubSdk, make_stub_sdk


@pytest.fixture(scope="session")
def stub_sdk(farm_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> StubSdk:
    return make_stub_sdk(
        tmp_path_factory.mktemp("lpai") / "stub-sdk",
        farm_cache,
        # Prelu has weights.
        unknown=("Gelu", "Prelu"),
    )
