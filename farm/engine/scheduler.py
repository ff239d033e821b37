"""Which device gets which job next: a pure choice, and its adapter to pytest-xdist."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence

    from xdist.workermanage import WorkerController

# A worker of xdist starts an item only when it knows the one after it, or that none comes.
_IN_HAND = 2


def dispatch_order(
    job_ids: Sequence[str],
    *,
    cached: Mapping[str, bool],
    expected_seconds: Mapping[str, float],
    sessions: Mapping[str, Hashable],
) -> list[str]:
    """Return the order in which jobs are built and handed out. Pure.

    What is compiled already goes first, so that devices work while the builders warm up; among those, jobs that want
    the same session (`sessions` tells them apart) stand together, as every change starts a runner; then the longest
    expected first, which leaves no long job for the end. Otherwise the order given.
    """
    position = {job_id: n for n, job_id in enumerate(job_ids)}
    group: dict[Hashable, int] = {}
    for job_id in job_ids:
        group.setdefault(sessions[job_id], len(group))
    return sorted(
        job_ids,
        key=lambda job: (
            not cached.get(job, False), group[sessions[job]], -expected_seconds.get(job, 0.0), position[job]
        ),
    )  # fmt: skip


def next_item(pending: Sequence[int], runs_here: Callable[[int], bool]) -> int | None:
    """Return the first of `pending` that the device can run, or None. Pure."""
    return next((item for item in pending if runs_here(item)), None)


class SocScheduling:
    """xdist's Scheduling protocol: every worker has a device, every item wants one SoC.

    Items are handed out one at a time in the order of the collection, each to the first worker with a device of
    its SoC that has room.
    """

    def __init__(self, soc_of_item: Callable[[str], str], soc_of_node: Callable[[Any], str], workers: int) -> None:
        self._soc_of_item, self._soc_of_node, self._workers = soc_of_item, soc_of_node, workers
        self._collections: dict[WorkerController, list[str]] = {}
        self._given: dict[WorkerController, list[int]] = {}
        self._items: list[str] | None = None
        self._pending: list[int] = []

    @property
    def nodes(self) -> list[WorkerController]:
        """Workers that have not gone."""
        return list(self._given)

    @property
    def collection_is_completed(self) -> bool:
        """True once every worker has told its items, as many workers as were asked for."""
        return self._items is not None or len(self._collections) >= self._workers

    @property
    def tests_finished(self) -> bool:
        """True when nothing is left to hand out and no worker has more than the item that ends it."""
        return (
            self.collection_is_completed and not self._pending and all(len(g) < _IN_HAND for g in self._given.values())
        )

    @property
    def has_pending(self) -> bool:
        """True while anything is unfinished."""
        return bool(self._pending) or any(self._given.values())

    def add_node(self, node: WorkerController) -> None:
        """Take a worker in."""
        self._given[node] = []

    def add_node_collection(self, node: WorkerController, collection: Sequence[str]) -> None:
        """Take a worker's items: all workers see the same."""
        self._collections[node] = list(collection)

    def mark_test_complete(self, node: WorkerController, item_index: int, duration: float = 0) -> None:
        """Note an item as done and hand out the next."""
        del duration
        self._given[node].remove(item_index)
        self._hand_out()

    def mark_test_pending(self, item: str) -> None:
        """Put an item back in front: the worker that ran it died."""
        if self._items is not None:
            self._pending.insert(0, self._items.index(item))
            self._hand_out()

    def remove_pending_tests_from_node(self, node: WorkerController, indices: Sequence[int]) -> None:
        """Never called: nothing here steals."""
        raise NotImplementedError

    def remove_node(self, node: WorkerController) -> str | None:
        """Let a worker go; return the item it died on, if any. What it had not begun is handed out again."""
        given = self._given.pop(node)
        if not given or self._items is None:
            return None
        self._pending[:0] = given[1:]
        self._hand_out()
        return self._items[given[0]]

    def schedule(self) -> None:
        """Begin, or let a worker in that replaces one that died."""
        if self._items is None:
            self._items = next(iter(self._collections.values()))
            self._pending = list(range(len(self._items)))
        self._hand_out()

    def running(self, node: WorkerController) -> str | None:
        """Return the item that a worker is busy with."""
        given = self._given.get(node)
        return self._items[given[0]] if given and self._items is not None else None

    def _hand_out(self) -> None:
        items = self._items
        if items is None:
            return
        # Round by round, so that a short list is spread over all workers.
        for room in range(_IN_HAND):
            for node, given in self._given.items():
                if len(given) > room or node.shutting_down or node not in self._collections:
                    continue
                soc = self._soc_of_node(node)
                item = next_item(self._pending, lambda index, soc=soc: self._soc_of_item(items[index]) == soc)  # type: ignore[misc]
                if item is None:
                    continue
                self._pending.remove(item)
                given.append(item)
                node.send_runtest_some([item])
        self._release()

    def _release(self) -> None:
        """Let go of workers for which nothing can come: their last item waits for that."""
        items = self._items
        if items is None:
            return
        for node in self._given:
            soc = self._soc_of_node(node)
            if not node.shutting_down and all(self._soc_of_item(items[index]) != soc for index in self._pending):
                node.shutdown()
