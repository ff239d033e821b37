from __future__ import annotations

import itertools
from typing import Any

from farm.engine.scheduler import SocScheduling, dispatch_order, next_item


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


def test_the_first_item_that_runs_here() -> None:
    assert next_item([3, 4, 5], lambda item: item % 2 == 0) == 4
    assert next_item([3, 5], lambda item: item % 2 == 0) is None
    assert next_item([], lambda _: True) is None


class Node:
    """Records what a worker is sent, as xdist's WorkerController would send it."""

    def __init__(self, soc: str) -> None:
        self.soc, self.sent, self.shutting_down = soc, [], False
        self.sent: list[int] = []

    def send_runtest_some(self, indices: list[int]) -> None:
        self.sent += indices

    def shutdown(self) -> None:
        self.shutting_down = True


def scheduling(items: list[str], nodes: list[Node]) -> SocScheduling:
    sched = SocScheduling(lambda item: item.partition(":")[0], lambda node: node.soc, len(nodes))
    for node in nodes:
        add(sched, node, items)
    sched.schedule()
    return sched


def add(sched: SocScheduling, node: Any, items: list[str]) -> None:
    sched.add_node(node)
    sched.add_node_collection(node, items)


def finish(sched: SocScheduling, nodes: list[Node]) -> None:
    """Let every node finish what it has, in turn, as workers do: an item ends once the next or the end is known."""
    for _ in range(1000):
        busy = [n for n in nodes if n in sched.nodes and n.sent and (len(n.sent) > 1 or n.shutting_down)]
        if not busy:
            return
        sched.mark_test_complete(busy[0], busy[0].sent.pop(0))  # type: ignore[arg-type]


def test_every_item_runs_once_on_a_device_of_its_soc() -> None:
    items = [f"A:{n}" for n in range(7)] + [f"B:{n}" for n in range(3)]
    nodes = [Node("A"), Node("A"), Node("B")]
    done: list[tuple[str, str]] = []
    sched = scheduling(items, nodes)
    mark = sched.mark_test_complete

    def record(node: Any, index: int, duration: float = 0) -> None:
        done.append((node.soc, items[index]))
        mark(node, index, duration)

    sched.mark_test_complete = record  # type: ignore[method-assign]
    finish(sched, nodes)
    assert sorted(item for _, item in done) == sorted(items)
    assert all(item.startswith(soc) for soc, item in done)
    assert sched.tests_finished
    assert not sched.has_pending
    assert all(node.shutting_down for node in nodes)


def test_a_short_list_is_spread_over_all_workers() -> None:
    nodes = [Node("A"), Node("A")]
    scheduling(["A:0", "A:1"], nodes)
    assert [node.sent for node in nodes] == [[0], [1]]
    assert all(node.shutting_down for node in nodes)


def test_a_worker_without_anything_to_do_is_let_go_at_once() -> None:
    nodes = [Node("A"), Node("B")]
    scheduling(["A:0", "A:1", "A:2"], nodes)
    assert nodes[1].shutting_down
    assert not nodes[0].shutting_down


def test_what_a_dead_worker_had_not_begun_is_run_by_another() -> None:
    items = [f"A:{n}" for n in range(4)]
    nodes = [Node("A"), Node("A")]
    sched = scheduling(items, nodes)
    assert nodes[0].sent == [0, 2]
    assert sched.running(nodes[0]) == "A:0"  # type: ignore[arg-type]
    assert sched.remove_node(nodes[0]) == "A:0"  # type: ignore[arg-type]
    sched.mark_test_pending("A:0")
    replacement = Node("A")
    add(sched, replacement, items)
    sched.schedule()
    finish(sched, [nodes[1], replacement])
    assert sched.tests_finished
    assert not sched.has_pending


def test_the_last_worker_dying_leaves_its_items_for_the_one_that_replaces_it() -> None:
    nodes = [Node("A")]
    sched = scheduling(["A:0", "A:1"], nodes)
    assert nodes[0].shutting_down
    assert sched.remove_node(nodes[0]) == "A:0"  # type: ignore[arg-type]
    assert not sched.tests_finished
    replacement = Node("A")
    add(sched, replacement, ["A:0", "A:1"])
    sched.schedule()
    assert replacement.sent == [1]
