"""Which devices a run may use now: those whose lease it holds, that are fit, and that are wanted.

One thread of the controller looks four times a second: leases are renewed and handed over, dead servers are started
again, and workers (farm.pool.worker_grant) and the scheduler learn what changed. What is wanted of a worker is
wanted again until it is done: whoever missed it, or takes the place of one that died, hears of it.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from typing import TYPE_CHECKING, Protocol

from farm.errors import NoDeviceError, StoreLostError
from farm.pool.lease_keeper import LeaseKeeper
from farm.pool.worker_grant import WorkerGrant, write_grant

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence
    from pathlib import Path

    from farm.devices.device import Device
    from farm.pool.announce import Announcer
    from farm.pool.lease_keeper import LeaseTerms
    from farm.store.leases.rules import Lease
    from farm.store.store import Store

_LOOK_SECONDS = 0.25
# Shorter waits are not noted.
_SHORT_SECONDS = 1.0


class JobScheduler(Protocol):
    """What hands out jobs to devices, by their numbers: farm.run.scheduler."""

    @property
    def tests_finished(self) -> bool:
        """True when no job is left."""

    def pause(self, device: int, *, away: bool = False) -> None:
        """Give a device no more jobs for now."""

    def resume(self, device: int) -> None:
        """Give it jobs again."""

    def retire(self, device: int) -> None:
        """Give it none ever again."""

    def nudge(self, device: int) -> None:
        """Let the worker of a paused device read its grant again."""

    def stop(self) -> None:
        """Give nobody anything."""


class DevicePool:
    """The devices of one run. Several threads may call it."""

    def __init__(
        self,
        devices: Sequence[Device],
        store: Store,
        terms: LeaseTerms | None,
        note: Callable[[str], None],
        grant: Callable[[Path, int, WorkerGrant], None] = write_grant,
    ) -> None:
        """Without `terms` the devices are this run's own. `grant` leaves a grant for a worker."""
        self._devices, self._note, self._write = tuple(devices), note, grant
        self._lock = threading.RLock()
        self.leases = LeaseKeeper(devices, store, terms, note, self._lock)
        self._unfit: set[int] = set()
        self._outvoted: Counter[int] = Counter()
        self._retired: dict[int, str] = {}
        """Why a device is not used any more."""
        self._waiting_since: dict[str, float] = {}
        """By SoC of which there is no device; infinite once that was noted."""
        self._problems: dict[str, str] = {}
        """What went wrong last, by what was done."""
        self._granted: dict[int, WorkerGrant] = {}
        self._scheduled: dict[int, tuple[bool, bool]] = {}
        """What the scheduler knows of a device: whether it may be used, and whether it is this run's."""
        self._folder: Path | None = None
        self._revive: Callable[[], Sequence[str]] = tuple
        self._watch: Callable[[], None] = lambda: None
        self._announcer: Announcer | None = None
        self._sched: JobScheduler | None = None
        self._ending = threading.Event()
        self._stopped = threading.Event()
        self._looked = threading.Event()
        self._thread = threading.Thread(target=self._keep_looking, name="devices", daemon=True)

    def revive_with(self, revive: Callable[[], Sequence[str]]) -> None:
        """Call `revive` four times a second: it returns a line for everything that it had to start again."""
        self._revive = revive

    def take_with(self, take: Callable[[Device], None]) -> None:
        """Call `take` with each device when it becomes this run's, before anything uses it."""
        self.leases.take = take
        if not self.leases.is_needed:
            for device in self._devices:
                take(device)

    def watch_with(self, watch: Callable[[], None]) -> None:
        """Call `watch` four times a second as well."""
        self._watch = watch

    def announce_with(self, announcer: Announcer) -> None:
        """Have `announcer` look four times a second as well, and close it at the end."""
        self._announcer = announcer

    def acquire(self, until_s: float = float("inf"), *, partly: bool = False) -> None:
        """Wait until there is a device of every SoC, or it is `until_s` on the clock of `time.monotonic`.

        Raises NoDeviceError for an SoC of which none is left to wait for; `partly`, only when that is so of all.
        """
        if not self.leases.is_needed:
            return
        self._start()
        while True:
            with self._lock:
                gone = [soc for soc in self._socs() if self._retired.keys() >= set(self._numbers(soc))]
                reasons = [f"{self._devices[n].called}: {why}" for n, why in self._retired.items()]
            if gone and not (partly and len(gone) < len(self._socs())):
                raise NoDeviceError(f"no {' and no '.join(gone)} is left to wait for: {'; '.join(reasons)}")
            if not self._lacking() or time.monotonic() >= until_s:
                return
            self._looked.wait(_LOOK_SECONDS)
            self._looked.clear()

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
        """Let workers begin that read their grants in a run's `folder`."""
        self._folder = folder
        if missed := self.leases.missed():
            self._note(f"once they are free, these take part as well: {'; '.join(missed.values())}")
        self._sync()
        self._start()

    def schedule_with(self, sched: JobScheduler) -> None:
        """Let this scheduler know from now on."""
        with self._lock:
            self._sched = sched
            for number in self._retired:
                sched.retire(number)
            self._sync()

    def is_retired(self, number: int) -> bool:
        """Return whether a device is not used any more."""
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
            self._stop()
            self._sync()

    def let_go(self, number: int, fence: int) -> None:
        """Take back a device that its worker has let go of, which had it with `fence`."""
        lease: Lease | None = None
        with self._lock:
            is_newest = self.leases.fence(number) in (0, fence)
            is_wanted = is_newest and number in self.leases.leaving
            if is_newest:
                lease = self._forget(number)
            self._sync()
        if lease is not None:
            self.leases.release([lease])
        if is_wanted:
            self._note(f"{self._devices[number].called} is given to somebody who waits for it")

    def suspend(self, number: int, problem: str) -> None:
        """Let nothing begin on a device until its worker has brought it back."""
        with self._lock:
            if number in self._retired or number in self._unfit:
                return
            self._unfit.add(number)
            self._sync()
        self._note(f"{self._devices[number].called} is being brought back: {problem}")

    def outvote(self, number: int, job_id: str) -> None:
        """Let a device show that it works, on which a job failed that passed on another."""
        with self._lock:
            self._outvoted[number] += 1
        self.suspend(number, f"{job_id} failed on it and passed on another device")

    def recovered(self, number: int) -> None:
        """Use a device again that was brought back."""
        with self._lock:
            if number in self._unfit:
                self._unfit.discard(number)
                self._sync()
                self._note(f"{self._devices[number].called} is back")

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
            self.leases.release([lease])
        if reason:
            self._note(f"{self._devices[number].called} {self.leases.why_unused(number, reason)}")

    def close(self) -> None:
        """Give every device back."""
        self._ending.set()
        if self._thread.is_alive():
            self._thread.join()
        self.leases.close()
        if self._announcer is not None:
            self._announcer.close()

    def _start(self) -> None:
        if not self._thread.is_alive():
            self._thread.start()

    def _keep_looking(self) -> None:
        while not self._ending.is_set():
            self.look()
            self._looked.set()
            self._ending.wait(_LOOK_SECONDS)

    def look(self) -> None:
        """Do once what the thread does all the time; what goes wrong is noted once, as long as it is the same."""
        acts = {
            "servers": self._keep_servers,
            "leases": self._look_after_leases,
            "stop": self._stop_when_asked,
            "grants": self._sync,
            "nudges": self._nudge,
            "workers": self._watch,
            "notices": self._announce,
        }
        for name, act in acts.items():
            try:
                act()
            except StoreLostError as error:
                self.halt(f"the store: {error}")
            except Exception as error:  # noqa: BLE001 - without this thread every lease is lost
                self._complain(name, error)
            else:
                self._problems.pop(name, None)

    def _complain(self, name: str, error: Exception) -> None:
        if str(error) != self._problems.get(name):
            self._problems[name] = str(error)
            self._note(f"devices cannot be minded: {error}")

    def _announce(self) -> None:
        if self._announcer is not None:
            self._announcer.look()

    def _keep_servers(self) -> None:
        for line in self._revive():
            self._note(line)

    def _stop_when_asked(self) -> None:
        with self._lock:
            if self._stopped.is_set():
                self._stop()

    def _stop(self) -> None:
        if self._sched is not None:
            self._sched.stop()

    def _look_after_leases(self) -> None:
        """Renew what is held, hand over what is wanted, take what is granted."""
        if not self.leases.is_needed:
            return
        lost = self.leases.renew()
        with self._lock:
            self._unfit.difference_update(lost)
        for number, reason in self.leases.unusable().items():
            self.retire(number, reason)
        for soc in self._socs():
            numbers = [number for number in self._numbers(soc) if number not in self._retired]
            self.leases.ask(soc, numbers, wanted=not self._stopped.is_set())
        self._note_waiting()

    def _note_waiting(self) -> None:
        """Note once, each time, that there is no device for what is left to do."""
        with self._lock:
            lacking = [] if self._stopped.is_set() or self._is_over else self._lacking()
        now = time.monotonic()
        self._waiting_since = {soc: self._waiting_since.get(soc, now) for soc in lacking}
        if long := [soc for soc, since in self._waiting_since.items() if now > since + _SHORT_SECONDS]:
            self._waiting_since |= dict.fromkeys(long, float("inf"))
            self._note(f"waiting for a {' and a '.join(long)}: {self.leases.holders(long)}")

    def _sync(self) -> None:
        """Let workers and scheduler know what holds now of every device."""
        with self._lock:
            if self._folder is None:
                return
            for number in range(len(self._devices)):
                self._leave_grant(self._folder, number)
                self._schedule(number)

    def _nudge(self) -> None:
        """Let workers look again that have something to do: bring a device back, or let go of one that is wanted."""
        with self._lock:
            if self._sched is None or self._stopped.is_set():
                return
            for number in self._unfit | self.leases.leaving:
                self._sched.nudge(number)

    def _leave_grant(self, folder: Path, number: int) -> None:
        grant = self._grant(number)
        if grant == self._granted.get(number):
            return
        try:
            self._write(folder, number, grant)
            self._granted[number] = grant
            self._problems.pop("grant", None)
        except OSError as error:
            # Its old one is over soon; meanwhile it is tried again.
            self._complain("grant", error)

    def _schedule(self, number: int) -> None:
        # What a worker has not been allowed in writing it would only give back.
        go = self._may_go(number) and number in self._granted and self._granted[number].go
        state = go, self._is_ours(number)
        if self._sched is None or state == self._scheduled.get(number, (True, True)):
            return
        self._scheduled[number] = state
        if go:
            self._sched.resume(number)
        else:
            self._sched.pause(number, away=not state[1])

    def _grant(self, number: int) -> WorkerGrant:
        others = tuple(
            self._devices[other].serial
            for other in self._numbers(self._devices[number].soc)
            if other != number and self._is_ours(other)
        )
        # An unfit device is brought back while it is ours and there is anything left to do.
        recover = number in self._unfit and self._is_ours(number) and not self._stopped.is_set() and not self._is_over
        fence, until_s = self.leases.fence(number), self.leases.until_s(number)
        wanted = number in self.leases.leaving
        return WorkerGrant(self._may_go(number), fence, until_s, recover, self._outvoted[number], others, wanted)

    def _is_ours(self, number: int) -> bool:
        """Return whether a device is there for this run, well or not."""
        if number in self._retired or number in self.leases.leaving:
            return False
        return self.leases.holds(number)

    def _may_go(self, number: int) -> bool:
        return self._is_ours(number) and number not in self._unfit and not self._stopped.is_set()

    @property
    def _is_over(self) -> bool:
        return self._sched is not None and self._sched.tests_finished

    def _forget(self, number: int) -> Lease | None:
        """Return the lease of a device that is not ours any more."""
        self._unfit.discard(number)
        return self.leases.forget(number)

    def _socs(self) -> list[str]:
        return list(dict.fromkeys(device.soc for device in self._devices))

    def _numbers(self, soc: str) -> list[int]:
        return [number for number, device in enumerate(self._devices) if device.soc == soc]

    def _lacking(self) -> list[str]:
        """Return the SoCs of which there is no device, although there could be."""
        with self._lock:
            could_be = (soc for soc in self._socs() if set(self._numbers(soc)) - self._retired.keys())
            return [soc for soc in could_be if self.leases.lacking(soc)]
