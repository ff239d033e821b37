"""Deaths of any process at any time: every run ends, and every job of a working device has one verdict."""

from __future__ import annotations

import itertools
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from run_model import Script, World

from farm.dispatch.device_runner import MOST_EXITS
from farm.results.attempt import Cause, Verdict

SCRIPTS: dict[str, dict[str, Any]] = {
    "healthy": {},
    "one is brought back": {"ailing": {0: 2}},
    "both are brought back": {"ailing": {0: 1, 1: 2}},
    "one is given up": {"is_unrecoverable": (0,)},
    "one computes wrong numbers": {"wrong": (1,)},
}
# Cases that others contain run only with -m whole.
NAMES = [
    pytest.param(
        name, marks=[pytest.mark.whole] if name in ("one is brought back", "one computes wrong numbers") else []
    )
    for name in SCRIPTS
]
Make = Callable[..., World]


@pytest.fixture
def quick_folder() -> Iterator[Path]:
    """Folder in memory where this machine has one: files that replace others wait there for no disk."""
    memory = Path("/dev/shm")  # noqa: S108 - the test's own folder is below
    with tempfile.TemporaryDirectory(prefix="farm-worlds-", dir=memory if os.access(memory, os.W_OK) else None) as name:
        yield Path(name)


@pytest.fixture
def world(quick_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Make worlds, each in a folder of its own, whose time is the only one."""
    numbers = itertools.count()

    def make(name: str, **facts: Any) -> World:
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


def moments(make: Make, name: str) -> int:
    """Return how many moments an undisturbed run has."""
    undisturbed = make(name)
    check(undisturbed)
    return undisturbed.points


@pytest.mark.parametrize("name", NAMES)
def test_a_worker_killed_at_any_moment(world: Make, name: str) -> None:
    for moment in range(1, moments(world, name) + 1):
        for victim in (0, 1):
            check(world(name, kills={moment: (victim,)}))


@pytest.mark.parametrize("name", NAMES)
def test_several_workers_killed_at_once_and_their_replacements_while_they_start(world: Make, name: str) -> None:
    last = moments(world, name)
    chance = random.Random(name)
    for moment in range(1, last + 1, 3):
        # The replacement begins a few moments later.
        later = moment + chance.randrange(1, 8)
        for victims in ((0, 1), (1,), (0,)):
            check(world(name, kills={moment: victims, later: victims, later + 1: victims}))


@pytest.mark.parametrize("name", NAMES)
def test_a_disk_that_is_full_for_a_while(world: Make, name: str) -> None:
    last = moments(world, name)
    for begin in range(0, last, 5):
        for length in (1, 4, 20):
            full = world(name, full=range(begin, begin + length))
            check(full)
            assert not any(note.startswith("the run stops") for note in full.notes)


def test_a_disk_that_stays_full_stops_the_run_and_says_what_to_do(world: Make) -> None:
    full = world("healthy", full=range(16, 10**9))
    full.run()
    [stop] = [note for note in full.notes if note.startswith("the run stops")]
    assert "No space left on device" in stop
    assert "farm run --resume run" in stop
    assert full.now_s < 3 * full.plan.health.disk_wait_s
    assert all(a.verdict in {Verdict.PASSED, Verdict.INFRA} for attempts in full.recorded.values() for a in attempts)


def test_a_device_whose_workers_die_all_the_time_is_given_up_and_the_others_do_its_jobs(world: Make) -> None:
    dying = world("healthy", kills=dict.fromkeys(range(1, 2000), (0,)))
    check(dying)
    assert any(f"device-0 is no longer used: its device process exited {MOST_EXITS} times" in n for n in dying.notes)


def test_a_run_whose_workers_all_die_ends(world: Make) -> None:
    dying = world("healthy", kills=dict.fromkeys(range(1, 5000), (0, 1)))
    dying.run()
    assert dying.verdicts == {}
    assert sum("is no longer used" in note for note in dying.notes) == 2


def test_kills_and_full_disks_at_random(world: Make) -> None:
    for seed in range(150):
        chance = random.Random(seed)
        name = chance.choice(list(SCRIPTS))
        begin, length = chance.randrange(150), chance.choice([0, 0, 3, 15])
        kills = {chance.randrange(1, 150): tuple(chance.sample((0, 1), chance.choice((1, 2)))) for _ in range(4)}
        check(world(name, kills=kills, full=range(begin, begin + length)))
