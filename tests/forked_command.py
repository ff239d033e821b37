"""Forks of one process per test worker that has imported farm: a command without the start of an interpreter."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from command_here import call_here, can_call_here
from forks import ForkedProcess, run_fork, start_forking
from warm_torch import session_facts

PRELOADED = (
    "alembic", "farm.builds.compile.pool", "farm.cli.looking.data", "farm.cli.looking.runs",
    "farm.cli.looking.status", "farm.cli.looking.transfer", "farm.cli.main", "farm.cli.progress",
    "farm.cli.running.exec", "farm.cli.running.nightly", "farm.cli.running.run", "farm.cli.setup.runtime",
    "farm.cli.setup.suites", "farm.devices.adb.transport", "farm.dispatch.cluster.agent.host_agent",
    "farm.dispatch.cluster.client.anywhere", "farm.dispatch.cluster.client.submit",
    "farm.dispatch.cluster.delivery", "farm.dispatch.history_comparison", "farm.dispatch.pool.device_pool",
    "farm.dispatch.request.records", "farm.dispatch.run.run", "farm.report.html.page_of_run",
    "farm.report.terminal.run", "farm.store.leases.leasing",
    "farm.store.queries.alerts", "farm.store.queries.history", "farm.store.queries.runs",
    "farm.store.queries.status", "farm.store.store", "numpy", "pdb", "psycopg",
    "pytest", "rich.console", "sqlalchemy.dialects.postgresql.psycopg", "unittest",
)  # fmt: skip
_PRELOADED_OF_TESTS = ("chaos_farm", "warm_pages", "warm_torch")
FORKED = frozenset({
    "alerts", "data export", "data import", "debug", "devices check", "devices disable", "devices enable",
    "devices label", "devices lease", "devices list", "devices name", "devices release", "devices remove",
    "devices show", "devices socs", "devices unquarantine", "diff", "doctor", "exec", "history", "jobs",
    "lab accounts", "lab agent drain", "lab agent list", "lab notify", "lab queue", "lab quota", "lab roles", "lease",
    "nightly", "perf baseline", "perf bisect", "perf confirm", "perf diff", "pytest", "report", "run", "runs cancel",
    "runs list", "runs prune", "runs remove", "runs show", "setup", "show", "status", "suites",
    "virtual clear", "virtual fault", "virtual faults",
})  # fmt: skip
"""Commands that read and write a store, files and the configuration, ask adb, or run programs on devices."""

_READ_AT_START = ("PYTHON", "LANG", "LC_", "TZ", "LD_", "_FARM_COMPLETE")
Program: TypeAlias = "ForkedProcess | subprocess.Popen[bytes]"


def can_fork(arguments: Sequence[str], env: Mapping[str, str]) -> bool:
    """Return whether a fork answers as a new interpreter does: nothing in `env` that only the start of one reads."""
    may_fork = any(" ".join(arguments[:count]) in FORKED for count in (1, 2, 3))
    return may_fork and not _differs(env)


def _differs(env: Mapping[str, str]) -> bool:
    """Return whether a new interpreter would find another environment at its start than this process."""
    changed = {name for name in {*env, *os.environ} if env.get(name) != os.environ.get(name)}
    return any(name.startswith(_READ_AT_START) for name in changed)


def command(
    arguments: Sequence[str],
    *,
    env: Mapping[str, str],
    cwd: Path,
    stdin: str = "",
    timeout_s: float = 120,
    interpreter: str = sys.executable,
    start: Mapping[str, Any] | None = None,
    forked: bool = True,
) -> subprocess.CompletedProcess[str]:
    """Return the output and the exit code of `farm`: of this process or a fork where these answer as it does."""
    words = [interpreter, "-m", "farm.cli.main", *arguments]
    if forked and interpreter == sys.executable and not start and can_fork(arguments, env):
        if timeout_s >= 1 and can_call_here(arguments, env):
            return call_here(arguments, env=env, cwd=cwd, stdin=stdin)
        return call(words, env=env, cwd=cwd, stdin=stdin, timeout_s=timeout_s)
    return subprocess.run(
        words, **(start or {}), env=env, cwd=cwd, input=stdin, capture_output=True, text=True, timeout=timeout_s,
        check=False,
    )  # fmt: skip


def call(words: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """Return the output and the exit code of a Python program in a fork, as `run_fork` does."""
    return run_fork(_place(), words, torch=session_facts(), **options)


def fork(words: Sequence[str], **options: Any) -> ForkedProcess:
    """Start a Python program in a fork and a session of its own."""
    return ForkedProcess(_place(), words, torch=session_facts(), **options)


def start_anew(words: Sequence[str], *, env: Mapping[str, str], cwd: Path, log: Path) -> subprocess.Popen[bytes]:
    """Start a program in a session of its own that appends to a log."""
    with log.open("ab") as output:
        return subprocess.Popen(
            words, cwd=cwd, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )


def start(words: Sequence[str], *, env: Mapping[str, str], cwd: Path, log: Path) -> Program:
    """Start a Python program as `start_anew` does, in a fork where that behaves the same."""
    is_known = words[0] == sys.executable and (words[1] == "-m" or words[1].endswith(".py"))
    if not is_known or _differs(env):
        return start_anew(words, env=env, cwd=cwd, log=log)
    with log.open("ab") as output:
        return fork(words, env=env, cwd=cwd, stdout=output.fileno(), stderr=output.fileno())


@functools.cache
def _place() -> Path:
    """Return the socket of a process that forks until this one ends."""
    folder = tempfile.mkdtemp(prefix="farm-forks-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    # Leftover processes are found by the names of folders in their environment.
    env = {name: value for name, value in os.environ.items() if not name.startswith(("FARM_", "PYTEST_"))}
    tests = Path(__file__).parent
    env["PYTHONPATH"] = os.pathsep.join([str(tests), str(tests / "chaos"), env.get("PYTHONPATH", "")])
    place = Path(folder, "socket")
    start_forking(place, [*PRELOADED, *_PRELOADED_OF_TESTS], owner=os.getpid(), env=env)
    return place
