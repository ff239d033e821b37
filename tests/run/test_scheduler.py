from __future__ import annotations

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from farm.devices.device import AdbAddress, Device
from farm.devices.discovery import _Found, scan_all
from farm.run.scheduler import IDLE, DeviceScheduling, dispatch_order
from farm.system.processes import Supervisor


def test_compiled_jobs_go_first_then_the_longest_then_the_order_given() -> None:
    cached = {"a": False, "b": True, "c": True, "d": False}
    for ids in itertools.permutations("abcd"):
        sessions = dict.fromkeys(ids, "")
        order = dispatch_order(ids, cached=cached, expected_seconds={"c": 2.0, "b": 1.0}, sessions=sessions)
        assert order[:2] == ["c", "b"]
        assert order[2:] == [job for job in ids if job in "ad"]


def test_jobs_of_one_session_stand_together_whatever_they_take() -> None:
    sessions = {"a": "burst", "b": "balanced", "c": "burst", "d": "balanced"}
    cached = dict.fromkeys(sessions, True)
    seconds = {"a": 1.0, "b": 4.0, "c": 3.0, "d": 2.0}
    assert dispatch_order(list("abcd"), cached=cached, expected_seconds=seconds, sessions=sessions) == list("cabd")


class Node:
    """Records what a worker is sent, as xdist's WorkerController would send it."""

    def __init__(self, soc: str, stands_for: Node | None = None) -> None:
        self.soc, self.stands_for, self.shutting_down = soc, stands_for or self, False
        self.sent: list[int] = []

    def send_runtest_some(self, indices: list[int]) -> None:
        self.sent += indices

    def shutdown(self) -> None:
        self.shutting_down = True


def scheduling(items: list[str], nodes: list[Node]) -> DeviceScheduling:
    numbers = {id(node): number for number, node in enumerate(nodes)}
    sched = DeviceScheduling(
        lambda item: item.partition(":")[0], lambda node: numbers[id(node.stands_for)], [node.soc for node in nodes]
    )
    for node in nodes:
        add(sched, node, items)
    sched.schedule()
    return sched


def add(sched: DeviceScheduling, node: Any, items: list[str]) -> None:
    sched.add_node(node)
    sched.add_node_collection(node, [*items, IDLE])


class World:
    """Workers as they are: an item runs once the next, or the end, is known."""

    def __init__(self, items: list[str], nodes: list[Node]) -> None:
        self.items, self.nodes = items, nodes
        self.sched = scheduling(items, nodes)
        self.ran: list[tuple[Node, str]] = []
        self.before_end: dict[str, Callable[[Node], None]] = {}

    def step(self) -> bool:
        """Let the first worker that can finish an item do so; return whether there was one."""
        for node in self.nodes:
            if node in self.sched.nodes and node.sent and (len(node.sent) > 1 or node.shutting_down):
                index = node.sent.pop(0)
                item = [*self.items, IDLE][index]
                if item != IDLE:
                    self.ran.append((node, item))
                self.before_end.pop(item, lambda _: None)(node)
                self.sched.mark_test_complete(node, index)  # type: ignore[arg-type]
                return True
        return False

    def finish(self) -> None:
        for _ in range(1000):
            if not self.step():
                return
        raise AssertionError("it never ends")

    def jobs(self) -> list[str]:
        return [item for _, item in self.ran]


def test_every_item_runs_once_on_a_device_of_its_soc() -> None:
    items = [f"A:{n}" for n in range(7)] + [f"B:{n}" for n in range(3)]
    nodes = [Node("A"), Node("A"), Node("B")]
    world = World(items, nodes)
    world.finish()
    assert sorted(world.jobs()) == sorted(items)
    assert all(item.startswith(node.soc) for node, item in world.ran)
    assert world.sched.tests_finished
    assert not world.sched.has_pending
    assert all(node.shutting_down for node in nodes)


def test_a_short_list_is_spread_over_all_workers_which_begin_at_once() -> None:
    world = World(["A:0", "A:1"], [Node("A"), Node("A")])
    assert [node.sent for node in world.nodes] == [[0, 2], [1, 2]]


def test_a_worker_for_whose_soc_there_is_nothing_is_let_go_at_once() -> None:
    world = World(["A:0", "A:1", "A:2"], [Node("A"), Node("B")])
    assert world.nodes[1].shutting_down
    assert not world.nodes[0].shutting_down


def test_what_a_dead_worker_had_not_begun_is_run_by_another() -> None:
    items = [f"A:{n}" for n in range(4)]
    world = World(items, [Node("A"), Node("A")])
    first = world.nodes[0]
    assert first.sent == [0, 2]
    assert world.sched.running(first) == "A:0"  # type: ignore[arg-type]
    assert world.sched.remove_node(first) == "A:0"  # type: ignore[arg-type]
    world.sched.mark_test_pending("A:0")
    replacement = Node("A", first)
    world.nodes.append(replacement)
    add(world.sched, replacement, items)
    world.sched.schedule()
    world.finish()
    assert sorted(world.jobs()) == items
    assert world.sched.tests_finished


def test_the_last_worker_dying_leaves_its_items_for_the_one_that_replaces_it() -> None:
    items = ["A:0", "A:1"]
    world = World(items, [Node("A")])
    assert world.sched.remove_node(world.nodes[0]) == "A:0"  # type: ignore[arg-type]
    assert not world.sched.tests_finished
    replacement = Node("A", world.nodes[0])
    world.nodes.append(replacement)
    add(world.sched, replacement, items)
    world.sched.schedule()
    assert replacement.sent == [1, 2]
    world.finish()
    assert world.sched.tests_finished


def test_a_worker_that_dies_idle_died_on_nothing() -> None:
    world = World(["A:0"], [Node("A"), Node("A")])
    world.step()
    world.nodes[1].sent = [1]
    world.sched._given[world.nodes[1]] = [1]  # type: ignore[index]
    assert world.sched.remove_node(world.nodes[1]) is None  # type: ignore[arg-type]


@pytest.mark.parametrize("count", [2, 3, 7])
def test_a_job_that_fails_last_of_all_is_tried_by_another_device(count: int) -> None:
    items = [f"A:{n}" for n in range(count)]
    world = World(items, [Node("A"), Node("A")])
    last = items[-1]
    world.before_end[last] = lambda node: world.sched.repeat(last, [world.nodes.index(node)])
    world.finish()
    where = [world.nodes.index(node) for node, item in world.ran if item == last]
    assert sorted(where) == [0, 1]
    assert sorted(set(world.jobs())) == items
    assert world.sched.tests_finished
    assert all(node.shutting_down for node in world.nodes)


def test_a_job_that_every_device_tried_is_abandoned_and_told() -> None:
    told: list[str] = []
    world = World(["A:0"], [Node("A"), Node("A")])
    world.sched._abandoned = told.append
    world.before_end["A:0"] = lambda _: world.sched.repeat("A:0", [0, 1])
    world.finish()
    assert told == ["A:0"]
    assert world.sched.tests_finished


def test_one_phone_on_two_addresses_does_not_confirm_its_own_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = [AdbAddress(5037, name=name) for name in ("2233fd19", "192.168.1.20:5555")]
    phone = Device("2233fd19", "SM8650", "hardware", "build", addresses[0], "phone", boot_id="same")
    found = [_Found(replace(phone, address=address)) for address in addresses]
    monkeypatch.setattr("farm.devices.discovery._ordinary", lambda *_: found)
    config: Any = SimpleNamespace(devices=(), hosts=())
    with Supervisor() as supervisor:
        devices = scan_all(config, supervisor).devices
    told: list[str] = []
    world = World(["A:0"], [Node("A") for _ in devices])
    world.sched._abandoned = told.append
    # A second try avoids only the device that the first one was on.
    world.before_end["A:0"] = lambda _: world.sched.repeat("A:0", [0])
    world.finish()
    assert told == ["A:0"], "no other device is there"


def test_a_device_that_pauses_gets_nothing_until_it_resumes_and_its_worker_notices() -> None:
    items = [f"A:{n}" for n in range(6)]
    world = World(items, [Node("A"), Node("A")])
    paused = world.nodes[0]
    world.sched.pause(0)
    assert paused.sent == [0, 2, 6, 6]
    world.before_end["A:2"] = lambda _: world.sched.repeat("A:2")
    world.finish()
    assert [item for node, item in world.ran if node is paused] == ["A:0", "A:2"]
    assert sorted(set(world.jobs())) == items
    assert world.sched.tests_finished


def test_work_waits_for_the_only_device_while_it_pauses() -> None:
    world = World(["A:0", "A:1", "A:2", "A:3"], [Node("A")])
    world.sched.pause(0)
    for item in ("A:0", "A:1"):
        world.before_end[item] = lambda _, item=item: world.sched.repeat(item)
    world.finish()
    assert world.sched.has_pending
    assert not world.nodes[0].shutting_down
    before = len(world.ran)
    world.sched.resume(0)
    world.finish()
    assert sorted(world.jobs()[before:]) == ["A:0", "A:1", "A:2", "A:3"]
    assert world.sched.tests_finished


def test_a_worker_that_has_nothing_notices_a_pause_too() -> None:
    world = World(["B:0", "A:0"], [Node("A"), Node("B"), Node("A")])
    assert world.nodes[2].sent == []
    world.sched.pause(2)
    assert world.nodes[2].sent == [2, 2]


def test_a_device_that_is_given_up_leaves_its_work_to_others() -> None:
    items = [f"A:{n}" for n in range(5)]
    world = World(items, [Node("A"), Node("A")])

    def give_up(node: Node) -> None:
        world.sched.retire(world.nodes.index(node))
        world.sched.repeat("A:0")

    world.before_end["A:0"] = give_up
    world.before_end["A:2"] = lambda _: world.sched.repeat("A:2")
    world.finish()
    assert {item for node, item in world.ran if node is world.nodes[1]} == set(items)
    assert world.sched.tests_finished


def test_a_job_that_was_tried_does_not_wait_for_a_device_that_is_away() -> None:
    told: list[str] = []
    world = World(["A:0", "A:1"], [Node("A"), Node("A")])
    world.sched._abandoned = told.append
    world.sched.pause(1, away=True)
    world.before_end["A:0"] = lambda _: world.sched.repeat("A:0", [0])
    world.before_end["A:1"] = lambda _: world.sched.repeat("A:1")
    world.finish()
    assert told == ["A:0"]
    assert world.sched.tests_finished


def test_stopping_before_the_jobs_are_known_ends_the_session() -> None:
    sched = DeviceScheduling(lambda _: "A", lambda _: 0, ["A"])
    node: Any = Node("A")
    sched.add_node(node)
    sched.stop()
    assert sched.tests_finished
    sched.add_node_collection(node, ["A:0", IDLE])
    sched.schedule()
    assert node.sent == []
    assert sched.tests_finished


def test_without_any_device_left_the_session_ends() -> None:
    told: list[str] = []
    world = World(["A:0", "A:1", "A:2"], [Node("A")])
    world.sched._abandoned = told.append
    world.before_end["A:0"] = lambda _: world.sched.retire(0)
    world.before_end["A:1"] = lambda _: world.sched.repeat("A:1")
    world.finish()
    assert sorted(told) == ["A:1", "A:2"]
    assert world.sched.tests_finished


def test_stopping_lets_what_runs_finish_and_begins_nothing() -> None:
    items = [f"A:{n}" for n in range(6)]
    world = World(items, [Node("A"), Node("A")])
    world.sched.stop()
    for item in ("A:2", "A:3"):
        world.before_end[item] = lambda _, item=item: world.sched.repeat(item)
    world.finish()
    assert sorted(world.jobs()) == ["A:0", "A:1", "A:2", "A:3"]
    assert world.sched.tests_finished


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_whatever_happens_every_job_ends_or_is_abandoned(data: st.DataObject) -> None:
    socs = data.draw(st.lists(st.sampled_from("AB"), min_size=1, max_size=4))
    items = [f"{data.draw(st.sampled_from(socs))}:{n}" for n in range(data.draw(st.integers(1, 8)))]
    abandoned: list[str] = []
    done: list[str] = []
    world = World(items, [Node(soc) for soc in socs])
    world.sched._abandoned = abandoned.append
    gone: set[int] = set()
    tries: dict[str, set[int]] = {}
    for _ in range(40):
        action = data.draw(st.sampled_from(["step"] * 6 + ["pause", "resume", "retire"]))
        number = data.draw(st.integers(0, len(socs) - 1))
        if action == "pause":
            world.sched.pause(number)
        elif action == "resume":
            world.sched.resume(number)
        elif action == "retire" and len(gone) < len(socs) - 1:
            gone.add(number)
            world.sched.retire(number)
        before = len(world.ran)
        outcome = data.draw(st.sampled_from(["done", "done", "returned", "repeat"]))

        def end(node: Node, item: str, outcome: str = outcome) -> None:
            device = world.nodes.index(node)
            if outcome == "repeat":
                tries.setdefault(item, set()).add(device)
                world.sched.repeat(item, tries[item])
            elif outcome == "returned":
                world.sched.repeat(item)
            else:
                done.append(item)

        world.before_end = {item: lambda node, item=item: end(node, item) for item in items}
        world.step()
        assert all(tries.get(item, set()) >= set() for _, item in world.ran[before:])
    world.before_end = {item: lambda _, item=item: done.append(item) for item in items}
    for number in range(len(socs)):
        world.sched.resume(number)
    world.finish()
    assert sorted(done + abandoned) == sorted(items)
    assert world.sched.tests_finished
    assert all(node.shutting_down for node in world.nodes)
