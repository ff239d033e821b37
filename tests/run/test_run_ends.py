"""Deaths of any process at any time: every run ends, and a resumed run has the same results, nothing left over."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from farm_home import FarmHome, processes_of, wait_for_no_process
from run_model import Script, World
from stub_home import StubHome, make_stub_home, next_stub_home, write_stub_suite
from waiting import all_the_time, poll, until

from farm.builds.compile.protocol import BUILDER_NAME
from farm.dispatch.device_forks import PROCESS_NAME, SERVER_NAME
from farm.dispatch.device_runner import MOST_EXITS
from farm.results.attempt import Cause, Verdict

# Deaths of any process at any time: every run ends, and every job of a working device has one verdict.


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


# kill -9 of one process while a run works, at any moment, and the run resumed: the same results, nothing left over.


VICTIMS = {
    "controller": "run --soc",
    "fork server": SERVER_NAME,
    "worker": PROCESS_NAME,
    "builder": BUILDER_NAME,
    "adb server": "server nodaemon",
    "runner": "--serve",
    "virtual device": "farm.devices.virtual",
}
OFTEN = ("controller", "worker")
REAL = (("controller", 3), ("worker", 3), ("builder", 0))
"""Moments that are in a run of the simulator and the compiler; all others are in runs of stubs."""


def how_often(victim: str, moment: int) -> list[pytest.MarkDecorator]:
    """Return the marks of a moment: -m whole has one for each process and two for OFTEN, of which one is default."""
    if moment not in ((0, 3) if victim in OFTEN else (0,)):
        return [pytest.mark.soak]
    return [pytest.mark.whole] if moment or victim not in OFTEN else []


MOMENTS = [
    pytest.param(victim, moment, id=f"{victim}-{moment}", marks=how_often(victim, moment))
    for victim in VICTIMS
    for moment in range(10)
]
RUN = ("run", "--soc", "SM8650", "--virtual", "2")
MINE = ("--suite", "./mine")
SIMULATED = ("--suite", "smoke", "-k", "linear or gelu or conv2d or softmax or new", "--iterations", "100")
LATENCIES_MS = {"add": 400, "mul": 410, "sub": 420, "maximum": 430, "minimum": 440, "neg": 450}
COMPILES_S = 1.5
NEVER_COMPILED = """
[suite]
name = "mine"
description = "a case that has never been compiled"
[suite.tolerance.8a8w.fp32]
sqnr_db = 20.0
[case.new]
module = "torch.nn:Hardtanh"
kwargs = {{ min_val = -{limit}, max_val = {limit} }}
inputs = [{{ shape = [1, 3, 16, 16] }}]
"""
STILLBORN = """\
Traceback (most recent call last):
  File "<string>", line 1, in <module>
  File "<string>", line 5, in <module>
BrokenPipeError: [Errno 32] Broken pipe
"""


@dataclass(frozen=True)
class Work:
    """A run whose jobs are compiled."""

    home: FarmHome
    command: tuple[str, ...]
    results: dict[str, dict[str, Any]]
    """Results of its jobs without any kill."""

    def with_new_case(self) -> tuple[str, ...]:
        """Make `new` a case that no session has ever compiled, and return the command."""
        part = random.SystemRandom().random()
        if isinstance(self.home, StubHome):
            write_stub_suite(self.home, "mine", {**LATENCIES_MS, "new": 460}, {"new": COMPILES_S + part / 100})
            return self.command
        (self.home.cwd / "mine").mkdir(exist_ok=True)
        limit = 2.0 + part
        (self.home.cwd / "mine" / "suite.toml").write_text(NEVER_COMPILED.format(limit=limit))
        return (*self.command, *MINE)


def attempts(home: FarmHome) -> list[tuple[int, str]]:
    return home.rows("select id, verdict from attempt order by id")


def results(view: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the results that must not depend on the kill: verdicts and exact numbers of every job."""
    found = {}
    for job in view["jobs"]:
        last = job["attempts"][-1]
        exact = {m["metric"]: m["samples"] for m in last["measurements"] if m["exact"]}
        found[job["case"]] = {"verdict": last["verdict"], "sqnr": [c["sqnr_db"] for c in last["comparisons"]], **exact}
    return found


@pytest.fixture(scope="module")
def stub_home(tmp_path_factory: pytest.TempPathFactory) -> StubHome:
    home = make_stub_home(tmp_path_factory.mktemp("stub") / "home")
    write_stub_suite(home, "mine", LATENCIES_MS)
    return home


@pytest.fixture(scope="module")
def stub_results(stub_home: StubHome) -> dict[str, dict[str, Any]]:
    return results(stub_home.json(*RUN, *MINE, timeout_s=300))


@pytest.fixture
def stubbed(stub_home: StubHome, stub_results: dict[str, dict[str, Any]], tmp_path: Path) -> Work:
    """Run of stubs: neither the simulator nor the compiler takes part."""
    home = next_stub_home(stub_home, tmp_path / "stub")
    write_stub_suite(home, "mine", LATENCIES_MS)
    return Work(home, (*RUN, *MINE), stub_results)


@pytest.fixture(scope="module")
def simulated_results(farm_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("undisturbed")
    return results(FarmHome(farm_cache, folder / "state", folder).json(*RUN, *SIMULATED, timeout_s=300))


@pytest.fixture
def simulated(home: FarmHome, simulated_results: dict[str, dict[str, Any]]) -> Work:
    return Work(home, (*RUN, *SIMULATED), simulated_results)


def find(home: FarmHome, victim: str, seconds: float) -> int | None:
    """Wait for a process of the run and return its id; None when the run is over."""

    def is_there() -> int | None:
        return next((pid for pid, command in processes_of(home).items() if VICTIMS[victim] in command), None)

    return poll(is_there, seconds)


def kill(home: FarmHome, victim: str) -> bool:
    """Kill a process of that kind, and return whether one was found."""
    pid = find(home, victim, 0.1)
    with contextlib.suppress(ProcessLookupError):
        if pid is not None:
            os.kill(pid, signal.SIGKILL)
            return True
    return False


def reapers(home: FarmHome) -> list[int]:
    """Return the reapers of a home's processes: they have no environment that would show it."""
    found = []
    for parent in processes_of(home):
        with contextlib.suppress(OSError):
            tasks = Path(f"/proc/{parent}/task").iterdir()
            children = [int(child) for task in tasks for child in (task / "children").read_text().split()]
            found += [child for child in children if b"reaper.py" in Path(f"/proc/{child}/cmdline").read_bytes()]
    return found


@pytest.mark.whole
def test_nothing_is_left_when_nobody_can_clean_up(stubbed: Work) -> None:
    """The controller is killed with every reaper: of its workers too, so that only the kernel is left to end things."""
    home = stubbed.home
    with home.running(*stubbed.with_new_case()) as process:
        # The last to come: the adb server, the devices and a builder are there, too.
        assert find(home, "runner", 120) is not None
        guards = reapers(home)
        assert guards
        for pid in guards:
            os.kill(pid, signal.SIGSTOP)
        for pid in [*guards, process.pid]:
            os.kill(pid, signal.SIGKILL)
        process.wait()
    assert wait_for_no_process(home, 60) == {}
    got = results(home.json("run", "--resume", "latest", timeout_s=240))
    assert got.pop("new")["verdict"] == "passed"
    assert got == stubbed.results


@pytest.mark.parametrize(("victim", "moment"), MOMENTS)
def test_killed_and_resumed_the_results_are_the_same(request: pytest.FixtureRequest, victim: str, moment: int) -> None:
    is_real = (victim, moment) in REAL
    work: Work = request.getfixturevalue("simulated" if is_real else "stubbed")
    home = work.home
    seed = f"{victim} {moment}"
    chance = random.Random(seed)
    # The controller is there from the beginning; the other processes start once it has loaded its parts.
    delay = chance.uniform(0.0, (3.0 if is_real else 1.2) + 2.0 * (victim == "controller"))
    for _ in range(4):
        # Each try compiles: a builder is there only then.
        command = work.with_new_case() if victim == "builder" else work.command
        with home.running(*command) as process:
            assert find(home, victim, 60) is not None, "it never was there"
            was_there = all_the_time(lambda: find(home, victim, 0.1) is not None, delay)
            finished = attempts(home)
            killed = was_there and kill(home, victim)
            output = process.communicate(timeout=240)[0]
        if killed:
            break
        # The run had ended before the kill: the next run is killed earlier.
        assert wait_for_no_process(home) == {}
        delay /= 4
    else:
        pytest.fail(f"the {victim} was never there at its moment")
    # A process that starts as the controller dies finds its pipe closed before any code of farm is in it.
    assert "Traceback" not in output.replace(STILLBORN, ""), output
    assert wait_for_no_process(home) == {}
    assert attempts(home)[: len(finished)] == finished
    # A run killed before its beginning cannot be resumed, and its remains do not disturb the next run.
    again = ("run", "--resume", "latest") if home.rows("select id from run") else command
    got = results(home.json(*again, timeout_s=240))
    if victim == "builder":
        assert got.pop("new")["verdict"] == "passed"
    assert got == work.results, output
    assert {verdict for _, verdict in attempts(home)} <= {"passed", "infra"}
    assert wait_for_no_process(home) == {}


@pytest.mark.whole
def test_a_run_ends_when_what_made_its_workers_is_killed_in_the_middle(stubbed: Work) -> None:
    """Workers are copies of the fork server: alone they end, and others take their place."""
    home = stubbed.home
    with home.running(*stubbed.command, "--json") as process:
        until(lambda: len(attempts(home)) >= 2, "two attempts")
        assert kill(home, "fork server")
        finished = attempts(home)
        output = process.communicate(timeout=120)[0]
    assert len(finished) < len(LATENCIES_MS), "nothing was left to do"
    assert process.returncode == 0, output
    assert {verdict for _, verdict in attempts(home)} == {"passed"}
    assert len(attempts(home)) == len(LATENCIES_MS)
    assert wait_for_no_process(home) == {}
