"""Choice of the fault that strikes an operation of a virtual device, and lasting states of the device."""

from __future__ import annotations

import asyncio
import json
import os
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from farm.devices.virtual.faults import CONDITIONS, DRAWN, LINK_KINDS, LOG, Fault, FaultKind
from farm.devices.virtual.tree import DF, HEALTHY_CELSIUS, HEALTHY_LEVEL, full_df

if TYPE_CHECKING:
    from random import Random

    from farm.devices.adb.protocol import LinkThrottle
    from farm.devices.virtual.tree import DeviceTree

SOC_PROPERTY = "ro.soc.model"

# Bytes per second of a slow link without a number; values of a hot or empty device: docs/reference/virtual_devices.md.
_SLOW = 100_000
_HOT_CELSIUS = 60
_LOW_PERCENT = 5
_OTHER_SOCS = ("SM8550", "SM8650")


_HEALTHY_BODY = {FaultKind.OVERHEATED: {"celsius": HEALTHY_CELSIUS}, FaultKind.LOW_BATTERY: {"level": HEALTHY_LEVEL}}

_OUTPUTS = "data/local/tmp/farm/run-*/*/output_*.raw"

# Ranges of random faults: long enough for effects, short enough for waits.
_DRAWN_SECONDS = (0.2, 2.0)
_DRAWN_BYTES_LOG2 = (0.0, 17.0)
_DRAWN_CODES = {FaultKind.EXIT_CODE: (1, 3, 137, 255), FaultKind.KILL_RUNNER: (6, 9, 11)}


class FaultyMachine(Protocol):
    """Operations of faults on the device itself."""

    def reset(self) -> asyncio.Future[Any]:
        """Reset every connection; the future ends afterwards. Commands on the device get SIGHUP and continue."""

    def leave(self, seconds: float, *, reboot: bool) -> asyncio.Future[Any]:
        """Go away, for `seconds` or until `come_back`; the result is there once the device is gone."""

    def come_back(self) -> None:
        """Be there again, if it is away."""

    def trust(self) -> None:
        """Let in who waits for it."""


class Injection:
    """The faults of one device."""

    def __init__(self, tree: DeviceTree, throttle: LinkThrottle, machine: FaultyMachine, serial: str) -> None:
        self._tree, self._throttle, self._machine, self._serial = tree, throttle, machine, serial
        self._log = Path(os.fsdecode(tree.root), LOG)
        self._waiting: list[tuple[Fault, re.Pattern[str], int]] = []
        self._rate, self._seed = 0.0, 0
        self._generators: dict[str, Random] = {}
        self._ends: dict[FaultKind, asyncio.TimerHandle] = {}
        self._soc = tree.properties[SOC_PROPERTY]
        self._body = (HEALTHY_LEVEL, HEALTHY_CELSIUS)
        self.armed = False
        """True if operations may meet faults; only then `strike` is called."""
        self.free_bytes: int | None = None
        """Free bytes of the device; None for the free space of this machine."""
        self.unauthorized = False
        """True while the device accepts no key."""

    async def add(self, fault: Fault) -> None:
        """Let a fault be in force; return when it is."""
        kind = FaultKind(fault.kind)
        waits = bool(fault.after_bytes or fault.match)
        if kind not in CONDITIONS and (kind not in LINK_KINDS or waits):
            self._waiting.append((fault, re.compile(fault.match), fault.times))
            self.armed = True
            return
        self._note(fault, "device", "")
        if (gone := self._begin(fault)) is not None:
            await gone

    def randomize(self, rate: float, seed: int) -> None:
        """Let every operation meet a fault of DRAWN with the probability `rate`. Raises ValueError."""
        if not 0 <= rate <= 1:
            raise ValueError(f"a fault rate is {rate}, expected a number from 0 to 1")
        self._rate, self._seed = rate, seed
        self._generators.clear()
        self.armed = bool(self._waiting) or rate > 0

    def clear(self) -> None:
        """Disarm all faults."""
        self._waiting.clear()
        self._rate = 0.0
        self.armed = False
        for timer in self._ends.values():
            timer.cancel()
        self._ends.clear()
        for kind in (*CONDITIONS, FaultKind.STALL):
            self._end(kind)
        self._machine.come_back()

    def strike(self, operation: str, subject: str) -> Fault | None:
        """Return the fault that this operation meets, which is noted; `subject` is its command, or its path."""
        fault = self._waiting_for(operation, subject) or self._draw(operation)
        if fault is not None:
            self._note(fault, operation, subject)
        return fault

    def strike_file(self, operation: str, path: bytes) -> Fault | None:
        """Return the fault that an operation on a file of the device meets, which is noted."""
        return self.strike(operation, path.decode(errors="surrogateescape")) if self.armed else None

    async def hit(self, fault: Fault) -> None:
        """Let a fault of the link, or a condition, strike in the middle of an operation.

        Returns only when the operation can go on; otherwise it is cancelled with its connection.
        """
        if self._begin(fault) is not None:
            await asyncio.Event().wait()

    def use_space(self, size: int) -> bool:
        """Take room for `size` bytes that are pushed; False when there is none."""
        if self.free_bytes is None:
            return True
        enough = size <= self.free_bytes
        self.free_bytes = self.free_bytes - size if enough else 0
        return enough

    def spoil_outputs(self, least_bytes: int) -> None:
        """Invert outputs of the newest job that are larger than `least_bytes`."""
        outputs = sorted(Path(os.fsdecode(self._tree.root)).glob(_OUTPUTS), key=lambda path: path.stat().st_mtime_ns)
        for path in outputs[-1].parent.glob("output_*.raw") if outputs else ():
            data = path.read_bytes()
            if len(data) > least_bytes:
                path.write_bytes(bytes(byte ^ 0xFF for byte in data))

    def tell_space(self) -> None:
        """Let df know what pushes have used."""
        if self.free_bytes is not None:
            self._tree.write(DF, full_df(self.free_bytes), mode=0o755)

    def _begin(self, fault: Fault) -> asyncio.Future[Any] | None:
        """Start the fault now; return a future to wait for if the fault ends every connection."""
        kind = FaultKind(fault.kind)
        gone: asyncio.Future[Any] | None = None
        if kind is FaultKind.STALL:
            self._throttle.stall()
        elif kind is FaultKind.RESET:
            gone = self._machine.reset()
        elif kind in LINK_KINDS:
            gone = self._machine.leave(fault.seconds, reboot=kind is FaultKind.REBOOT)
        elif kind is FaultKind.UNAUTHORIZED:
            self.unauthorized = True
            gone = self._machine.reset()
        else:
            self._change(kind, fault)
        if kind in CONDITIONS or kind is FaultKind.STALL:
            if timer := self._ends.pop(kind, None):
                timer.cancel()
            if fault.seconds:
                self._ends[kind] = asyncio.get_running_loop().call_later(fault.seconds, self._end, kind)
        return gone

    def _change(self, kind: FaultKind, fault: Fault) -> None:
        """Let a condition be true of the device."""
        if kind is FaultKind.SLOW_LINK:
            self._throttle.limit(fault.bytes_per_s or _SLOW)
        elif kind is FaultKind.WRONG_SOC:
            other = next(name for name in _OTHER_SOCS if name != self._soc)
            self._tree.set_property(SOC_PROPERTY, fault.text or other)
        elif kind is FaultKind.OVERHEATED:
            self._set_body(celsius=fault.code or _HOT_CELSIUS)
        elif kind is FaultKind.LOW_BATTERY:
            self._set_body(level=fault.code or _LOW_PERCENT)
        elif kind is FaultKind.DISK_FULL:
            self.free_bytes = fault.after_bytes
            self.tell_space()

    def _end(self, kind: FaultKind) -> None:
        """End a condition or a stall; without one nothing happens."""
        tree = self._tree
        self._ends.pop(kind, None)
        if kind is FaultKind.STALL:
            self._throttle.resume()
        elif kind is FaultKind.SLOW_LINK:
            self._throttle.limit(0)
        elif kind is FaultKind.WRONG_SOC and tree.properties[SOC_PROPERTY] != self._soc:
            tree.set_property(SOC_PROPERTY, self._soc)
        elif kind in _HEALTHY_BODY:
            self._set_body(**_HEALTHY_BODY[kind])
        elif kind is FaultKind.DISK_FULL:
            self.free_bytes = None
            tree.remove(DF)
        elif kind is FaultKind.UNAUTHORIZED and self.unauthorized:
            self.unauthorized = False
            self._machine.trust()

    def _set_body(self, *, level: int | None = None, celsius: int | None = None) -> None:
        """Change the given values if they differ."""
        body = (self._body[0] if level is None else level, self._body[1] if celsius is None else celsius)
        if body != self._body:
            self._body = body
            self._tree.set_body(*body)

    def _waiting_for(self, operation: str, subject: str) -> Fault | None:
        for number, (fault, pattern, left) in enumerate(self._waiting):
            if operation in FaultKind(fault.kind).operations and pattern.search(subject):
                if left == 1:
                    del self._waiting[number]
                    self.armed = bool(self._waiting) or self._rate > 0
                elif left:
                    self._waiting[number] = (fault, pattern, left - 1)
                return fault
        return None

    def _draw(self, operation: str) -> Fault | None:
        """Draw from a generator of each operation's own: how they follow each other changes nothing."""
        if not self._rate:
            return None
        generator = self._generators.get(operation)
        if generator is None:
            # Takes longer to import than the rest of a start.
            from random import Random

            generator = self._generators[operation] = Random(f"{self._seed}/{self._serial}/{operation}")  # noqa: S311
        if generator.random() >= self._rate:
            return None
        kinds = [kind for kind in FaultKind if kind in DRAWN and operation in kind.operations]
        kind = generator.choice(kinds)
        return Fault(
            kind,
            after_bytes=int(2 ** generator.uniform(*_DRAWN_BYTES_LOG2)),
            seconds=round(generator.uniform(*_DRAWN_SECONDS), 3),
            code=generator.choice(_DRAWN_CODES.get(kind, (0,))),
        )

    def _note(self, fault: Fault, operation: str, subject: str) -> None:
        line = {"kind": str(fault.kind), "operation": operation, "subject": subject[:200], "time": time.time()}
        with self._log.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        self._tree.log("farm", f"fault {fault.kind} strikes: {operation}")
