"""Processes that use a store: forks of a process that has imported farm, as imports take half a second each time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from forked_command import call, fork


class Fork(NamedTuple):
    """Process that has ended."""

    code: int
    output: str


_BEGIN = "import sys; from farm.store.store import open_store; argv = sys.argv[1:]; sys.stdin.read()\n"


def run_forks(code: str, calls: Sequence[Sequence[object]], *, one_by_one: bool = False) -> list[Fork]:
    """Execute `code` in a fork for each call, whose words are `argv` there; all at once, or one after the other."""
    words = [[sys.executable, "-c", f"{_BEGIN}{code}", *map(str, one)] for one in calls]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    if one_by_one:
        ended = [call(one, env=env) for one in words]
        return [Fork(one.returncode, f"{one.stdout}{one.stderr}") for one in ended]
    wait, begin = os.pipe()
    streams = {"stdin": wait, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    processes = [fork(one, env=env, text=True, **streams) for one in words]
    # All of them read this pipe to its end.
    os.close(begin)
    os.close(wait)
    outputs = [one.communicate()[0] for one in processes]
    return [Fork(one.wait(), output) for one, output in zip(processes, outputs, strict=True)]


_KILLED = """
import os, signal
from sqlalchemy import Engine, event
address, last, how, *more = argv
done = 0

def count():
    global done
    done += 1
    if done == int(last):
        os.kill(os.getpid(), signal.SIGKILL)

def execute(connection, cursor, statement, *_):
    if how == "every" or statement.split()[0] in ("CREATE", "ALTER", "DROP", "UPDATE", "INSERT", "DELETE"):
        count()

def commit(connection):
    if how == "every":
        count()
    elif done:
        os.write(1, str(done).encode())
        os.kill(os.getpid(), signal.SIGKILL)

def connect(connection, record):
    # Also what begins and ends a transaction, and what sets up the connection.
    connection.set_trace_callback(lambda statement: count())

store = open_store(address) if more else None
if how == "every" and "://" not in address:
    event.listen(Engine, "connect", connect)
else:
    event.listen(Engine, "before_cursor_execute", execute)
    event.listen(Engine, "commit", commit)
"""


def kill_before_changes(address: str, action: str, *more: str, step: int = 1) -> int:
    """Kill processes that execute `action`, each before another change or before the commit; return their number.

    With `more`, the words of the action, `store` is open before.
    """
    [commit] = run_forks(_KILLED + action, [[address, -1, "", *more]])
    assert commit.code == -signal.SIGKILL, commit.output
    calls = [[address, number, "", *more] for number in range(1, int(commit.output) + 1, step)]
    killed = run_forks(_KILLED + action, calls, one_by_one=True)
    assert {one.code for one in killed} == {-signal.SIGKILL}, killed
    return len(killed)


def kill_before_statements(address: str, action: str, first: str, step: int) -> int:
    """Kill processes that execute `action`, each before another statement, until it is done; return their number.

    Statements are counted at `first`, where the action comes to its end.
    """
    [whole] = run_forks(f"{_KILLED}{action}\nprint(done)", [[first, 0, "every"]])
    assert whole.code == 0, whole.output
    calls = [[address, number, "every"] for number in range(step, int(whole.output) + 1, step)]
    ended = run_forks(_KILLED + action, calls, one_by_one=True)
    assert {one.code for one in ended} <= {0, -signal.SIGKILL}, ended
    return sum(one.code != 0 for one in ended)
