"""The pytest plugin that `farm pytest` loads into the user's pytest: fixtures, and hooks of all its processes.

Each process that runs tests (a worker of xdist, or the only process) has a device. The process that reports (xdist's
controller, or the only process) records.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

import pytest

from farm.base.log_setup import RecordHandler
from farm.dispatch.pytest_plugin.plan import GIVEN_UP, read_plan
from farm.dispatch.pytest_plugin.record import FACTS, OPEN, PROCESS, SERIAL, SuiteRecorder
from farm.dispatch.pytest_plugin.upstream import is_framework, provide_subtests

if TYPE_CHECKING:
    from collections.abc import Generator

    from farm.dispatch.pytest_plugin.runner import Bundles, Runner
    from farm.dispatch.pytest_plugin.scheduling import GroupScheduling
    from farm.dispatch.pytest_plugin.worker import LeasedDevice, SuiteWorker

_WORKER = pytest.StashKey["SuiteWorker"]()
_SCHEDULING = pytest.StashKey["GroupScheduling"]()
_SUITE = pytest.StashKey[bool]()
"""True once upstream's tests of every backend are directed to the device."""

INFRA = "farm_infra"
"""Attribute of a report of a failure by fault of the farm or the device."""

# Key of xdist's `workerinput`: every device is to run every test.
_EACH = "farm_each"


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Limit the workers to the number of devices, before xdist reads the option."""
    plan, count = read_plan(), config.getoption("numprocesses", None)
    if plan is not None and isinstance(count, int):
        config.option.numprocesses = min(count, plan.workers)


@pytest.hookimpl(optionalhook=True, tryfirst=True)
def pytest_xdist_auto_num_workers() -> int | None:
    """Return one worker for each device."""
    plan = read_plan()
    return plan.workers if plan is not None else None


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Set up the plugin's parts in this process: a recorder, a worker, or both."""
    if is_framework(config):
        provide_subtests()
    plan = read_plan()
    if plan is None:
        return
    worker_input = getattr(config, "workerinput", None)
    if worker_input is None:
        config.pluginmanager.register(SuiteRecorder(plan, config), "farm-recorder")
    if worker_input is not None or not config.getoption("numprocesses", None):
        from farm.dispatch.pytest_plugin.lease import DeviceLease
        from farm.dispatch.pytest_plugin.worker import SuiteWorker

        # Lines about leases, which the command prints. Tests with `caplog` see none of them.
        pool = logging.getLogger("farm.dispatch.pool")
        pool.propagate = False
        pool.setLevel(logging.INFO)
        pool.addHandler(RecordHandler(plan.leave_note))
        lease = DeviceLease(plan, exchanges=not (worker_input or {}).get(_EACH, False))
        config.stash[_WORKER] = SuiteWorker(plan, lease, config)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Send a new worker the distribution mode of tests, which xdist does not send."""
    node.workerinput[_EACH] = node.config.getoption("dist") == "each"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config) -> GroupScheduling | None:
    """Distribute tests so that every mode ends, and a worker without a device gets none."""
    if read_plan() is None:
        return None
    from farm.dispatch.pytest_plugin.scheduling import GroupScheduling

    scheduling = config.stash[_SCHEDULING] = GroupScheduling(config)
    return scheduling


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Give the tests of a worker without a device to the other workers."""
    node = getattr(report, "node", None)
    if node is not None and getattr(report, GIVEN_UP, False) and (found := node.config.stash.get(_SCHEDULING, None)):
        found.give_up(node)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Restore and release the device."""
    worker = config.stash.get(_WORKER, None)
    if worker is not None:
        worker.close()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect upstream's flows of other backends."""
    plan = read_plan()
    if plan is None:
        return
    from farm.dispatch.pytest_plugin.backend_suite import is_of_backend

    other = [item for item in items if not is_of_backend(item, plan.backend)]
    if other:
        config.hook.pytest_deselected(items=other)
        items[:] = [item for item in items if item not in set(other)]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Write the paths of the test files, before the first report of a test."""
    worker = session.config.stash.get(_WORKER, None)
    if worker is not None:
        worker.plan.leave_files({item.nodeid.partition("::")[0]: str(item.path) for item in session.items})


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    """Begin the test at the worker; a test that failed, perhaps by fault of its device, runs again on the next one."""
    worker = item.config.stash.get(_WORKER, None)
    if worker is None:
        return (yield)
    worker.begin_test(item.path.parent)
    with worker.upstream.around(item):
        done = yield
    if worker.repeats:
        return item.ihook.pytest_runtest_protocol(item=item, nextitem=nextitem)
    return done


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Check the device before any part of the test begins."""
    __tracebackhide__ = True
    worker = item.config.stash.get(_WORKER, None)
    if worker is not None:
        worker.get_ready()
        worker.upstream.prepare(item)
        _prepare_suite(item, worker)


def _prepare_suite(item: pytest.Item, worker: SuiteWorker) -> None:
    """Direct upstream's tests of every backend to the device, before the first one."""
    from farm.dispatch.pytest_plugin import backend_suite

    if backend_suite.flow_of(item) is not None and item.config.stash.get(_SUITE, None) is None:
        backend_suite.BackendSuite(worker).take_over()
        item.config.stash[_SUITE] = True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Mark failures of the farm or the device, apart from failures of the test, and add the worker's facts."""
    report = yield
    worker = item.config.stash.get(_WORKER, None)
    if worker is None:
        return report
    if call.when == "call" and item.config.stash.get(_SUITE, None) is not None:
        from farm.dispatch.pytest_plugin.backend_suite import result_of

        worker.upstream_result = result_of(item)
    is_expected = report.skipped and hasattr(report, "wasxfail")
    error = call.excinfo.value if call.excinfo is not None and (report.failed or is_expected) else None
    if error is not None and (why := worker.classify(error)):
        if is_expected:
            # The test may be expected to fail, its device is not.
            report.outcome = "failed"
            del report.wasxfail
        setattr(report, INFRA, why)
        report.sections.append(("farm", f"the farm or the device is at fault, not the test: {why}"))
    elif report.failed and (cause := worker.open_cause):
        setattr(report, OPEN, str(cause))
    if report.failed and (hasattr(report, INFRA) or hasattr(report, OPEN)) and worker.decide_repeat():
        report.outcome = "rerun"  # type: ignore[assignment]
    setattr(report, SERIAL, worker.serial)
    setattr(report, PROCESS, os.getpid())
    if report.when == "teardown":
        setattr(report, FACTS, worker.facts().packed())
        setattr(report, GIVEN_UP, bool(worker.given_up))
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_report_teststatus(report: pytest.TestReport) -> tuple[str, str, Any] | None:
    """Show failures of the farm or the device by their own letter."""
    if getattr(report, INFRA, "") and report.failed:
        return "failed", "I", ("INFRA", {"purple": True})
    if hasattr(report, SERIAL) and report.outcome == "rerun":  # type: ignore[comparison-overlap]
        return "rerun", "R", ("ANOTHER DEVICE", {"yellow": True})
    return None


@pytest.fixture(scope="session")
def device(pytestconfig: pytest.Config) -> LeasedDevice:
    """Device of this worker, on which tests run programs, and push and pull files."""
    return _worker(pytestconfig).device


@pytest.fixture(scope="session")
def runner(pytestconfig: pytest.Config) -> Runner:
    """Runner of programs of `bundle` on the device of this worker: outputs as numpy arrays, latency, profile."""
    from farm.dispatch.pytest_plugin.runner import Bundles, Runner

    worker = _worker(pytestconfig)
    return Runner(worker, Bundles(worker).health_check)


@pytest.fixture(scope="session")
def bundle(pytestconfig: pytest.Config) -> Bundles:
    """Programs for the device: `bundle.case`, `bundle.module` and `bundle.pte`."""
    from farm.dispatch.pytest_plugin.runner import Bundles

    return Bundles(_worker(pytestconfig))


def _worker(config: pytest.Config) -> SuiteWorker:
    worker = config.stash.get(_WORKER, None)
    if worker is None:
        raise pytest.UsageError("devices are there for tests that 'farm pytest' runs: docs/guides/pytest.md")
    return worker
