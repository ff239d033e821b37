"""Shared fixtures: one cache a session, so that a bundle is compiled once; no file of a user is touched."""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import warm_torch
from farm_home import FarmHome
from made_decoders import compiled, tiny_decoder
from postgresql_server import running_cluster
from stores import create_database, create_store, place_store
from users import User, two_users
from warm_torch import WarmTorch, run_script

from farm.base import processes
from farm.base.config.settings import load_config
from farm.base.errors import FarmError
from farm.base.files import published
from farm.base.processes import Supervisor
from farm.builds.bundles.bundle import Bundle
from farm.builds.runtime.native import planned_native
from farm.builds.runtime.qnn_sdk import host_sdk
from farm.devices.adb.server import start_adb_server
from farm.store.database import Database
from farm.store.store import Store, open_store

if TYPE_CHECKING:
    from selenium.webdriver.remote.webdriver import WebDriver

pytest_plugins = ["adbd_device", "timing_report"]

_WRITES_NO_BYTECODE = sys.dont_write_bytecode
# pytest's rewritten assertions are kept between runs: without them the collection takes 18 s of each worker, not 7 s.
sys.dont_write_bytecode = False
# Python's own thresholds cost a tenth of the processor time of tests that start no process.
gc.set_threshold(100_000, 20, 20)
# Files with tests of half a minute to three minutes each.
_LONGEST = ("test_upstream_tests.py", "test_board.py", "test_sanitizers.py", "test_soak.py", "test_bench.py")


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Fail the collection of a file that imports torch: 9.5 s of processor time in each worker."""
    had_torch = "torch" in sys.modules
    report = yield
    if not had_torch and "torch" in sys.modules:
        report.outcome = "failed"
        report.longrepr = f"{collector.nodeid} imports torch: only modules torch_*.py may"
    return report


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest tests first: as the last ones they would leave the other workers without work for minutes."""
    items.sort(key=lambda item: item.path.name not in _LONGEST)


def pytest_collection_finish() -> None:
    """Restore the value of PYTHONDONTWRITEBYTECODE: tests import modules that they edit."""
    sys.dont_write_bytecode = _WRITES_NO_BYTECODE
    # The garbage collector need not look at thousands of tests.
    gc.collect()
    gc.freeze()


def pytest_configure() -> None:
    """Restore SIGINT and SIGHUP for processes that tests start, also in the background and under nohup."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(scope="session", autouse=True)
def _ordinary_adb_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Stand for the user's own adb server: no test sees the user's phones, nor starts a server that stays."""
    with Supervisor() as supervisor, pytest.MonkeyPatch.context() as patch:
        server = start_adb_server(supervisor, tmp_path_factory.mktemp("adb"))
        patch.setenv("ANDROID_ADB_SERVER_PORT", str(server.port))
        yield


@pytest.fixture(autouse=True)
def _environment_of_the_process() -> Iterator[None]:
    """Fail a test that leaves another environment to the tests after it, and restore the environment."""
    before = dict(os.environ)
    yield
    names = (before.keys() | os.environ) - {"PYTEST_CURRENT_TEST"}
    if changed := sorted(name for name in names if before.get(name) != os.environ.get(name)):
        os.environ.clear()
        os.environ.update(before)
        pytest.fail(f"the test has changed {', '.join(changed)} in the environment: use monkeypatch")


@pytest.fixture(autouse=True)
def _log_of_farm() -> Iterator[None]:
    """Take back the handlers and the level that a test gives to the log of farm."""
    log = logging.getLogger("farm")
    handlers, level = list(log.handlers), log.level
    yield
    log.handlers[:] = handlers
    log.setLevel(level)


@pytest.fixture
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Environment that a test may change, as a worker of `farm pytest` does when it names its device there."""
    monkeypatch.setattr(os, "environ", dict(os.environ))


@pytest.fixture(scope="session")
def _users() -> Iterator[tuple[User, User]]:
    with two_users() as users:
        yield users


@pytest.fixture(name="two_users")
def _two_users(_users: tuple[User, User]) -> tuple[User, User]:
    """Ada and Bob, two real users with empty homes, who share a group and nothing else."""
    for user in _users:
        user.begin()
    return _users


@pytest.fixture(scope="session")
def farm_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty cache for the whole session; FARM_TEST_CACHE names one to keep between sessions."""
    kept = os.environ.get("FARM_TEST_CACHE")
    cache = Path(kept) if kept else _folder_of_session(tmp_path_factory, "cache")
    _take_built_runner(cache)
    return cache


def _take_built_runner(cache: Path) -> None:
    """Copy the native runner that farmw has built for this user into `cache`: a build takes 40 s."""
    with contextlib.suppress(FarmError):
        wanted = planned_native(cache)
        built = load_config().cache_dir / "native" / wanted.key
        if built.is_dir() and not wanted.built:
            published(wanted.folder, partial(_copy, built))


def _copy(source: Path, target: Path) -> None:
    shutil.copytree(source, target, dirs_exist_ok=True)


def _folder_of_session(tmp_path_factory: pytest.TempPathFactory, name: str) -> Path:
    """Return the folder of this name that all workers of the session share."""
    base = tmp_path_factory.getbasetemp()
    shared = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    shared.mkdir(exist_ok=True)
    return shared


@pytest.fixture(scope="session", autouse=True)
def _warm_torch(farm_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Let compiler processes be forks of one process, unless each is to start by itself."""
    if warm_torch.COLD in os.environ:
        yield
        return
    owner = os.getppid() if "PYTEST_XDIST_WORKER" in os.environ else os.getpid()
    folder = _folder_of_session(tmp_path_factory, "torch")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(warm_torch, "session", torch := WarmTorch(folder, farm_cache, owner))
        patch.setattr(processes, "subprocess", torch.subprocess())
        yield


@pytest.fixture(scope="session")
def filled_by(farm_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Function that returns the folder of a script and its arguments, files, for which the script runs once a session.

    The output is the file `printed`.
    """

    def run(script: Path, *files: Path) -> Path:
        def fill(folder: Path) -> None:
            (folder / "printed").write_text(run_script(script, *map(str, files), cache=farm_cache, folder=folder))

        name = "-".join(file.stem for file in (script, *files))
        return published(_folder_of_session(tmp_path_factory, "scripts") / name, fill)

    return run


@pytest.fixture(scope="session")
def printed_json(filled_by: Callable[..., Path]) -> Callable[[Path], dict[str, Any]]:
    """A function that returns the last line that a script prints, as JSON. The script runs once a session."""
    return lambda script: dict(json.loads((filled_by(script) / "printed").read_text().splitlines()[-1]))


@pytest.fixture(scope="session")
def toolchain(farm_cache: Path) -> Iterator[Path]:
    """Toolchain that farm builds once, in a folder that every user may read."""
    host_sdk(farm_cache)
    folder = Path(tempfile.mkdtemp(prefix="farm-toolchain-", dir="/tmp"))
    folder.chmod(0o755)
    for part in ("native", "sdk"):
        # Another worker may be building something at this moment.
        unfinished = shutil.ignore_patterns("*.partial")
        shutil.copytree(farm_cache / part, folder / part, symlinks=True, ignore=unfinished)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def models(farm_cache: Path) -> Path:
    """The folder that native_runner/compile_models.py fills: small programs of every kind."""
    return compiled(farm_cache, "compile_models.py")


@pytest.fixture(scope="session")
def decoders(farm_cache: Path) -> Path:
    """The folder that native_runner/compile_decoders.py fills: small programs that generate text."""
    return compiled(farm_cache, "compile_decoders.py")


@pytest.fixture(scope="session")
def generated_bundle(farm_cache: Path) -> Bundle:
    """A tiny decoder with a method for prompts, compiled for a virtual SM8650, once for all tests."""
    return tiny_decoder(farm_cache)


@pytest.fixture
def home(farm_cache: Path, tmp_path: Path) -> FarmHome:
    """The session's cache, a state folder and a current folder of this test alone."""
    cwd = tmp_path / "cwd"
    cwd.mkdir()
    return FarmHome(farm_cache, tmp_path / "state", cwd)


@pytest.fixture
def address(tmp_path: Path) -> str:
    """Address of this test's own store, which `home` has as well; other tests override it."""
    (tmp_path / "state").mkdir(exist_ok=True)
    return str(tmp_path / "state" / "farm.db")


@pytest.fixture
def store(address: str) -> Iterator[Store]:
    with open_store(address) as opened:
        yield opened


@pytest.fixture(scope="session")
def postgresql_cluster() -> Iterator[str]:
    """The folder of the socket of a running cluster, whose superuser `farm` needs no password."""
    with running_cluster() as folder:
        yield folder


@pytest.fixture(scope="session")
def new_database(postgresql_cluster: str) -> Callable[[str], str]:
    """A function that makes an empty database of a name and returns its address."""
    return partial(create_database, postgresql_cluster)


@pytest.fixture(scope="session")
def new_store(postgresql_cluster: str) -> Callable[[str], str]:
    """A function that makes a database of a name with an empty store and returns its address."""
    return partial(create_store, postgresql_cluster)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WebDriver]:
    from chromium import start

    session = start(tmp_path_factory.mktemp("profile"))
    yield session
    session.quit()


@pytest.fixture(autouse=True)
def _new_stores_are_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a new SQLite store of this process be a copy; tests/store has the revisions themselves."""
    check = Database._check_file

    def check_and_place(database: Database, *, existing: bool) -> None:
        check(database, existing=existing)
        if not database.readonly and not Path(database.name).exists():
            place_store(Path(database.name))

    monkeypatch.setattr(Database, "_check_file", check_and_place)


@pytest.fixture(autouse=True)
def _own_farm_folders(farm_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("FARM_") and name != "FARM_TEST_CACHE":
            monkeypatch.delenv(name)
    monkeypatch.delenv("QNN_SDK_ROOT", raising=False)
    monkeypatch.setenv("FARM_CACHE_DIR", str(farm_cache))
    monkeypatch.setenv("FARM_STATE_DIR", str(tmp_path / "state"))
