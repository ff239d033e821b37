"""Messages between a dispatcher and a device process, their frames in a pipe, and the dispatcher's end of it."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import msgspec

from farm.base.errors import InfraError
from farm.base.files import end_of_log
from farm.base.machine import now_s
from farm.base.processes import ending
from farm.base.reaper import read_stat
from farm.devices.connect import from_plain
from farm.devices.device import HealthEvent
from farm.policy.retries import Tried
from farm.results.attempt import Attempt
from farm.store.cluster.records import PlannedJob
from farm.store.records import ArtifactRecord

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from farm.base.fork_server import ForkProcess, ForkServer


# Messages between a dispatcher and a device process, and their frames in a pipe.
#
# A device process handles messages in order, except Grant, Abort and End, which count at once. Each RunJob and
# each ApplyGrant has one answer. After a JobReturned the process returns every job that it has, until the next
# Grant.


GRANT_APPLIED = -1
"""Number of the answer to an ApplyGrant."""

_SIZE_BYTES = 4


class Grant(msgspec.Struct, frozen=True, tag=True):
    """Permission of the dispatcher to use one device, from now on."""

    go: bool
    """A job may begin on it."""
    fence: int = 0
    """Fence of the lease; 0 for a device of this run alone, without a lease."""
    until_s: float | None = None
    """End of the lease on the clock of `now_s`, unless it is renewed: a dispatcher that is stopped or cut off from
    the store cannot revoke the grant. None without a lease."""
    recover: bool = False
    """The device is to be recovered before the next job."""
    outvoted: int = 0
    """Number of jobs that failed on the device and passed on another device of the run."""
    others: tuple[str, ...] = ()
    """Ids of other devices of its SoC that may try a job that failed here."""

    @property
    def is_over(self) -> bool:
        """Return whether the lease has ended as far as this process knows."""
        return self.until_s is not None and now_s() >= self.until_s


class Begin(msgspec.Struct, frozen=True, tag=True):
    """The following jobs belong to this plan."""

    plan: str
    """Path of the plan's file."""
    number: int = 0
    """Number of the device in the plan."""


class RunJob(msgspec.Struct, frozen=True, tag=True):
    """Job to run."""

    number: int
    planned: PlannedJob
    more: bool = False
    """Another RunJob follows at once; its bundle can be staged meanwhile."""


class ApplyGrant(msgspec.Struct, frozen=True, tag=True):
    """Recover the device or leave it, as the newest grant has it."""


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Abort the running job; its result is dropped."""


class End(msgspec.Struct, frozen=True, tag=True):
    """Leave the device as it was found, and exit."""


ToDevice = Begin | Grant | RunJob | ApplyGrant | Abort | End


class JobBegun(msgspec.Struct, frozen=True, tag=True):
    """The device process works on a job from now on."""

    number: int


class JobEnded(msgspec.Struct, frozen=True, tag=True):
    """Result of a job that was tried."""

    attempts: tuple[Attempt, ...]
    """Oldest first; the last decides."""
    artifacts: tuple[ArtifactRecord, ...] = ()
    """Artifacts of the last attempt; the files are in this machine's artifact store."""
    repeat: tuple[Tried, ...] = ()
    """Whole history of the job, by ids of devices, if it is tried again."""
    avoid: tuple[str, ...] = ()
    """Ids of devices that cannot run the job, if another device is to try it."""
    outvoted: tuple[str, ...] = ()
    """Ids of devices on which the job had failed, if it passed here."""
    number: int = GRANT_APPLIED
    """Number of the job, which the device process adds."""


class JobReturned(msgspec.Struct, frozen=True, tag=True):
    """A job that was not begun, because the device may not be used, or the answer to an ApplyGrant.

    Unless the device is unfit, was recovered or this machine has a fault, nothing of farm is left on it.
    """

    unfit: str = ""
    """Fault of the device, which has to be recovered first."""
    recovered: bool = False
    given_up: str = ""
    """Reason for the end of the device's use."""
    halt: str = ""
    """Lasting fault of this machine."""
    number: int = GRANT_APPLIED
    """Number of the job, which the device process adds."""


class DeviceEvent(msgspec.Struct, frozen=True, tag=True):
    """A health event of a device."""

    event: HealthEvent


class ProcessEnded(msgspec.Struct, frozen=True, tag=True):
    """Last message: the device process has exited."""

    reason: str
    log: str = ""
    """End of its standard error."""


FromDevice = JobBegun | JobEnded | JobReturned | DeviceEvent | ProcessEnded


def read_messages(pipe: IO[bytes], kind: Any) -> Iterator[Any]:
    """Yield the messages of a pipe, of the type ToDevice or FromDevice. Raises OSError, msgspec.MsgspecError.

    Each is its size, four bytes, and MessagePack, as JSON has no infinity. A message that is cut short is left out.
    """
    decoder = msgspec.msgpack.Decoder(kind, dec_hook=from_plain)
    while len(head := pipe.read(_SIZE_BYTES)) == _SIZE_BYTES:
        size = int.from_bytes(head)
        content = pipe.read(size)
        if len(content) == size:
            yield decoder.decode(content)


def frame(message: ToDevice | FromDevice) -> bytes:
    """Return the bytes of a message in a stream."""
    content = msgspec.msgpack.encode(message, enc_hook=str)
    return len(content).to_bytes(_SIZE_BYTES) + content


# The dispatcher's end of a device process.


_CLOSE_SECONDS = 20.0
"""Time to leave its device; then the process is killed, and the next user of the device removes its files."""


class ForkedProcess:
    """A device process that a ForkServer makes."""

    def __init__(self, forks: ForkServer, log: Path) -> None:
        """The standard error of the process goes into `log`."""
        self._forks, self._log = forks, log
        self._forked: ForkProcess | None = None
        """None before the start, and after the exit."""
        self._reader: threading.Thread | None = None
        self._writing = threading.Lock()

    def start(self, answer: Callable[[FromDevice], None]) -> None:
        """Start the process; `answer` gets every message, from a thread. Raises InfraError."""
        try:
            self._forked = self._forks.fork(self._log)
        except OSError as error:
            raise InfraError(f"a device process cannot be started: {error}") from error
        os.set_blocking(self._forked.stdin.fileno(), False)
        self._reader = threading.Thread(
            target=self._read, args=(self._forked, answer), daemon=True, name="device process"
        )
        self._reader.start()

    @property
    def pid(self) -> int:
        """Process id; 0 before the start, and after the exit."""
        forked = self._forked
        return forked.pid if forked is not None else 0

    @property
    def is_stopped(self) -> bool:
        """True if a signal or a debugger has stopped the process."""
        stat = read_stat(self.pid)
        return stat is not None and stat.state in {"T", "t"}

    def send(self, *messages: ToDevice) -> None:
        """Send messages in one piece. A process that is stopped, and so reads nothing, is killed."""
        data = b"".join(map(frame, messages))
        with self._writing:
            forked = self._forked
            try:
                while data and forked is not None:
                    data = data[os.write(forked.stdin.fileno(), data) :]
            except BlockingIOError:
                self.kill()
            except (OSError, ValueError):
                # The process has exited: its last message follows.
                return

    def close(self) -> None:
        """Let the process leave the device and exit, wait, then kill it."""
        if self._reader is None:
            return
        self.send(End())
        self._reader.join(_CLOSE_SECONDS)
        self.kill()
        self._reader.join()

    def kill(self) -> None:
        """Kill the process and everything in its session that it started. Its last message is ProcessEnded."""
        forked = self._forked
        if forked is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(forked.pid, signal.SIGKILL)

    def _read(self, forked: ForkProcess, answer: Callable[[FromDevice], None]) -> None:
        reason = ""
        try:
            for message in read_messages(forked.stdout, FromDevice):
                answer(message)
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            reason = f"its messages could not be read: {error}"
        self.kill()
        code = forked.wait()
        with self._writing:
            self._forked = None
        forked.stdin.close()
        forked.stdout.close()
        forked.lifeline.cut()
        log = end_of_log(self._log).strip()
        last = log.rpartition("\n")[2]
        answer(ProcessEnded(": ".join(filter(None, [reason or ending(code), last])), log))
