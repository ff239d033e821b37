"""The job source of an agent: its leases, claims of shards, heartbeats and records."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from farm.base.errors import FarmError, InfraError, LeaseLostError, UnreadableRowError
from farm.base.machine import now_s
from farm.devices.device import Health, HealthEvent
from farm.dispatch.cluster.hints import Hints
from farm.dispatch.dispatcher import Prepared
from farm.policy.situation import Lease
from farm.store.clock import Answers
from farm.store.cluster.records import Claimed, HeartbeatReply, HeldShard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from farm.devices.device import Device
    from farm.dispatch.cluster.files import Preparer
    from farm.dispatch.dispatcher import Dispatcher
    from farm.dispatch.recorder import Recorder
    from farm.store.cluster.records import AgentFacts, AgentId, PlannedJob, ShardResult
    from farm.store.store import Store


# Link between an agent and the store: heartbeats, hints of news, claims of shards for the devices, and results.


logger = logging.getLogger(__name__)

_COALESCE_SECONDS = 0.003
"""Time in which the requests of several devices are collected for one claim."""

_RETRY_SECONDS = 1.0
"""Seconds between two tries while the database is away."""

_BUSY_SECONDS = 0.06
"""Delay until a claim is repeated for leases under which this agent was recording results, which a claim skips."""
_SPREAD_SECONDS = 0.1
"""Time over which agents spread their decision about busy devices: the same hint of work reaches all at once."""

_SECOND_LOOK_SECONDS = 0.25
"""Delay of the second request for that decision: the store limits its rate and may have skipped the first."""


class _ClaimRequest(NamedTuple):
    soc: str
    keep: Lease | None


class AgentLink:
    """Thread that sends heartbeats, listens for hints and claims shards, and records of the agent.

    A heartbeat is sent at an interval and at urgent hints; its answer carries requests to the agent. One claim serves
    all devices of an SoC, and follows every hint of work. Any thread may call the methods; writes to the store,
    `stop_claims` and `close` may take a while.

    Claims, releases and heartbeats, each with its messages to the devices, happen one after the other: otherwise a late
    answer to a heartbeat would report a lease as lost that was claimed meanwhile, or take back a shard whose claim is
    being answered.
    """

    def __init__(
        self,
        store: Store,
        facts: Callable[[], AgentFacts],
        *,
        on_reply: Callable[[HeartbeatReply, float], None],
        on_hints: Callable[[set[str]], bool],
        on_claimed: Callable[[HeldShard, float], None],
        ttl_s: float,
        heartbeat_s: float,
    ) -> None:
        """`on_reply` receives the answer to every heartbeat and the end of the leases, on the clock of `now_s`.

        `on_hints` receives notifications, and returns whether a heartbeat should follow at once. `on_claimed` receives
        every shard and the end of its lease.
        """
        self._store, self._facts = store, facts
        self._on_reply, self._on_hints, self._on_claimed = on_reply, on_hints, on_claimed
        self._ttl_s, self._heartbeat_s = ttl_s, heartbeat_s
        self._agent: AgentId
        self._sent: AgentFacts | None = None
        self._problems: dict[str, str] = {}
        """Last error by its subject, which is logged once."""
        self._answers = Answers()
        self._due_s = 0.0
        """Time of the next heartbeat, like all times of this thread by `time.monotonic`."""
        self._is_urgent = False
        self._requests: dict[str, _ClaimRequest] = {}
        self._claims_s: dict[str, list[float]] = {}
        """Times of the next claims by SoC; without a waiting device a claim decides about the busy ones."""
        self._lock, self._changing = threading.RLock(), threading.Lock()
        self._leases: dict[str, Lease] = {}
        """Leases of the agent by device."""
        self._claimed: Claimed = frozenset()
        """Shards of its answered claims."""
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._is_claiming, self._is_ending = True, False
        self._thread = threading.Thread(target=self._run, daemon=True, name="store-link")

    def begin(self, agent: AgentId) -> None:
        """Record in the name of `agent`, whose facts the store has from its registration."""
        self._agent, self._sent = agent, self._facts()

    def start(self) -> None:
        """Start heartbeats and claims, after the results of the former agent of the name are recorded."""
        self._answers.begin()
        self._thread.start()

    def is_stable(self) -> bool:
        """Return whether the store has answered for one lease duration: an agent without a heartbeat is dead then."""
        return self._answers.is_stable(self._ttl_s)

    def send_heartbeat(self) -> None:
        """Send a heartbeat at once: the facts of the agent have changed."""
        self._is_urgent = True
        self._wake()

    def request(self, device: str, soc: str, keep: Lease | None) -> None:
        """Claim for a device until it has a shard."""
        with self._lock:
            self._requests[device] = _ClaimRequest(soc, keep)
        self._claim_in(soc, _COALESCE_SECONDS)

    def cancel_request(self, device: str) -> None:
        """Stop claiming for a device; the shard of a claim under way may still arrive."""
        with self._lock:
            self._requests.pop(device, None)

    def claim(self, soc: str, *, also_busy: bool = False) -> None:
        """Claim for the waiting devices of an SoC, as there may be work for them.

        `also_busy`: if no device of the SoC waits, request the decision which run has to hand over a device after a
        short delay, unless another agent has requested it by then.
        """
        with self._lock:
            if self._waiting(soc):
                self._claim_in(soc, _COALESCE_SECONDS)
            elif also_busy:
                at_s = time.monotonic() + random.uniform(0, _SPREAD_SECONDS)  # noqa: S311
                self._claims_s[soc] = [at_s, at_s + _SECOND_LOOK_SECONDS]
                self._wake()

    def decided(self, soc: str) -> None:
        """Note that an agent has just had the store decide which run hands over a device of an SoC."""
        with self._lock:
            if not self._waiting(soc):
                self._claims_s.pop(soc, None)

    def record(self, results: Sequence[ShardResult]) -> Mapping[int, FarmError]:
        """Record results under their fences; return the reason for each refused result, by its index."""
        refused = self._store.cluster.record(self._agent, results, ttl_s=self._ttl_s)
        return {index: LeaseLostError(why) for index, why in refused.items()}

    def put_back(self, held: HeldShard, jobs: Sequence[PlannedJob], why: str) -> None:
        """Put back a shard with its remaining jobs. Raises LeaseLostError."""
        self._store.cluster.put_back(self._agent, held.id, held.lease.fence, why=why, jobs=jobs)

    def release(self, leases: Sequence[Lease]) -> None:
        """End leases. Raises StoreError."""
        with self._changing:
            self._store.cluster.release(self._agent, leases)
            self._forget(lease.device for lease in leases)

    def stop_claims(self) -> None:
        """Stop claiming, and wait at most 5 s for a claim under way."""
        self._is_claiming = False
        if self._changing.acquire(timeout=5.0):
            self._changing.release()

    def close(self) -> None:
        """End the thread, waiting at most 5 s for it."""
        self._is_ending = True
        self._wake()
        if self._thread.ident is not None:
            self._thread.join(5.0)
        if not self._thread.is_alive():
            os.close(self._wake_read)
            os.close(self._wake_write)

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            os.write(self._wake_write, b".")

    def _waiting(self, soc: str) -> dict[str, _ClaimRequest]:
        with self._lock:
            return {device: request for device, request in self._requests.items() if request.soc == soc}

    def _claim_in(self, soc: str, seconds: float) -> None:
        """Claim for an SoC in so many seconds, or when it is due already."""
        with self._lock:
            self._claims_s[soc] = [min([time.monotonic() + seconds, *self._claims_s.get(soc, ())])]
        self._wake()

    def _run(self) -> None:
        with contextlib.closing(Hints(self._store)) as hints:
            while not self._is_ending:
                received = hints.wait(self._until_due_s(), self._wake_read)
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake_read, 1024)
                is_urgent = bool(received) and self._on_hints(received)
                if is_urgent or self._is_urgent or time.monotonic() >= self._due_s:
                    self._is_urgent = False
                    was_answered = self._send()
                    self._due_s = time.monotonic() + (self._heartbeat_s if was_answered else _RETRY_SECONDS)
                # The loop claims for one SoC at a time, as a heartbeat may come due meanwhile.
                if (soc := self._due_soc()) is not None and self._is_claiming:
                    self._claim_for(soc)

    def _until_due_s(self) -> float:
        with self._lock:
            first_s = min([self._due_s, *(times[0] for times in self._claims_s.values())])
        return max(0.0, first_s - time.monotonic())

    def _due_soc(self) -> str | None:
        """Return the SoC whose claim is due first, and remove its time; None if none is due."""
        now = time.monotonic()
        with self._lock:
            soc = min(self._claims_s, key=lambda one: self._claims_s[one][0], default=None)
            if soc is None or self._claims_s[soc][0] > now:
                return None
            if later := [at_s for at_s in self._claims_s.pop(soc) if at_s > now]:
                self._claims_s[soc] = later
            return soc

    def _send(self) -> bool:
        facts = self._facts()
        # The answer may take any time: count the lease from the request, not from the answer.
        until_s = now_s() + self._ttl_s
        changed_facts = None if facts == self._sent else facts
        try:
            with self._changing:
                leases = list(self._leases.values())
                reply = self._store.cluster.heartbeat(self._agent, changed_facts, self._ttl_s, leases, self._claimed)
                self._forget(reply.lost)
                self._claimed = reply.claimed
                self._on_reply(reply, until_s)
        except FarmError as error:
            self._warn_once("no heartbeat", error)
            return False
        self._answers.note(self._ttl_s)
        if self._problems.pop("no heartbeat", ""):
            logger.info("heartbeats reach the store again")
        self._sent = facts
        return True

    def _claim_for(self, soc: str) -> None:
        requests = self._waiting(soc)
        until_s = now_s() + self._ttl_s
        keep = {device: request.keep for device, request in requests.items() if request.keep is not None}
        try:
            with self._changing:
                if not self._is_claiming:
                    return
                found = self._store.cluster.claim(
                    self._agent, soc, list(requests), ttl_s=self._ttl_s, keep=keep, is_stable=self.is_stable
                )
                self._take(found, requests, until_s)
        except FarmError as error:
            self._warn_once("nothing can be claimed", error)
            self._claim_in(soc, _RETRY_SECONDS)
            return
        self._problems.pop("nothing can be claimed", "")
        if set(keep) - {held.lease.device for held in found}:
            self._claim_in(soc, _BUSY_SECONDS)

    def _take(self, found: Sequence[HeldShard], requests: dict[str, _ClaimRequest], until_s: float) -> None:
        with self._lock:
            for held in found:
                if self._requests.get(held.lease.device) is requests[held.lease.device]:
                    del self._requests[held.lease.device]
        for held in found:
            # A new lease replaces an earlier lease of the device.
            self._leases[held.lease.device] = held.lease
            self._claimed |= {(held.id, held.lease.fence)}
            self._on_claimed(held, until_s)

    def _forget(self, devices: Iterable[str]) -> None:
        for device in devices:
            self._leases.pop(device, None)

    def _warn_once(self, subject: str, error: FarmError) -> None:
        if self._problems.get(subject) != str(error):
            self._problems[subject] = str(error)
            logger.warning("%s: %s", subject, error)


# The job source of an agent: shards from PostgreSQL, by the parts that claim, fetch and record.


_FETCHING = 4
"""Shards that are prepared at once."""


class SharedJobs:
    """A `JobSource`. Belongs to the decision thread."""

    def __init__(
        self,
        host: Dispatcher,
        store: Store,
        recorder: Recorder,
        link: AgentLink,
        preparer: Preparer,
        *,
        device_of: Callable[[str], Device],
        changed: Callable[[], None],
    ) -> None:
        """`device_of` returns a device by its id; `changed` is called when a device rests."""
        self._host, self._store, self._recorder, self._link, self._preparer = host, store, recorder, link, preparer
        self._device_of, self._changed = device_of, changed
        self._fetchers = ThreadPoolExecutor(_FETCHING, "prepare")
        self._recorded: set[tuple[str, str]] = set()
        """Run and device of each recorded device of a run."""
        self.has_quarantined = False
        """True once a device was quarantined, so that a notice may be due."""

    def request(self, device: str, keep: Lease | None) -> None:
        """Claim a shard for a device."""
        self._link.request(device, self._device_of(device).soc, keep)

    def cancel_request(self, device: str) -> None:
        """Claim nothing for a device."""
        self._link.cancel_request(device)

    def prepare(self, held: HeldShard, device: Device, done: Callable[[Prepared | FarmError], None]) -> None:
        """Fetch the files of a shard, then call `done`."""

        def prepare() -> None:
            try:
                answer: Prepared | FarmError = self._prepared(held, device)
            except UnreadableRowError as error:
                answer = error
                with contextlib.suppress(FarmError):
                    self._store.cluster.set_aside(error)
            except FarmError as error:
                answer = error
            except Exception as error:  # noqa: BLE001 - a shard that cannot be prepared must not stay with this host
                answer = InfraError(f"{type(error).__name__}: {error}")
            self._host.post(partial(done, answer))

        self._fetchers.submit(prepare)

    def _prepared(self, held: HeldShard, device: Device) -> Prepared:
        ready = self._preparer.prepare(held, device)
        key = held.run_id, device.id
        if key not in self._recorded:
            runtime = ready.plan.runtimes[device.serial]
            self._store.record_device(held.run_id, device, runtime.versions)
            self._recorded.add(key)
        return ready

    def others(self, held: HeldShard) -> tuple[str, ...]:
        """Return the ids of the other living devices at the time of the claim."""
        return held.others

    def forget_run(self, run_id: str) -> None:
        """Remove the files of a run that is over."""
        self._recorded = {one for one in self._recorded if one[0] != run_id}
        self._fetchers.submit(self._preparer.forget, run_id)

    def result(self, result: ShardResult) -> None:
        """Record a result."""
        self._recorder.result(result)

    def put_back(self, held: HeldShard, jobs: Sequence[PlannedJob], why: str) -> None:
        """Put back a shard with its remaining jobs."""
        self._recorder.after(held.lease.device, partial(self._link.put_back, held, tuple(jobs), why))

    def release(self, lease: Lease, done: Callable[[], None]) -> None:
        """End a lease after all results are recorded, then call `done`."""
        release = partial(self._link.release, [lease])
        self._recorder.after(lease.device, release, partial(self._host.post, done))

    def health(self, event: HealthEvent) -> None:
        """Record a health event of a device."""
        self._recorder.after("", partial(self._store.devices.record_health, event))
        self.has_quarantined = self.has_quarantined or event.state == Health.QUARANTINED

    def resting(self, device: str, why: str, *, halts: bool) -> None:
        """Announce that a device rests, or has jobs again."""
        del halts
        if why:
            name = self._device_of(device).called
            logger.warning("%s is not used for a while: %s", name, why, extra={"device": name})
        self._changed()

    def aside(self, action: Callable[[], None]) -> None:
        """Call `action`, which takes a while, in another thread."""
        self._fetchers.submit(action)

    def close(self) -> None:
        """Begin nothing else."""
        self._fetchers.shutdown(wait=False, cancel_futures=True)
