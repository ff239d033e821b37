"""The pytest plugin that `farm pytest` loads into the user's pytest: fixtures, and hooks of both kinds of process."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest

from farm.pytest_plugin.distribution import distribution_problem
from farm.pytest_plugin.plan import GIVEN_UP, read_plan
from farm.pytest_plugin.record import FACTS, OPEN
from farm.pytest_plugin.rework import is_framework, stand_in_for_subtests

if TYPE_CHECKING:
    from collections.abc import Generator

    from farm.pytest_plugin.bundles import Bundles
    from farm.pytest_plugin.device import LeasedDevice
    from farm.pytest_plugin.runner import Runner
    from farm.pytest_plugin.worker import SuiteWorker

_WORKER = pytest.StashKey["SuiteWorker"]()

INFRA = "farm_infra"
"""Attribute of a report of a failure that the farm or the device is to blame for."""


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Take part, in a worker or in the process that starts them."""
    if is_framework(config):
        stand_in_for_subtests()
    plan = read_plan()
    if plan is None:
        return
    if not hasattr(config, "workerinput"):
        if problem := distribution_problem(config.getoption("dist", "no")):
            raise pytest.UsageError(problem)
        if config.getoption("numprocesses", None):
            from farm.pytest_plugin.controller import SuiteController

            config.pluginmanager.register(SuiteController(plan, config), "farm-controller")
        return
    from farm.devices.adb.names import choose_server
    from farm.pytest_plugin.worker import SuiteWorker

    worker = config.stash[_WORKER] = SuiteWorker(plan, int(config.workerinput["farm_device"]))
    if variables := worker.run.transport.tool_environment():
        choose_server(os.environ, variables)
    worker.upstream.set_options(config)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Give the device back as it was found."""
    worker = config.stash.get(_WORKER, None)
    if worker is not None:
        worker.close()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Write where the tests are, before any of them is reported."""
    worker = session.config.stash.get(_WORKER, None)
    if worker is not None:
        worker.plan.leave_files({item.nodeid.partition("::")[0]: str(item.path) for item in session.items})


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Let the worker know which test runs."""
    worker = item.config.stash.get(_WORKER, None)
    if worker is None:
        return (yield)
    worker.begin_test(item.path.parent)
    with worker.upstream.around(item):
        return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Make sure of the device before anything of the test begins."""
    __tracebackhide__ = True
    worker = item.config.stash.get(_WORKER, None)
    if worker is not None:
        worker.get_ready()
        worker.upstream.prepare(item)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Tell a failure of the farm or the device from one of the test, and add what the worker knows."""
    report = yield
    worker = item.config.stash.get(_WORKER, None)
    if worker is None:
        return report
    if report.failed and call.excinfo is not None and (why := worker.blame(call.excinfo.value)):
        setattr(report, INFRA, why)
        report.sections.append(("farm", f"the farm or the device is to blame, not the test: {why}"))
    elif report.failed and (cause := worker.open_cause):
        setattr(report, OPEN, str(cause))
    if report.when == "teardown":
        setattr(report, FACTS, worker.facts().packed())
        setattr(report, GIVEN_UP, bool(worker.given_up))
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_report_teststatus(report: pytest.TestReport) -> tuple[str, str, Any] | None:
    """Show what the farm or the device is to blame for by a letter of its own."""
    if getattr(report, INFRA, "") and report.failed:
        return "failed", "I", ("INFRA", {"purple": True})
    if getattr(report, OPEN, "") and report.outcome == "rerun":  # type: ignore[comparison-overlap]
        return "rerun", "R", ("ANOTHER DEVICE", {"yellow": True})
    return None


@pytest.fixture(scope="session")
def device(pytestconfig: pytest.Config) -> LeasedDevice:
    """The device of this worker: run programs on it, push and pull files."""
    return _worker(pytestconfig).device


@pytest.fixture(scope="session")
def runner(pytestconfig: pytest.Config) -> Runner:
    """Runs a program of `bundle` on the device of this worker: outputs as numpy arrays, latency, profile."""
    from farm.pytest_plugin.bundles import Bundles
    from farm.pytest_plugin.runner import Runner

    worker = _worker(pytestconfig)
    return Runner(worker, Bundles(worker).canary)


@pytest.fixture(scope="session")
def bundle(pytestconfig: pytest.Config) -> Bundles:
    """Makes programs for the device: `bundle.case`, `bundle.module` and `bundle.pte`."""
    from farm.pytest_plugin.bundles import Bundles

    return Bundles(_worker(pytestconfig))


def _worker(config: pytest.Config) -> SuiteWorker:
    worker = config.stash.get(_WORKER, None)
    if worker is None:
        raise pytest.UsageError("devices are there for tests that 'farm pytest' runs: docs/pytest.md")
    return worker
