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
from collections import Counter
from typing import TYPE_CHECKING

from farm.devices.health import Health
from farm.errors import FarmError, LeaseLostError, NoDeviceError, StoreLostError
from farm.pool.worker_grant import Permit, leave_permit, now_s
from farm.system.user import user_name

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence
    from pathlib import Path

    from farm.devices.device import Device
    from farm.run.scheduler import DeviceScheduling
    from farm.store.leases.rules import Lease, Priority
    from farm.store.store import Store

_LOOK_SECONDS = 0.25
# Shorter is not worth a word.
_PATIENCE_SECONDS = 1.0
# People put devices out of service, and runs quarantine them.
_REGISTRY_SECONDS = 2.0


class LeaseTerms:
    """How a run asks for devices: for how long at a time, how urgently, and how many of each SoC at most."""

    def __init__(self, *, ttl_s: float, priority: Priority, purpose: str, most: int | None) -> None:
        self.ttl_s, self.priority, self.purpose, self.most = ttl_s, priority, purpose, most


class Custody:
    """The devices of one run. Several threads may call it."""

    def __init__(
        self,
        devices: Sequence[Device],
        store: Store,
        terms: LeaseTerms | None,
        note: Callable[[str], None],
        leave: Callable[[Path, int, Permit], None] = leave_permit,
    ) -> None:
        """Without `terms` the devices are this run's own. `leave` writes a permit."""
        self._leave = leave
        self._devices, self._store, self._terms, self._note = tuple(devices), store, terms, note
        self._number = {device.id: number for number, device in enumerate(self._devices)}
        self._leases: dict[int, Lease] = {}
        self._until_s: dict[int, float] = {}
        """When what is leased ends if it cannot be renewed, on the clock of permits."""
        self._leaving: set[int] = set()
        """Wanted by somebody else: their workers have been told."""
        self._ailing: set[int] = set()
        self._outvoted: Counter[int] = Counter()
        self._retired: dict[int, str] = {}
        """Why a device is not used any more."""
        self._requests: dict[str, str] = {}
        """Token of what is waited for, by SoC."""
        self._waiting_since: dict[str, float] = {}
        """By SoC of which there is no device; infinite once that was told."""
        self._asked_at = float("-inf")
        self._complaints: dict[str, str] = {}
        """What went wrong last, by what was done."""
        self._told: dict[int, Permit] = {}
        self._scheduled: dict[int, tuple[bool, bool]] = {}
        """What the scheduler was told of a device: whether it may be used, and whether it is ours."""
        self._folder: Path | None = None
        self._revive: Callable[[], Sequence[str]] = tuple
        self._watch: Callable[[], None] = lambda: None
        self._sched: DeviceScheduling | None = None
        self._lock = threading.RLock()
        self._ending = threading.Event()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._keep_minding, name="custody", daemon=True)
        self._came = threading.Event()

    def keep_alive(self, revive: Callable[[], Sequence[str]]) -> None:
        """Call `revive` four times a second: it returns a line for everything that it had to bring back."""
        self._revive = revive

    def watch_with(self, watch: Callable[[], None]) -> None:
        """Call `watch` four times a second as well."""
        self._watch = watch

    def acquire(self, until_s: float = float("inf"), *, partly: bool = False) -> None:
        """Wait until there is a device of every SoC, or it is `until_s` on the clock of `time.monotonic`.

        Raises NoDeviceError for an SoC of which none is left to wait for; `partly`, only when that is so of all.
        """
        if self._terms is None:
            return
        self._start()
        while True:
            with self._lock:
                gone = [soc for soc in self._socs() if self._retired.keys() >= set(self._numbers(soc))]
                reasons = [f"{self._devices[n].serial}: {why}" for n, why in self._retired.items()]
            if gone and not (partly and len(gone) < len(self._socs())):
                raise NoDeviceError(f"no {' and no '.join(gone)} is left to wait for: {'; '.join(reasons)}")
            if not self._lacking() or time.monotonic() >= until_s:
                return
            self._came.wait(_LOOK_SECONDS)
            self._came.clear()

    def held(self) -> list[Device]:
        """Return the devices that may be used now."""
        with self._lock:
            return [device for number, device in enumerate(self._devices) if self._may_go(number)]

    def give_up(self, socs: Collection[str], reason: str) -> None:
        """Wait no more for devices of these SoCs."""
        for number, device in enumerate(self._devices):
            if device.soc in socs:
                self.retire(number, reason)

    def begin(self, folder: Path) -> None:
        """Let workers begin that read their permits in a run's `folder`."""
        self._folder = folder
        self._sync()
        self._start()

    def schedule_with(self, sched: DeviceScheduling) -> None:
        """Tell this scheduler from now on."""
        with self._lock:
            self._sched = sched
            for number in self._retired:
                sched.retire(number)
            self._sync()

    def is_retired(self, number: int) -> bool:
        """Tell whether a device is not used any more."""
        return number in self._retired

    def finish_running(self) -> None:
        """Let nothing begin any more: safe in a signal handler."""
        self._stopped.set()

    @property
    def stopped(self) -> bool:
        """Whether nothing begins any more."""
        return self._stopped.is_set()

    def halt(self, reason: str) -> None:
        """Let nothing begin any more, as no device could do anything for what is wrong."""
        with self._lock:
            if not self._stopped.is_set():
                self._note(f"the run stops: {reason}")
            self._stopped.set()
            if self._sched is not None:
                self._sched.stop()
            self._sync()

    def let_go(self, number: int, fence: int) -> None:
        """Take back a device that its worker has let go of, which had it with `fence`."""
        with self._lock:
            lease = self._leases.get(number)
            ours = lease is not None and lease.fence == fence
            wanted = ours and number in self._leaving
            if ours or lease is None:
                self._forget(number)
            self._sync()
        if ours and lease is not None:
            self._release([lease])
        if wanted:
            self._note(f"{self._devices[number].serial} is given to somebody who waits for it")

    def ail(self, number: int, problem: str) -> None:
        """Let nothing begin on a device until its worker has mended it."""
        with self._lock:
            if number in self._retired or number in self._ailing:
                return
            self._ailing.add(number)
            self._sync()
        self._note(f"{self._devices[number].serial} is being brought back: {problem}")

    def outvote(self, number: int, job_id: str) -> None:
        """Let a device show that it works, on which a job failed that passed on another."""
        with self._lock:
            self._outvoted[number] += 1
        self.ail(number, f"{job_id} failed on it and passed on another device")

    def heal(self, number: int) -> None:
        """Use a device again that was mended."""
        with self._lock:
            if number in self._ailing:
                self._ailing.discard(number)
                self._sync()
                self._note(f"{self._devices[number].serial} is back")

    def retire(self, number: int, reason: str = "") -> None:
        """Use a device no more for the rest of the run; without a reason when there is nothing left to do for it."""
        with self._lock:
            if number in self._retired:
                return
            self._retired[number] = reason
            lease = self._forget(number)
            self._sync()
            if self._sched is not None:
                self._sched.retire(number)
        if lease is not None:
            self._release([lease])
        if reason:
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

    def _start(self) -> None:
        if not self._thread.is_alive():
            self._thread.start()

    def _keep_minding(self) -> None:
        while not self._ending.is_set():
            self.mind()
            self._came.set()
            self._ending.wait(_LOOK_SECONDS)

    def mind(self) -> None:
        """Do once what the thread does all the time."""
        acts = {
            "servers": self._keep_server,
            "leases": self._look,
            "stop": self._stop,
            "permits": self._sync,
            "nudges": self._nudge,
            "workers": self._watch,
        }
        for name, act in acts.items():
            try:
                act()
            except StoreLostError as error:
                self.halt(f"the store: {error}")
            except Exception as error:  # noqa: BLE001 - without this thread every lease is lost
                self._complain(name, error)
            else:
                self._complaints.pop(name, None)

    def _complain(self, name: str, error: Exception) -> None:
        """Say what is wrong with one thing that is done all the time, once as long as it is the same."""
        if str(error) != self._complaints.get(name):
            self._complaints[name] = str(error)
            self._note(f"devices cannot be minded: {error}")

    def _keep_server(self) -> None:
        for line in self._revive():
            self._note(line)

    def _stop(self) -> None:
        with self._lock:
            if self._stopped.is_set() and self._sched is not None:
                self._sched.stop()

    def _look(self) -> None:
        """Renew what is ours, hand over what is wanted, take what is granted."""
        terms = self._terms
        if terms is None:
            return
        with self._lock:
            held = dict(self._leases)
        if held:
            until_s = now_s() + terms.ttl_s
            renewal = self._store.leases.renew(list(held.values()), ttl_s=terms.ttl_s)
            with self._lock:
                for lease in renewal.kept:
                    number = self._number[lease.device]
                    if number in self._leases and lease.expires_ms != self._leases[number].expires_ms:
                        self._leases[number], self._until_s[number] = lease, until_s
                for lease in renewal.lost:
                    number = self._number[lease.device]
                    if number in self._leases and self._leases[number].fence == lease.fence:
                        self._forget(number)
                        self._note(f"{self._devices[number].serial} is not ours any more: its lease was lost")
                self._leaving |= {self._number[device] for device in renewal.wanted} & self._leases.keys()
        self._drop_unusable()
        for soc in self._socs():
            self._ask(soc, terms)
        self._tell_waiting()

    def _ask(self, soc: str, terms: LeaseTerms) -> None:
        """Wait for the devices of an SoC that are not ours, and take those that became so."""
        numbers = self._numbers(soc)
        with self._lock:
            lacking = [n for n in numbers if n not in self._leases and n not in self._retired]
            room = (len(numbers) if terms.most is None else terms.most) - len(self._leases.keys() & set(numbers))
        wishes = [self._devices[number].id for number in lacking]
        count = min(len(wishes), room) if not self._stopped.is_set() else 0
        if count <= 0:
            if soc in self._requests:
                self._store.leases.withdraw(self._requests.pop(soc))
            return
        if soc not in self._requests:
            self._requests[soc] = self._store.leases.request(
                wishes,
                count=count,
                user=user_name(),
                host=socket.gethostname(),
                pid=os.getpid(),
                purpose=terms.purpose,
                priority=terms.priority,
                ttl_s=terms.ttl_s,
            )
        until_s = now_s() + terms.ttl_s
        try:
            granted = self._store.leases.poll(self._requests[soc], ttl_s=terms.ttl_s, devices=wishes, count=count)
        except LeaseLostError:
            # Forgotten, as after a long stop: asked anew the next time.
            del self._requests[soc]
            return
        with self._lock:
            for lease in granted:
                number = self._number[lease.device]
                self._leases[number], self._until_s[number] = lease, until_s

    def _drop_unusable(self) -> None:
        """Give up devices that are not ours and that nobody is given any more, now and then."""
        if time.monotonic() < self._asked_at + _REGISTRY_SECONDS:
            return
        self._asked_at = time.monotonic()
        with self._lock:
            lacking = {self._devices[n].id: n for n in range(len(self._devices)) if n not in self._leases}
        if not lacking:
            return
        for known in self._store.devices.all():
            if known.id in lacking and not known.in_service:
                self.retire(lacking[known.id], f"it was put out of service: {known.service_note or 'without a note'}")
            elif known.id in lacking and known.health == Health.QUARANTINED:
                self.retire(lacking[known.id], f"it is quarantined: {known.health_reason}")

    def _tell_waiting(self) -> None:
        """Say once, each time, that there is no device for what is left to do."""
        with self._lock:
            lacking = [] if self._stopped.is_set() or self._is_over else self._lacking()
        now = time.monotonic()
        self._waiting_since = {soc: self._waiting_since.get(soc, now) for soc in lacking}
        if told := [soc for soc, since in self._waiting_since.items() if now > since + _PATIENCE_SECONDS]:
            self._waiting_since |= dict.fromkeys(told, float("inf"))
            self._note(f"waiting for a {' and a '.join(told)}: {self.holders(told)}")

    def _sync(self) -> None:
        """Let workers and scheduler know what holds now of every device."""
        with self._lock:
            if self._folder is None:
                return
            for number in range(len(self._devices)):
                self._leave_permit(self._folder, number)
                self._schedule(number)

    def _nudge(self) -> None:
        """Let workers look again that have something to do for us: mend a device, or let go of one that is wanted."""
        with self._lock:
            if self._sched is None or self._stopped.is_set():
                return
            for number in self._ailing | self._leaving:
                self._sched.nudge(number)

    def _leave_permit(self, folder: Path, number: int) -> None:
        permit = self._permit(number)
        if permit == self._told.get(number):
            return
        try:
            self._leave(folder, number, permit)
            self._told[number] = permit
            self._complaints.pop("permit", None)
        except OSError as error:
            # Its old one is over soon; meanwhile it is tried again.
            self._complain("permit", error)

    def _schedule(self, number: int) -> None:
        # What a worker has not been allowed in writing it would only give back.
        go = self._may_go(number) and number in self._told and self._told[number].go
        ours = self._is_ours(number)
        state = go, ours
        if self._sched is None or state == self._scheduled.get(number, (True, True)):
            return
        self._scheduled[number] = state
        if go:
            self._sched.resume(number)
        else:
            self._sched.pause(number, away=not ours)

    def _permit(self, number: int) -> Permit:
        others = tuple(
            self._devices[other].serial
            for other in self._numbers(self._devices[number].soc)
            if other != number and self._is_ours(other)
        )
        lease, go = self._leases.get(number), self._may_go(number)
        # An ailing device is mended while it is ours and there is anything left to do.
        mend = number in self._ailing and self._is_ours(number) and not self._stopped.is_set() and not self._is_over
        fence = lease.fence if lease else 0
        return Permit(go, fence, self._until_s.get(number), mend, self._outvoted[number], others)

    def _is_ours(self, number: int) -> bool:
        """Tell whether a device is there for this run, well or not."""
        if number in self._retired or number in self._leaving:
            return False
        return self._terms is None or number in self._leases

    @property
    def _is_over(self) -> bool:
        return self._sched is not None and self._sched.tests_finished

    def _forget(self, number: int) -> Lease | None:
        """Return the lease of a device that is not ours any more."""
        self._leaving.discard(number)
        self._ailing.discard(number)
        self._until_s.pop(number, None)
        return self._leases.pop(number, None)

    def _may_go(self, number: int) -> bool:
        return self._is_ours(number) and number not in self._ailing and not self._stopped.is_set()

    def _socs(self) -> list[str]:
        return list(dict.fromkeys(device.soc for device in self._devices))

    def _numbers(self, soc: str) -> list[int]:
        return [number for number, device in enumerate(self._devices) if device.soc == soc]

    def _lacking(self) -> list[str]:
        """Return the SoCs of which there is no device, although there could be."""
        with self._lock:
            could_be = {soc: set(self._numbers(soc)) - self._retired.keys() for soc in self._socs()}
            return [soc for soc, numbers in could_be.items() if numbers and not numbers & self._leases.keys()]

    def holders(self, socs: Collection[str]) -> str:
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
