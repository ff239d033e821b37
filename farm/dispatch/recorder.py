"""Recording of results in the store: in batches, in order; a result log on the local disk holds them until then."""

from __future__ import annotations

import contextlib
import logging
import os
import struct
import threading
import time
import zlib
from collections import Counter
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, NamedTuple, Protocol

import msgspec

from farm.base.errors import ArtifactLostError, ArtifactsError, FarmError, LeaseLostError, StoreError, StoreLostError
from farm.base.text import reason_line
from farm.report.model.format import plural
from farm.store.cluster.records import ShardResult

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from farm.store.records import ArtifactRecord


# Result log: results that are not in the store yet, in a file that is replayed after a kill.


_HEAD = struct.Struct(">II")
"""Size and CRC-32 of the result that follows."""

_decoder = msgspec.msgpack.Decoder(ShardResult)


class ResultLog:
    """File to which results are appended. Belongs to one process, whose threads take turns.

    A result that a full disk or a loss of power cut short at the end of the file is ignored. While the disk is full,
    results wait in memory until there is space.
    """

    def __init__(self, path: Path) -> None:
        """Open or create the file. Raises OSError."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._left, self._end = _read(path.read_bytes())
        os.ftruncate(self._file, self._end)
        self._unwritten: list[bytes] = []
        self._open = len(self._left)

    def left(self) -> list[ShardResult]:
        """Return the results of the agent's former life, oldest first; only once."""
        left, self._left = self._left, []
        return left

    def append(self, result: ShardResult) -> bool:
        """Keep a result; return False while the disk is full, as then it is only in memory."""
        content = msgspec.msgpack.encode(result)
        self._unwritten.append(_HEAD.pack(len(content), zlib.crc32(content)) + content)
        self._open += 1
        while self._unwritten:
            try:
                self._write(self._unwritten[0])
            except OSError:
                # Remove the half-written result: results behind it could not be read.
                os.ftruncate(self._file, self._end)
                return False
            del self._unwritten[0]
        return True

    @property
    def is_empty(self) -> bool:
        """True if every result is recorded, or refused for good."""
        return self._open <= 0

    def sync(self) -> None:
        """Bring the results to the disk, where they survive a loss of power. Raises OSError."""
        os.fdatasync(self._file)

    def mark_recorded(self, count: int) -> None:
        """Note that `count` results were recorded, or refused for good."""
        self._open -= count
        if self._open <= 0:
            self._unwritten.clear()
            os.ftruncate(self._file, 0)
            self._end = self._open = 0

    def close(self) -> None:
        """Close the file, emptied if all results are recorded."""
        self.mark_recorded(0)
        os.close(self._file)

    def _write(self, data: bytes) -> None:
        at = self._end
        while data:
            written = os.pwrite(self._file, data, at)
            data, at = data[written:], at + written
        self._end = at


def open_result_log(folder: Path) -> ResultLog:
    """Open the log of an agent in its folder; the log of an agent of farm 0.2.0 goes on. Raises OSError."""
    log, earlier = folder / "result_log", folder / "spool"
    if earlier.exists() and not log.exists():
        earlier.rename(log)
    return ResultLog(log)


def _read(content: bytes) -> tuple[list[ShardResult], int]:
    """Return the results in a file, and the offset behind the last whole one. Pure."""
    found, at = [], 0
    while len(content) >= at + _HEAD.size:
        size, checksum = _HEAD.unpack_from(content, at)
        data = content[at + _HEAD.size : at + _HEAD.size + size]
        if len(data) < size or zlib.crc32(data) != checksum:
            break
        try:
            found.append(_decoder.decode(data))
        except msgspec.MsgspecError:
            # A result of another version of farm, which this one cannot record.
            break
        at += _HEAD.size + size
    return found, at


# Records results, health events and the ends of leases in the store: in batches, in order, until they are there.


logger = logging.getLogger(__name__)

_COALESCE_SECONDS = 0.05
"""Results that arrive within that time are one transaction."""

_RETRY_SECONDS = 1.0
_UPLOAD_SECONDS = 120.0
"""After so long without the artifacts' store a result is recorded without its files."""


class Uploads(Protocol):
    """Store of the files of attempts."""

    def upload(self, records: Sequence[ArtifactRecord]) -> None:
        """Copy files of this machine's artifact store into the artifact store of all hosts. Raises FarmError."""

    def discard(self, records: Sequence[ArtifactRecord]) -> None:
        """Forget files whose attempt is recorded."""


class _Action(NamedTuple):
    """A change of the store that follows the results of a device."""

    write: Callable[[], None]
    done: Callable[[], None]


_Item = ShardResult | _Action


class Recorder:
    """Thread that records in the order of arrival, for each device.

    While the store gives no answer, the recorder tries again; the results are in the result log until then.
    """

    def __init__(
        self,
        record: Callable[[Sequence[ShardResult]], Mapping[int, FarmError]],
        log: ResultLog,
        uploads: Uploads | None,
        *,
        recorded: Callable[[Sequence[ShardResult], Mapping[int, FarmError]], None] = lambda *_: None,
        failing: Callable[[FarmError, float], None] = lambda *_: None,
    ) -> None:
        """`record` writes results into the store and returns the reason for each refused result, by its index.

        `recorded` gets results and the refused results among them by index, `failing` the seconds without answer. Both
        are called in the recorder's thread.
        """
        self._write, self._log, self._uploads = record, log, uploads
        self._recorded, self._failing = recorded, failing
        self._failing_since_s: float | None = None
        self._queue: SimpleQueue[_Item | None] = SimpleQueue()
        self._to_upload: SimpleQueue[tuple[str, _Item] | None] = SimpleQueue()
        """Results whose files are uploaded first, and changes behind them, with their device."""
        self._uploading: Counter[str] = Counter()
        """Number of these items by device."""
        self._ending, self._lock = threading.Event(), threading.Lock()
        self._problem = ""
        self._threads = [
            threading.Thread(target=self._run, daemon=True, name="recorder"),
            threading.Thread(target=self._upload_all, daemon=True, name="uploads"),
        ]

    def begin(self) -> None:
        """Record the results that an earlier process left in the log, then new ones. Raises StoreError."""
        if left := self._log.left():
            self._record(left)
            logger.info("recorded %s that an earlier process had left", plural(len(left), "result"))
        for thread in self._threads:
            thread.start()

    def result(self, result: ShardResult) -> None:
        """Record a result, which is in the result log at once."""
        with self._lock:
            is_kept = self._log.append(result)
        if not is_kept:
            self._warn_once("this disk is full: results are only in memory")
        self._put(result.device, result)

    def after(self, device: str, write: Callable[[], None], done: Callable[[], None] = lambda: None) -> None:
        """Call `write`, which changes the store, behind the results of a device, then `done`, from another thread.

        An empty `device` waits for no files. `done` is called as well where the change was given up.
        """
        self._put(device, _Action(write, done))

    def _put(self, device: str, item: _Item) -> None:
        has_files = isinstance(item, ShardResult) and bool(item.artifacts) and self._uploads is not None
        with self._lock:
            if has_files or (isinstance(item, _Action) and self._uploading[device]):
                self._uploading[device] += 1
                self._to_upload.put((device, item))
            else:
                self._queue.put(item)

    def close(self, patience_s: float) -> bool:
        """Record everything and end; return False if that takes longer: then the result log keeps the rest."""
        self._to_upload.put(None)
        deadline = time.monotonic() + patience_s
        if self._threads[0].ident is None:
            return True
        self._threads[0].join(patience_s)
        self._ending.set()
        for thread in self._threads:
            thread.join(max(0.2, deadline - time.monotonic()))
        return not self._threads[0].is_alive() and self._log.is_empty

    def _run(self) -> None:
        while (items := self._next()) and not self._ending.is_set():
            self._process(items)

    def _next(self) -> list[_Item]:
        """Return the next items, none after the last."""
        first = self._queue.get()
        if first is None:
            return []
        if isinstance(first, ShardResult):
            time.sleep(_COALESCE_SECONDS)
        items = [first]
        with contextlib.suppress(Empty):
            while (item := self._queue.get_nowait()) is not None:
                items.append(item)
            # The end, for the next call.
            self._queue.put(None)
        return items

    def _upload_all(self) -> None:
        while (found := self._to_upload.get()) is not None:
            device, item = found
            self._queue.put(self._upload(item) if isinstance(item, ShardResult) else item)
            with self._lock:
                self._uploading[device] -= 1
        self._queue.put(None)

    def _upload(self, result: ShardResult) -> ShardResult:
        deadline = time.monotonic() + _UPLOAD_SECONDS
        while self._uploads is not None:
            try:
                self._uploads.upload(result.artifacts)
            except (FarmError, OSError) as error:
                self._warn_once(f"files of {result.job_id} cannot be uploaded: {error}")
                is_away = isinstance(error, ArtifactsError) and not isinstance(error, ArtifactLostError)
                if not is_away or time.monotonic() > deadline or self._ending.wait(_RETRY_SECONDS):
                    *earlier, last = result.attempts
                    note = reason_line(f"its files are not kept: {error}")
                    last = msgspec.structs.replace(last, notes=(*last.notes, note))
                    return msgspec.structs.replace(result, attempts=(*earlier, last), artifacts=())
                continue
            return result
        return result

    def _process(self, items: Sequence[_Item]) -> None:
        results = [item for item in items if isinstance(item, ShardResult)]
        if results:
            self._retry(lambda: self._record(results))
        for item in items:
            if isinstance(item, _Action):
                self._retry(item.write)
                item.done()

    def _record(self, results: Sequence[ShardResult]) -> None:
        """Record results, and note refused ones: another device has the job by now. Raises StoreError."""
        with contextlib.suppress(OSError):
            self._log.sync()
        refused = self._write(results)
        with self._lock:
            self._log.mark_recorded(len(results))
        for index, error in refused.items():
            result = results[index]
            fields = {"job": result.job_id, "device": result.device}
            logger.warning("%s from %s is not recorded: %s", result.job_id, result.device, error, extra=fields)
        self._recorded(results, refused)
        if self._uploads is not None:
            for result in results:
                if result.artifacts:
                    self._uploads.discard(result.artifacts)

    def _retry(self, action: Callable[[], object]) -> None:
        """Call `action` until the store answers."""
        while True:
            try:
                action()
            except StoreLostError as error:
                self._warn_once(f"not recorded: {error}")
                self._failing(error, float("inf"))
                return
            except StoreError as error:
                self._warn_once(f"the store: {error}")
                self._failing_since_s = self._failing_since_s or time.monotonic()
                self._failing(error, time.monotonic() - self._failing_since_s)
                if self._ending.wait(_RETRY_SECONDS):
                    return
            except LeaseLostError:
                # Another device has the shard by now.
                return
            except FarmError as error:
                # Another try would fail in the same way.
                self._warn_once(f"not recorded: {error}")
                return
            else:
                self._problem, self._failing_since_s = "", None
                return

    def _warn_once(self, problem: str) -> None:
        if problem != self._problem:
            self._problem = problem
            logger.warning(problem)
