"""`farm` as a user calls it, in folders of its own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from forked_command import can_fork, command, fork
from programs import require_code
from waiting import Started, poll

from farm.builds.compile.protocol import BUILDER_NAME, TEMPLATE_NAME
from farm.dispatch.device_forks import PROCESS_NAME, SERVER_NAME


@dataclass(frozen=True)
class FarmHome:
    """Cache and state of its own, and the `farm` command in it."""

    cache: Path
    state: Path
    cwd: Path
    owns_cache: bool = False
    """No other home uses the cache."""
    interpreter: str = sys.executable

    @classmethod
    def make(cls, cache: Path, folder: Path) -> FarmHome:
        """Return a home in a new folder, with a cache that it may share."""
        (folder / "cwd").mkdir()
        return cls(cache, folder / "state", folder / "cwd")

    def without(self, *parts: str, folder: Path) -> FarmHome:
        """Return this home with a cache in `folder` that lacks virtual devices and `parts`, and links to the others."""
        folder.mkdir()
        for part in self.cache.iterdir():
            if part.name not in ("virtual", *parts):
                (folder / part.name).symlink_to(part)
        return replace(self, cache=folder, owns_cache=True)

    @property
    def start(self) -> dict[str, Any]:
        """Return further arguments of processes: none, as they belong to the user who runs the tests."""
        return {}

    @property
    def program(self) -> list[str]:
        """Words of a shell that start `farm`."""
        return [self.interpreter, "-m", "farm.cli.main"]

    @property
    def env(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("FARM_", "QNN_", "PYTEST_"))}
        return {**kept, "FARM_CACHE_DIR": str(self.cache), "FARM_STATE_DIR": str(self.state), "COLUMNS": "80"}

    def farm(
        self,
        *arguments: str,
        timeout_s: float = 120,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        stdin: str = "",
        forked: bool = True,
        code: int | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run `farm` as a user does, without a terminal; where `forked` allows it, in a fork that has imported farm.

        Raises AssertionError for an exit code other than `code`; None allows any.
        """
        options = {"cwd": cwd or self.cwd, "stdin": stdin, "timeout_s": timeout_s}
        done = self.answer(arguments, {**self.env, **(env or {})}, options, forked=forked)
        require_code(done, code)
        return done

    def use_one_builder(self) -> None:
        """Let one builder compile: builders of another toolchain or SDK are no forks, and import torch each."""
        config = self.cwd / "farm.toml"
        text = config.read_text() if config.exists() else ""
        if "[build]" not in text:
            config.write_text(f"{text}\n[build]\nbuilders = 1\n")

    def rows(self, query: str) -> list[Any]:
        """Return rows of the store in SQLite, which may not exist yet, or have no tables."""
        with (
            contextlib.suppress(sqlite3.Error),
            contextlib.closing(sqlite3.connect(f"file:{self.state / 'farm.db'}?mode=ro", uri=True)) as store,
        ):
            return store.execute(query).fetchall()
        return []

    def json(self, *arguments: str, code: int | None = 0, **options: Any) -> Any:
        """Return the answer of a command with --json; `options` are passed to `farm`."""
        return json.loads(self.farm(*arguments, "--json", code=code, **options).stdout)

    def refused(self, *arguments: str, code: int = 2, **options: Any) -> str:
        """Return the one line with which a command refuses; `options` are passed to `farm`."""
        done = self.farm(*arguments, code=code, **options)
        assert (done.stdout, done.stderr.count("\n")) == ("", 1), done.stderr
        return done.stderr

    def answer(
        self, arguments: Sequence[str], env: Mapping[str, str], options: Mapping[str, Any], *, forked: bool
    ) -> subprocess.CompletedProcess[str]:
        """Run `farm` in an environment; `options` are the folder, the text of standard input and the timeout."""
        return command(arguments, env=env, interpreter=self.interpreter, start=self.start, forked=forked, **options)

    @contextlib.contextmanager
    def running(self, *arguments: str, env: Mapping[str, str] | None = None) -> Iterator[subprocess.Popen[str]]:
        """Run `farm` in the background, in its own process group, which is killed at the end of the block."""
        process = self._start(arguments, {**self.env, **(env or {})})
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            assert process.stdout is not None
            process.stdout.close()

    def start_alone(self, *arguments: str, env: Mapping[str, str] | None = None, **options: Any) -> Started[Any]:
        """Start `farm` in an interpreter of its own, with pipes for the standard streams."""
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        environment = {**self.env, **(env or {})}
        return Started([*self.program, *arguments], env=environment, cwd=self.cwd, **{**pipes, **options})

    def _start(self, arguments: Sequence[str], env: Mapping[str, str]) -> subprocess.Popen[str]:
        words = [*self.program, *arguments]
        options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        if self.interpreter == sys.executable and not self.start and can_fork(arguments, env):
            return cast("subprocess.Popen[str]", fork(words, env=env, cwd=self.cwd, **options))
        return subprocess.Popen(
            words, **self.start, env=env, cwd=self.cwd, stdin=subprocess.DEVNULL, start_new_session=True, **options
        )


def processes_of(home: FarmHome) -> dict[int, str]:
    """Return the command lines of the processes, by id, that were started for this home and still live."""
    # Virtual devices of a run are below the cache, which other homes may share.
    virtual = home.cache / "virtual"
    folders = [virtual] if home.owns_cache else [virtual / run.name for run in (home.state / "runs").glob("*")]
    return processes_marked(str(home.state), *(f"{folder}/" for folder in folders))


def processes_marked(*marks: str) -> dict[int, str]:
    """Return the command lines of the living processes, by id, with any of `marks` in command or environment.

    Workers, and the process that forks them, go by the name that they give themselves: they are copies of the command.
    """
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command, environment = (folder / "cmdline").read_bytes(), (folder / "environ").read_bytes()
            if any(mark.encode() in command or mark.encode() in environment for mark in marks):
                name = (folder / "comm").read_text().strip()
                own = name if name in (SERVER_NAME, PROCESS_NAME, BUILDER_NAME, TEMPLATE_NAME) else ""
                found[int(folder.name)] = own or command.replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
    return found


def wait_for_no_process(home: FarmHome, seconds: float = 30) -> dict[int, str]:
    """Return the processes of `home` that still run after `seconds`."""
    left: dict[int, str] = {}

    def is_empty() -> bool:
        left.clear()
        left.update(processes_of(home))
        return not left

    poll(is_empty, seconds)
    return left
