"""Device processes: messages, jobs on a virtual device, and forks of one server with their environment and ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import msgspec
import pytest
from made import device as made_device
from stub_farm import make_bundle, make_stub_farm
from waiting import ends, until

from farm.base.errors import InfraError
from farm.base.fork_server import ForkProcess, ForkServer
from farm.base.machine import now_s
from farm.base.processes import Child, Supervisor
from farm.builds.bundles.cache import BundleCache
from farm.devices.device import HealthEvent
from farm.dispatch import messages
from farm.dispatch.device_forks import PROCESS_NAME, SERVER_NAME, device_forks
from farm.dispatch.device_process import DeviceLoop
from farm.dispatch.device_run.health_check import health_check_job
from farm.dispatch.request.profiling import Profile
from farm.dispatch.request.request import RunPlan
from farm.results.attempt import Attempt, Cause, Stage, Verdict
from farm.store.cluster.records import PlannedJob

# Messages of a device process, with a stub in the place of its worker.


PLANNED = PlannedJob(health_check_job("SM8650", "htp"), "key", cached=True)


class StubWorker:
    """Passes every job, and reports `event` before each."""

    def __init__(self, _plan: RunPlan, _number: int, grant: Callable[[], messages.Grant], **parts: Any) -> None:
        self._grant, self._record_health = grant, parts["record_health"]
        self.event: HealthEvent | None = None
        self.fault: Exception | None = None
        self.jobs = 0

    def run(self, planned: PlannedJob, *_: object) -> messages.JobEnded | messages.JobReturned:
        if not self._grant().go:
            return messages.JobReturned()
        self.jobs += 1
        if self.fault is not None:
            raise self.fault
        if self.event is not None:
            self._record_health(self.event)
        return messages.JobEnded((Attempt(planned.job.id, Verdict.PASSED, Stage.DONE, ""),))

    def apply_grant(self) -> messages.JobReturned:
        return messages.JobReturned()

    def abort(self) -> None: ...
    def close(self) -> None: ...


class Process:
    """A loop that is stepped."""

    def __init__(self, folder: Path) -> None:
        self.workers: list[StubWorker] = []
        self.told: list[Any] = []
        self.loop = DeviceLoop(self.told.append, self._make)  # type: ignore[arg-type]
        plan = RunPlan("run", folder, folder, (PLANNED,), (made_device("phone"),), {}, folder)
        plan.write()
        self.begin = messages.Begin(str(plan.path))

    def _make(self, *arguments: Any, **parts: Any) -> StubWorker:
        self.workers.append(StubWorker(*arguments, **parts))
        return self.workers[-1]

    def take(self, *sent: Any) -> list[Any]:
        """Handle messages, and return the answers."""
        self.told.clear()
        for message in sent:
            self.loop.take(message)
        while self.loop.has_message:
            self.loop.step()
        return list(self.told)


@pytest.fixture
def process(tmp_path: Path) -> Process:
    return Process(tmp_path)


def test_a_worker_counts_failures_from_shard_to_shard_of_a_run(process: Process) -> None:
    go, stop = messages.Grant(go=True, fence=1), messages.Grant(go=False)
    for number in range(3):
        # A shard, then the device is left, and the next shard of the run follows under another lease.
        begin = [] if number else [process.begin]
        answers = process.take(go, *begin, messages.RunJob(number, PLANNED))
        assert [type(one) for one in answers] == [messages.JobBegun, messages.JobEnded]
        assert process.take(stop, messages.ApplyGrant()) == [messages.JobReturned()]
    [worker] = process.workers
    assert worker.jobs == 3


def test_trouble_of_farm_over_a_job_is_its_result_with_the_traceback(process: Process) -> None:
    process.take(messages.Grant(go=True), process.begin)
    process.workers[0].fault = ValueError("frame\n" * 20_000 + "\x1b[2Jno")
    [_, ended] = process.take(messages.RunJob(4, PLANNED))
    [attempt] = ended.attempts
    assert (ended.number, attempt.verdict, attempt.cause) == (4, Verdict.INFRA, Cause.WORKER)
    assert attempt.reason == "the worker broke down over this job: no"
    assert attempt.log.endswith("frame\nno\n")
    assert len(attempt.log) < 70_000
    process.workers[0].fault = RuntimeError("of a library\n")
    [_, ended] = process.take(messages.RunJob(5, PLANNED))
    assert ended.attempts[0].reason == "the worker broke down over this job: RuntimeError: of a library"


def test_a_broken_job_tells_no_health_event_and_the_run_begins_with_another_worker(process: Process) -> None:
    go = messages.Grant(go=True)
    process.take(go, process.begin)
    process.workers[0].event = HealthEvent("phone", "check_failed", "suspect", "it was broken off")
    assert any(isinstance(one, messages.DeviceEvent) for one in process.take(messages.RunJob(0, PLANNED)))
    answers = process.take(messages.Abort(), messages.RunJob(1, PLANNED))
    assert not any(isinstance(one, messages.DeviceEvent) for one in answers)
    assert answers[-1] == messages.JobReturned(number=1)
    process.take(go, process.begin, messages.RunJob(1, PLANNED))
    assert [worker.jobs for worker in process.workers] == [2, 1]


# A device process runs jobs on a real (virtual) device and sends their results.


class Device:
    """A virtual device with a stub of its runner, and a process for it."""

    def __init__(self, supervisor: Supervisor, folder: Path) -> None:
        farm = make_stub_farm(folder, devices=1, jobs=3, latency_ms=20, planted={}, supervisor=supervisor)
        self.plan = RunPlan(
            "run", folder / "run", farm.cache_root, farm.jobs, farm.devices, farm.runtimes, folder / "artifacts",
            health_checks=farm.health_checks, leased=True, profile=Profile.OFF,
        )  # fmt: skip
        self.health: list[str] = []
        self._log, self._heard = folder / "device.log", SimpleQueue[messages.FromDevice]()
        self.process = messages.ForkedProcess(device_forks(supervisor), self._log)
        self.process.start(self._heard.put)

    def begin(self, **facts: Any) -> list[messages.RunJob]:
        """Begin a run of the plan with `facts`, and return its jobs."""
        plan = msgspec.structs.replace(self.plan, **facts)
        plan.prepare_folder()
        self.process.send(messages.Begin(str(plan.path)))
        return [messages.RunJob(n, planned, more=n < len(plan.jobs) - 1) for n, planned in enumerate(plan.jobs)]

    def hear(self) -> messages.FromDevice:
        """Return the next message; events of the device's health are kept."""
        try:
            message = self._heard.get(timeout=60)
        except Empty:
            raise AssertionError(self._log.read_text()) from None
        if isinstance(message, messages.DeviceEvent):
            self.health.append(message.event.event)
        return message

    def answers(self, count: int) -> list[messages.FromDevice]:
        """Return the next answers."""
        found: list[messages.FromDevice] = []
        while len(found) < count:
            if not isinstance(message := self.hear(), messages.DeviceEvent | messages.JobBegun):
                found.append(message)
        return found


def lease(until_s: float) -> messages.Grant:
    return messages.Grant(go=True, fence=3, until_s=until_s)


def test_jobs_end_one_after_the_other_and_a_broken_run_leaves_the_device(tmp_path: Path) -> None:
    with Supervisor() as supervisor:
        device = Device(supervisor, tmp_path)
        runs = device.begin()
        # Without a lease nothing begins.
        device.process.send(lease(now_s() - 1), *runs)
        assert device.answers(3) == [messages.JobReturned(number=number) for number in range(3)]
        device.process.send(lease(now_s() + 100), *runs)
        for run, ended in zip(runs, device.answers(3), strict=True):
            assert isinstance(ended, messages.JobEnded), ended
            [attempt] = ended.attempts
            assert (ended.number, attempt.verdict) == (run.number, Verdict.PASSED), attempt
            assert attempt.job_id == run.planned.job.id
        assert device.health == ["check_passed"]
        # The same jobs, which take minutes now.
        key = make_bundle(BundleCache(device.plan.cache_root), "pass 100000")
        jobs = tuple(msgspec.structs.replace(one, key=key) for one in device.plan.jobs)
        device.process.send(*device.begin(folder=tmp_path / "long", jobs=jobs))
        while not isinstance(device.hear(), messages.JobBegun):
            continue
        device.process.send(messages.Grant(go=False), messages.Abort(), messages.ApplyGrant())
        assert device.answers(4) == [
            messages.JobReturned(number=number) for number in (0, 1, 2, messages.GRANT_APPLIED)
        ]
        assert not list((tmp_path / "devices").glob("*/data/local/tmp/farm*/**/run-*"))
        # A job that farm broke off is no event of the device.
        assert set(device.health) == {"check_passed"}
        device.process.close()


# Device processes as forks of one server: their environment, descriptors, exit codes and ends.


# Variables of the documentation that open a store, its files, a server, a forge or a collector of spans.
ACCESS = (
    "FARM_STORE", "FARM_TOKEN", "PGPASSWORD", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN",
    "GITHUB_TOKEN", "GITLAB_TOKEN", "OTEL_EXPORTER_OTLP_HEADERS", "OTEL_EXPORTER_OTLP_TRACES_HEADERS",
)  # fmt: skip

# A dispatcher in a process of its own, which prints the ids of its server and of a device process.
DISPATCHER = """
import json, pathlib, signal, sys
from farm.dispatch.device_forks import device_forks
from farm.base.processes import Child, Supervisor
with Supervisor() as supervisor:
    forks = device_forks(supervisor)
    forked = forks.fork(pathlib.Path(sys.argv[1]))
    print(json.dumps([forks.pid, forked.pid]), flush=True)
    signal.pause()
"""


class Heard:
    """A device process and its messages."""

    def __init__(self, forks: ForkServer, log: Path) -> None:
        self.messages: SimpleQueue[messages.FromDevice] = SimpleQueue()
        self.process = messages.ForkedProcess(forks, log)
        self.process.start(self.messages.put)
        self.pid = self.process.pid
        # A device process takes its name before it reads the first message.
        until(lambda: _name(self.pid) == PROCESS_NAME, "a device process")

    def end(self) -> str:
        """Return how it ended."""
        message = self.messages.get(timeout=60)
        assert isinstance(message, messages.ProcessEnded)
        return message.reason


@pytest.fixture(scope="module")
def supervisor() -> Iterator[Supervisor]:
    with Supervisor() as made:
        yield made


@pytest.fixture(scope="module")
def forks(supervisor: Supervisor) -> Iterator[ForkServer]:
    with pytest.MonkeyPatch.context() as patch:
        for name in ACCESS:
            patch.setenv(name, "secret-of-the-store")
        patch.setenv("FARM_TOLD", "yes")
        yield device_forks(supervisor)


@contextmanager
def device_process(forks: ForkServer, folder: Path) -> Iterator[Heard]:
    heard = Heard(forks, folder / "device.log")
    try:
        yield heard
    finally:
        heard.process.close()


def test_a_device_process_has_its_own_session_and_pipes_and_no_access(forks: ForkServer, tmp_path: Path) -> None:
    with device_process(forks, tmp_path / "first") as first, device_process(forks, tmp_path / "second") as second:
        assert _name(forks.pid) == SERVER_NAME
        for pid in (first.pid, second.pid):
            assert (int(_stat(pid)[1]), os.getsid(pid), os.getpgid(pid)) == (forks.pid, pid, pid)
        # With its pipes in another process, a process would not notice that the dispatcher has closed them.
        assert not _ends(first.pid) & _ends(second.pid) - _ends(forks.pid)
        for pid in (forks.pid, first.pid):
            environment = Path(f"/proc/{pid}/environ").read_bytes()
            assert b"secret-of-the-store" not in environment
            assert b"FARM_TOLD=yes" in environment.split(b"\0")
    assert not Path(f"/proc/{first.pid}").exists()


def test_the_exit_code_and_the_last_line_of_a_device_process_are_reported(forks: ForkServer, tmp_path: Path) -> None:
    with device_process(forks, tmp_path) as one:
        one.process.send(messages.Begin(str(tmp_path / "no-plan")))
        reason = one.end()
    assert reason.startswith("exit code 1: FileNotFoundError: ")
    assert "no-plan" in reason


def test_a_device_process_survives_ctrl_c_and_a_stopped_one_is_killed(forks: ForkServer, tmp_path: Path) -> None:
    with device_process(forks, tmp_path) as one:
        for pid in (forks.pid, one.pid):
            os.kill(pid, signal.SIGINT)
        assert not one.process.is_stopped
        os.kill(one.pid, signal.SIGSTOP)
        until(lambda: one.process.is_stopped, "a stopped process")
        one.process.kill()
        assert one.end() == f"signal {signal.SIGKILL}"
    with device_process(forks, tmp_path) as one:
        os.kill(one.pid, signal.SIGSEGV)
        assert one.end() == f"signal {signal.SIGSEGV}"


def test_after_the_server_was_killed_the_next_fork_starts_another(supervisor: Supervisor, tmp_path: Path) -> None:
    forks = device_forks(supervisor)
    with device_process(forks, tmp_path / "first") as first:
        before = forks.pid
        os.kill(before, signal.SIGKILL)
        assert ends(before)
        with device_process(forks, tmp_path / "second") as second:
            assert forks.pid != before
            assert int(_stat(second.pid)[1]) == forks.pid
            os.kill(second.pid, signal.SIGKILL)
            assert second.end() == f"signal {signal.SIGKILL}"
        # The reaper ends the children of a process that was killed.
        assert first.end().startswith(f"signal {signal.SIGKILL}")


def test_server_and_device_processes_end_with_the_dispatcher(tmp_path: Path) -> None:
    dispatcher = subprocess.Popen(
        [sys.executable, "-c", DISPATCHER, str(tmp_path / "log")], stdout=subprocess.PIPE, text=True
    )
    assert dispatcher.stdout is not None
    with dispatcher.stdout:
        pids = json.loads(dispatcher.stdout.readline())
        # Stopped processes do not notice that a socket or a pipe is closed.
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        dispatcher.kill()
        dispatcher.wait()
        until(lambda: not any(map(_is_alive, pids)), "their end")


@pytest.fixture(scope="module")
def server(supervisor: Supervisor) -> Iterator[ForkServer]:
    """Server whose forks print a variable and their first word, wait for the end of their input, and end with 7."""
    run = "def run(words): os.write(1, os.environb[b'FARM_TOLD'] + b' ' + os.fsencode(words[0])) if words else None"
    program = f"import os, sys\nfrom farm.base.fork_server import serve_forks\n{run}; sys.stdin.read(); return 7\n"
    started = [sys.executable, "-P", "-c", program + "serve_forks(print, run)"]
    server = ForkServer(supervisor, started, name="forks", env=dict(os.environ))
    assert server.wait_ready(60)
    yield server
    server.close()


@pytest.fixture
def fork(server: ForkServer, tmp_path: Path) -> Iterator[Callable[[], ForkProcess]]:
    """Function that forks the server; the end of the test closes the pipes."""
    with ExitStack() as ending:

        def fork() -> ForkProcess:
            made = server.fork(tmp_path / "log")
            ending.callback(made.lifeline.cut)
            ending.callback(made.stdout.close)
            return made

        yield fork


def spawn(supervisor: Supervisor, server: ForkServer, word: str, folder: Path) -> Child:
    return supervisor.spawn(
        [word], name="fork", stdin_pipe=True, stdout_pipe=True, stderr=folder / "stderr", popen=server.popen
    )


def test_a_fork_gets_variables_and_arguments_that_are_not_utf8_and_none_that_are_too_long(
    supervisor: Supervisor, server: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The name of a user or a folder in Latin-1.
    name = os.fsdecode(b"Andr\xe9")
    monkeypatch.setenv("FARM_TOLD", name)
    child = spawn(supervisor, server, name, tmp_path).process
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.close()
    assert (child.stdout.read(), child.wait(60)) == (b"Andr\xe9 Andr\xe9", 7)
    for number in range(16):
        monkeypatch.setenv(f"FARM_LONG_{number}", "x" * 100_000)
    with pytest.raises(InfraError, match="Message too long"):
        spawn(supervisor, server, "", tmp_path)
    assert server.is_alive


def test_a_server_that_answers_no_longer_is_killed_and_the_next_fork_starts_another(
    supervisor: Supervisor,
    server: ForkServer,
    fork: Callable[[], ForkProcess],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("farm.base.fork_server._ANSWER_S", 0.3)
    os.kill(server.pid, signal.SIGSTOP)
    with pytest.raises(InfraError, match="forks has exited"):
        spawn(supervisor, server, "", tmp_path)
    assert not server.is_alive
    monkeypatch.undo()
    forked = fork()
    os.kill(forked.pid, signal.SIGKILL)
    assert forked.wait(60) == -signal.SIGKILL
    forked.stdin.close()


def test_an_endless_fork_delays_no_other(
    server: ForkServer, fork: Callable[[], ForkProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    # A killed process that waits in the kernel, as for a network disk, ends later.
    first = fork()
    monkeypatch.setattr("farm.base.fork_server._ANSWER_S", 2.0)
    codes: SimpleQueue[int | None] = SimpleQueue()
    waiting = threading.Thread(target=lambda: codes.put(first.wait()))
    waiting.start()
    with pytest.raises(Empty):
        codes.get(timeout=0.3)
    before = server.pid
    second = fork()
    assert server.pid == before
    for one in (first, second):
        one.stdin.close()
    assert (codes.get(timeout=60), second.wait(60)) == (7, 7)
    waiting.join()


def test_a_fork_that_a_debugger_holds_after_its_end_delays_no_other(
    server: ForkServer, fork: Callable[[], ForkProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("farm.base.fork_server._ANSWER_S", 2.0)
    first, second = fork(), fork()
    # PTRACE_SEIZE: until the debugger has taken note of the end, the server cannot.
    seize = f"print(ctypes.CDLL(None).ptrace(0x4206, {first.pid}, 0, 0), flush=True); sys.stdin.read()"
    debugger = subprocess.Popen(
        [sys.executable, "-c", f"import ctypes, sys; {seize}"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with debugger:
        assert debugger.stdout is not None
        if debugger.stdout.readline() != b"0\n":
            pytest.skip("this machine permits no debugger")
        first.stdin.close()
        assert first.wait(60) == -signal.SIGKILL
        assert server.is_alive
        assert second.poll() is None
    second.stdin.close()
    assert second.wait(60) == 7


def test_ctrl_c_during_a_fork_gives_no_other_request_its_answer(
    server: ForkServer, fork: Callable[[], ForkProcess]
) -> None:
    def interrupt(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    first = fork()
    os.kill(server.pid, signal.SIGSTOP)
    kept = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        with pytest.raises(KeyboardInterrupt):
            fork()
    finally:
        signal.signal(signal.SIGALRM, kept)
    os.kill(server.pid, signal.SIGCONT)
    first.stdin.close()
    assert first.wait(60) == 7


def _name(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the name: state, parent, ..."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _ends(pid: int) -> set[str]:
    """Return the pipes and sockets that a process has."""
    names = (os.readlink(file) for file in Path(f"/proc/{pid}/fd").iterdir())
    return {name for name in names if name.startswith(("pipe:", "socket:"))}


def _is_alive(pid: int) -> bool:
    try:
        return _stat(pid)[0] != "Z"
    except FileNotFoundError:
        return False
