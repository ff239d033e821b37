"""Whatever dies, whenever: every run ends, and every job of a device that works has its verdict, once."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
from run_model import Script, World
from waiting import until

from farm.dispatch.device_runner import MOST_EXITS
from farm.pytest_plugin.workers import START_SECONDS, STOPPED_SECONDS, Workers
from farm.results.attempt import Cause, Verdict

if TYPE_CHECKING:
    from collections.abc import Iterator

SCRIPTS = {
    "healthy": {},
    "one is brought back": {"ailing": {0: 2}},
    "both are brought back": {"ailing": {0: 1, 1: 2}},
    "one is given up": {"hopeless": (0,)},
    "one computes wrong numbers": {"wrong": (1,)},
}
# What the others contain is in the whole run.
NAMES = [
    pytest.param(
        name, marks=[pytest.mark.whole] if name in ("one is brought back", "one computes wrong numbers") else []
    )
    for name in SCRIPTS
]


@pytest.fixture
def quick_folder() -> Iterator[Path]:
    """Folder in memory where this machine has one: files that replace others wait there for no disk."""
    memory = Path("/dev/shm")  # noqa: S108 - the test's own folder is below
    with tempfile.TemporaryDirectory(prefix="farm-worlds-", dir=memory if os.access(memory, os.W_OK) else None) as name:
        yield Path(name)


@pytest.fixture
def world(quick_folder: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    """Make worlds, each in a folder of its own, whose time is the only one."""
    numbers = itertools.count()

    def make(name: str, **facts: object) -> World:
        script = Script(**{key: dict(v) if isinstance(v, dict) else v for key, v in (SCRIPTS[name] | facts).items()})
        folder = quick_folder / str(next(numbers))
        folder.mkdir()
        made = World(folder, script)
        monkeypatch.setattr(time, "sleep", made.sleep)
        monkeypatch.setattr(time, "monotonic", lambda: made.now_s)
        return made

    return make


def check(world: World, *, jobs: int = 6) -> None:
    world.run()
    assert len(world.recorded) == jobs, world.notes
    for job, attempts in world.recorded.items():
        decided = [attempt.verdict for attempt in attempts if attempt.verdict is not Verdict.INFRA]
        # A job under which two workers died is infra.
        deaths = [attempt for attempt in attempts if attempt.cause is Cause.WORKER]
        assert decided == [Verdict.PASSED] or (len(deaths) == 1 and not decided), (job, attempts, world.notes)
        assert not deaths or sum(map(len, world.script.kills.values())) > 1


def moments(make: object, name: str) -> int:
    """Return how many moments an undisturbed run has."""
    undisturbed = make(name)  # type: ignore[operator]
    check(undisturbed)
    return undisturbed.points


@pytest.mark.parametrize("name", NAMES)
def test_a_worker_killed_at_any_moment(world: object, name: str) -> None:
    for moment in range(1, moments(world, name) + 1):
        for victim in (0, 1):
            check(world(name, kills={moment: (victim,)}))  # type: ignore[operator]


@pytest.mark.parametrize("name", NAMES)
def test_several_workers_killed_at_once_and_their_replacements_while_they_start(world: object, name: str) -> None:
    last = moments(world, name)
    chance = random.Random(name)
    for moment in range(1, last + 1, 3):
        # The replacement begins a few moments later.
        later = moment + chance.randrange(1, 8)
        for victims in ((0, 1), (1,), (0,)):
            check(world(name, kills={moment: victims, later: victims, later + 1: victims}))  # type: ignore[operator]


@pytest.mark.parametrize("name", NAMES)
def test_a_disk_that_is_full_for_a_while(world: object, name: str) -> None:
    last = moments(world, name)
    for begin in range(0, last, 5):
        for length in (1, 4, 20):
            full = world(name, full=range(begin, begin + length))  # type: ignore[operator]
            check(full)
            assert not any(note.startswith("the run stops") for note in full.notes)


def test_a_disk_that_stays_full_stops_the_run_and_says_what_to_do(world: object) -> None:
    full = world("healthy", full=range(16, 10**9))  # type: ignore[operator]
    full.run()
    [stop] = [note for note in full.notes if note.startswith("the run stops")]
    assert "No space left on device" in stop
    assert "farm run --resume run" in stop
    assert full.now_s < 3 * full.plan.health.disk_wait_s
    assert all(a.verdict in {Verdict.PASSED, Verdict.INFRA} for attempts in full.recorded.values() for a in attempts)


def test_a_device_whose_workers_die_all_the_time_is_given_up_and_the_others_do_its_jobs(world: object) -> None:
    dying = world("healthy", kills=dict.fromkeys(range(1, 2000), (0,)))  # type: ignore[operator]
    check(dying)
    assert any(f"device-0 is not used any more: its device process exited {MOST_EXITS} times" in n for n in dying.notes)


def test_a_run_whose_workers_all_die_ends(world: object) -> None:
    dying = world("healthy", kills=dict.fromkeys(range(1, 5000), (0, 1)))  # type: ignore[operator]
    dying.run()
    assert dying.verdicts == {}
    assert sum("is not used any more" in note for note in dying.notes) == 2


def test_kills_and_full_disks_at_random(world: object) -> None:
    for seed in range(150):
        chance = random.Random(seed)
        name = chance.choice(list(SCRIPTS))
        begin, length = chance.randrange(150), chance.choice([0, 0, 3, 15])
        kills = {chance.randrange(1, 150): tuple(chance.sample((0, 1), chance.choice((1, 2)))) for _ in range(4)}
        check(world(name, kills=kills, full=range(begin, begin + length)))  # type: ignore[operator]


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


class Watched:
    """Looks after one process, as if it were a worker, on a clock of its own."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process, self.now_s, self.sign = process, 0.0, 0
        self.workers = Workers(
            ["device-0"],
            is_wanted=lambda _: True,
            retire=lambda *_: None,
            note=lambda _: None,
            sign_of=lambda _: self.sign,
            most_silence_s=1000.0,
            clock=lambda: self.now_s,
        )
        self.node = Node(process.pid)
        self.workers.assign(self.node)

    def send(self, number: signal.Signals, state: str) -> None:
        """Send a signal and wait until the process is in the state that it leads to."""
        self.process.send_signal(number)
        stat = Path(f"/proc/{self.process.pid}/stat")
        until(lambda: stat.read_text().rpartition(")")[2].split()[0] == state, state)

    def lasts(self, seconds: int, *, shows: bool = True) -> bool:
        """Look once a second, and tell whether the process is still there then."""
        for _ in range(seconds):
            self.now_s += 1
            self.sign += shows
            self.workers.watch([self.node])
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(0.5)
        return self.process.poll() is None


class Node:
    """What xdist knows of a worker."""

    def __init__(self, pid: int) -> None:
        self.channel = None
        self.gateway = SimpleNamespace(_rinfo=lambda: SimpleNamespace(pid=pid))


def test_a_worker_that_does_not_start_is_ended(sleeper: subprocess.Popen[bytes]) -> None:
    watched = Watched(sleeper)
    assert watched.lasts(int(START_SECONDS) - 1)
    assert not watched.lasts(3)


def test_a_worker_that_is_stopped_is_ended_unless_it_goes_on_in_time(sleeper: subprocess.Popen[bytes]) -> None:
    watched = Watched(sleeper)
    watched.workers.is_ready(watched.node)
    watched.send(signal.SIGSTOP, "T")
    assert watched.lasts(int(STOPPED_SECONDS) - 1)
    watched.send(signal.SIGCONT, "S")
    assert watched.lasts(int(STOPPED_SECONDS) + 5)
    watched.send(signal.SIGSTOP, "T")
    assert not watched.lasts(int(STOPPED_SECONDS) + 5)


def test_a_worker_that_shows_no_sign_is_ended_however_it_hangs(sleeper: subprocess.Popen[bytes]) -> None:
    watched = Watched(sleeper)
    watched.workers.is_ready(watched.node)
    assert watched.lasts(1500)
    assert watched.lasts(999, shows=False)
    assert not watched.lasts(5, shows=False)


def test_workers_that_were_stopped_together_with_their_controller_are_not_late(
    sleeper: subprocess.Popen[bytes],
) -> None:
    watched = Watched(sleeper)
    watched.workers.is_ready(watched.node)
    assert watched.lasts(5)
    watched.now_s += 3600
    assert watched.lasts(5)
