"""Execution of `farm pytest`, from devices to exit code: the user's pytest runs in another process."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from farm.base.backends.registry import DEFAULT_BACKEND
from farm.base.config.settings import Config, LeaseConfig
from farm.base.errors import ExitCode, InfraError, MissingToolError, NoDeviceError, NothingSelectedError, UsageError
from farm.base.interrupts import INTERRUPTED, InterruptHandler
from farm.base.processes import Child, Supervisor, ask_program, ending
from farm.base.socs import Soc, find_soc, load_socs
from farm.base.text import one_line
from farm.builds.compile.pool import MemoryLimits
from farm.builds.runtime.native import runner_executorch
from farm.builds.runtime.qnn_sdk import outside_environment
from farm.builds.runtime.runtime import require_backend
from farm.devices.adb.server import find_adb
from farm.devices.device import Device, common_kind
from farm.dispatch.pool.fleet import Choice, Fleet, attached_fleet, choose, narrowed, virtual_fleet
from farm.dispatch.pytest_plugin.plan import PLAN_VARIABLE, STORE_VARIABLE, SuitePlan
from farm.dispatch.request.records import exit_code_of, run_record, write_report
from farm.dispatch.request.request import RunOutcome
from farm.report.model.format import plural
from farm.store.records import Purpose

if TYPE_CHECKING:
    from farm.builds.toolchains.toolchain import Compiler, Toolchain
    from farm.store.store import Store

logger = logging.getLogger(__name__)


class TestTree(NamedTuple):
    """Tree of upstream's tests."""

    folder: tuple[str, ...]
    """Place in the package `executorch`."""
    files: str = ""
    """Pattern of the names of its test files; empty for pytest's own."""
    filled_in: tuple[str, ...] = ()
    """Options of its conftest that farm fills in for each worker: docs/guides/pytest.md."""

    @property
    def package(self) -> str:
        """Name of its package."""
        return ".".join(("executorch", *self.folder))


REWORK = TestTree(
    ("backends", "qualcomm", "tests", "rework"),
    "test.py",
    ("--device", "--host", "--soc_model", "--backend", "--build_folder", "--target", "--config_file"),
)
ALL_BACKENDS = TestTree(("backends", "test", "suite"))
_TREES = (REWORK, ALL_BACKENDS)

_INSTALLED = (
    "import importlib.util as u; s = u.find_spec('executorch'); "
    "print(*(s and s.submodule_search_locations or ()), sep='\\n')"
)


def find_tree(arguments: Sequence[str], folder: Path) -> tuple[TestTree, Path] | None:
    """Return the tree with an argument of pytest, which is relative to `folder`, and the folder of that tree."""
    for argument in arguments:
        path = Path(os.path.normpath(folder / argument.partition("::")[0]))
        if argument.startswith("-") or not path.exists():
            continue
        for parent in (path, *path.parents):
            for tree in _TREES:
                if parent.parts[-len(tree.folder) :] == tree.folder and (parent / "conftest.py").is_file():
                    return tree, parent
    return None


def rooted_arguments(arguments: Sequence[str], folder: Path) -> list[str]:
    """Return further arguments of pytest for collecting these tests from a source tree in any place.

    Their conftest declares options and markers, and pytest looks for a conftest only below its root; many modules have
    one name. Empty for other tests. Raises UsageError for options of these tests that farm fills in.
    """
    found = find_tree(arguments, folder)
    if found is None:
        return []
    tree, place = found
    names = [argument.partition("=")[0] for argument in arguments]
    if named := next((name for name in names if name in tree.filled_in), ""):
        raise UsageError(f"{named} is filled in for each device: give --soc, --backend or --device before the --")
    wanted = {
        "-c": os.devnull,
        "--rootdir": str(place.parent),
        "--confcutdir": str(place),
        "--import-mode": "importlib",
    }
    chosen = [word for name, value in wanted.items() if name not in names for word in (name, value)]
    return [*chosen, *(("-o", f"python_files={tree.files}") if tree.files else ())]


def require_tree(arguments: Sequence[str], folder: Path, compiler: Compiler) -> None:
    """Raise UsageError if these tests would import their own modules from another source tree."""
    found = find_tree(arguments, folder)
    if found is None:
        return
    tree, place = found
    if not any(tree.package.encode() in path.read_bytes() for path in place.rglob("*.py")):
        return
    output = ask_program([compiler.python, "-c", _INSTALLED], None, {**os.environ, **compiler.env}).output
    trees = [Path(line) for line in output.splitlines() if line]
    if not any(one.joinpath(*tree.folder).resolve() == place.resolve() for one in trees):
        installed = one_line(output) or "no executorch"
        raise UsageError(
            f"{place} would be run with {installed}, which is another tree: give --toolchain with an environment in "
            "which the tree is installed, or run the installed tests"
        )


# Plugins by the names of their entry points: loaded once, also with the user's PYTEST_DISABLE_PLUGIN_AUTOLOAD.
_PLUGINS = ("-p", "xdist", "-p", "farm.dispatch.pytest_plugin.plugin")
_PYTEST_INTERNAL, _PYTEST_USAGE, _PYTEST_EMPTY = 3, 4, 5
# Options with which pytest only prints something, and needs no device.
_LISTING = {
    "--collect-only", "--co", "-h", "--help", "-V", "--version", "--fixtures", "--funcargs", "--fixtures-per-test",
    "--markers", "--cache-show",
}  # fmt: skip
# Refused options: workers on other machines, which have no plan, and debuggers, which do not work in a worker.
_OTHER_MACHINES = "--tx"
_TERMINAL = ("--pdb", "--trace")
# A little longer than xdist waits for its workers.
_ENDING_SECONDS = 30.0
# The successor of a dead worker may have to wait for the end of a lease.
_OWN_LEASES = LeaseConfig(ttl_s=6.0, heartbeat_s=1.0)
_NONE_FREE = "no device is free: one worker waits for the first"


class SuiteRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Request of a `farm pytest`."""

    soc: str
    """SoC; empty for the common SoC of all attached devices."""
    backend: str = DEFAULT_BACKEND
    virtual: int = 0
    """Virtual devices; 0 for attached ones."""
    choice: Choice = Choice()
    most_devices: int | None = None
    arguments: tuple[str, ...] = ()
    """Arguments of pytest."""
    upstream: dict[str, str | int | bool] = {}
    """Values for upstream's TestQNN."""
    command: str = ""
    name: str = ""
    """Name of the run."""
    purpose: Purpose = Purpose.LOCAL
    quiet: bool = False
    """Pytest writes to standard error, as standard output is for other data."""


def is_listing(arguments: Sequence[str]) -> bool:
    """Return whether pytest only prints information, so that no device is needed. Pure."""
    return not _LISTING.isdisjoint(arguments)


def list_tests(arguments: Sequence[str]) -> int:
    """Run pytest for its output alone, and return the exit code: 0, 2 for a usage error, 5 without any test."""
    rooted = rooted_arguments(arguments, Path.cwd())
    done = subprocess.run([sys.executable, "-m", "pytest", *_PLUGINS, *rooted, *arguments], check=False)
    return done.returncode if done.returncode in (0, _PYTEST_EMPTY) else ExitCode.USAGE


def _check_arguments(arguments: Sequence[str]) -> None:
    """Raise UsageError for arguments that farm sets itself, or that cannot work in a worker."""
    for argument in arguments:
        if argument.startswith(_OTHER_MACHINES):
            raise UsageError(f"{argument}: workers run on this machine, one a device; -n N starts fewer")
        if argument in _TERMINAL or argument.startswith("--pdbcls"):
            raise UsageError(f"{argument} needs a terminal, which a worker has not: run plain pytest for that")


def run(config: Config, request: SuiteRequest) -> RunOutcome:
    """Run the user's pytest on devices, end all started processes, and return the outcome.

    Raises UsageError, NoDeviceError or MissingToolError before any change to the store, NothingSelectedError without a
    test, InfraError if pytest crashed before its first test.
    """
    from farm.store.store import open_store

    _check_arguments(request.arguments)
    rooted = rooted_arguments(request.arguments, Path.cwd())
    soc = find_soc(request.soc) if request.soc else None
    with InterruptHandler(), open_store(config.store_url) as store, Supervisor() as supervisor:
        soc = soc or _attached_soc(config, request.choice, supervisor, store)
        require_backend(soc, request.backend, config.sdk_root)
        return _Launch(config, request, soc, store, rooted).execute(supervisor)


def _attached_soc(config: Config, choice: Choice, supervisor: Supervisor, store: Store) -> Soc:
    """Return the common SoC of all usable attached devices. Raises NoDeviceError, UsageError for several SoCs."""
    from farm.devices.discovery import scan_all

    registered = {one.id: one for one in store.devices.all()}
    scan = narrowed(scan_all(config, supervisor), choice.devices)
    devices, refused = choose(scan, registered, list(load_socs()), choice)
    names = sorted({device.soc for device in devices})
    if not names:
        raise NoDeviceError(
            f"no usable device is attached ({', '.join(refused) or 'none is connected'}): attach one, or use the "
            "simulator with '--soc SM8650 --virtual 2'"
        )
    if len(names) > 1:
        raise UsageError(f"devices of {', '.join(names)} are attached, and tests run on one SoC: choose it with --soc")
    return find_soc(names[0])


class _Launch:
    """Part of a `farm pytest` with effects: store, folder, processes."""

    def __init__(self, config: Config, request: SuiteRequest, soc: Soc, store: Store, rooted: Sequence[str]) -> None:
        self._config, self._request, self._soc, self._store, self._rooted = config, request, soc, store, rooted
        self._interrupted = False

    def execute(self, supervisor: Supervisor) -> RunOutcome:
        from farm.builds.toolchains.selection import prepare
        from farm.devices.virtual.boot import virtual_storage

        tools = prepare(self._config, virtual=self._request.virtual > 0)
        _require_plugin(tools.compiler)
        require_tree(self._request.arguments, Path.cwd(), tools.compiler)
        token = secrets.token_hex(6)
        plan: SuitePlan | None = None
        with virtual_storage(self._config.cache_dir, f"pytest-{token}") as folder:
            try:
                fleet = self._fleet(folder, supervisor)
                plan = self._plan(token, folder, fleet, tools)
                plan.write()
                with self._looking_after(fleet, plan):
                    status = self._pytest(plan, supervisor)
                interrupted = self._interrupted or plan.was_interrupted
                return self._finished(plan.run_id, status, interrupted=interrupted)
            except KeyboardInterrupt:
                # A second Ctrl-C, or SIGTERM: keep the results so far.
                if plan is None or not plan.run_id:
                    raise
                return self._finished(plan.run_id, 0, interrupted=True)

    def _fleet(self, folder: Path, supervisor: Supervisor) -> Fleet:

        config, request = self._config, self._request
        if request.virtual:
            return virtual_fleet(config, [self._soc], request.virtual, request.backend, supervisor, folder)
        return attached_fleet(config, [self._soc], request.backend, request.choice, supervisor, self._store)

    @contextlib.contextmanager
    def _looking_after(self, fleet: Fleet, plan: SuitePlan) -> Iterator[None]:
        """Keep the connections to the devices, which workers lease, and print the notes of workers."""
        from farm.dispatch.pool.device_pool import DevicePool

        printed = 0

        def look() -> list[str]:
            nonlocal printed
            lines = plan.notes()[printed:]
            printed += len(lines)
            for device, reason in plan.devices_left().items():
                pool.retire(device, reason)
            return [*lines, *fleet.revive()]

        pool = DevicePool(fleet.devices, self._store, None, revive=look)
        pool.begin(lambda: None)
        try:
            yield
        finally:
            pool.close()
            for line in plan.notes()[printed:]:
                logger.info(line)

    def _free(self, fleet: Fleet) -> list[Device]:
        """Return the devices that workers can lease now."""
        open_to_us = ("", self._store.user)
        leases = self._store.leases.all() if fleet.leased else []
        taken = {one.device for one in leases if one.token or one.reserved_for not in open_to_us}
        return [device for device in fleet.devices if device.id not in taken]

    def _lay_out_leases(self, folder: Path, fleet: Fleet) -> str:
        """Return the URL of a store for leases of the command's own devices; empty for shared devices."""
        from farm.store.leases.registry import Seen
        from farm.store.store import open_store

        if fleet.leased:
            return ""
        url = f"sqlite:///{folder / 'leases.db'}"
        with open_store(url) as store:
            store.devices.see([Seen(device, "device", None) for device in fleet.devices])
        return url

    def _plan(self, token: str, folder: Path, fleet: Fleet, tools: Toolchain) -> SuitePlan:

        kind = common_kind(device.kind for device in fleet.devices)
        free = self._free(fleet)[: self._request.most_devices]
        if free:
            logger.info("pytest with %s: %s", plural(len(free), "device"), ", ".join(device.serial for device in free))
        else:
            logger.info(_NONE_FREE)
        return SuitePlan(
            token=token,
            folder=folder,
            soc=self._soc.name,
            backend=self._request.backend,
            devices=tuple(fleet.devices),
            # Without a free device one worker waits.
            workers=max(1, len(free)),
            runtimes=fleet.runtimes,
            leased=fleet.leased,
            leases=self._lay_out_leases(folder, fleet),
            lease_times=self._config.leases if fleet.leased else _OWN_LEASES,
            purpose=self._request.command,
            record=run_record(
                self._config,
                self._store,
                tools,
                command=self._request.command,
                facts=tools.fingerprint(kind),
                purpose=self._request.purpose,
                name=self._request.name,
            ),
            cache_root=self._config.cache_dir,
            suite_folders=self._config.suite_folders,
            versions=dict(tools.versions),
            compiler=tools.compiler,
            build_timeout_s=self._config.build_timeout_s,
            build_limits=MemoryLimits(self._config.build_memory_mb, self._config.build_recycle_mb),
            health=self._config.health,
            upstream=self._request.upstream,
        )

    def _pytest(self, plan: SuitePlan, supervisor: Supervisor) -> int:
        """Return pytest's exit status."""
        # Set all on the command line, which takes precedence over an ini file.
        python = plan.compiler.python
        argv = [python, "-m", "pytest", *_PLUGINS, *self._rooted, "-n", "auto", *self._request.arguments]
        popen = _popen_on_stderr if self._request.quiet else None
        child = supervisor.spawn(argv, name="pytest", env=self._environment(plan), foreground=True, popen=popen)
        try:
            return child.process.wait()
        except KeyboardInterrupt:
            self._interrupted = True
            return _let_end(child)

    def _environment(self, plan: SuitePlan) -> dict[str, str]:
        from farm.dispatch.pytest_plugin.upstream import lay_out_sdk

        config = self._config
        outside = outside_environment(config.cache_dir, config.sdk_root, runner_executorch(config))
        sdk = lay_out_sdk(plan.folder / "sdk", Path(outside["QNN_SDK_ROOT"]), self._soc)
        return {
            **os.environ,
            **plan.compiler.env,
            **outside,
            "QNN_SDK_ROOT": str(sdk),
            "PATH": f"{find_adb().parent}:{os.environ.get('PATH', os.defpath)}",
            PLAN_VARIABLE: str(plan.path),
            STORE_VARIABLE: self._config.store_url,
        }

    def _finished(self, run_id: str, status: int, *, interrupted: bool) -> RunOutcome:
        if not run_id:
            raise _without_tests(status, interrupted=interrupted)
        exit_code: int = ExitCode.INFRA
        try:
            exit_code = INTERRUPTED if interrupted else self._exit_code(run_id, status)
        finally:
            self._store.finish_run(run_id, exit_code)
        view = self._store.runs.view(run_id)
        folder = self._config.run_folder(run_id)
        folder.mkdir(parents=True, exist_ok=True)
        report = write_report(view, folder / "report.html", self._store, self._config)
        return RunOutcome(exit_code, view, report)

    def _exit_code(self, run_id: str, status: int) -> int:
        if status == _PYTEST_INTERNAL or status < 0:
            logger.warning("pytest ended by an internal error (%s): the reason is in its output above", ending(status))
            return ExitCode.INFRA
        found = exit_code_of(self._store.runs.view(run_id))
        # Other plugins may fail a session by themselves, for example for its coverage.
        return found or (1 if status else 0)


def _popen_on_stderr(words: Sequence[str], **how: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen(words, **{**how, "stdout": sys.stderr.fileno()})


def _require_plugin(compiler: Compiler) -> None:
    """Raise MissingToolError if the interpreter of a toolchain cannot load pytest with farm's plugin."""
    if Path(compiler.python) == Path(sys.executable):
        return
    imports = "import pytest, xdist; from farm.dispatch.pytest_plugin import plugin, worker"
    answer = ask_program([compiler.python, "-c", imports], None, {**os.environ, **compiler.env})
    if answer.code:
        raise MissingToolError(
            f"farm pytest runs your tests under {compiler.python}, which cannot load farm's plugin: "
            f"{one_line(answer.reason)}: {compiler.python} -m pip install snapdragon-farm"
        )


def _without_tests(status: int, *, interrupted: bool) -> BaseException:
    """Return the error for a session without a collected test."""
    if interrupted:
        return KeyboardInterrupt()
    if status == _PYTEST_EMPTY:
        return NothingSelectedError("pytest collected no test: what stands behind -- selects none")
    if status == _PYTEST_USAGE:
        return UsageError("pytest could not start: its output above names the argument, ini file or conftest")
    return InfraError(f"pytest ended without a recorded test ({ending(status)}): the reason is in its output above")


def _let_end(child: Child) -> int:
    """Wait until pytest, which was interrupted as well, has cleaned up and ended; return its exit status."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # Pytest ignores the signal as well, as under nohup.
        return child.terminate()
    if not _hears_terminal():
        with contextlib.suppress(ProcessLookupError):
            os.kill(child.pid, signal.SIGINT)
    try:
        return child.process.wait(_ENDING_SECONDS)
    except subprocess.TimeoutExpired:
        return child.terminate()


def _hears_terminal() -> bool:
    """Return whether a terminal sends Ctrl-C to this process and its children."""
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)
