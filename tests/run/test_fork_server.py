"""Workers are copies of one process: what they get of it, and what ends them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

from waiting import until

from farm.run.fork_server import SERVER_NAME, WORKER_NAME, forking

# In a process of its own: it has to have one thread. Prints one line of JSON.
HEAD = """
import json, os, signal, sys, time
from execnet import XSpec
from farm.run.fork_server import ForkingGroup, forking

def worker(group):
    return group.makegateway(XSpec("execmodel=main_thread_only//popen"))

def ask(gateway, expression):
    channel = gateway.remote_exec(f"import os, signal, sys, threading; channel.send({expression})")
    try:
        return channel.receive(30)
    finally:
        channel.waitclose(30)

def name(pid):
    return open(f"/proc/{pid}/comm").read().strip()
"""
FACTS = """
kept = open(os.devnull)
with forking() as forks:
    group = ForkingGroup(forks)
    os.environ["FARM_TOLD_LATE"] = "yes"
    gateway = worker(group)
    pid = ask(gateway, "os.getpid()")
    print(json.dumps({
        "names": [name(forks.pid), name(pid)],
        "parent": ask(gateway, "os.getppid()") == forks.pid == gateway._io.parent,
        "late": ask(gateway, "os.environ['FARM_TOLD_LATE']"),
        "imported": ask(gateway, "'farm.run.worker' in sys.modules"),
        "file": ask(gateway, f"os.readlink('/proc/self/fd/{kept.fileno()}')"),
        "sigint": ask(gateway, "signal.getsignal(signal.SIGINT) is signal.default_int_handler"),
    }))
    group.terminate(30)
"""
KILLED_SERVER = """
with forking() as forks:
    group = ForkingGroup(forks)
    os.kill(forks.pid, signal.SIGKILL)
    os.waitid(os.P_PID, forks.pid, os.WEXITED | os.WNOWAIT)
    gateway = worker(group)
    pid = ask(gateway, "os.getpid()")
    print(json.dumps({"parent": ask(gateway, "os.getppid()") == os.getpid(), "name": name(pid)}))
    group.terminate(30)
"""
KILLED_CONTROLLER = """
with forking() as forks:
    gateway = worker(ForkingGroup(forks))
    print(json.dumps([forks.pid, ask(gateway, "os.getpid()")]), flush=True)
    signal.pause()
"""


def run(script: str) -> dict[str, object]:
    done = subprocess.run(
        [sys.executable, "-c", HEAD + script], capture_output=True, text=True, check=True, timeout=120
    )
    answer: dict[str, object] = json.loads(done.stdout)
    assert done.stderr == ""
    return answer


def test_a_worker_has_the_controllers_imports_and_environment_and_nothing_else_of_it() -> None:
    facts = run(FACTS)
    assert facts.pop("names") == [SERVER_NAME, WORKER_NAME]
    assert facts == {"parent": True, "late": "yes", "imported": True, "file": os.devnull, "sigint": True}


def test_where_the_server_was_killed_workers_are_started_as_xdist_does() -> None:
    facts = run(KILLED_SERVER)
    assert facts["parent"]
    assert facts["name"] != WORKER_NAME


def test_server_and_workers_end_with_the_controller() -> None:
    controller = subprocess.Popen([sys.executable, "-c", HEAD + KILLED_CONTROLLER], stdout=subprocess.PIPE, text=True)
    assert controller.stdout is not None
    with controller.stdout:
        pids = json.loads(controller.stdout.readline())
        # Stopped, it does not see that its pipe ends.
        os.kill(pids[0], signal.SIGSTOP)
        controller.kill()
        controller.wait()
        until(lambda: not any(is_alive(pid) for pid in pids), "their end")


def test_a_process_with_threads_is_not_copied() -> None:
    end = threading.Event()
    other = threading.Thread(target=end.wait)
    other.start()
    try:
        with forking() as forks:
            assert forks is None
    finally:
        end.set()
        other.join()


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] != b"Z"
    except FileNotFoundError:
        return False


def test_the_times_of_workers_count_as_those_of_the_controllers_children() -> None:
    facts = run("""
before = os.times()
with forking() as forks:
    group = ForkingGroup(forks)
    ask(worker(group), "sum(range(10**7))")
    group.terminate(30)
after = os.times()
print(json.dumps({"seconds": after.children_user - before.children_user}))
""")
    assert float(str(facts["seconds"])) > 0.05
