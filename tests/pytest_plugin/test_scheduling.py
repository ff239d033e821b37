"""Tests go to workers that have a device, and every mode of distribution ends, also when workers die."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from farm.dispatch.pytest_plugin.scheduling import GroupScheduling

SUITE = """
import os
import signal

import pytest

pytestmark = pytest.mark.xdist_group("{name}")


@pytest.mark.parametrize("n", range(3))
def test_one(n):
    if n == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def test_after():
    pass
"""
CONFTEST = """
def pytest_xdist_make_scheduler(config):
    from farm.dispatch.pytest_plugin.scheduling import GroupScheduling

    return GroupScheduling(config)
"""


@pytest.mark.parametrize(
    "mode", ["loadfile", *(pytest.param(one, marks=pytest.mark.whole) for one in ("loadgroup", "worksteal", "each"))]
)
def test_every_mode_ends_when_workers_are_killed(mode: str, tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    for name in "abc":
        (tmp_path / f"test_{name}.py").write_text(SUITE.format(name=name))
    words = ["-m", "pytest", "-p", "xdist", "-p", "no:cacheprovider", "-n", "2", "--max-worker-restart=50", "--dist"]

    done = subprocess.run(
        [sys.executable, *words, mode], cwd=tmp_path, env={"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip

    times = 2 if mode == "each" else 1
    assert re.search(f"{3 * times} failed, {9 * times} passed in", done.stdout), done.stdout + done.stderr
    assert done.returncode == 1


class NodeStub:
    """Worker of pytest-xdist for a scheduler: it starts a test only when it has the next one or has to shut down."""

    def __init__(self) -> None:
        self.shutting_down = False
        self.given: list[int] = []
        self.asked_back: list[int] = []

    def send_runtest_some(self, indices: Sequence[int]) -> None:
        assert not self.shutting_down
        self.given += indices

    def send_steal(self, indices: Sequence[int]) -> None:
        self.asked_back += indices

    def shutdown(self) -> None:
        self.shutting_down = True


TESTS = [f"test_{name}.py::test_{n}" for name in "abcd" for n in range(5)]


def started(mode: str, *tests: Sequence[str], hook: object = None) -> tuple[GroupScheduling, list[NodeStub]]:
    """Return a scheduler and its workers, each with `tests` of its own."""
    tests = tests or (TESTS, TESTS)
    config: Any = SimpleNamespace(getoption={"dist": mode, "tx": ["popen"] * len(tests)}.get, hook=hook)
    sched, nodes = GroupScheduling(config), [NodeStub() for _ in tests]
    for node, collected in zip(nodes, tests, strict=True):
        sched.add_node(node)
        sched.add_node_collection(node, collected)
    assert sched.collection_is_completed
    sched.schedule()
    return sched, nodes


def run_all(sched: GroupScheduling, node: NodeStub) -> list[int]:
    """Let a worker run its tests until it waits for more; return their numbers."""
    done: list[int] = []
    while node.given and (len(node.given) > 1 or node.shutting_down):
        done.append(node.given.pop(0))
        sched.mark_test_complete(node, done[-1])
    return done


def test_the_files_of_a_group_stay_together() -> None:
    sched, nodes = started("loadfile")
    ran = [run_all(sched, node) for node in nodes]
    ran = [one + run_all(sched, node) for one, node in zip(ran, nodes, strict=True)]
    files = [{TESTS[index].partition("::")[0] for index in one} for one in ran]
    assert not files[0] & files[1]
    assert sorted(ran[0] + ran[1]) == list(range(len(TESTS)))
    assert sched.tests_finished


def test_a_group_is_in_the_name_behind_the_parameters() -> None:
    sched, [node] = started("loadgroup", ["t.py::a@one", "t.py::b[x@y]", "t.py::c[x]@one"])
    assert node.given == [0, 2]
    assert run_all(sched, node) == [0, 2, 1]


def test_with_each_the_rest_of_two_dead_workers_is_for_one_worker_each() -> None:
    sched, nodes = started("each")
    for node in nodes:
        sched.remove_node(node)
    new = [NodeStub(), NodeStub()]
    for node in new:
        sched.add_node(node)
        sched.add_node_collection(node, TESTS)
        sched.schedule()
        assert run_all(sched, node) == list(range(1, len(TESTS)))
    assert sched.tests_finished


@pytest.mark.parametrize("mode", ["load", "loadfile"])
def test_what_a_dead_worker_had_is_for_the_others(mode: str) -> None:
    sched, (dead, well) = started(mode)
    held = list(dead.given)
    assert sched.remove_node(dead) == TESTS[held[0]]
    new = NodeStub()
    sched.add_node(new)
    sched.add_node_collection(new, TESTS)
    sched.schedule()
    ran = run_all(sched, well) + run_all(sched, new) + run_all(sched, well)
    assert sorted(ran) == [index for index in range(len(TESTS)) if index != held[0]]
    assert sched.tests_finished


@pytest.mark.parametrize("mode", ["load", "loadfile"])
def test_a_worker_that_lost_its_device_leaves_its_tests_to_the_others(mode: str) -> None:
    sched, (broken, well) = started(mode)
    sched.give_up(broken)
    sched.give_up(broken)
    assert len(broken.asked_back) == len(set(broken.asked_back)), "asked for once"
    back, broken.given = broken.asked_back, [one for one in broken.given if one not in broken.asked_back]
    if back:
        sched.remove_pending_tests_from_node(broken, back)
    assert broken.shutting_down
    assert len(run_all(sched, broken)) <= 2
    sched.remove_node(broken)
    # The broken worker has ended, and gives nothing back.
    sched.remove_pending_tests_from_node(broken, [])
    run_all(sched, well)
    assert sched.tests_finished


def test_tests_end_where_no_device_is_left() -> None:
    sched, nodes = started("load")
    ran: list[int] = []
    for node in nodes:
        sched.give_up(node)
        ran += run_all(sched, node)
    assert sorted(ran) == list(range(len(TESTS)))
    assert sched.tests_finished


def test_a_worker_with_other_tests_gets_none() -> None:
    output: list[pytest.CollectReport] = []
    hook = SimpleNamespace(pytest_collectreport=lambda report: output.append(report))
    sched, nodes = started("load", TESTS, TESTS[1:], hook=hook)
    assert [one.failed for one in output] == [True]
    assert nodes[1].shutting_down
    assert run_all(sched, nodes[0]) == list(range(len(TESTS)))
