"""Nightly runs that agents start: `[agent] nights` of farm.toml, each at its time, by a single agent that has it.

A row of the store decides which agent starts a nightly run, once: `farm.store.cluster.cluster`.
Procrastinate's periodic tasks call `check` as a hint, at any time and any number of times. The database's clock decides
when a nightly run is due, and how late it may begin. The nightly run itself is `farm nightly`, a child of the agent,
whose cells are submitted like the runs of users.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import threading
import time
import tomllib
from datetime import datetime, timedelta
from datetime import time as time_of_day
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from zoneinfo import ZoneInfo

import msgspec

from farm.base.config.runs import NightlyReceivers, with_files_of
from farm.base.config.settings import OWN_COMMAND
from farm.base.errors import ExitCode, FarmError, StoreError, UsageError
from farm.base.files import make_folders
from farm.base.interrupts import INTERRUPTED
from farm.base.paths import beside
from farm.base.processes import Child, Supervisor
from farm.dispatch.notify.channels import TAKEN
from farm.dispatch.notify.delivery import Receiver, find_receivers
from farm.report.model.format import clock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from farm.base.config.settings import Config
    from farm.base.config.shared import NightlyConfig
    from farm.store.cluster.records import AgentId, NightlyStart
    from farm.store.store import Store

logger = logging.getLogger(__name__)

# Names as in farm.dispatch.nightly.plan.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]{0,79}")
_RETRY_S = 3.0
# Time for `farm nightly` to finish running cells and report after a request to end.
_STOP_PATIENCE_S = 60.0
# Exit codes of a nightly run that was executed: its findings are in its own report.
_WAS_RUN = (ExitCode.PASSED, ExitCode.FAILED, ExitCode.REGRESSION, ExitCode.NOTHING)


def due_before(nightly_run: NightlyConfig, now_ms: int) -> int:
    """Return the latest time at or before `now_ms` when `nightly_run` was due, epoch milliseconds. Pure."""
    zone = ZoneInfo(nightly_run.timezone)
    today = datetime.fromtimestamp(now_ms / 1000, zone).date()
    at = time_of_day(nightly_run.hour, nightly_run.minute)
    days = [today - timedelta(days=back) for back in range(9)]
    times = [datetime.combine(day, at, zone).timestamp() for day in days if day.weekday() in nightly_run.days]
    return next(int(one * 1000) for one in times if one * 1000 <= now_ms)


def name_of(file: Path) -> str:
    """Return the name in a nightly.toml. Raises UsageError for an unreadable file or an illegal name."""
    try:
        name = tomllib.loads(file.read_text(encoding="utf-8"))["nightly"]["name"]
    except OSError as error:
        raise UsageError(f"{file}: {error.strerror or error}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise UsageError(f"{file}: no [nightly] with a name in it ({error}): farm nightly {file} --check") from None
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise UsageError(f"{file}: the name of a nightly run has letters, digits and _ . + -, at most 80")
    return name


def receivers_of(file: Path) -> list[Receiver]:
    """Return the receivers of a nightly.toml, whose secrets leave the environment. Raises UsageError."""
    try:
        notify = tomllib.loads(file.read_text(encoding="utf-8")).get("notify", {})
        found = msgspec.convert(notify, NightlyReceivers)
    except (OSError, ValueError) as error:
        raise UsageError(f"{file}: no receivers of notices can be read: farm nightly {file} --check") from error
    own = partial(beside, file.parent)
    mail = None if found.mail is None else with_files_of(found.mail, own)
    return find_receivers([with_files_of(one, own) for one in found.webhook], mail)


def nightly_lines(starts: Iterable[NightlyStart]) -> list[str]:
    """Return starts of nightly runs as text, a line each."""
    return [
        f"nightly run {one.name} of {clock(one.due_ms)}: {one.state} on {one.agent}"
        + ("" if one.exit_code is None else f" exit code {one.exit_code}")
        + (f" ({one.why})" if one.why else "")
        for one in starts
    ]


class NightlyStarter:
    """Nightly runs of one agent. Any thread may call the methods."""

    def __init__(self, config: Config, store: Store, command: Sequence[str] = (*OWN_COMMAND, "nightly")) -> None:
        """Read the names of the nightly runs. Raises UsageError for a file without a name, or for a name twice."""
        self._config, self._store, self._command = config, store, tuple(command)
        self._nightly_runs: dict[str, NightlyConfig] = {}
        for nightly_run in config.agent.nights:
            name = name_of(nightly_run.file)
            if name in self._nightly_runs:
                raise UsageError(
                    f"{config.file}: agent.nights: {nightly_run.file} is called {name}, as another nightly run is"
                )
            self._nightly_runs[name] = nightly_run
        self._supervisor = Supervisor()
        self._lock, self._checking = threading.Lock(), threading.Lock()
        self._started: dict[str, int] = {}
        """Due time of the newest nightly run that was started here, by name."""
        self._agent: AgentId | None = None
        self._running: dict[str, Child] = {}
        self._threads: list[threading.Thread] = []
        self._stopping = threading.Event()

    def checks(self) -> dict[str, Callable[[], None]]:
        """Return `check` of each nightly run, by name, to be called periodically."""
        return {f"nightly-{name}": partial(self.check, name) for name in self._nightly_runs}

    def begin(self, agent: AgentId) -> None:
        """Start nightly runs as `agent` from now on, and resume the ones of its former life. Raises StoreError."""
        self._agent = agent
        for name, nightly_run in self._nightly_runs.items():
            due_ms = due_before(nightly_run, self._store.leases.now_ms())
            # Only the newest due time is resumed: the nightly run of an earlier day is not.
            left = self._store.cluster.nightly_runs.take_up(agent, name, since_ms=due_ms - 1)
            if left is not None:
                logger.info("nightly run %s goes on: its agent was ended", name)
                self._start(agent, name, left.due_ms, resume=True)

    def check(self, name: str) -> None:
        """Start the nightly run `name` if it is due and no agent has started it. Raises StoreError."""
        agent, nightly_run = self._agent, self._nightly_runs[name]
        if agent is None or self._stopping.is_set():
            return
        nightly_runs = self._store.cluster.nightly_runs
        due_ms = due_before(nightly_run, self._store.leases.now_ms())
        with self._checking:
            if self._started.get(name) == due_ms:
                return
            state = nightly_runs.begin(agent, name, due_ms, late_ms=int(nightly_run.late_s * 1000))
            if state == "running":
                self._start(agent, name, due_ms, resume=False)
        if state in ("missed", "skipped"):
            nightly_runs.lose()
            logger.info("nightly run %s of %s was %s", name, clock(due_ms), state)

    def stop(self, patience_s: float = _STOP_PATIENCE_S) -> None:
        """End the nightly runs here: they report their results so far, and the agent's next life resumes them."""
        self._stopping.set()
        with self._lock:
            children = list(self._running.values())
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGTERM)
        end_s = time.monotonic() + patience_s
        for thread in self._threads:
            thread.join(max(0.0, end_s - time.monotonic()))
        self._supervisor.close()
        for thread in self._threads:
            thread.join()

    def _start(self, agent: AgentId, name: str, due_ms: int, *, resume: bool) -> None:
        nightly_run = self._nightly_runs[name]
        self._started[name] = due_ms
        folder = self._config.state_dir / "nightly" / name
        log = folder / "agent.log"
        words = [*self._command, str(nightly_run.file), *(["--resume"] if resume else [])]
        # Children do not inherit the secrets of notices, except for this one.
        env = self._config.environment | TAKEN
        try:
            make_folders(folder)
            with self._lock:
                child = self._supervisor.spawn(
                    words, name=f"nightly-{name}", env=env, cwd=nightly_run.file.parent, stderr=log
                )
                self._running[name] = child
        except (FarmError, OSError) as error:
            logger.warning("nightly run %s could not be started: %s", name, error)
            self._record_end(agent, name, due_ms, exit_code=ExitCode.INFRA, why=str(error), stopped=False)
            return
        logger.info("nightly run %s has begun (process %s, log %s)", name, child.pid, log)
        thread = threading.Thread(target=self._watch, args=(agent, name, due_ms, child), name=f"nightly-{name}")
        self._threads.append(thread)
        thread.start()

    def _watch(self, agent: AgentId, name: str, due_ms: int, child: Child) -> None:
        """Wait for the end of a nightly run, and record it."""
        code = child.process.wait()
        stopped = self._stopping.is_set() and (code == INTERRUPTED or code < 0)
        last = child.log_tail().strip().rpartition("\n")[2]
        # A nightly run that ended by a signal may have left processes: end the rest of its group.
        child.terminate(timeout_s=1.0)
        with self._lock:
            del self._running[name]
        why = "" if code in _WAS_RUN else last
        logger.info(
            "nightly run %s %s, exit code %s%s",
            name,
            "was stopped" if stopped else "ended",
            code,
            f": {why}" if why else "",
        )
        self._record_end(agent, name, due_ms, exit_code=code, why=why, stopped=stopped)

    def _record_end(self, agent: AgentId, name: str, due_ms: int, *, exit_code: int, why: str, stopped: bool) -> None:
        """Record the end of a nightly run, trying again while the store is away."""
        while True:
            try:
                self._store.cluster.nightly_runs.end(agent, name, due_ms, exit_code=exit_code, why=why, stopped=stopped)
            except StoreError as error:
                if self._stopping.wait(_RETRY_S):
                    logger.warning("how nightly run %s ended could not be recorded: %s", name, error)
                    return
            else:
                return
