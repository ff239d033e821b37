"""What several tests share: one cache a session, so that a bundle is compiled once; nothing of a user is touched."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from farm_home import FarmHome


def pytest_configure() -> None:
    """Let what tests start hear Ctrl-C, also when a shell started the tests in the background, where it is ignored."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def farm_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty cache for the whole session; FARM_TEST_CACHE names one to keep between sessions."""
    kept = os.environ.get("FARM_TEST_CACHE")
    if kept:
        return Path(kept)
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return tmp_path_factory.mktemp("cache")
    shared = tmp_path_factory.getbasetemp().parent / "cache"
    shared.mkdir(exist_ok=True)
    return shared


@pytest.fixture
def home(farm_cache: Path, tmp_path: Path) -> FarmHome:
    """The session's cache, a state folder and a current folder of this test alone."""
    cwd = tmp_path / "cwd"
    cwd.mkdir()
    return FarmHome(farm_cache, tmp_path / "state", cwd)


@pytest.fixture(autouse=True)
def _own_farm_folders(farm_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("FARM_") and name not in ("FARM_REQUIRE_CHROMIUM", "FARM_TEST_CACHE"):
            monkeypatch.delenv(name)
    monkeypatch.delenv("QNN_SDK_ROOT", raising=False)
    monkeypatch.setenv("FARM_CACHE_DIR", str(farm_cache))
    monkeypatch.setenv("FARM_STATE_DIR", str(tmp_path / "state"))
