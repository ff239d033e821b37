"""Tests go to workers that have a device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from farm.pytest_plugin.controller import FairScheduling

if TYPE_CHECKING:
    from collections.abc import Sequence


class NodeStub:
    """A worker as xdist's schedulers see it; it takes what it is given and gives back what is asked for."""

    def __init__(self, name: str) -> None:
        self.gateway = type("Gateway", (), {"id": name})
        self.shutting_down = False
        self.asked_back: list[int] = []

    def send_runtest_some(self, indices: Sequence[int]) -> None:
        pass

    def send_steal(self, indices: Sequence[int]) -> None:
        self.asked_back += indices

    def shutdown(self) -> None:
        self.shutting_down = True


@pytest.fixture
def workers(pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch) -> tuple[FairScheduling, list[NodeStub]]:
    monkeypatch.setattr(pytestconfig.option, "tx", ["2*popen"], raising=False)
    monkeypatch.setattr(pytestconfig.option, "maxschedchunk", None, raising=False)
    sched = FairScheduling(pytestconfig, None)
    nodes = [NodeStub("gw0"), NodeStub("gw1")]
    for node in nodes:
        sched.add_node(node)
    for node in nodes:
        sched.add_node_collection(node, [f"test_{n}" for n in range(40)])
    sched.schedule()
    return sched, nodes


def run_all(sched: FairScheduling, node: NodeStub) -> int:
    """Let a worker run what it is given until it is given no more."""
    count = 0
    while sched.node2pending[node] and (len(sched.node2pending[node]) > 1 or node.shutting_down):
        sched.mark_test_complete(node, sched.node2pending[node][0])
        count += 1
    return count


def test_who_lost_its_device_gives_its_tests_to_others(workers: tuple[FairScheduling, list[NodeStub]]) -> None:
    sched, (broken, well) = workers
    before = list(sched.node2pending[broken])
    assert len(before) > 2

    sched.give_up(broken)
    assert broken.asked_back == before[2:]
    sched.remove_pending_tests_from_node(broken, broken.asked_back)

    assert run_all(sched, broken) == 1, "the last one waits for the word that nothing follows"
    assert run_all(sched, well) + len(sched.node2pending[well]) == 38
    assert sched.tests_finished


def test_what_is_given_back_after_a_worker_has_ended_is_nothing(
    workers: tuple[FairScheduling, list[NodeStub]],
) -> None:
    sched, (broken, _) = workers
    sched.give_up(broken)
    sched.give_up(broken)
    assert len(broken.asked_back) == len(set(broken.asked_back)), "asked for once"
    sched.remove_node(broken)
    before = list(sched.pending)

    sched.remove_pending_tests_from_node(broken, [])

    assert sched.pending == before


def test_tests_end_where_no_device_is_left(workers: tuple[FairScheduling, list[NodeStub]]) -> None:
    sched, nodes = workers
    for node in nodes:
        sched.give_up(node)
        sched.remove_pending_tests_from_node(node, node.asked_back)

    assert sum(run_all(sched, node) for node in nodes) == 40
    assert not sched.pending


def test_a_test_that_is_open_goes_to_another_device_alone(workers: tuple[FairScheduling, list[NodeStub]]) -> None:
    sched, (first, second) = workers
    sched._device_of = [first, second].index
    test = sched.node2pending[first][0]
    sched.mark_test_complete(first, test)
    sched.try_elsewhere(f"test_{test}", [0])
    assert not sched.tests_finished
    run_all(sched, first)
    assert test not in sched.node2pending[first]
    run_all(sched, second)
    assert sched.tests_finished
    assert sched.open_tests() == {}


def test_a_test_that_every_worker_has_tried_waits_and_can_be_let_go(
    workers: tuple[FairScheduling, list[NodeStub]],
) -> None:
    sched, nodes = workers
    sched._device_of = nodes.index
    for node in nodes:
        run_all(sched, node)
    sched.try_elsewhere("test_3", [0, 1])
    for node in nodes:
        sched.check_schedule(node)
    assert sched.open_tests() == {3: frozenset({0, 1})}
    assert not sched.tests_finished
    sched.leave_open(3)
    assert sched.tests_finished
