"""What an agent and a slot, which runs the jobs of one device, say to each other.

A slot does in order what it is sent, but for SetGrant, Break and End, which count at once. It answers every RunJob and
every LookNow with one message. One that answers with a Back does nothing else before the next SetGrant: what it had
in hand comes back as well.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec

from farm.devices.connect import from_plain
from farm.pool.worker_grant import WorkerGrant
from farm.request.plan import PlannedJob
from farm.results.attempt import Attempt
from farm.results.blame import Tried
from farm.store.leases.registry import HealthEvent
from farm.store.records import ArtifactRecord

if TYPE_CHECKING:
    from collections.abc import Callable

LOOKED = -1
"""Number of the answer to a LookNow."""

_SIZE = struct.Struct(">I")


class Begin(msgspec.Struct, frozen=True, tag=True):
    """What follows is of this plan, and is run on its first device."""

    plan: str
    """Path of the plan's file."""


class SetGrant(msgspec.Struct, frozen=True, tag=True):
    """Whether the device may be used, from now on."""

    grant: WorkerGrant


class RunJob(msgspec.Struct, frozen=True, tag=True):
    """A job."""

    number: int
    planned: PlannedJob
    history: tuple[Tried, ...] = ()
    """What other devices found, by their ids."""
    more: bool = False
    """Another RunJob follows at once, so that its bundle can be staged meanwhile."""


class LookNow(msgspec.Struct, frozen=True, tag=True):
    """Recover the device or let go of it, as the newest grant says."""


class Break(msgspec.Struct, frozen=True, tag=True):
    """Break off what runs: nobody wants its result."""


class End(msgspec.Struct, frozen=True, tag=True):
    """Leave the device as it was found, and end."""


ToSlot = Begin | SetGrant | RunJob | LookNow | Break | End


class Ended(msgspec.Struct, frozen=True, tag=True):
    """A job was run."""

    number: int
    attempts: tuple[Attempt, ...]
    """Oldest first."""
    artifacts: tuple[ArtifactRecord, ...] = ()
    """Of the last attempt; the files are in this machine's artifact store."""
    repeat: tuple[Tried, ...] = ()
    """All of the job's history, by ids of devices, where another device is to try it."""


class Back(msgspec.Struct, frozen=True, tag=True):
    """A job was not begun; or what came of a LookNow."""

    number: int
    off: bool = False
    """Nothing of ours is on the device any more."""
    unfit: str = ""
    """What is wrong with the device: it has to be recovered first."""
    recovered: bool = False
    given_up: str = ""
    """Why the device is of no use."""
    halt: str = ""
    """What of this machine has failed for too long."""


class Broken(msgspec.Struct, frozen=True, tag=True):
    """A job has no result, as farm itself broke down over it."""

    number: int
    text: str
    """A traceback."""


class DeviceEvent(msgspec.Struct, frozen=True, tag=True):
    """Something happened to a device."""

    event: HealthEvent


class Died(msgspec.Struct, frozen=True, tag=True):
    """The slot is no more: its last message."""

    reason: str


FromSlot = Ended | Back | Broken | DeviceEvent | Died


class DeviceSlot(Protocol):
    """Runs the jobs of one device, in another process or thread."""

    def start(self, answer: Callable[[FromSlot], None]) -> None:
        """Begin; `answer` gets every message, from any thread. Raises InfraError."""

    def send(self, *messages: ToSlot) -> None:
        """Send messages; those to a slot that is no more are lost."""

    def close(self) -> None:
        """Let it leave the device and end, and wait for that; then it is killed. No message comes afterwards."""

    def kill(self) -> None:
        """End it at once. Its last message is Died."""


class Frames:
    """Messages in a stream of bytes: each its size, four bytes, and MessagePack, as JSON has no infinity."""

    def __init__(self, kind: Any) -> None:
        """`kind` is ToSlot or FromSlot."""
        self._decoder = msgspec.msgpack.Decoder(kind, dec_hook=from_plain)
        self._rest = b""

    def feed(self, data: bytes) -> list[Any]:
        """Return the messages that are whole now. Raises msgspec.DecodeError."""
        data, at, found = self._rest + data, 0, []
        while len(data) >= at + _SIZE.size:
            end = at + _SIZE.size + _SIZE.unpack_from(data, at)[0]
            if len(data) < end:
                break
            found.append(self._decoder.decode(memoryview(data)[at + _SIZE.size : end]))
            at = end
        self._rest = data[at:]
        return found


def frame(message: ToSlot | FromSlot) -> bytes:
    """Return the bytes of a message in a stream."""
    content = msgspec.msgpack.encode(message, enc_hook=str)
    return _SIZE.pack(len(content)) + content


class SlotTimes(NamedTuple):
    """How long a slot has, in seconds."""

    close_s: float = 20.0
    """To leave its device; then it is killed, and whoever uses the device next removes what is there."""
    break_s: float = 10.0
    """To break off what runs."""
