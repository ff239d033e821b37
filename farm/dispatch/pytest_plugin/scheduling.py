"""Distribution of tests to the workers of a session: xdist's protocol `Scheduling`.

xdist 3.8 loses tests or never ends with `loadscope`, `loadfile` and `loadgroup` when a worker dies (its issue 1323),
and loses some with `each` when a second one does. Its other modes give most tests to a worker without a device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import pytest

# A worker begins a test once it has received the next one, or the message that none follows.
_AHEAD = 2


# In the modes `load` and `worksteal` a test is a group of its own.
_GROUPS: dict[str, Callable[[str], str]] = {
    "loadscope": lambda nodeid: nodeid.rpartition("::")[0],
    "loadfile": lambda nodeid: nodeid.partition("::")[0],
    # xdist appends the group to the node id, behind the parameters.
    "loadgroup": lambda nodeid: nodeid.rpartition("@")[2] if nodeid.rfind("@") > nodeid.rfind("]") else nodeid,
    "each": lambda _: "",
}


class GroupScheduling:
    """Distribution of tests in their order, a group at a time, to the worker with the fewest tests."""

    def __init__(self, config: pytest.Config) -> None:
        self._config, self._mode = config, config.getoption("dist")
        self._workers = len(config.getoption("tx"))
        self._first: list[str] | None = None
        """Tests that the first worker has collected."""
        self._ids: list[str] | None = None
        self._queue: deque[list[int]] = deque()
        self._pending: dict[Any, list[int]] = {}
        """Tests of each worker that have not ended, in their order."""
        self._collected: set[Any] = set()
        self._given_up: set[Any] = set()

    @property
    def nodes(self) -> list[Any]:
        """Workers that have started and not ended."""
        return list(self._pending)

    @property
    def collection_is_completed(self) -> bool:
        """True once the first workers have collected the tests."""
        return self._ids is not None or len(self._collected) >= self._workers

    @property
    def has_pending(self) -> bool:
        """True while a test has not ended."""
        return bool(self._queue or any(self._pending.values()))

    @property
    def tests_finished(self) -> bool:
        """True once all tests have ended."""
        return self._ids is not None and not self.has_pending

    def add_node(self, node: Any) -> None:
        """Take a worker that has started."""
        self._pending[node] = []

    def add_node_collection(self, node: Any, collection: Sequence[str]) -> None:
        """Take the tests that a worker has collected; a worker with different tests gets none."""
        if self._first is None:
            self._first = list(collection)
        if list(collection) != self._first:
            text = "other tests, or another order, than the first worker: see pytest-xdist, known limitations"
            report = pytest.CollectReport(nodeid=str(node), outcome="failed", longrepr=text, result=[])
            self._config.hook.pytest_collectreport(report=report)
            self._workers -= 1
            node.shutdown()
            return
        self._collected.add(node)

    def schedule(self) -> None:
        """Give tests to workers that have collected them."""
        if self._ids is None:
            self._ids = self._first or []
            groups: dict[str, list[int]] = {}
            for index, nodeid in enumerate(self._ids):
                # Parameters can make node ids alike.
                name = _GROUPS[self._mode](nodeid) if self._mode in _GROUPS else str(index)
                groups.setdefault(name, []).append(index)
            for group in groups.values():
                self._queue.extend([group] * (self._workers if self._mode == "each" else 1))
        self._feed()

    def mark_test_complete(self, node: Any, item_index: int, duration: float = 0) -> None:  # noqa: ARG002 - of the protocol
        """Note the end of a test."""
        self._pending[node].remove(item_index)
        self._feed()

    def mark_test_pending(self, item: str) -> None:
        """Run a test again."""
        self._queue.appendleft([(self._first or []).index(item)])
        self._feed()

    def remove_pending_tests_from_node(self, node: Any, indices: Sequence[int]) -> None:
        """Give the tests that a worker without a device has not begun to the other workers."""
        if node in self._pending:
            self._pending[node] = [index for index in self._pending[node] if index not in indices]
            if indices:
                self._queue.appendleft(list(indices))
            node.shutdown()
        self._feed()

    def remove_node(self, node: Any) -> str | None:
        """Return the test that ended a worker; None without one. Other workers get the rest of its tests."""
        pending = self._pending.pop(node)
        self._collected.discard(node)
        if not pending:
            return None
        crashed, *rest = pending
        if rest:
            self._queue.appendleft(rest)
        self._feed()
        return (self._first or [])[crashed]

    def give_up(self, node: Any) -> None:
        """Leave the tests that a worker without a device has not begun to the other workers, if there are any."""
        if node in self._given_up:
            return
        self._given_up.add(node)
        if not self._takers(self._collected - self._given_up):
            return
        # The worker may have received the next tests already.
        if later := self._pending[node][_AHEAD:]:
            node.send_steal(later)
        else:
            node.shutdown()

    def _takers(self, nodes: set[Any]) -> list[Any]:
        return [node for node in self._pending if node in nodes and not node.shutting_down]

    def _feed(self) -> None:
        while self._queue:
            takers = self._takers(self._collected - self._given_up) or self._takers(self._collected)
            node = min(takers, key=lambda one: len(self._pending[one]), default=None)
            if node is None or len(self._pending[node]) >= _AHEAD:
                return
            group = self._queue.popleft()
            self._pending[node] += group
            node.send_runtest_some(group)
            if self._mode == "each":
                # The other groups are the same tests, for other workers.
                node.shutdown()
        # A worker that ends leaves its device to the waiting workers.
        for node in self._takers(self._collected):
            node.shutdown()
