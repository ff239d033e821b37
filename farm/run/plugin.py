"""The pytest plugin: every job is an item. Loaded in the controller and in every worker with `-p`."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from farm.request.plan import RunPlan, read_plan
from farm.run.scheduler import IDLE

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    from _pytest._code.code import ExceptionInfo

    from farm.request.plan import PlannedJob
    from farm.results.attempt import Attempt
    from farm.run.worker import Done, Returned, Worker

PLAN = pytest.StashKey[RunPlan]()
_WORKER = pytest.StashKey["Worker"]()
_FOLLOWING = pytest.StashKey["PlannedJob | None"]()

REPORT_KEY = "farm"
"""Name of the report property that carries what the controller shows of an attempt."""

OUTVOTED_KEY = "farm_outvoted"
"""Name of the property of an attempt that passed: serials of the devices on which the job had failed."""

REPEAT_KEY = "farm_repeat"
"""Name of the property of an attempt that another device should make again: serials of those that need not."""

RETURNED_KEY = "farm_returned"
"""Name of the property of a job that was not begun, because its device may not be used."""


SHORT_KEY = "farm_job"
"""Of a report as a worker without a pytest session sends it (farm.run.remote): a JobReport as JSON."""


class JobReport(msgspec.Struct, omit_defaults=True):
    """How an item of such a worker ended."""

    index: int
    """Of the job in the plan; the idle item is behind the last."""
    nodeid: str
    seconds: float
    properties: list[tuple[str, Any]] = []
    outcome: str = "passed"
    text: str = ""
    """Why it did not pass."""
    known_issue: str = ""


class JobNotPassed(Exception):  # noqa: N818 - it is an outcome, not an error of farm's
    """Ends an item whose attempt did not pass."""

    def __init__(self, attempt: Attempt, *, repeated: bool = False) -> None:
        self.attempt, self.repeated = attempt, repeated
        super().__init__(text_of(attempt))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options that `farm.request.pytest_session` gives."""
    group = parser.getgroup("farm")
    group.addoption("--farm-plan", help="plan of a run, as written by farm run")
    group.addoption("--farm-sessions", action="store_true", help="workers have a session of pytest's")


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Read the plan; show nothing: farm's own listener does."""
    path = config.getoption("--farm-plan")
    if not path:
        return
    config.stash[PLAN] = read_plan(Path(path))
    config.pluginmanager.unregister(name="terminalreporter")
    if hasattr(config, "workerinput"):
        prepare_process(config.stash[PLAN], _number(config))


def prepare_process(plan: RunPlan, number: int) -> None:
    """Set the signals of a worker's process, and import what it takes to run a job on device `number`.

    That takes a second: now, as everybody waits for the last worker to begin.
    """
    # A terminal sends Ctrl-C to all: the first lets jobs finish, and it is for the controller to say what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    import farm.run.worker  # noqa: F401
    from farm.devices.connect import open_transport

    open_transport(plan.devices[number]).close()


class JobFile(pytest.File):
    """The plan, as the collector of its jobs."""

    def collect(self) -> Iterator[pytest.Item]:
        """Yield one item a job, in dispatch order."""
        for planned in self.config.stash[PLAN].jobs:
            yield JobItem.from_parent(self, name=planned.job.id, nodeid=planned.job.id, planned=planned)


class JobItem(pytest.Item):
    """One job."""

    def __init__(self, *, planned: PlannedJob, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.planned = planned

    def runtest(self) -> None:
        """Run the job on the device of this worker. Raises JobNotPassed."""
        from farm.errors import StoreError
        from farm.results.attempt import Verdict
        from farm.run.worker import Done, Returned

        try:
            worker = _worker(self.config)
        except StoreError as error:
            device = self.config.stash[PLAN].devices[_number(self.config)]
            done: Done | Returned = Returned(device.serial, halt=f"the store: {error}")
        else:
            done = worker.run(self.planned, self.config.stash.get(_FOLLOWING, None))
        self.user_properties.extend(properties_of(done))
        if isinstance(done, Done) and done.attempt.verdict is Verdict.SKIPPED:
            pytest.skip(done.attempt.reason)
        if isinstance(done, Done) and done.attempt.verdict is not Verdict.PASSED:
            raise JobNotPassed(done.attempt, repeated=bool(done.avoid))

    def setup(self) -> None:
        """Forget the report of an earlier execution in this process."""
        self.user_properties.clear()

    def repr_failure(self, excinfo: ExceptionInfo[BaseException], style: Any = None) -> Any:
        """Return the reason, without a traceback through farm."""
        if isinstance(excinfo.value, JobNotPassed):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, int | None, str]:
        """Return where the job stands: nowhere but in its name."""
        return self.path, None, self.name


class IdleItem(pytest.Item):
    """Follows the last job that a worker has; it only looks whether the device is still the worker's."""

    def runtest(self) -> None:
        """Let go of the device where that is wanted."""
        self.user_properties.clear()
        returned = _worker(self.config).look()
        if returned is not None:
            self.user_properties.extend(properties_of(returned))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Add the idle item, in workers, after everything was selected."""
    if PLAN in config.stash and hasattr(config, "workerinput"):
        items.append(IdleItem.from_parent(session, name=IDLE, nodeid=IDLE))


def properties_of(done: Done | Returned) -> list[tuple[str, object]]:
    """Return what the report of an item carries to the controller."""
    from farm.run.worker import Returned

    if isinstance(done, Returned):
        return [(RETURNED_KEY, done.shown())]
    lists = {OUTVOTED_KEY: list(done.outvoted), REPEAT_KEY: list(done.avoid)}
    return [(REPORT_KEY, shown(done.attempt)), *((key, serials) for key, serials in lists.items() if serials)]


def shown(attempt: Attempt) -> dict[str, str | float]:
    """Return what a progress listener receives of an attempt."""
    return {
        "job_id": attempt.job_id,
        "verdict": str(attempt.verdict),
        "stage": str(attempt.stage),
        "reason": attempt.reason,
        "device": attempt.device,
        "seconds": attempt.seconds,
        "known_issue": attempt.known_issue,
    }


def text_of(attempt: Attempt) -> str:
    """Return why an attempt did not pass, with its log."""
    text = f"{attempt.verdict} at {attempt.stage}: {attempt.reason}"
    return f"{text}\n{attempt.log}" if attempt.log else text


def pytest_report_from_serializable(data: dict[str, Any]) -> pytest.TestReport | None:
    """Return the report of an item that a worker without a pytest session has run."""
    if SHORT_KEY not in data:
        return None
    job = msgspec.json.decode(data[SHORT_KEY], type=JobReport)
    extra: dict[str, Any] = {"wasxfail": f"known issue: {job.known_issue}"} if job.known_issue else {}
    return pytest.TestReport(
        nodeid=job.nodeid or IDLE,
        location=("", None, job.nodeid),
        keywords={},
        outcome=job.outcome,  # type: ignore[arg-type]
        longrepr=job.text or None,
        when="call",
        duration=job.seconds,
        user_properties=job.properties,
        # Of the session: reports and the end of an item are two messages where pytest runs it.
        completed_index=job.index,
        **extra,
    )


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """Collect the plan, and nothing else that may lie beside it."""
    plan = parent.config.stash.get(PLAN, None)
    if plan is None or file_path != plan.path:
        return None
    collector = JobFile.from_parent(parent, path=file_path)
    # `-k plan` must not select every job of a file that the user never saw.
    collector.name = ""
    return collector


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Note what comes after a job, so that it can be staged meanwhile."""
    item.config.stash[_FOLLOWING] = nextitem.planned if isinstance(nextitem, JobItem) else None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    call: pytest.CallInfo[None],
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Turn a failure that is a known issue into an expected one, as pytest's xfail does."""
    report = yield
    if call.excinfo is not None and isinstance(call.excinfo.value, JobNotPassed):
        known_issue = call.excinfo.value.attempt.known_issue
        if call.excinfo.value.repeated:
            # Neither passed nor failed yet: -x waits for the last word.
            report.outcome = "rerun"  # type: ignore[assignment]
        elif known_issue:
            report.outcome = "skipped"
            report.wasxfail = f"known issue: {known_issue}"
            report.longrepr = str(call.excinfo.value)
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Give the device back."""
    worker = session.config.stash.get(_WORKER, None)
    if worker is not None:
        worker.close()


def _worker(config: pytest.Config) -> Worker:
    if _WORKER not in config.stash:
        from farm.run.worker import Worker

        controller = int(config.workerinput["farm_controller"])  # type: ignore[attr-defined]
        config.stash[_WORKER] = Worker(config.stash[PLAN], _number(config), controller)
    return config.stash[_WORKER]


def _number(config: pytest.Config) -> int:
    """Return the number of this worker's device."""
    return int(config.workerinput["farm_device"])  # type: ignore[attr-defined]
