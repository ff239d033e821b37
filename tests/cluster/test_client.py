"""A run on a shared farm as its user sees it: submitted, followed, left, attached to, cancelled, resumed."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from farm_home import FarmHome
from networks import Relay
from shared_rows import execute
from stub_host import PASSED, StubHost, device_of, virtual_device, write_config
from stub_run import Quiet
from terminals import terminal_of
from waiting import until

from farm.base.config.settings import Config, load_config
from farm.base.interrupts import InterruptHandler
from farm.base.processes import ready_of
from farm.builds.toolchains.selection import prepare
from farm.cli.setup.lab import queue_lines
from farm.dispatch.cluster.client.devices import choose
from farm.dispatch.cluster.client.follow import ProgressView, Signals
from farm.dispatch.cluster.queue import queued, why_it_waits
from farm.dispatch.cluster.terms import offered
from farm.dispatch.pool.fleet import Choice
from farm.policy.situation import Lease, LivingDevice, OpenOrder, Priority, Situation
from farm.results.attempt import Stage, Verdict
from farm.store.cluster.records import Agent, AgentDevice, AgentFacts, Order, QueueView, RunProgress, ShardSum
from farm.store.leases.registry import Seen
from farm.store.objects.objects import open_objects
from farm.store.records import PROTOCOL
from farm.store.store import Store, open_store

# A run on a shared farm as its user sees it: submitted, followed, left, attached to, cancelled, resumed.
#
# Agents are stand-ins (stub_host.py) that claim and record through the store: nothing is compiled and nothing
# executed.


SUITE = """
[suite]
name = "mine"
description = "Of a test"
precisions = ["8a8w"]

[suite.tolerance.8a8w]
fp32 = { sqnr_db = 10.0 }
"""
CASE = """
[case.{name}]
module = "torch.nn:ReLU"
inputs = [{{ shape = [1, {size}] }}]
"""
RUN = ("run", "--soc", "SM8650", "--suite", "./mine")


class Shared:
    """A shared farm of this test alone: a database, a folder of artifacts, a farm.toml and a suite of four jobs."""

    def __init__(self, home: FarmHome, url: str, folder: Path) -> None:
        self.home, self.url = home, url
        artifacts = folder / "artifacts"
        artifacts.mkdir()
        self.file = write_config(home.cwd, url, artifacts)
        suite = home.cwd / "mine"
        suite.mkdir()
        cases = "".join(CASE.format(name=f"c{number}", size=3 + number) for number in range(4))
        (suite / "suite.toml").write_text(SUITE + cases)

    @property
    def config(self) -> Config:
        return load_config(self.file)

    def host(self, name: str = "lab1", devices: Sequence[AgentDevice] = (), **more: Any) -> StubHost:
        more |= {
            "objects": open_objects(self.config),
            "offered": offered("", prepare(self.config, virtual=True).versions),
        }
        return StubHost(self.url, name, devices or [virtual_device("v1", name)], **more)

    def store(self) -> Store:
        return open_store(self.url)


@pytest.fixture
def shared(home: FarmHome, address: str, tmp_path: Path) -> Shared:
    return Shared(home, address, tmp_path)


def run_of(text: str) -> str:
    """Return the run that a command submitted."""
    return next(word for line in text.splitlines() if "is submitted" in line for word in line.split() if "-" in word)


def test_a_run_is_handed_in_followed_and_ends_as_one_on_this_machine_does(shared: Shared) -> None:
    def answer(job_id: str, _device: str) -> tuple[Verdict, Stage, str]:
        return (Verdict.FAILED, Stage.NUMERICS, "SQNR 3 dB < 10 dB") if "/c2" in job_id else PASSED

    with shared.host(answer=answer) as host:
        done = shared.home.farm(*RUN, "--json", "--junitxml", "out.xml", code=1)
    view = json.loads(done.stdout)
    assert [job["attempts"][-1]["verdict"] for job in view["jobs"]].count("passed") == 3
    assert len(host.ran) == 4
    assert re.search(r"4 jobs, [45] to compile, 1 device: v1", done.stderr)
    assert "FAILED mine/c2[SM8650-htp-8a8w] (0.20 s): SQNR 3 dB < 10 dB" in done.stderr
    assert (shared.home.cwd / "out.xml").is_file()
    assert (view["exit_code"], bool(view["finished_ms"])) == (1, True)
    assert (shared.home.state / "runs" / view["id"] / "report.html").is_file()


@pytest.mark.whole
def test_nobody_follows_and_the_run_ends_all_the_same_and_can_be_attached_to(shared: Shared) -> None:
    with shared.host(jobs=1) as host:
        run_id = shared.home.farm(*RUN, "--detach", code=0).stdout.strip()
        with shared.home.running("runs", "watch", run_id) as process:
            assert process.stdout is not None
            seen = next(line for line in process.stdout if line.startswith("["))
            host.let()
            output, _ = process.communicate(timeout=60)
        assert process.returncode == 0, output
        assert seen.startswith("[1/4] ok mine/c")
        assert "[4/4]" in output
        assert len(host.ran) == 4
        # A late `farm runs watch` shows the end of the run.
        shared.home.farm("runs", "watch", code=0)
    with shared.store() as store:
        assert store.runs.view(run_id).exit_code == 0


@pytest.mark.whole
def test_cancelling_frees_the_devices_and_resume_does_what_is_missing(shared: Shared) -> None:
    farm = shared.home.farm
    with shared.host(jobs=1) as host:
        run_id = farm(*RUN, "--detach").stdout.strip()
        until(lambda: host.ran)
        farm("runs", "cancel", run_id, code=0)
        assert len(host.ran) == 1
        assert "is cancelled already" in farm("runs", "cancel", run_id, code=2).stderr
        assert f"farm run --resume {run_id}" in farm("runs", "watch", run_id, code=130).stderr
        host.let()
        resumed = farm("run", "--resume", run_id, code=0)
        assert f"run {run_id}: 1 of 4 jobs are finished" in resumed.stderr
        assert len(host.ran) == len({job for job, _ in host.ran}) == 4


@pytest.mark.whole
def test_who_follows_is_told_that_the_database_is_away_and_sees_the_run_again(
    shared: Shared, postgresql_cluster: str, tmp_path: Path
) -> None:
    name = shared.url.partition("@/")[2].partition("?")[0]
    with contextlib.closing(Relay(f"{postgresql_cluster}/.s.PGSQL.5432")) as line, shared.host(jobs=1) as host:
        write_config(shared.home.cwd, f"postgresql://farm@127.0.0.1:{line.port}/{name}", tmp_path / "artifacts")
        with shared.home.running(*RUN) as process:
            until(lambda: host.ran)
            line.abort(always=True)
            assert process.stdout is not None
            lines = iter(process.stdout.readline, "")
            facts = "".join(itertools.takewhile(lambda one: "is shown again once the store answers" not in one, lines))
            line.abort(always=False)
            host.let()
            output = process.communicate(timeout=60)[0]
    assert process.returncode == 0, facts + output
    assert "the store answers again" in output
    assert "[4/4]" in output


@pytest.mark.whole
def test_without_a_terminal_a_signal_cancels(shared: Shared) -> None:
    with shared.host(jobs=1) as host:
        with shared.home.running(*RUN) as process:
            until(lambda: host.ran)
            process.send_signal(signal.SIGTERM)
            output, _ = process.communicate(timeout=30)
        assert process.returncode == 130, output
        assert len(host.ran) == 1
    with shared.store() as store:
        assert not any(lease.token for lease in store.leases.all())
        assert store.runs.view(run_of(output)).exit_code == 130


@pytest.mark.whole
@pytest.mark.parametrize(
    ("answer", "code", "ran"), [("leave", 130, 4), ("twice", 130, 4), ("cancel", 130, 1), ("follow", 0, 4)]
)
def test_ctrl_c_asks_whether_to_leave_or_to_cancel(shared: Shared, answer: str, code: int, ran: int) -> None:
    env = {**shared.home.env, "TERM": "xterm"}
    with shared.host(jobs=1) as host, terminal_of(*RUN, env=env, cwd=shared.home.cwd) as terminal:
        until(lambda: host.ran)
        os.kill(terminal.pid, signal.SIGINT)
        terminal.read_until(r"\[l\]eave it running")
        if answer == "twice":
            os.kill(terminal.pid, signal.SIGINT)
        else:
            terminal.write(f"{answer[0]}\n".encode())
        if answer == "follow":
            host.let()
        assert terminal.close() == code, terminal.shown
        text = terminal.shown.decode()
        assert (f"run {run_of(text)} continues" in text) == (answer in ("leave", "twice"))
        if ran > 1:
            host.let()
            until(lambda: len(host.ran) == ran)
        assert len(host.ran) == ran


@pytest.mark.whole
def test_an_soc_that_no_living_host_has_is_an_error_at_once_or_waits(shared: Shared) -> None:
    refused = shared.home.farm(*RUN, code=4)
    assert "no living host has a SM8650" in refused.stderr
    assert "--wait-for-hosts" in refused.stderr
    with shared.store() as store:
        assert store.cluster.queue().orders == ()
        # The device is seen once, so that the farm knows its SoC.
        store.devices.see([Seen(device_of(virtual_device("v9", "lab9"), "lab9"), "device", None)])
        with shared.home.running(*RUN, "--wait-for-hosts") as process:
            until(lambda: store.cluster.queue().orders)
            assert "no living host has" in shared.home.farm("lab", "queue").stdout
            with shared.host("lab9", [virtual_device("v9", "lab9")]):
                output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output


@pytest.mark.whole
def test_exitfirst_and_a_budget_end_a_run_early(shared: Shared) -> None:
    with shared.host(answer=lambda *_: (Verdict.FAILED, Stage.NUMERICS, "wrong")) as host:
        shared.home.farm(*RUN, "-x", code=1)
        assert len(host.ran) == 1
    with shared.host(seconds=3.0):
        done = shared.home.farm(*RUN, "--budget", "4s", "--json")
    assert any(job["skipped"] for job in json.loads(done.stdout)["jobs"]), done.stderr
    assert done.returncode in (0, 5), done.stderr


@pytest.mark.whole
def test_what_a_shared_farm_and_what_only_a_shared_farm_can_do_is_said(shared: Shared, tmp_path: Path) -> None:
    for words, says in (
        ((*RUN, "--profile", "optrace"), "--virtual"),
        ((*RUN, "--detach", "--build-on", "here"), "leave one of them out"),
        ((*RUN, "--detach", "--html", "a.html"), "farm runs watch"),
        ((*RUN, "--virtual", "1", "--detach"), "--detach is of a shared farm"),
        ((*RUN, "--device", "nobody"), "unknown device"),
    ):
        assert says in shared.home.farm(*words, code=2).stderr
    (shared.home.cwd / "farm.toml").unlink()
    for words, says in ((("runs", "cancel", "latest"), ""), ((*RUN, "--detach"), "--detach is of a shared farm")):
        assert says in shared.home.farm(*words, env={"FARM_STORE": str(tmp_path / "farm.db")}, code=2).stderr


@pytest.mark.whole
def test_a_client_that_is_killed_in_the_middle_leaves_nothing_half(shared: Shared) -> None:
    with shared.host(seconds=0.2) as host:
        for wait_s in (0.7, 1.7):
            with shared.home.running(*RUN) as process:
                time.sleep(wait_s)
                process.kill()
                process.communicate()
        with shared.store() as store:
            until(lambda: not store.cluster.queue().orders)
            runs = [run_id for (run_id,) in execute(store, "SELECT run_id FROM run_order")]
            # The agent that ends the last shard of a run finishes the run.
            until(lambda: all(store.runs.view(run_id).exit_code == 0 for run_id in runs))
            # Runs that were not submitted never began.
            assert len(host.ran) == 4 * len(runs)


# Progress of a run on a shared farm, and the queue, as shown to users: from values, without a database.


ORDER = Order(
    run_id="20261123-171000-abcdef", user="ada", priority=Priority.PERSON, state="open", submitted_ms=1_000_000,
    purpose="farm run --soc SM8650 --suite quantized_ops", cancelled_by="", terms=b"", devices=(), labels=(),
    most_devices=None, waiting=12, held=0, ended=3, lacking=0,
)  # fmt: skip


class Listener(Quiet):
    """Recorder of a run's events."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[str] = []

    def build_started(self, job_id: str) -> None:
        self.told.append(f"build {job_id}")

    def build_ended(self, job_id: str, reply: object) -> None:
        del reply
        self.told.append(f"built {job_id}")

    def job_ended(self, shown: dict[str, Any]) -> None:
        self.told.append(f"ended {shown['job_id']} on {shown['device']}")

    def job_repeated(self, shown: dict[str, Any]) -> None:
        self.told.append(f"repeated {shown['job_id']} on {shown['device']}")


def attempt(job_id: str, device: str) -> dict[str, Any]:
    return {"job_id": job_id, "device": device, "verdict": "infra", "reason": "", "known_issue": "", "seconds": 0.1}


def progress(
    *attempts: dict[str, Any], retried: tuple[str, ...] = (), building: tuple[str, ...] = (), built: int = 0
) -> RunProgress:
    return RunProgress(0, attempts, frozenset(retried), {}, building, built, 3, ORDER, finished=False, exit_code=None)


A1, A2, B1 = attempt("a", "v1"), attempt("a", "v2"), attempt("b", "v1")


@pytest.mark.parametrize(
    ("shown", "told"),
    [
        # Another device is left for a job, then it ends.
        (
            [progress(A1, B1, retried=("a",)), progress(retried=("a",)), progress(A2)],
            ["repeated a on v1", "ended b on v1", "ended a on v2"],
        ),
        # No device is left for the job, which ends with its first attempt.
        ([progress(A1, retried=("a",)), progress(), progress()], ["repeated a on v1", "ended a on v1"]),
        # Two attempts in one look.
        ([progress(A1, A2)], ["repeated a on v1", "ended a on v2"]),
    ],
)
def test_a_job_ends_once_however_often_it_is_tried(shown: list[RunProgress], told: list[str]) -> None:
    listener = Listener()
    view = ProgressView(listener)
    for one in shown:
        view.show(one)
    assert listener.told == told


def test_bundles_are_counted_from_where_the_run_began() -> None:
    listener = Listener()
    shown = ProgressView(listener, 1)
    shown.show(progress(building=("a", "needs 0"), built=1))
    shown.show(progress(built=3))
    assert sorted(listener.told) == ["build a", "build health check", "built a", "built health check"]


def agent(name: str, *devices: AgentDevice, alive: bool = True, protocol: int = PROTOCOL) -> Agent:
    facts = AgentFacts(host=name, pid=1, version="1.0", protocol=protocol, devices=devices)
    return Agent(name, "farm", 0, 0, alive, facts)


def device(serial: str, kind: str = "hardware", soc: str = "SM8650", **more: Any) -> AgentDevice:
    return AgentDevice(id=serial, serial=serial, soc=soc, kind=kind, os="android", **more)


def test_a_run_has_the_hardware_of_living_hosts_or_else_virtual_devices() -> None:
    agents = [agent("a", device("phone"), device("v1", "virtual")), agent("b", device("dead"), alive=False)]
    chosen, refused = choose(agents, {}, ["SM8650"], Choice())
    assert [one.serial for one in chosen] == ["phone"]
    assert refused == ["dead (SM8650 of b: its agent does not answer)"]
    named, _ = choose(agents, {}, ["SM8650"], Choice(devices=("v1",)))
    assert [one.serial for one in named] == ["v1"]
    labelled = agent("c", device("x", labels=("camera",)), device("y", refused="no root"))
    chosen, refused = choose([labelled], {}, ["SM8650"], Choice(labels=("camera",)))
    assert [one.serial for one in chosen] == ["x"]
    assert refused == ["y (SM8650 of c: not labelled camera)"]
    _, refused = choose([agent("old", device("z"), protocol=PROTOCOL + 1)], {}, ["SM8650"], Choice())
    assert "upgrade it, or this one" in refused[0]


def view(**more: Any) -> QueueView:
    order = OpenOrder(ORDER.run_id, "ada", Priority.PERSON, 1_000_000, ready=12, **more)
    devices = [LivingDevice("v1", names=("v1",))]
    situation = Situation(soc="SM8650", now_ms=1_060_000, devices=devices, leases=[], orders=[order])
    sums = (ShardSum(ORDER.run_id, "SM8650", 12, 720.0, 0, 0.0),)
    return QueueView(1_060_000, (ORDER,), {"SM8650": situation}, sums, {}, ())


def test_the_queue_says_when_a_run_begins_and_ends_within_80_columns() -> None:
    runs = queued(view())
    assert (runs[0].waiting, runs[0].running, runs[0].priority) == (12, 0, "person")
    assert runs[0].ends_s == pytest.approx(720.0)
    lines = list(queue_lines(runs, 1_060_000, 80))
    assert max(map(len, lines)) <= 80
    assert ORDER.run_id in lines[1]
    assert lines[1].split()[-4:] == ["now", "12", "min", "ada"]
    assert list(queue_lines([], 0, 80)) == []


def test_a_run_for_a_reserved_device_begins_when_the_reservation_ends() -> None:
    until_ms = 1_060_000 + 2 * 3_600_000
    lease = Lease("v1", 0, "", "", "", 0, "", Priority.PERSON, 0, 0, reserved_for="bob", reserved_until_ms=until_ms)
    now = view()
    situation = msgspec.structs.replace(now.situations["SM8650"], leases=[lease])
    [run] = queued(msgspec.structs.replace(now, situations={"SM8650": situation}))
    assert (run.starts_s, run.ends_s) == (pytest.approx(7200.0), pytest.approx(7920.0))
    line, why = list(queue_lines([run], 1_060_000, 80))[1:]
    assert "now" not in line
    assert why.strip() == f"reserved for bob until {time.strftime('%H:%M', time.localtime(until_ms / 1000))}"
    assert "no living host has" in why_it_waits(view(labels=("camera",)), ORDER.run_id)


def test_living_build_hosts_share_the_compilation_of_a_queue() -> None:
    order = msgspec.structs.replace(ORDER, lacking=12)
    sums = (ShardSum(ORDER.run_id, "SM8650", 12, 1.0, 0, 0.0),)

    def ends_s(*agents: Agent) -> float:
        situation = view().situations["SM8650"]
        orders = [msgspec.structs.replace(situation.orders[0], ready=0)]
        situation = msgspec.structs.replace(situation, orders=orders)
        queue = QueueView(1_060_000, (order,), {"SM8650": situation}, sums, {}, agents)
        [run] = queued(queue)
        assert run.ends_s is not None
        return run.ends_s

    def builds(host: Agent) -> Agent:
        return msgspec.structs.replace(host, facts=msgspec.structs.replace(host.facts, toolchains=("t",)))

    one, two = builds(agent("a")), builds(agent("b"))
    others = agent("c", device("phone")), builds(agent("d", alive=False))
    assert ends_s(one, *others) == ends_s(one)
    assert ends_s(one) == pytest.approx(2 * ends_s(one, two, *others), abs=2.0)


def test_the_end_of_an_enclosing_command_wakes_the_follower_and_a_second_one_ends_it() -> None:
    with InterruptHandler(term=True) as command, Signals(command) as signals:
        assert ready_of([signals.descriptor], 0.0) == set()
        signal.raise_signal(signal.SIGTERM)
        assert ready_of([signals.descriptor], 0.0) == {signals.descriptor}
        assert (signals.received, command.was_interrupted) == ([signal.SIGTERM], True)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
