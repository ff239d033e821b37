"""Progress of a run on a shared farm, and the queue, as shown to users: from values, without a database."""

from __future__ import annotations

import signal
import time
from typing import Any

import msgspec
import pytest
from stub_run import Quiet

from farm.base.interrupts import InterruptHandler
from farm.base.processes import ready_of
from farm.cli.cluster.queue import queue_lines
from farm.dispatch.cluster.client.devices import choose
from farm.dispatch.cluster.client.follow import ProgressView, Signals
from farm.dispatch.cluster.queue import queued, why_it_waits
from farm.dispatch.pool.fleet import Choice
from farm.policy.situation import Lease, LivingDevice, OpenOrder, Priority, Situation
from farm.store.cluster.records import Agent, AgentDevice, AgentFacts, Order, QueueView, RunProgress, ShardSum
from farm.store.protocol import PROTOCOL

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
