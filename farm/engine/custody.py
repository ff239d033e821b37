"""Which devices a run may use now: leases that come and go, devices that are given up, and Ctrl-C.

One thread of the controller minds it all: it renews leases, hands a device over when somebody with a better right waits
for it, takes devices in that become free, and tells workers (permits) and scheduler.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from typing import TYPE_CHECKING

from farm.engine.permits import Permit, leave_permit
from farm.errors import FarmError
from farm.identity import user_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from farm.devices.device import Device
    from farm.engine.scheduler import DeviceScheduling
    from farm.leases import Lease, Priority
    from farm.store.store import Store

_LOOK_SECONDS = 0.25
# Shorter is not worth a word.
_PATIENCE_SECONDS = 1.0


class LeaseTerms:
    """How a run asks for devices: for how long at a time, how urgently, and how many of each SoC at most."""

    def __init__(self, *, ttl_s: float, priority: Priority, purpose: str, most: int | None) -> None:
        self.ttl_s, self.priority, self.purpose, self.most = ttl_s, priority, purpose, most


class Custody:
    """The devices of one run. Several threads may call it."""

    def __init__(
        self, devices: Sequence[Device], store: Store, terms: LeaseTerms | None, note: Callable[[str], None]
    ) -> None:
        """Without `terms` the devices are this run's own."""
        self._devices, self._store, self._terms, self._note = tuple(devices), store, terms, note
        self._number = {device.id: number for number, device in enumerate(self._devices)}
        self._leases: dict[int, Lease] = {}
        self._leaving: set[int] = set()
        """Wanted by somebody else: their workers have been told."""
        self._ailing: set[int] = set()
        self._retired: set[int] = set()
        self._requests: dict[str, str] = {}
        """Token of what is waited for, by SoC."""
        self._folder: Path | None = None
        self._revive: Callable[[], bool] = lambda: False
        self._sched: DeviceScheduling | None = None
        self._lock = threading.RLock()
        self._ending = threading.Event()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._mind, name="custody", daemon=True)
        self._came = threading.Event()

    def keep_alive(self, revive: Callable[[], bool]) -> None:
        """Call `revive` four times a second: it returns whether it had to bring the devices' adb server back."""
        self._revive = revive

    def acquire(self) -> None:
        """Wait until there is a device of every SoC."""
        if self._terms is None:
            return
        self._thread.start()
        told_at = time.monotonic() + _PATIENCE_SECONDS
        while lacking := self._lacking():
            if time.monotonic() > told_at:
                told_at = float("inf")
                self._note(f"waiting for a {' and a '.join(lacking)}: {self._holders(lacking)}")
            self._came.wait(_LOOK_SECONDS)
            self._came.clear()

    def held(self) -> list[Device]:
        """Return the devices that may be used now."""
        with self._lock:
            return [device for number, device in enumerate(self._devices) if self._may_go(number)]

    def begin(self, folder: Path) -> None:
        """Let workers begin that read their permits in a run's `folder`."""
        with self._lock:
            self._folder = folder
            self._tell(range(len(self._devices)))
        if not self._thread.is_alive():
            self._thread.start()

    def schedule_with(self, sched: DeviceScheduling) -> None:
        """Tell this scheduler from now on."""
        with self._lock:
            self._sched = sched
            for number in range(len(self._devices)):
                if not self._may_go(number):
                    sched.pause(number)

    def finish_running(self) -> None:
        """Let nothing begin any more: safe in a signal handler."""
        self._stopped.set()

    @property
    def stopped(self) -> bool:
        """Whether nothing begins any more."""
        return self._stopped.is_set()

    def let_go(self, number: int) -> None:
        """Take back a device that its worker has let go of."""
        with self._lock:
            lease = self._leases.pop(number, None)
            self._leaving.discard(number)
            self._ailing.discard(number)
        if lease is not None:
            self._release([lease])
            self._note(f"{self._devices[number].serial} is given to somebody who waits for it")

    def ail(self, number: int, problem: str) -> None:
        """Let nothing begin on a device until its worker has mended it."""
        with self._lock:
            if number in self._retired or number in self._ailing:
                return
            self._ailing.add(number)
            self._change([number])
        self._note(f"{self._devices[number].serial} is being brought back: {problem}")

    def heal(self, number: int) -> None:
        """Use a device again that was mended."""
        with self._lock:
            if number in self._ailing:
                self._ailing.discard(number)
                self._change([number])
                self._note(f"{self._devices[number].serial} is back")

    def retire(self, number: int, reason: str) -> None:
        """Give up a device for the rest of the run."""
        with self._lock:
            if number in self._retired:
                return
            self._retired.add(number)
            lease = self._leases.pop(number, None)
            self._tell(range(len(self._devices)))
            if self._sched is not None:
                self._sched.retire(number)
        if lease is not None:
            self._release([lease])
        self._note(f"{self._devices[number].serial} is not used any more: {reason}")

    def close(self) -> None:
        """Give every device back."""
        self._ending.set()
        if self._thread.is_alive():
            self._thread.join()
        with contextlib.suppress(FarmError):
            for token in self._requests.values():
                self._store.leases.withdraw(token)
        self._release(self._leases.values())
        self._leases.clear()

    def _mind(self) -> None:
        last = ""
        while not self._ending.is_set():
            try:
                if self._revive():
                    self._note("the adb server had died and was started again")
                if self._stopped.is_set():
                    self._stop()
                elif self._ailing and self._sched is not None and self._sched.tests_finished:
                    # Nobody waits for them any more.
                    with self._lock:
                        self._tell(tuple(self._ailing))
                if self._terms is not None:
                    self._look()
            except FarmError as error:
                if str(error) != last:
                    last = str(error)
                    self._note(f"devices cannot be minded: {last}")
            self._came.set()
            self._ending.wait(_LOOK_SECONDS)

    def _stop(self) -> None:
        with self._lock:
            self._tell(range(len(self._devices)))
            if self._sched is not None:
                self._sched.stop()

    def _look(self) -> None:
        """Renew what is ours, hand over what is wanted, take what is granted."""
        terms = self._terms
        if terms is None:
            return
        with self._lock:
            held = dict(self._leases)
        if held:
            renewal = self._store.leases.renew(list(held.values()), ttl_s=terms.ttl_s)
            wanted = {self._number[device] for device in renewal.wanted}
            lost = {self._number[lease.device] for lease in renewal.lost}
            with self._lock:
                kept = {self._number[lease.device]: lease for lease in renewal.kept}
                self._leases |= {number: kept[number] for number in kept.keys() & self._leases.keys()}
                for number in lost & self._leases.keys():
                    del self._leases[number]
                    self._leaving.discard(number)
                    self._note(f"{self._devices[number].serial} is not ours any more: its lease was lost")
                leaving = (wanted & self._leases.keys()) - self._leaving
                self._leaving |= leaving
                self._change(lost | leaving)
        self._ask()

    def _ask(self) -> None:
        """Wait for the devices that are not ours, and take those that became so."""
        terms = self._terms
        if terms is None:
            return
        for soc in dict.fromkeys(device.soc for device in self._devices):
            numbers = [number for number, device in enumerate(self._devices) if device.soc == soc]
            with self._lock:
                lacking = [n for n in numbers if n not in self._leases and n not in self._retired]
                room = (len(numbers) if terms.most is None else terms.most) - len(self._leases.keys() & set(numbers))
            wishes = [self._devices[number].id for number in lacking]
            count = min(len(wishes), room) if not self._stopped.is_set() else 0
            token = self._requests.get(soc)
            if count <= 0:
                if token is not None:
                    self._store.leases.withdraw(self._requests.pop(soc))
                continue
            if token is None:
                token = self._requests[soc] = self._store.leases.request(
                    wishes,
                    count=count,
                    user=user_name(),
                    host=socket.gethostname(),
                    pid=os.getpid(),
                    purpose=terms.purpose,
                    priority=terms.priority,
                    ttl_s=terms.ttl_s,
                )
            granted = self._store.leases.poll(token, ttl_s=terms.ttl_s, devices=wishes, count=count)
            if granted:
                with self._lock:
                    numbers_granted = {self._number[lease.device]: lease for lease in granted}
                    self._leases |= numbers_granted
                    self._change(numbers_granted)

    def _change(self, numbers: Iterable[int]) -> None:
        """Tell workers and scheduler of devices that came or went."""
        numbers = tuple(numbers)
        if not numbers:
            return
        self._tell(numbers)
        if self._sched is None:
            return
        for number in numbers:
            if self._may_go(number):
                self._sched.resume(number)
            else:
                self._sched.pause(number)

    def _tell(self, numbers: Iterable[int]) -> None:
        if self._folder is None:
            return
        for number in numbers:
            soc = self._devices[number].soc
            others = tuple(
                device.serial
                for other, device in enumerate(self._devices)
                if other != number and device.soc == soc and other not in self._retired
            )
            fence = self._leases[number].fence if number in self._leases else 0
            leave_permit(self._folder, number, Permit(self._may_go(number), fence, self._is_worth(number), others))

    def _may_go(self, number: int) -> bool:
        if self._stopped.is_set() or number in self._retired | self._leaving | self._ailing:
            return False
        return self._terms is None or number in self._leases

    def _is_worth(self, number: int) -> bool:
        """Tell whether an ailing device is to be mended: while it is ours, and there is anything left to do."""
        if number not in self._ailing or self._stopped.is_set() or number in self._retired or number in self._leaving:
            return False
        over = self._sched is not None and self._sched.tests_finished
        return not over and (self._terms is None or number in self._leases)

    def _lacking(self) -> list[str]:
        """Return the SoCs of which there is no device yet."""
        socs = dict.fromkeys(device.soc for device in self._devices)
        return [soc for soc in socs if not any(self._devices[number].soc == soc for number in self._leases)]

    def _holders(self, socs: Sequence[str]) -> str:
        """Return who has the devices of some SoCs."""
        ids = {device.id for device in self._devices if device.soc in socs}
        parts = []
        for lease in self._store.leases.all():
            who = lease.reserved_for or lease.user
            if lease.device in ids and who:
                parts.append(f"{lease.device} is with {who}" + (f" ({lease.purpose})" if lease.purpose else ""))
        return "; ".join(parts) or "somebody has it"

    def _release(self, leases: Iterable[Lease]) -> None:
        with contextlib.suppress(FarmError):
            # Not heard: it ends by itself when its time is over.
            self._store.leases.release(list(leases))
