"""What the devices of an agent found out goes into the store: in batches, in order, and again until it is there."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, NamedTuple, Protocol

import msgspec

from farm.errors import ArtifactLostError, ArtifactsError, FarmError, LeaseLostError, StoreError, StoreLostError
from farm.store.leases.registry import HealthEvent
from farm.system.text import reason_line

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from farm.cluster.agent.ledger import Ledger
    from farm.cluster.agent.spool import Spool
    from farm.store.cluster.records import AgentId, HeldShard, ShardJob, ShardResult
    from farm.store.leases.rules import Lease
    from farm.store.records import ArtifactRecord
    from farm.store.store import Store

_COALESCE_SECONDS = 0.05
"""Results that come within that time are one transaction."""

_AGAIN_SECONDS = 1.0
_LAST_SECONDS = 0.2
_UPLOAD_SECONDS = 120.0
"""After so long without the artifacts' store a result is recorded without its files."""


class ShardBack(NamedTuple):
    """A shard that is given back."""

    held: HeldShard
    jobs: tuple[ShardJob, ...]
    """Those that are left."""
    why: str


class Release(NamedTuple):
    """A lease that ends."""

    lease: Lease
    done: Callable[[], None]


class Uploads(Protocol):
    """Where files of attempts go."""

    def upload(self, records: Sequence[ArtifactRecord]) -> None:
        """Bring files of this machine's artifact store to where all hosts find them. Raises FarmError."""

    def settled(self, records: Sequence[ArtifactRecord]) -> None:
        """Let go of files of which the attempt is recorded."""


class _SpooledResult(NamedTuple):
    """A result on its way."""

    result: ShardResult
    is_uploaded: bool = False
    """Files of the result are in the artifacts' store."""


_Item = _SpooledResult | ShardBack | Release | HealthEvent


class Recorder:
    """A thread that records. What is given to it later is recorded later, for each device.

    While the database is away it goes on trying: what it has not recorded is in the spool as well.
    """

    def __init__(
        self,
        store: Store,
        spool: Spool,
        ledger: Ledger,
        uploads: Uploads | None,
        note: Callable[[str], None],
        ttl_s: float,
    ) -> None:
        self._store, self._spool, self._ledger = store, spool, ledger
        self._uploads, self._note, self._ttl_s = uploads, note, ttl_s
        self._agent: AgentId | None = None
        self._queue: SimpleQueue[_Item | None] = SimpleQueue()
        self._uploading: Counter[str] = Counter()
        """Results of a device whose files are on their way."""
        self._waiting: list[ShardBack | Release] = []
        """What waits for uploads of its device."""
        self._to_upload: SimpleQueue[_SpooledResult | None] = SimpleQueue()
        self._ending, self._spooling = threading.Event(), threading.Lock()
        self._problem = ""
        self._threads = [
            threading.Thread(target=self._run, daemon=True, name="recorder"),
            threading.Thread(target=self._upload_all, daemon=True, name="uploads"),
        ]

    def begin(self, agent: AgentId) -> None:
        """Record what a former life left, then what comes, in the name of `agent`. Raises StoreError."""
        self._agent = agent
        if left := self._spool.left():
            self._note(f"{len(left)} results of the time before this start are offered again")
            self._record(left)
        for thread in self._threads:
            thread.start()

    def result(self, result: ShardResult) -> None:
        """Record a result. It is in the spool at once: while the database is away, only the queue grows."""
        with self._spooling:
            is_kept = self._spool.append(result)
        if not is_kept:
            self._say("this disk is full: results are only in memory")
        self._queue.put(_SpooledResult(result))

    def put_back(self, held: HeldShard, jobs: Sequence[ShardJob], why: str) -> None:
        """Give back a shard with the jobs that are left."""
        self._queue.put(ShardBack(held, tuple(jobs), why))

    def release(self, lease: Lease, done: Callable[[], None]) -> None:
        """End a lease, then call `done`, from another thread."""
        self._queue.put(Release(lease, done))

    def health(self, event: HealthEvent) -> None:
        """Record what happened to a device."""
        self._queue.put(event)

    def close(self, patience_s: float) -> bool:
        """Record what there is, and end; return False when that takes longer, as it stays in the spool then."""
        self._queue.put(None)
        deadline = time.monotonic() + patience_s
        if self._threads[0].ident is None:
            return True
        self._threads[0].join(patience_s)
        self._ending.set()
        self._to_upload.put(None)
        for thread in self._threads:
            thread.join(max(0.2, deadline - time.monotonic()))
        return not self._threads[0].is_alive()

    def _run(self) -> None:
        is_last = False
        while not self._ending.is_set() and not (is_last and not self._waiting and not self._uploading.total()):
            items, is_last = self._next(is_last=is_last)
            self._do(self._divert(items))

    def _next(self, *, is_last: bool) -> tuple[list[_Item], bool]:
        """Return what there is to do, as soon as there is anything, and whether nothing else comes."""
        items: list[_Item] = []
        try:
            first = self._queue.get(timeout=_LAST_SECONDS if is_last else None)
        except Empty:
            return items, is_last
        if first is None:
            return items, True
        items.append(first)
        if isinstance(first, _SpooledResult):
            time.sleep(_COALESCE_SECONDS)
        while True:
            try:
                one = self._queue.get_nowait()
            except Empty:
                return items, is_last
            if one is None:
                is_last = True
            else:
                items.append(one)

    def _divert(self, items: Sequence[_Item]) -> list[_Item]:
        """Return what can be done now: not results whose files are not uploaded, nor what follows them on a device."""
        now: list[_Item] = []
        for item in items:
            if isinstance(item, _SpooledResult) and item.is_uploaded:
                now.append(item)
                self._uploading[device := item.result.device] -= 1
                if not self._uploading[device]:
                    now += [one for one in self._waiting if _device(one) == device]
                    self._waiting = [one for one in self._waiting if _device(one) != device]
            elif isinstance(item, _SpooledResult) and item.result.artifacts and self._uploads is not None:
                self._uploading[item.result.device] += 1
                self._to_upload.put(item)
            elif isinstance(item, ShardBack | Release) and self._uploading[_device(item)]:
                self._waiting.append(item)
            else:
                now.append(item)
        return now

    def _upload_all(self) -> None:
        while (found := self._to_upload.get()) is not None:
            self._queue.put(_SpooledResult(self._upload(found.result), is_uploaded=True))

    def _upload(self, result: ShardResult) -> ShardResult:
        deadline = time.monotonic() + _UPLOAD_SECONDS
        while self._uploads is not None:
            try:
                self._uploads.upload(result.artifacts)
            except (FarmError, OSError) as error:
                self._say(f"files of {result.job_id} cannot be uploaded: {error}")
                is_away = isinstance(error, ArtifactsError) and not isinstance(error, ArtifactLostError)
                if not is_away or time.monotonic() > deadline or self._ending.wait(_AGAIN_SECONDS):
                    *earlier, last = result.attempts
                    note = reason_line(f"its files are not kept: {error}")
                    last = msgspec.structs.replace(last, notes=(*last.notes, note))
                    return msgspec.structs.replace(result, attempts=(*earlier, last), artifacts=())
                continue
            return result
        return result

    def _do(self, items: Sequence[_Item]) -> None:
        results = [item.result for item in items if isinstance(item, _SpooledResult)]
        releases = [item for item in items if isinstance(item, Release)]
        if results:
            self._patiently(lambda: self._record(results))
        for item in items:
            if isinstance(item, ShardBack):
                self._patiently(partial(self._put_back, item))
            elif isinstance(item, HealthEvent):
                self._patiently(partial(self._store.devices.record_health, item))
        if releases and (agent := self._agent) is not None:
            self._patiently(partial(self._release, agent, [one.lease for one in releases]))
            for one in releases:
                one.done()

    def _release(self, agent: AgentId, leases: Sequence[Lease]) -> None:
        with self._ledger.changing():
            self._store.cluster.release(agent, leases)
            self._ledger.drop(leases)

    def _put_back(self, item: ShardBack) -> None:
        if self._agent is not None:
            held = item.held
            # Others may have it by now.
            with contextlib.suppress(LeaseLostError):
                self._store.cluster.put_back(self._agent, held.id, held.lease.fence, why=item.why, jobs=item.jobs)

    def _record(self, results: Sequence[ShardResult]) -> None:
        """Record results, and note those that are refused: others have the job by now. Raises StoreError."""
        if self._agent is None:
            return
        refused = self._store.cluster.record(self._agent, results, ttl_s=self._ttl_s)
        with self._spooling:
            self._spool.settle(len(results))
        for index, reason in refused.items():
            result = results[index]
            self._note(f"{result.job_id} from {result.device} is not recorded: {reason}")
        if self._uploads is not None:
            for result in results:
                if result.artifacts:
                    self._uploads.settled(result.artifacts)

    def _patiently(self, action: Callable[[], object]) -> None:
        """Call `action` until the store is there for it."""
        while True:
            try:
                action()
            except StoreLostError as error:
                self._say(f"not recorded: {error}")
                return
            except StoreError as error:
                self._say(f"the store: {error}")
                if self._ending.wait(_AGAIN_SECONDS):
                    return
            except FarmError as error:
                # It would say the same again.
                self._say(f"not recorded: {error}")
                return
            else:
                self._problem = ""
                return

    def _say(self, problem: str) -> None:
        if problem != self._problem:
            self._problem = problem
            self._note(problem)


def _device(item: ShardBack | Release) -> str:
    return item.held.lease.device if isinstance(item, ShardBack) else item.lease.device
