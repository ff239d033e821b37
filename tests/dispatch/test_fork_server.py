"""Device processes as forks of one server: their environment, descriptors, exit codes and ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Empty, SimpleQueue

import pytest
from waiting import ends, until

from farm.base.errors import InfraError
from farm.base.fork_server import ForkServer
from farm.base.processes import Child, Supervisor
from farm.dispatch.device_forks import PROCESS_NAME, SERVER_NAME, device_forks
from farm.dispatch.device_run.health_check import health_check_job
from farm.dispatch.messages import Begin, FromDevice, ProcessEnded
from farm.dispatch.process_link import ForkedProcess
from farm.dispatch.request.plan import RunPlan
from farm.store.cluster.records import PlannedJob

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
        self.messages: SimpleQueue[FromDevice] = SimpleQueue()
        self.process = ForkedProcess(forks, log)
        self.process.start(self.messages.put)
        self.pid = self.process.pid
        # A device process takes its name before it reads the first message.
        until(lambda: _name(self.pid) == PROCESS_NAME, "a device process")

    def end(self) -> str:
        """Return how it ended."""
        message = self.messages.get(timeout=60)
        assert isinstance(message, ProcessEnded)
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


def test_a_device_process_is_a_fork_of_the_server_in_a_session_of_its_own(forks: ForkServer, tmp_path: Path) -> None:
    with device_process(forks, tmp_path) as one:
        assert _name(forks.pid) == SERVER_NAME
        assert int(_stat(one.pid)[1]) == forks.pid
        assert os.getsid(one.pid) == one.pid
        assert os.getpgid(one.pid) == one.pid


def test_a_device_process_has_the_environment_but_no_access(forks: ForkServer, tmp_path: Path) -> None:
    with device_process(forks, tmp_path) as one:
        for pid in (forks.pid, one.pid):
            environment = Path(f"/proc/{pid}/environ").read_bytes()
            assert b"secret-of-the-store" not in environment
            assert b"FARM_TOLD=yes" in environment.split(b"\0")


def test_a_device_process_has_no_pipes_of_another(forks: ForkServer, tmp_path: Path) -> None:
    with device_process(forks, tmp_path / "first") as first, device_process(forks, tmp_path / "second") as second:
        # Otherwise the first would not notice that the dispatcher has closed its pipe.
        assert not _ends(first.pid) & _ends(second.pid) - _ends(forks.pid)


def test_a_closed_device_process_ends_by_itself(forks: ForkServer, tmp_path: Path) -> None:
    with device_process(forks, tmp_path) as one:
        pid = one.pid
    assert not Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_the_signal_that_ended_a_device_process_is_reported(
    forks: ForkServer, tmp_path: Path, number: signal.Signals
) -> None:
    with device_process(forks, tmp_path) as one:
        os.kill(one.pid, number)
        assert one.end() == f"signal {number}"


def test_the_exit_code_and_the_last_line_of_a_device_process_are_reported(forks: ForkServer, tmp_path: Path) -> None:
    with device_process(forks, tmp_path) as one:
        one.process.send(Begin(str(tmp_path / "no-plan")))
        reason = one.end()
    assert reason.startswith("exit code 1: FileNotFoundError: ")
    assert "no-plan" in reason


def test_ctrl_c_in_a_terminal_does_not_end_a_device_process(forks: ForkServer, tmp_path: Path) -> None:
    with device_process(forks, tmp_path) as one:
        os.kill(forks.pid, signal.SIGINT)
        os.kill(one.pid, signal.SIGINT)
        one.process.kill()
        assert one.end() == f"signal {signal.SIGKILL}"
    with device_process(forks, tmp_path):
        pass


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
        # The reaper ends the children of a process that was killed; that process alone could have their exit codes.
        assert first.end().startswith("it has exited")


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


def test_a_stopped_device_process_is_recognized_and_killed(forks: ForkServer, tmp_path: Path) -> None:
    with device_process(forks, tmp_path) as one:
        assert not one.process.is_stopped
        os.kill(one.pid, signal.SIGSTOP)
        until(lambda: one.process.is_stopped, "a stopped process")
        one.process.kill()
        assert one.end() == f"signal {signal.SIGKILL}"


def test_the_times_of_device_processes_count_as_those_of_the_dispatchers_children(tmp_path: Path) -> None:
    plan = plan_of_many_jobs(tmp_path)
    with Supervisor() as supervisor:
        forks = device_forks(supervisor)
        with device_process(forks, tmp_path) as one:
            one.process.send(Begin(str(plan)))
            until(lambda: _ticks(_stat(one.pid)[11:13]) > 0.1, "some work")
        own_and_children = _stat(forks.pid)[11:15]
        assert _ticks(own_and_children[2:]) > 0.1
        before = os.times()
    after = os.times()
    reaped_s = after.children_user + after.children_system - before.children_user - before.children_system
    # Sums of hundredths of a second.
    assert round(reaped_s, 2) >= round(_ticks(own_and_children), 2)


@contextmanager
def server_of(supervisor: Supervisor, run: str) -> Iterator[ForkServer]:
    """Start a server whose forks are the function `run(words)` of the text."""
    program = f"import os, sys, time\nfrom farm.base.fork_server import serve_forks\n{run}\nserve_forks(print, run)"
    forks = ForkServer(supervisor, [sys.executable, "-P", "-c", program], name="forks", env=dict(os.environ))
    try:
        yield forks
    finally:
        forks.close()


def spawned(supervisor: Supervisor, forks: ForkServer, word: str, folder: Path) -> Child:
    return supervisor.spawn(
        [word], name="fork", stdin_pipe=True, stdout_pipe=True, stderr=folder / "stderr", popen=forks.popen
    )


def test_a_fork_gets_variables_and_arguments_that_are_not_utf8(
    supervisor: Supervisor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The name of a user or a folder in Latin-1.
    name = os.fsdecode(b"Andr\xe9")
    monkeypatch.setenv("FARM_TOLD", name)
    say = "def run(words): os.write(1, os.environb[b'FARM_TOLD'] + b' ' + os.fsencode(words[0])); return 0"
    with server_of(supervisor, say) as forks:
        assert forks.wait_ready(60)
        child = spawned(supervisor, forks, name, tmp_path)
        assert child.process.stdout is not None
        assert child.process.stdout.read() == b"Andr\xe9 Andr\xe9"
        assert child.process.wait(60) == 0


def test_a_request_beyond_the_size_of_a_message_ends_no_server(
    supervisor: Supervisor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with server_of(supervisor, "def run(words): return 0") as forks:
        assert forks.wait_ready(60)
        for number in range(16):
            monkeypatch.setenv(f"FARM_LONG_{number}", "x" * 100_000)
        with pytest.raises(InfraError, match="Message too long"):
            spawned(supervisor, forks, "", tmp_path)
        assert forks.is_alive


def test_a_server_that_answers_no_longer_is_killed(
    supervisor: Supervisor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with server_of(supervisor, "def run(words): sys.stdin.read(); return 0") as forks:
        assert forks.wait_ready(60)
        monkeypatch.setattr("farm.base.fork_server._ANSWER_S", 0.3)
        os.kill(forks.pid, signal.SIGSTOP)
        with pytest.raises(InfraError, match="forks has exited"):
            spawned(supervisor, forks, "", tmp_path)
        assert not forks.is_alive
        # Device processes get another server.
        monkeypatch.setattr("farm.base.fork_server._ANSWER_S", 60.0)
        forked = forks.fork(tmp_path / "log")
        os.kill(forked.pid, signal.SIGKILL)
        assert forks.wait(forked.pid) == -signal.SIGKILL
        os.close(forked.stdin)
        os.close(forked.stdout)
        forked.lifeline.cut()


def test_a_fork_that_does_not_end_delays_no_other(
    supervisor: Supervisor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A killed process that waits in the kernel, as for a network disk, ends later.
    with server_of(supervisor, "def run(words): sys.stdin.read(); return 7") as forks:
        first = forks.fork(tmp_path / "first")
        monkeypatch.setattr("farm.base.fork_server._ANSWER_S", 2.0)
        codes: SimpleQueue[int | None] = SimpleQueue()
        waiting = threading.Thread(target=lambda: codes.put(forks.wait(first.pid)))
        waiting.start()
        with pytest.raises(Empty):
            codes.get(timeout=0.3)
        before = forks.pid
        second = forks.fork(tmp_path / "second")
        assert forks.pid == before
        for one in (first, second):
            os.close(one.stdin)
        assert codes.get(timeout=60) == 7
        assert forks.wait(second.pid) == 7
        waiting.join()
        for one in (first, second):
            os.close(one.stdout)
            one.lifeline.cut()


def test_ctrl_c_during_a_fork_gives_no_other_request_its_answer(supervisor: Supervisor, tmp_path: Path) -> None:
    def interrupt(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    with server_of(supervisor, "def run(words): sys.stdin.read(); return 7") as forks:
        assert forks.wait_ready(60)
        first = forks.fork(tmp_path / "first")
        os.kill(forks.pid, signal.SIGSTOP)
        kept = signal.signal(signal.SIGALRM, interrupt)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        try:
            with pytest.raises(KeyboardInterrupt):
                forks.fork(tmp_path / "second")
        finally:
            signal.signal(signal.SIGALRM, kept)
        os.kill(forks.pid, signal.SIGCONT)
        os.close(first.stdin)
        assert forks.wait(first.pid) == 7
        os.close(first.stdout)
        first.lifeline.cut()


def plan_of_many_jobs(folder: Path) -> Path:
    """Return the file of a plan that takes some time to read."""
    planned = PlannedJob(health_check_job("SM8650", "htp"), "key", cached=True)
    plan = RunPlan("run", folder, folder, (planned,) * 20_000, (), {}, folder)
    plan.write()
    return plan.path


def _name(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the name: state, parent, ..."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _ticks(fields: list[str]) -> float:
    return sum(map(int, fields)) / os.sysconf("SC_CLK_TCK")


def _ends(pid: int) -> set[str]:
    """Return the pipes and sockets that a process has."""
    names = (os.readlink(file) for file in Path(f"/proc/{pid}/fd").iterdir())
    return {name for name in names if name.startswith(("pipe:", "socket:"))}


def _is_alive(pid: int) -> bool:
    try:
        return _stat(pid)[0] != "Z"
    except FileNotFoundError:
        return False
