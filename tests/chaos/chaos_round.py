"""Round of chaos.py: a run that is disturbed, watched, resumed until no verdict is missing, and judged."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from chaos_acts import DEVICE_SIDE, LOCAL, THEMES, Pace, Tormentor, plan_acts
from chaos_home import (
    LEASE_TTL_S,
    Disturbed,
    DisturbedPostgres,
    DisturbedSqlite,
    Home,
    Lab,
    Process,
    has_sshd,
    lab_of,
    processes_of,
)
from chaos_store import Cluster
from stub_run import judge

from farm.base.errors import ENDED_EARLY, ExitCode, FarmError
from farm.devices.device import Health
from farm.devices.recovery import STEP_SECONDS
from farm.policy.situation import Lease
from farm.results.attempt import Verdict
from farm.store.records import RunView
from farm.store.store import open_store

_SLACK_S = 15.0
LONGEST_WAIT_S = sum(STEP_SECONDS.values()) + _SLACK_S
"""Seconds that a run may be without an attempt, an event or a new word between two acts. Among the waits in
docs/explanation/health.md the recovery of a device is the longest here: stopped, filled or killed parts are back
by then, jobs take two seconds (chaos_home.py), and nothing stops a worker."""
_POLL_S = 0.25
_COUNT_EVERY_S = 1.0
_STACKS_S = 1.0


class Watch:
    """Notices that a run stands still."""

    def __init__(self, process: subprocess.Popen[bytes], output: Path, store: Disturbed) -> None:
        self._process, self._output, self._store = process, output, store
        self._last: object = None
        self._counts: object = None
        self._counted_at = 0.0
        self._since = time.monotonic()
        self.longest_s = 0.0
        """Without progress, while nothing happened to it."""

    def wait(self, bound_s: float, tend: Callable[[], bool]) -> bool:
        """Return True once the run has ended, False when it stood still for `bound_s`.

        `tend` is called all the time, and returns whether anything happens to the run.
        """
        while self._process.poll() is None:
            tormented = tend()
            now = time.monotonic()
            if tormented or self._moved():
                self._since = now
            still_s = now - self._since
            self.longest_s = max(self.longest_s, still_s)
            if still_s > bound_s:
                return False
            time.sleep(_POLL_S)
        return True

    def _moved(self) -> bool:
        if time.monotonic() > self._counted_at + _COUNT_EVERY_S:
            # A store that does not answer keeps the last counts.
            self._counts = self._store.counts() or self._counts
            self._counted_at = time.monotonic()
        # The same complaint over and over is no progress.
        now = (len(set(self._output.read_bytes().splitlines())), self._counts)
        moved = now != self._last
        self._last = now
        return moved


def dump(home: Home, output: Path, acts: Path, into: Path) -> None:
    """Keep the evidence of a hang: stacks, kernel wait channels, grants, logs, and the store."""
    into.mkdir(parents=True)
    lines = []
    for one in processes_of(home.folder):
        proc = Path("/proc", str(one.pid))
        facts = []
        for name in ("wchan", "status", "stack"):
            with contextlib.suppress(OSError):
                text = (proc / name).read_text()
                facts.append("\n".join(text.splitlines()[:9]) if name == "status" else text)
        lines += [f"== {one.pid} {one.role}: {one.command}", *facts, ""]
        if one.role in ("controller", "worker", "builder"):
            with contextlib.suppress(OSError):
                os.kill(one.pid, signal.SIGUSR1)
    (into / "processes.txt").write_text("\n".join(lines))
    time.sleep(_STACKS_S)
    for name in (output, acts, home.stacks, home.state, home.cwd, *home.storage.rglob("*.log")):
        with contextlib.suppress(OSError, shutil.Error):
            copy = shutil.copytree if name.is_dir() else shutil.copy
            copy(name, into / name.name)  # type: ignore[operator]


ATTACHED = 3
_REFUSED = ENDED_EARLY - {ExitCode.INFRA, ExitCode.STORE_UNREACHABLE, ExitCode.INTERRUPTED}
"""Exit codes of runs that refuse to be resumed; no disturbance of a round explains them."""
_MOST_PARTS = 7
_PEACEFUL_PARTS = 4
"""Number of resumptions at the end that run undisturbed."""
_KEPT_LINES = 40
_PLACES = ("own", "attached", "tunnel")
_LEFT_S = 30.0
"""How long processes of a run may take to end after their controller: docs/developers/architecture.md."""
_PERSON_AFTER_S = 1.5
_DEVICE_CAUSES = frozenset({"connection", "gone", "space", "damage", "crash", "hang"})
_GIVEN_UP = re.compile(r"\S+ is no longer used: .*")
# A process that starts as its controller dies finds its pipe closed before any code of farm is in it.
_STILLBORN = "BrokenPipeError: [Errno 32] Broken pipe"


@dataclass
class Tally:
    """Findings of all rounds."""

    verdicts: Counter[str] = field(default_factory=Counter)
    causes: Counter[str] = field(default_factory=Counter)
    acts: Counter[str] = field(default_factory=Counter)
    found: dict[str, list[str]] = field(
        default_factory=lambda: {
            what: []
            for what in (
                "hangs",
                "wrong_verdict",
                "wrong_cause",
                "lost",
                "duplicated",
                "quarantined_locally",
                "orphans",
                "tracebacks",
                "refused",
                "broke_down",
            )
        }
    )
    quarantined: int = 0
    given_up: int = 0
    """Number of devices that a run stopped to use."""
    rounds: int = 0
    runs: int = 0
    jobs: int = 0
    faults: int = 0
    longest_wait_s: float = 0.0


class Settings(NamedTuple):
    """Common settings of all rounds."""

    folder: Path
    runner: Path
    seed: int
    jobs: int
    pace: Pace
    bound_s: float
    cluster: Cluster | None
    kept: Path
    """Folder for the evidence of findings."""


class Round:
    """Run from its start to the last resumption."""

    def __init__(self, settings: Settings, number: int, tally: Tally) -> None:
        self._settings, self._number, self._tally = settings, number, tally
        self._chance = random.Random(f"{settings.seed} {number}")
        # In turns, so that a few rounds meet everything, and some more everything everywhere.
        turn, theme = divmod(number + settings.seed, len(THEMES))
        self._theme = THEMES[theme]
        place = (turn + theme) % len(_PLACES)
        attached = ATTACHED if place else 0
        self._tunnel = _PLACES[place] == "tunnel" and has_sshd()
        self._folder = settings.folder / f"r{number}"
        self._home = Home(self._folder, settings.runner, self._chance, jobs=settings.jobs, attached=attached)
        # On attached devices too, so that users of a server and of a file both meet everything.
        on_server = settings.cluster is not None and self._chance.random() < 0.5
        self._store: Disturbed = (
            DisturbedPostgres(settings.cluster, f"round{number}")
            if on_server and settings.cluster is not None
            else DisturbedSqlite(self._home.state / "farm.db")
        )
        self._acts_log = self._folder / "acts.log"
        self._struck: set[str] = set()
        self._outputs: list[Path] = []

    def play(self) -> None:
        """Play it."""
        kind = f"{self._home.attached} attached devices" if self._home.attached else "2 devices of its own"
        kind += " behind a tunnel" if self._tunnel else ""
        before = {what: len(found) for what, found in self._tally.found.items()}
        self._log(f"round {self._number}: {self._theme}, {kind}, {self._store.name}")
        try:
            with lab_of(self._home, tunnel=self._tunnel) as lab:
                self._play_parts(lab)
        finally:
            self._store.come_back()
            for left in processes_of(self._folder):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(left.pid, signal.SIGKILL)
            new = {what: found[before[what] :] for what, found in self._tally.found.items()}
            if any(new.values()):
                self._keep(new)
            self._home.close()
            shutil.rmtree(self._folder, ignore_errors=True)
        self._tally.rounds += 1

    def _play_parts(self, lab: Lab | None) -> None:
        view: RunView | None = None
        for part in range(_MOST_PARTS):
            resume = self._has_begun()
            self._run_once(lab, part, resume=resume)
            self._look_at_quarantine(lab)
            view = self._view()
            # A run whose controller died after the last job has no end yet.
            if view is not None and view.exit_code is not None and not _missing(view, self._home.behaviours):
                break
        self._judge(view)
        self._look_at_leases()

    def _tend(self, lab: Lab | None) -> bool:
        """Start dead processes of the lab again; return whether any process is or was dead."""
        done = lab.tend(_PERSON_AFTER_S) if lab is not None else []
        for what in done:
            self._log(f"{what} is started again")
        return bool(done) or (lab is not None and not lab.is_whole)

    def _run_once(self, lab: Lab | None, part: int, *, resume: bool) -> None:
        # A resumption starts only with all devices present.
        while self._tend(lab):
            time.sleep(0.1)
        if lab is not None:
            lab.connect_all()
        words = ["run", "--resume", "latest"] if resume else self._first_words()
        environment = self._home.environment(self._store.url, lab.environment if lab else {})
        output = self._folder / f"output-{part}.txt"
        self._outputs.append(output)
        process = self._home.start(words, environment, output)
        self._tally.runs += 1
        self._log(f"part {part}: farm {' '.join(words)} is {process.pid}")
        peaceful = part >= _MOST_PARTS - _PEACEFUL_PARTS or (part > 0 and self._chance.random() < 0.6)
        disks = bool(self._home.mounts)
        attached = self._home.attached > 0
        pace = self._settings.pace
        acts = [] if peaceful else plan_acts(self._chance, self._theme, pace, disks=disks, attached=attached)
        tormentor = Tormentor(self._home, self._store, acts, self._log)
        watch = Watch(process, output, self._store)

        ended = watch.wait(self._settings.bound_s, lambda: self._tend(lab) or not tormentor.is_over)
        tormentor.stop()
        self._struck |= tormentor.struck
        self._tally.faults += tormentor.count
        self._tally.acts.update(tormentor.struck)
        if watch.longest_s > self._tally.longest_wait_s:
            self._tally.longest_wait_s = watch.longest_s
            self._log(f"longest wait so far: {watch.longest_s:.0f} s")
        if not ended:
            self._note_hang(process, output, part)
        self._log(f"part {part}: ended with {process.wait()}")
        self._look_at_output(output, process.returncode)
        self._look_at_processes(lab)

    def _first_words(self) -> list[str]:
        where = [] if self._home.attached else ["--virtual", "2"]
        return ["run", "--soc", "SM8650", "--suite", "./chaos", *where, "--iterations", "1", "--timeout", "2"]

    def _note_hang(self, process: subprocess.Popen[bytes], output: Path, part: int) -> None:
        into = self._settings.kept / f"hang-seed{self._settings.seed}-round{self._number}-part{part}"
        dump(self._home, output, self._acts_log, into)
        self._found("hangs", f"round {self._number} part {part}: nothing for {self._settings.bound_s:.0f} s: {into}")
        process.send_signal(signal.SIGINT)
        try:
            process.wait(10.0)
        except subprocess.TimeoutExpired:
            process.kill()

    def _look_at_output(self, output: Path, code: int) -> None:
        text = output.read_text(errors="replace")
        name = f"round {self._number}: {output.name}"
        if "Traceback" in text and _STILLBORN not in text:
            self._found("tracebacks", f"{name}: {_excerpt(text)}")
        if code in _REFUSED:
            self._found("refused", f"{name}: {text.splitlines()[-1:]}")
        if "the test session broke down" in text and not self._struck & {"controller", "state disk"}:
            broken = next(line for line in text.splitlines() if "the test session broke down" in line)
            self._found("broke_down", f"{name}: {broken[:300]}")
        self._tally.given_up += len(_GIVEN_UP.findall(text))

    def _look_at_quarantine(self, lab: Lab | None) -> None:
        """Count devices in quarantine, and release them, as a person does who has looked at them."""
        with contextlib.suppress(FarmError), open_store(self._store.url, readonly=True) as store:
            for one in store.devices.all():
                if one.health == Health.QUARANTINED:
                    self._tally.quarantined += 1
                    self._log(f"{one.serial} is quarantined: {one.health_reason}")
                    if not self._struck & {*DEVICE_SIDE, "storage"}:
                        self._found("quarantined_locally", f"round {self._number}: {one.serial}: {one.health_reason}")
                    environment = self._home.environment(self._store.url, lab.environment if lab else {})
                    words = ["devices", "unquarantine", one.serial]
                    self._home.start(words, environment, self._folder / "release.txt").wait(120)

    def _look_at_processes(self, lab: Lab | None) -> None:
        for one in self._left(lab.pids if lab else frozenset(), _LEFT_S):
            self._found("orphans", f"round {self._number}: {one.role} {one.pid}: {one.command[:160]}")
            with contextlib.suppress(ProcessLookupError):
                os.kill(one.pid, signal.SIGKILL)

    def _left(self, known: frozenset[int] | set[int], seconds: float) -> list[Process]:
        deadline = time.monotonic() + seconds
        while True:
            # An adb server that farm starts for attached devices stays, as adb's do.
            left = [one for one in processes_of(self._folder) if one.pid not in known and not _stays(one)]
            if not left or time.monotonic() > deadline:
                return left
            time.sleep(0.1)

    def _has_begun(self) -> bool:
        return self._view() is not None

    def _view(self) -> RunView | None:
        with contextlib.suppress(FarmError), open_store(self._store.url, readonly=True) as store:
            return store.runs.view(store.runs.resolve("latest"))
        return None

    def _judge(self, view: RunView | None) -> None:
        where = f"round {self._number}"
        self._tally.jobs += len(self._home.behaviours)
        if view is None:
            self._found("lost", f"{where}: there is no run")
            return
        self._tally.verdicts.update(str(job.attempts[-1].verdict) for job in view.jobs if job.attempts)
        self._tally.causes.update(str(a.cause) for job in view.jobs for a in job.attempts if a.verdict is Verdict.INFRA)
        wrong = judge(view, self._home.behaviours)
        for what in ("wrong_verdict", "duplicated"):
            for job in wrong[what]:
                self._found(what, f"{where}: {job}")
        for job_id in _missing(view, self._home.behaviours):
            self._found("lost", f"{where}: {job_id} has no verdict after {len(self._outputs)} parts")
        if self._struck <= LOCAL:
            for job in view.jobs:
                for attempt in job.attempts:
                    wrong = attempt.verdict is Verdict.INFRA and str(attempt.cause) in _DEVICE_CAUSES
                    if wrong and self._home.behaviours[job.id] == "pass":
                        began = time.strftime("%H:%M:%S", time.localtime(attempt.started_ms / 1000))
                        text = f"{attempt.cause} {attempt.seconds:.1f} s after {began}: {attempt.reason[:200]}"
                        self._found("wrong_cause", f"{where}: {job.id}: {text}")

    def _look_at_leases(self) -> None:
        deadline = time.monotonic() + LEASE_TTL_S + 2
        left: list[Lease] = []
        with contextlib.suppress(FarmError), open_store(self._store.url) as store:
            # Leases of a killed controller expire.
            while (left := store.leases.all()) and time.monotonic() < deadline:
                time.sleep(0.5)
        for lease in left:
            self._found("orphans", f"round {self._number}: lease of {lease.device}")

    def _found(self, what: str, text: str) -> None:
        self._tally.found[what].append(text)
        self._log(f"FOUND {what}: {text}")

    def _keep(self, new: dict[str, list[str]]) -> None:
        into = self._settings.kept / f"seed{self._settings.seed}-round{self._number}"
        into.mkdir(parents=True, exist_ok=True)
        (into / "found.json").write_text(json.dumps(new, indent=1))
        for file in (self._acts_log, *self._outputs, *self._folder.rglob("*.log")):
            with contextlib.suppress(OSError):
                shutil.copy(file, into / file.name)
        for file in self._outputs:
            # CI keeps nothing else of a round.
            lines = file.read_text(errors="replace").splitlines()
            print(*(f"{file.name}: {line}" for line in lines[-_KEPT_LINES:]), sep="\n", flush=True)
        with contextlib.suppress(OSError):
            shutil.copytree(self._home.state, into / "state", ignore=shutil.ignore_patterns("ballast"))

    def _log(self, text: str) -> None:
        line = f"{time.strftime('%H:%M:%S')} r{self._number} {text}"
        print(line, flush=True)
        with self._acts_log.open("a") as file:
            file.write(line + "\n")


def _stays(one: Process) -> bool:
    return "fork-server server" in one.command


def _excerpt(text: str) -> str:
    start = text.index("Traceback")
    return text[start : start + 1500]


def _missing(view: RunView, behaviours: dict[str, str]) -> list[str]:
    decided = {job.id for job in view.jobs if job.attempts and job.attempts[-1].verdict is not Verdict.INFRA}
    return sorted(behaviours.keys() - decided)
