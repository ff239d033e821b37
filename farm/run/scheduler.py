"""Which device gets which job next: a pure choice, and its adapter to pytest-xdist.

Whether a job is tried again at all is decided in `farm.results.blame`.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, cast

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Mapping, Sequence

    from xdist.workermanage import WorkerController

# A worker of xdist starts an item only when it knows the one after it, or that none comes.
_IN_HAND = 2

IDLE = "farm: idle"
"""Name of an item that does nothing, which every worker has last: it follows the last job that a worker has, so that
the job starts although others may come, from a device that fails."""

_Method = TypeVar("_Method", bound=Callable[..., Any])


def _locked(method: _Method) -> _Method:
    """Let one thread in at a time: xdist's and the one that minds the devices."""

    @functools.wraps(method)
    def call(self: DeviceScheduling, *arguments: Any, **named: Any) -> Any:
        with self._lock:
            return method(self, *arguments, **named)

    return cast("_Method", call)


def dispatch_order(
    job_ids: Sequence[str],
    *,
    cached: Mapping[str, bool],
    expected_seconds: Mapping[str, float],
    sessions: Mapping[str, Hashable],
    first: Collection[str] = (),
) -> list[str]:
    """Return the order in which jobs are built and handed out. Pure.

    Those that are to be `first` come before all others. What is compiled already goes next, so that devices work while
    the builders warm up; among those, jobs that want the same session (`sessions` tells them apart) stand together, as
    every change starts a runner; then the longest expected first, which leaves no long job for the end. Otherwise the
    order given.
    """
    position = {job_id: n for n, job_id in enumerate(job_ids)}
    group: dict[Hashable, int] = {}
    for job_id in job_ids:
        group.setdefault(sessions[job_id], len(group))
    return sorted(
        job_ids,
        key=lambda job: (
            job not in first,
            not cached.get(job, False),
            group[sessions[job]],
            -expected_seconds.get(job, 0.0),
            position[job],
        ),
    )


class DeviceScheduling:
    """xdist's Scheduling protocol: every worker has a device, every item wants one SoC.

    Items are handed out one at a time in the order of the collection, each to the first worker with a device of its SoC
    that has room and may have it. A device may pause, and go for good; an item may come back, and avoid the devices
    that tried it. Workers stay until every job of their SoC is done, as one may come back to them.
    """

    def __init__(
        self,
        soc_of_item: Callable[[str], str],
        device_of_node: Callable[[Any], int],
        socs: Sequence[str],
        abandoned: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`socs` are those of the devices, by number; `abandoned` is called with items that no device is left for."""
        self._soc_of_item, self._device_of_node, self._socs = soc_of_item, device_of_node, socs
        self._abandoned = abandoned
        self._collections: dict[WorkerController, list[str]] = {}
        self._given: dict[WorkerController, list[int]] = {}
        self._items: list[str] | None = None
        self._idle = -1
        self._pending: list[int] = []
        self._soc: list[str] = []
        """By item; the idle one has none."""
        self._avoid: dict[int, frozenset[int]] = {}
        self._paused: set[int] = set()
        self._away: set[int] = set()
        """Paused, and nobody knows for how long."""
        self._retired: set[int] = set()
        self._stopped = False
        self._lock = threading.RLock()

    @property
    def nodes(self) -> list[WorkerController]:
        """Workers that have not gone."""
        return list(self._given)

    @property
    def collection_is_completed(self) -> bool:
        """True once a worker of every device that is still used has listed its items."""
        listed = {self._device_of_node(node) for node in self._collections}
        return self._items is not None or not (set(range(len(self._socs))) - self._retired - listed)

    @property
    def tests_finished(self) -> bool:
        """True when no job is left, neither here nor with a worker."""
        return (self.collection_is_completed or self._stopped) and not self.has_pending

    @property
    def has_pending(self) -> bool:
        """True while any job is unfinished."""
        return bool(self._pending) or any(self._jobs_of(node) for node in self._given)

    @_locked
    def add_node(self, node: WorkerController) -> None:
        """Take a worker in."""
        self._given[node] = []

    @_locked
    def add_node_collection(self, node: WorkerController, collection: Sequence[str]) -> None:
        """Take a worker's items: all workers see the same."""
        self._collections[node] = list(collection)

    @_locked
    def mark_test_complete(self, node: WorkerController, item_index: int, duration: float = 0) -> None:
        """Note an item as done, unless it came back, and hand out the next."""
        del duration
        self._given[node].remove(item_index)
        self._hand_out()

    @_locked
    def mark_test_pending(self, item: str) -> None:
        """Put an item back in front: the worker that ran it died.

        Not one that it had given back before it died: another may have it by now.
        """
        if self._items is not None and self._items.index(item) not in itertools.chain(*self._given.values()):
            self._put_back(item)
        self._hand_out()

    def remove_pending_tests_from_node(self, node: WorkerController, indices: Sequence[int]) -> None:
        """Never called: nothing here steals."""
        raise NotImplementedError

    @_locked
    def remove_node(self, node: WorkerController) -> str | None:
        """Let a worker go; return the item it died on, if any. What it had not begun is handed out again."""
        given = self._given.pop(node)
        if not given or self._items is None:
            return None
        if not self._stopped:
            self._pending[:0] = [index for index in given[1:] if index != self._idle]
            self._hand_out()
        return self._items[given[0]] if given[0] != self._idle else None

    @_locked
    def schedule(self) -> None:
        """Begin, or let a worker in that replaces one that died."""
        if self._items is None and self._collections:
            self._items = next(iter(self._collections.values()))
            self._idle = self._items.index(IDLE)
            self._soc = ["" if item == IDLE else self._soc_of_item(item) for item in self._items]
            everything = range(len(self._items)) if not self._stopped else ()
            self._pending = [index for index in everything if index != self._idle]
        self._hand_out()

    @_locked
    def running(self, node: WorkerController) -> str | None:
        """Return the job that a worker is busy with."""
        jobs = self._jobs_of(node) if node in self._given else []
        return self._items[jobs[0]] if jobs and self._items is not None else None

    @_locked
    def repeat(self, item: str, avoid: Collection[int] = ()) -> None:
        """Take an item back that a worker is about to complete, for a device that is not in `avoid`."""
        self._put_back(item)
        if self._items is not None:
            index = self._items.index(item)
            self._avoid[index] = self._avoid.get(index, frozenset()) | frozenset(avoid)
            self._abandon()

    @_locked
    def pause(self, device: int, *, away: bool = False) -> None:
        """Give a device no more items, and let its worker notice at once.

        One that is `away` may not come back: an item that was tried elsewhere does not wait for it.
        """
        self._paused.add(device)
        (self._away.add if away else self._away.discard)(device)
        self._abandon()
        for node in self._given:
            if self._device_of_node(node) == device and not node.shutting_down and self._items is not None:
                # One that does it, and the next, without which that would wait.
                for _ in range(_IN_HAND):
                    self._send(node, self._idle)

    @_locked
    def nudge(self, device: int) -> None:
        """Let the worker of a paused device look once more what is wanted of it, when it has nothing to do.

        It may have looked before it could see it, or be another one by now than the one that it was meant for.
        """
        for node, given in self._given.items():
            if self._device_of_node(node) == device and device in self._paused and node in self._collections:
                if len(given) >= _IN_HAND or node.shutting_down or self._items is None:
                    continue
                for _ in range(_IN_HAND - len(given)):
                    self._send(node, self._idle)

    @_locked
    def has_work_for(self, device: int) -> bool:
        """Return whether a worker of a device could still be needed, now or when a job comes back."""
        if self._stopped or device in self._retired:
            return False
        if self._items is None:
            return True
        return self._is_unfinished(self._socs[device])

    @_locked
    def resume(self, device: int) -> None:
        """Give a device items again."""
        self._paused.discard(device)
        self._away.discard(device)
        self._hand_out()

    @_locked
    def retire(self, device: int) -> None:
        """Give a device nothing any more, whatever happens."""
        self._retired.add(device)
        self._abandon()
        if self._items is None and self.collection_is_completed:
            # It was the last one that the others waited for.
            self.schedule()
        self._hand_out()

    @_locked
    def stop(self) -> None:
        """Give nobody anything: what runs may finish."""
        self._stopped = True
        self._pending.clear()
        for node in self._given:
            if not node.shutting_down:
                node.shutdown()

    def _put_back(self, item: str) -> None:
        if self._items is not None and not self._stopped and (index := self._items.index(item)) not in self._pending:
            self._pending.insert(0, index)

    def _jobs_of(self, node: WorkerController) -> list[int]:
        return [index for index in self._given[node] if index != self._idle]

    def _send(self, node: WorkerController, index: int) -> None:
        self._given[node].append(index)
        # One that has just died is about to be taken away, with what it was given.
        with contextlib.suppress(OSError):
            node.send_runtest_some([index])

    def _hand_out(self) -> None:
        if self._items is None:
            return
        # Round by round, so that a short list is spread over all workers.
        for room in range(_IN_HAND):
            for node in self._given:
                if len(self._jobs_of(node)) > room or node.shutting_down or node not in self._collections:
                    continue
                device = self._device_of_node(node)
                if device in self._paused:
                    continue
                item = next((index for index in self._pending if self._could_have(device, index)), None)
                if item is not None:
                    self._pending.remove(item)
                    self._send(node, item)
        for node, given in self._given.items():
            if given and given[-1] != self._idle and len(self._jobs_of(node)) < _IN_HAND and not node.shutting_down:
                self._send(node, self._idle)
        self._release()

    def _could_have(self, device: int, index: int) -> bool:
        """Return whether a device, paused or not, is one for an item."""
        return (
            device not in self._retired
            and self._socs[device] == self._soc[index]
            and device not in self._avoid.get(index, ())
        )

    def _abandon(self) -> None:
        """Let go of items for which no device is left."""
        for index in list(self._pending):
            # What nobody has tried yet waits for whatever may come.
            away = self._away if self._avoid.get(index) else set()
            left = (device for device in range(len(self._socs)) if device not in away)
            if self._items is not None and not any(self._could_have(device, index) for device in left):
                self._pending.remove(index)
                self._abandoned(self._items[index])

    def _is_unfinished(self, soc: str) -> bool:
        """Return whether any job of an SoC is waiting, or with a worker."""
        items = itertools.chain(self._pending, *self._given.values())
        return any(self._soc[index] == soc for index in items)

    def _release(self) -> None:
        """Let go of workers for which nothing can come."""
        unfinished: dict[str, bool] = {}
        for node in self._given:
            device = self._device_of_node(node)
            soc = self._socs[device]
            if soc not in unfinished:
                unfinished[soc] = self._is_unfinished(soc)
            if not node.shutting_down and (not unfinished[soc] or device in self._retired):
                node.shutdown()
