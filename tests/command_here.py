"""Commands that read or write a store and files, called in the process of the tests: a fork takes ten times as long."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from farm.base import socs
from farm.base.config import settings
from farm.cli.main import main

HERE = frozenset({
    "alerts", "data export", "data import", "devices disable", "devices enable", "devices label",
    "devices list", "devices name", "devices release", "devices remove", "devices show", "devices socs",
    "devices unquarantine", "diff", "history", "jobs bundle", "jobs coverage", "jobs history", "jobs profile",
    "jobs show", "lab accounts", "lab queue", "lab quota", "lab roles", "perf baseline", "perf diff", "report",
    "runs list", "runs prune", "runs remove", "runs show", "show", "status", "suites", "virtual clear", "virtual fault",
    "virtual faults",
})  # fmt: skip
# Options after which a process prints more or less until its end.
_FOR_THE_PROCESS = {"-v", "--verbose", "-q", "--quiet"}
_FARM_LOG = logging.getLogger("farm")


def can_call_here(arguments: Sequence[str], env: Mapping[str, str]) -> bool:
    """Return whether a command leaves this process as it was, and no other thread of a test is disturbed."""
    is_known = any(" ".join(arguments[:count]) in HERE for count in (1, 2))
    is_alone = threading.current_thread() is threading.main_thread() and not any(
        thread.name.startswith("Thread-") for thread in threading.enumerate()
    )
    return is_known and is_alone and _FOR_THE_PROCESS.isdisjoint(arguments) and "FARM_LOG" not in env


def call_here(
    arguments: Sequence[str], *, env: Mapping[str, str], cwd: Path, stdin: str
) -> subprocess.CompletedProcess[str]:
    """Return the output and the exit code of `farm`."""
    with tempfile.TemporaryDirectory(prefix="farm-command-") as folder:
        streams = [Path(folder, name) for name in ("stdin", "stdout", "stderr")]
        streams[0].write_text(stdin, encoding="utf-8")
        with _place(arguments, env, cwd), _streams(streams):
            try:
                main()
            except SystemExit as ended:
                code = ended.code
        output, errors = (stream.read_text(encoding="utf-8") for stream in streams[1:])
    assert isinstance(code, int)
    return subprocess.CompletedProcess(["farm", *arguments], code, output, errors)


@contextlib.contextmanager
def _place(arguments: Sequence[str], env: Mapping[str, str], cwd: Path) -> Iterator[None]:
    """Have the arguments, the environment and the folder of a command; leave nothing of it behind."""
    handlers, level = list(_FARM_LOG.handlers), _FARM_LOG.level
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        former = dict(os.environ)
        patch.setattr(sys, "argv", ["farm", *arguments])
        patch.setattr(socs, "_like", socs._like)
        # The command is the last thing that a process does: it lets garbage lie.
        patch.setattr(gc, "freeze", lambda: None)
        patch.setattr(gc, "set_threshold", lambda *_: None)
        patch.chdir(cwd)
        settings._warn.cache_clear()
        os.environ.clear()
        os.environ.update(env)
        try:
            yield
        finally:
            os.environ.clear()
            os.environ.update(former)
            _FARM_LOG.handlers[:] = handlers
            _FARM_LOG.setLevel(level)


@contextlib.contextmanager
def _streams(files: Sequence[Path]) -> Iterator[None]:
    """Have the standard streams in files, also for processes that the command starts."""
    sys.stdout.flush()
    sys.stderr.flush()
    with contextlib.ExitStack() as ends, pytest.MonkeyPatch.context() as patch:
        for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
            kept = os.dup(number)
            ends.callback(os.close, kept)
            opened = os.open(files[number], os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
            os.dup2(opened, number)
            os.close(opened)
            ends.callback(os.dup2, kept, number)
            stream = ends.enter_context(open(number, mode, -1 if number < 2 else 1, encoding="utf-8", closefd=False))
            patch.setattr(sys, name, stream)
        yield
