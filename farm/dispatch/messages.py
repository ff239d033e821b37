"""Messages between a dispatcher and a device process, and their frames in a pipe.

A device process handles messages in order, except SetGrant, Abort and End, which count at once. Each RunJob and each
ApplyGrant has one answer. After a JobReturned the process returns every job that it has, until the next SetGrant.
"""

from __future__ import annotations

import struct
from typing import Any

import msgspec

from farm.base.clock import now_s
from farm.devices.connect import from_plain
from farm.devices.health import HealthEvent
from farm.policy.retries import Tried
from farm.results.attempt import Attempt
from farm.store.cluster.records import PlannedJob
from farm.store.records import ArtifactRecord

GRANT_APPLIED = -1
"""Number of the answer to an ApplyGrant."""

_SIZE = struct.Struct(">I")


class Grant(msgspec.Struct, frozen=True):
    """Permission of the dispatcher to use one device."""

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
    """Serials or ids of other devices of its SoC that may try a job that failed here."""

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


class SetGrant(msgspec.Struct, frozen=True, tag=True):
    """Permission to use the device from now on."""

    grant: Grant


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


ToDevice = Begin | SetGrant | RunJob | ApplyGrant | Abort | End


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
    """Devices, as the history names them, on which the job had failed, if it passed here."""
    number: int = GRANT_APPLIED
    """Number of the job, which the device process adds."""


class JobReturned(msgspec.Struct, frozen=True, tag=True):
    """A job that was not begun, because the device may not be used, or the answer to an ApplyGrant."""

    off: bool = False
    """Nothing of farm is left on the device."""
    unfit: str = ""
    """Fault of the device, which has to be recovered first."""
    recovered: bool = False
    given_up: str = ""
    """Reason for the end of the device's use."""
    halt: str = ""
    """Lasting fault of this machine."""
    number: int = GRANT_APPLIED
    """Number of the job, which the device process adds."""


class JobBroken(msgspec.Struct, frozen=True, tag=True):
    """A job without a result: farm itself failed."""

    number: int
    text: str
    """A traceback."""


class DeviceEvent(msgspec.Struct, frozen=True, tag=True):
    """A health event of a device."""

    event: HealthEvent


class ProcessEnded(msgspec.Struct, frozen=True, tag=True):
    """Last message: the device process has exited."""

    reason: str
    log: str = ""
    """End of its standard error."""


FromDevice = JobBegun | JobEnded | JobReturned | JobBroken | DeviceEvent | ProcessEnded


class Frames:
    """Decoder of messages in a stream of bytes: each its size, four bytes, and MessagePack, as JSON has no infinity."""

    def __init__(self, kind: Any) -> None:
        """`kind` is ToDevice or FromDevice."""
        self._decoder = msgspec.msgpack.Decoder(kind, dec_hook=from_plain)
        self._rest = b""

    def feed(self, data: bytes) -> list[Any]:
        """Return the messages that are complete now. Raises msgspec.DecodeError."""
        data, at, found = self._rest + data, 0, []
        while len(data) >= at + _SIZE.size:
            end = at + _SIZE.size + _SIZE.unpack_from(data, at)[0]
            if len(data) < end:
                break
            found.append(self._decoder.decode(memoryview(data)[at + _SIZE.size : end]))
            at = end
        self._rest = data[at:]
        return found


def frame(message: ToDevice | FromDevice) -> bytes:
    """Return the bytes of a message in a stream."""
    content = msgspec.msgpack.encode(message, enc_hook=str)
    return _SIZE.pack(len(content)) + content
