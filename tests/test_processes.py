"""Processes of farm: none stays behind, and none reads another's secrets."""

from __future__ import annotations

import contextlib
import fcntl
import inspect
import os
import resource
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from waiting import Started, alive, ends, until

from farm.base import processes, reaper
from farm.base.errors import InfraError, MissingToolError
from farm.base.processes import Supervisor, ready_of

# Starts three grandchildren: an ordinary one, one in a session of its own and a third with SIGTERM ignored.
FAMILY = """
import os, signal, subprocess, sys
sleep, deaf = ["/bin/sleep", "600"], ["/bin/sh", "-c", "trap '' TERM; exec /bin/sleep 600"]
pids = [subprocess.Popen(sleep).pid, subprocess.Popen(sleep, start_new_session=True).pid, subprocess.Popen(deaf).pid]
print(*pids, os.getpid(), flush=True)
signal.pause()
"""

# Group that neither obeys SIGTERM nor reads anything: a child, its own child, and a stopped process.
DEAF = """
import os, signal, subprocess, sys
for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
    signal.signal(number, signal.SIG_IGN)
sleep = ["/bin/sleep", "600"]
pids = [subprocess.Popen(sleep).pid, subprocess.Popen(sleep).pid]
os.kill(pids[1], signal.SIGSTOP)
print(*pids, os.getpid(), flush=True)
signal.pause()
"""

# Prints the reaper, a copy of this process or 0, and the child's group.
PARENT = """
import os, signal, sys
from farm.base import processes
from farm.base.processes import Supervisor
supervisor = Supervisor()
child = supervisor.spawn([sys.executable, "-c", sys.argv[1]], name="family", stdout_pipe=True)
line = child.process.stdout.readline().decode()
copy = os.fork() if sys.argv[2] == "copied" else 0
if copy or sys.argv[2] != "copied":
    print(processes._link._process.pid, copy, line, flush=True)
if sys.argv[2] != "exits":
    signal.pause()
"""


def family(supervisor: Supervisor) -> tuple[list[int], int]:
    child = supervisor.spawn([sys.executable, "-c", FAMILY], name="family", stdout_pipe=True)
    *pids, leader = map(int, child.process.stdout.readline().split())
    assert leader == child.pid
    return pids, leader


@pytest.mark.parametrize(
    ("program", "way", "killed"),
    [
        (FAMILY, "exits", ()),
        (FAMILY, "lives", ("parent",)),
        # A copy of the parent keeps every descriptor, so that an end of file alone proves nothing.
        (FAMILY, "copied", ("parent",)),
        (DEAF, "lives", ("reaper", "parent")),
        (DEAF, "lives", ("parent", "reaper")),
        (DEAF, "copied", ("reaper", "parent")),
    ],
)
def test_nothing_outlives_its_parent_and_the_reaper(program: str, way: str, killed: tuple[str, ...]) -> None:
    with Started([sys.executable, "-c", PARENT, program, way], stdout=subprocess.PIPE) as parent:
        guard, copy, *pids = map(int, parent.stdout.readline().split())
        assert len(pids) >= 3
        if "reaper" in killed:
            # A stopped reaper does nothing between the two deaths.
            os.kill(guard, signal.SIGSTOP)
        for name in killed:
            os.kill(guard if name == "reaper" else parent.pid, signal.SIGKILL)
        parent.wait()
        try:
            assert all(ends(pid) for pid in pids)
        finally:
            for pid in filter(None, [copy, *pids]):
                if alive(pid):
                    os.kill(pid, signal.SIGKILL)


FOREGROUND = """
import signal
from farm.base import processes
from farm.base.processes import Supervisor
supervisor = Supervisor()
child = supervisor.spawn(["/bin/sleep", "600"], name="shell", foreground=True)
print(processes._link._process.pid, child.pid, flush=True)
signal.pause()
"""
CALLER = """
import os, select, signal, subprocess, sys
parent = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE)
guard, child = map(int, parent.stdout.readline().split())
end = os.pidfd_open(child)
for pid in (guard, parent.pid):
    os.kill(pid, signal.SIGKILL)
select.select([end], [], [])
print("still here")
"""


def test_a_child_in_the_foreground_dies_alone() -> None:
    """The child shares its process group with the caller of farm, which lives on."""
    argv = [sys.executable, "-c", CALLER, FOREGROUND]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, start_new_session=True, check=False)
    assert (done.returncode, done.stdout) == (0, "still here\n"), done.stderr


def test_close_ends_the_whole_group() -> None:
    with Supervisor() as supervisor:
        pids, leader = family(supervisor)
    assert not any(alive(pid) for pid in [*pids, leader])
    supervisor.close()
    with pytest.raises(InfraError, match="farm is ending"):
        supervisor.spawn(["/bin/true"], name="late")


def test_killing_the_leader_ends_what_it_started() -> None:
    with Supervisor() as supervisor:
        pids, leader = family(supervisor)
        os.kill(leader, signal.SIGKILL)
        assert all(ends(pid) for pid in pids)


def test_several_threads_spawn_and_terminate() -> None:
    def run() -> int:
        return supervisor.spawn(["/bin/sh", "-c", "exit 7"], name="seven").process.wait()

    with Supervisor() as supervisor, ThreadPoolExecutor(8) as pool:
        assert [one.result() for one in [pool.submit(run) for _ in range(8)]] == [7] * 8
        child = supervisor.spawn(["/bin/sleep", "600"], name="sleep")
        assert [one.result() for one in [pool.submit(child.terminate) for _ in range(4)]] == [-signal.SIGTERM] * 4


def test_streams_and_environment(tmp_path: Path) -> None:
    with Supervisor() as supervisor:
        log = tmp_path / "logs" / "child.log"
        script = 'read line; echo "$line from $WHO in $PWD"; echo trouble >&2'
        child = supervisor.spawn(
            ["/bin/sh", "-c", script], name="talk", env={"WHO": "me"}, cwd=tmp_path, stdin_pipe=True,
            stdout_pipe=True, stderr=log,
        )  # fmt: skip
        out, _ = child.process.communicate(b"hello\n")
        assert out.decode() == f"hello from me in {tmp_path}\n"
        assert child.log_tail() == "trouble\n"
        assert child.terminate() == 0


def test_a_reaper_that_was_killed_is_replaced() -> None:
    script = """
import os, signal, subprocess, sys
from farm.base import processes
supervisor = processes.Supervisor()
first = supervisor.spawn(["/bin/sleep", "600"], name="first")
reaper = processes._link._process
reaper.kill(); reaper.wait()
second = supervisor.spawn(["/bin/sleep", "600"], name="second")
print(first.pid, second.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False)
    pids = list(map(int, done.stdout.split()))
    assert len(pids) == 2, done.stderr
    assert all(ends(pid) for pid in pids)


def test_a_missing_program_is_named(tmp_path: Path) -> None:
    with Supervisor() as supervisor:
        with pytest.raises(MissingToolError, match="no /nowhere/tool"):
            supervisor.spawn(["/nowhere/tool"], name="tool")
        with pytest.raises(InfraError, match="cannot be started"):
            supervisor.spawn(["/bin/true"], name="tool", cwd=tmp_path / "gone")


def test_a_death_that_the_reaper_hears_of_late_ends_nobody_else() -> None:
    """The descriptor it watched the dead one by is free again, and the next one gets its number."""

    def link_live() -> dict[str, reaper.Group]:
        return processes._link._live  # other tests may have theirs still

    def watched() -> int:
        count = 0
        for entry in Path(f"/proc/{reaper_pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # it opens and closes others meanwhile
                count += "pidfd" in os.readlink(entry)
        return count

    with Supervisor() as supervisor:
        first = supervisor.spawn(["/bin/sleep", "600"], name="first")
        link = processes._link._process
        assert link is not None
        reaper_pid = link.pid
        others = len(link_live()) - 1
        until(lambda: watched() == others + 2)  # this process and the child
        os.kill(reaper_pid, signal.SIGSTOP)
        try:
            until(lambda: (stat := reaper.read_stat(reaper_pid)) is not None and stat.state == "T")
            first.process.kill()
            first.terminate()
            second = supervisor.spawn(["/bin/sleep", "600"], name="second")
        finally:
            os.kill(reaper_pid, signal.SIGCONT)
        third = supervisor.spawn(["/bin/sleep", "600"], name="third")
        until(lambda: watched() == others + 3)
        assert second.process.poll() is None
        assert third.process.poll() is None


LATE_PARENT = """
import os, signal
from farm.base import processes
from farm.base.processes import Supervisor
supervisor = Supervisor()
supervisor.spawn(["/bin/true"], name="first").process.wait()
watcher = processes._link._process.pid
os.kill(watcher, signal.SIGSTOP)
os.waitid(os.P_PID, watcher, os.WSTOPPED)
child = supervisor.spawn(["/bin/sleep", "600"], name="late")
copy = os.fork()
if copy:
    print(watcher, child.pid, copy, flush=True)
signal.pause()
"""


def test_what_was_said_just_before_a_death_counts() -> None:
    """The death and the last words arrive together, and a copy of the dead one keeps the pipe open."""
    with Started([sys.executable, "-c", LATE_PARENT], stdout=subprocess.PIPE) as parent:
        watcher, child, copy = map(int, parent.stdout.readline().split())
        parent.kill()
        parent.wait()
        try:
            os.kill(watcher, signal.SIGCONT)
            assert ends(child)
        finally:
            os.kill(copy, signal.SIGKILL)


def test_a_descriptor_beyond_1023_is_watched() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(2048, hard) if hard >= 0 else 2048, hard))
    read, write = os.pipe()
    try:
        high = fcntl.fcntl(read, fcntl.F_DUPFD_CLOEXEC, 1024)
        assert ready_of([high], 0) == set()
        os.write(write, b"x")
        assert ready_of([high, read], 60) == {high, read}
        os.close(high)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        os.close(read)
        os.close(write)


# Code of a suite runs as the user of the agent, and must not read the secrets of the agent.


NOBODY = 65534
WAIT = "print('ready', flush=True); input()"
HIDE = f"import os, sys\n{inspect.getsource(processes.hide_environment)}\nhide_environment()"
READ = "import sys; print('of the agent' in open(f'/proc/{sys.argv[1]}/environ').read())"


PYTHON = shutil.which("python3", path="/usr/bin") or ""
"""Interpreter that another user may execute."""


def read_environment_of(code: str) -> subprocess.CompletedProcess[str]:
    """Start a process with a secret that runs `code`, and read its environment as the same user, without root."""
    user = NOBODY if not os.getuid() else None
    env = {"PGPASSWORD": "of the agent", "PYTHONDONTWRITEBYTECODE": "1", "PATH": os.environ["PATH"]}
    with Started(
        [PYTHON, "-c", f"{code}\n{WAIT}"], user=user, env=env, cwd="/", text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        assert process.stdout.readline()
        reading = [PYTHON, "-S", "-c", READ, str(process.pid)]
        done = subprocess.run(reading, user=user, env={}, cwd="/", capture_output=True, text=True, check=False)
        process.communicate("\n")
    return done


@pytest.mark.skipif(not PYTHON, reason="no interpreter in /usr/bin")
def test_the_environment_is_hidden_from_other_processes_of_the_user() -> None:
    assert read_environment_of("").stdout == "True\n"
    hidden = read_environment_of(HIDE)
    assert "PermissionError" in hidden.stderr
    assert hidden.stdout == ""
