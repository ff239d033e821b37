"""Forks of one process per test worker that has imported farm: a command without the start of an interpreter."""

from __future__ import annotations

import atexit
import contextlib
import importlib
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import IO, Any, TypeAlias

import pytest
import warm_torch
from warm_torch import WarmTorch, publish

from farm.base import processes
from farm.cli.main import main

PRELOADED = (
    "alembic",
    "farm.cli.cluster.following",
    "farm.cli.progress",
    "farm.dispatch.cluster.agent.host_agent",
    "farm.dispatch.cluster.client.anywhere",
    "farm.dispatch.cluster.client.submit",
    "farm.dispatch.cluster.delivery.app",
    "farm.dispatch.cluster.delivery.worker",
    "farm.cli.looking.history",
    "farm.cli.looking.report",
    "farm.cli.looking.sql",
    "farm.cli.looking.status",
    "farm.cli.looking.transfer",
    "farm.cli.running.exec",
    "farm.cli.running.nightly",
    "farm.cli.running.run",
    "farm.cli.setup.prune",
    "farm.cli.setup.runtime",
    "farm.cli.setup.suites",
    "farm.builds.compile.pool",
    "farm.devices.adb.transport",
    "farm.dispatch.pool.device_pool",
    "farm.dispatch.history_comparison",
    "farm.report.html.layer_graph",
    "farm.report.html.page_of_run",
    "farm.report.terminal.run",
    "farm.dispatch.run.run",
    "farm.dispatch.request.resume",
    "farm.dispatch.run.run",
    "farm.store.leases.leasing",
    "farm.store.queries.alerts",
    "farm.store.queries.coverage",
    "farm.store.queries.flakiness",
    "farm.store.queries.history",
    "farm.store.queries.runs",
    "farm.store.queries.selection",
    "farm.store.queries.status",
    "farm.store.queries.trends",
    "farm.store.store",
    "multiprocessing.popen_fork",
    "numpy",
    "pdb",
    "psycopg",
    "pytest",
    "rich.console",
    "sqlalchemy.dialects.postgresql.psycopg",
    "unittest",
)
_PRELOADED_OF_TESTS = ("chaos_farm", "warm_pages", "frozen_heap")
FORKED = frozenset({
    "alerts", "data export", "data import", "data sql", "debug", "devices check", "devices disable", "devices enable",
    "devices label", "devices lease", "devices list", "devices name", "devices release", "devices remove",
    "devices show", "devices socs", "devices unquarantine", "diff", "doctor", "exec", "help", "history", "jobs",
    "lab agent drain", "lab agent list", "lab notify", "lab queue", "lab quota", "lab roles", "lease", "nightly",
    "perf baseline", "perf bisect", "perf confirm", "perf diff", "pytest", "report", "run", "runs cancel",
    "runs list", "runs prune", "runs remove", "runs show", "setup", "show", "status", "suites",
})  # fmt: skip
"""Commands that read and write a store, files and the configuration, ask adb, or run programs on devices."""

_READ_AT_START = ("PYTHON", "LANG", "LC_", "TZ", "LD_", "_FARM_COMPLETE")


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
    """Return the output and the exit code of `farm`: of a fork where that answers as the interpreter does."""
    if forked and interpreter == sys.executable and not start and can_fork(arguments, env):
        return call(arguments, env=env, cwd=cwd, stdin=stdin, timeout_s=timeout_s)
    return subprocess.run(
        [interpreter, "-m", "farm.cli.main", *arguments], **(start or {}), env=env, cwd=cwd, input=stdin,
        capture_output=True, text=True, timeout=timeout_s, check=False,
    )  # fmt: skip


def call(
    arguments: Sequence[str],
    *,
    env: Mapping[str, str],
    cwd: Path,
    stdin: str,
    timeout_s: float,
    program: Callable[[], None] = main,
) -> subprocess.CompletedProcess[str]:
    """Return the output and the exit code of `program` in a fork. Raises TimeoutExpired."""
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(prefix="farm-command-") as folder:
        context = _fork_server(patch)
        streams = [Path(folder, name) for name in ("stdin", "stdout", "stderr")]
        streams[0].write_text(stdin, encoding="utf-8")
        given = (program, list(arguments), dict(env), cwd, streams, warm_torch.session)
        process = context.Process(target=_answer, args=given)
        process.start()
        try:
            process.join(timeout_s)
            if process.exitcode is None:
                raise subprocess.TimeoutExpired(["farm", *arguments], timeout_s)
        finally:
            process.kill()
            process.join()
        code = process.exitcode
        output, errors = (stream.read_text(encoding="utf-8") for stream in streams[1:])
    return subprocess.CompletedProcess(["farm", *arguments], code or 0, output, errors)


Program: TypeAlias = "ForkedProgram | subprocess.Popen[bytes]"


class ForkedProgram:
    """A program in a fork, as `subprocess.Popen` shows it."""

    def __init__(self, process: ForkServerProcess, words: Sequence[str]) -> None:
        self.args, self.returncode = list(words), process.exitcode
        self._process = process
        self.pid = process.pid or 0

    def poll(self) -> int | None:
        self.returncode = self._process.exitcode
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class RunningCommand(ForkedProgram):
    """`farm` in a fork with its output in a pipe, as `subprocess.Popen` shows it."""

    def __init__(self, process: ForkServerProcess, words: Sequence[str], output: int) -> None:
        super().__init__(process, words)
        self.stdout = open(output, encoding="utf-8")  # noqa: SIM115 - the caller closes it

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        texts = list[str]()
        reader = threading.Thread(target=lambda: texts.append(self.stdout.read()), daemon=True)
        reader.start()
        reader.join(timeout)
        if reader.is_alive():
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        self.wait(timeout)
        return texts[0], None


def start_command(
    arguments: Sequence[str], *, words: Sequence[str], env: Mapping[str, str], cwd: Path, program: Callable[[], None]
) -> RunningCommand:
    """Start `program` in a fork and a session of its own; /proc shows it as `words` followed by `arguments`."""
    with pytest.MonkeyPatch.context() as patch:
        context = _fork_server(patch)
        (reader, writer), (ready, started) = context.Pipe(duplex=False), context.Pipe(duplex=False)
        shown = [*words, *arguments]
        given = (program, list(arguments), shown, dict(env), cwd, writer, started, warm_torch.session)
        process = context.Process(target=_run_command, args=given, daemon=True)
        process.start()
        writer.close()
        started.close()
        with contextlib.suppress(EOFError):
            ready.recv_bytes()
        ready.close()
        output = os.dup(reader.fileno())
        reader.close()
    return RunningCommand(process, shown, output)


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
    with pytest.MonkeyPatch.context() as patch:
        context = _fork_server(patch)
        log.touch()
        ready, started = context.Pipe(duplex=False)
        arguments = (list(words), dict(env), cwd, log, started, warm_torch.session)
        process = context.Process(target=_run, args=arguments, daemon=True)
        process.start()
        started.close()
        with contextlib.suppress(EOFError):
            ready.recv_bytes()
        ready.close()
    return ForkedProgram(process, words)


def _fork_server(patch: pytest.MonkeyPatch) -> ForkServerContext:
    """Return the context of a running server, which outlives this test and has no names of its folders."""
    # Leftover processes are found by the names of folders in their environment.
    for name in [name for name in os.environ if name.startswith("FARM_")]:
        patch.delenv(name)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOADED, *_PRELOADED_OF_TESTS])
    with pytest.MonkeyPatch.context() as found:
        # The server does not take over sys.path.
        tests = Path(__file__).parent
        found.setenv("PYTHONPATH", f"{tests}:{tests / 'chaos'}", prepend=":")
        forkserver.ensure_running()
    return context


def _run(
    words: list[str], env: dict[str, str], cwd: Path, log: Path, started: Connection, torch: WarmTorch | None
) -> None:
    os.setsid()
    _become(words[3:], env, cwd, (Path(os.devnull), log, log), torch)
    started.send_bytes(b".")
    started.close()
    _, first, *rest = words
    try:
        if first == "-m":
            importlib.import_module(rest[0]).main()
        else:
            sys.argv = [first, *rest]
            sys.path.insert(0, str(Path(first).parent))
            runpy.run_path(first, run_name="__main__")
    finally:
        # A fork of multiprocessing ends by os._exit.
        atexit._run_exitfuncs()


def _run_command(
    program: Callable[[], None],
    arguments: list[str],
    shown: list[str],
    env: dict[str, str],
    cwd: Path,
    output: Connection,
    started: Connection,
    torch: WarmTorch | None,
) -> None:
    os.setsid()
    _become(arguments, env, cwd, (Path(os.devnull), output.fileno(), output.fileno()), torch)
    output.close()
    publish(shown, env)
    started.send_bytes(b".")
    started.close()
    try:
        program()
    finally:
        # A fork of multiprocessing ends by os._exit.
        atexit._run_exitfuncs()
        try:
            sys.stderr.flush()
        except OSError:
            # An interpreter ends well where the reader of its standard error has left; multiprocessing flushes again.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def _answer(
    program: Callable[[], None],
    arguments: list[str],
    env: dict[str, str],
    cwd: Path,
    streams: list[Path],
    torch: WarmTorch | None,
) -> None:
    _become(arguments, env, cwd, streams, torch)
    try:
        program()
    finally:
        # A fork of multiprocessing ends by os._exit.
        atexit._run_exitfuncs()


def _become(
    arguments: Sequence[str], env: Mapping[str, str], cwd: Path, streams: Sequence[Path | int], torch: WarmTorch | None
) -> None:
    """Take the environment, the folder, the streams and the arguments of a new `farm`."""
    os.environ.clear()
    os.environ.update(env)
    publish([], env)
    if torch is not None:
        processes.subprocess = torch.subprocess()  # type: ignore[attr-defined]
    os.chdir(cwd)
    for number, stream in enumerate(streams):
        file = stream if isinstance(stream, int) else os.open(stream, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(file, number)
        if file is not stream:
            os.close(file)
    started: list[IO[str] | None] = [sys.__stdin__, sys.__stdout__, sys.__stderr__]
    sys.stdin, sys.stdout, sys.stderr = (
        # Standard error has a buffer of a line everywhere. The files are open until the end.
        open(number, mode, -1 if number < 2 else 1, encoding="utf-8", errors=was and was.errors, closefd=False)  # noqa: SIM115
        for number, mode, was in zip(range(3), "rww", started, strict=True)
    )
    # A new interpreter has the current folder there, and no folder of the tests.
    sys.path[:] = [str(cwd), *(entry for entry in sys.path if entry and Path(entry).name not in {"tests", "bench"})]
    sys.argv = [sys.modules["farm.cli.main"].__file__ or "", *arguments]
