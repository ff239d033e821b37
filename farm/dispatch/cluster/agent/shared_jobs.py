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
    from collections.abc import Callable, Mapping

    from farm.devices.device import Device
    from farm.dispatch.cluster.files import Preparer
    from farm.dispatch.dispatcher import Dispatcher
    from farm.dispatch.recorder import Recorder
    from farm.store.cluster.records import AgentFacts, AgentId, PlannedJob, ShardResult
    from farm.store.store import Store


# Leases and shards of an agent, and one order of their changes for the database and for the devices.
#
# `SharedRecords` writes the agent's results under these leases.


class SharedRecords:
    """A `RecordSink` in the name of an agent."""

    def __init__(self, store: Store, ledger: Ledger, ttl_s: float) -> None:
        self._store, self._ledger, self._ttl_s = store, ledger, ttl_s
        self._agent: AgentId

    def begin(self, agent: AgentId) -> None:
        """Record in the name of `agent`."""
        self._agent = agent

    def record(self, results: Sequence[ShardResult]) -> Mapping[int, FarmError]:
        """Record results under their fences; return the reason for each refused result, by its index."""
        refused = self._store.cluster.record(self._agent, results, ttl_s=self._ttl_s)
        return {index: LeaseLostError(why) for index, why in refused.items()}

    def put_back(self, held: HeldShard, jobs: Sequence[PlannedJob], why: str) -> None:
        """Put back a shard with its remaining jobs. Raises LeaseLostError."""
        self._store.cluster.put_back(self._agent, held.id, held.lease.fence, why=why, jobs=jobs)

    def release(self, leases: Sequence[Lease]) -> None:
        """End leases."""
        with self._ledger.changing:
            self._store.cluster.release(self._agent, leases)
            self._ledger.drop(leases)

    def record_health(self, event: HealthEvent) -> None:
        """Record a health event of a device."""
        self._store.devices.record_health(event)


class Ledger:
    """Leases of an agent by device, and the shards of its answered claims.

    Claims, releases and heartbeats, each with its messages to the devices, happen one after the other under the lock
    `changing`: otherwise a late answer to a heartbeat would report a lease as lost that was claimed meanwhile, or take
    back a shard whose claim is being answered.
    """

    def __init__(self) -> None:
        self.changing = threading.Lock()
        self.leases: dict[str, Lease] = {}
        self.claimed: Claimed = frozenset()

    def add(self, held: HeldShard) -> None:
        """Add a claimed shard and its lease, which replaces an earlier lease of the device."""
        self.leases[held.lease.device] = held.lease
        self.claimed |= {(held.id, held.lease.fence)}

    def drop(self, leases: Sequence[Lease]) -> None:
        """Remove leases that have ended."""
        for lease in leases:
            self.leases.pop(lease.device, None)

    def apply(self, reply: HeartbeatReply) -> None:
        """Remove the leases that a heartbeat found lost; take over the shards that the store has for this agent."""
        for device in reply.lost:
            self.leases.pop(device, None)
        self.claimed = reply.claimed


# Claims of shards for the devices of an agent: one claim for all devices of an SoC, at every hint of work.


logger = logging.getLogger(__name__)

_COALESCE_SECONDS = 0.003
"""Time in which the requests of several devices are collected for one claim."""

_RETRY_SECONDS = 1.0
_BUSY_SECONDS = 0.06
"""Delay until a claim is repeated for leases under which this agent was recording results, which a claim skips."""
_SPREAD_SECONDS = 0.1
"""Time over which agents spread their decision about busy devices: the same hint of work reaches all at once."""

_SECOND_LOOK_SECONDS = 0.25
"""Delay of the second request for that decision: the store limits its rate and may have skipped the first."""


class _ClaimRequest(NamedTuple):
    soc: str
    keep: Lease | None


class Claimer:
    """Thread that claims shards. Any thread may call its methods, which return at once."""

    def __init__(
        self,
        store: Store,
        ledger: Ledger,
        claimed: Callable[[HeldShard, float], None],
        ttl_s: float,
        is_stable: Callable[[], bool],
    ) -> None:
        """`claimed` receives every shard and the end of its lease, on the clock of `now_s`.

        `is_stable` as in `Claims.claim`.
        """
        self._is_stable = is_stable
        self._store, self._ledger, self._claimed, self._ttl_s = store, ledger, claimed, ttl_s
        self._agent: AgentId | None = None
        self._requests: dict[str, _ClaimRequest] = {}
        self._due: set[str] = set()
        self._undecided: dict[str, list[float]] = {}
        """Times of the next decisions about busy devices, by SoC (`time.monotonic`)."""
        self._changed = threading.Condition()
        self._is_ending = False
        self._problem = ""
        self._thread = threading.Thread(target=self._run, daemon=True, name="claims")

    def begin(self, agent: AgentId) -> None:
        """Claim in the name of `agent`."""
        self._agent = agent
        self._thread.start()

    def request(self, device: str, soc: str, keep: Lease | None) -> None:
        """Claim for a device until it has a shard."""
        with self._changed:
            self._requests[device] = _ClaimRequest(soc, keep)
            self._due.add(soc)
            self._changed.notify()

    def cancel_request(self, device: str) -> None:
        """Stop claiming for a device; the shard of a claim under way may still arrive."""
        with self._changed:
            self._requests.pop(device, None)

    def wake(self, soc: str = "", *, also_busy: bool = False) -> None:
        """Claim for the waiting devices of an SoC, as there may be work for them; of all SoCs without `soc`.

        `also_busy`: if no device of the SoC waits, request the decision which run has to hand over a device after a
        short delay, unless another agent has requested it by then.
        """
        with self._changed:
            wanted = {request.soc for request in self._requests.values()}
            self._due |= wanted & {soc} if soc else wanted
            if also_busy and soc not in wanted:
                at_s = time.monotonic() + random.uniform(0, _SPREAD_SECONDS)  # noqa: S311
                self._undecided[soc] = [at_s, at_s + _SECOND_LOOK_SECONDS]
            if self._due or also_busy:
                self._changed.notify()

    def decided(self, soc: str) -> None:
        """Note that an agent has just had the store decide which run hands over a device of an SoC."""
        with self._changed:
            self._undecided.pop(soc, None)

    def close(self) -> None:
        """Stop claiming and wait at most 5 s for the thread."""
        with self._changed:
            self._is_ending = True
            self._changed.notify()
        if self._thread.ident is not None:
            self._thread.join(5.0)

    def _run(self) -> None:
        while True:
            with self._changed:
                if not (self._due or self._is_ending):
                    # Not wait_for: a new decision may come due meanwhile, which changes the timeout.
                    self._changed.wait(self._until_undecided())
                if self._is_ending:
                    return
            time.sleep(_COALESCE_SECONDS)
            now_s = time.monotonic()
            with self._changed:
                due, self._due = self._due, set()
                requests = dict(self._requests)
                undecided = {soc for soc, times in self._undecided.items() if times[0] <= now_s}
                later = {soc: [at_s for at_s in times if at_s > now_s] for soc, times in self._undecided.items()}
                self._undecided = {soc: times for soc, times in later.items() if times}
            for soc in sorted(due | undecided):
                mine = {device: request for device, request in requests.items() if request.soc == soc}
                if mine or soc in undecided:
                    self._claim(soc, mine)

    def _until_undecided(self) -> float | None:
        """Return the seconds until the next decision is due; None without one."""
        return max(0.0, min(self._undecided.values())[0] - time.monotonic()) if self._undecided else None

    def _claim(self, soc: str, requests: dict[str, _ClaimRequest]) -> None:
        agent = self._agent
        if agent is None:
            return
        until_s = now_s() + self._ttl_s
        keep = {device: request.keep for device, request in requests.items() if request.keep is not None}
        try:
            with self._ledger.changing:
                found = self._store.cluster.claim(
                    agent, soc, list(requests), ttl_s=self._ttl_s, keep=keep, is_stable=self._is_stable
                )
                self._take(found, requests, until_s)
        except FarmError as error:
            if str(error) != self._problem:
                self._problem = str(error)
                logger.warning("nothing can be claimed: %s", error)
            self._wake_later(soc, _RETRY_SECONDS)
            return
        self._problem = ""
        if set(keep) - {held.lease.device for held in found}:
            self._wake_later(soc, _BUSY_SECONDS)

    def _wake_later(self, soc: str, seconds: float) -> None:
        timer = threading.Timer(seconds, self.wake, [soc])
        timer.daemon = True
        timer.start()

    def _take(self, found: Sequence[HeldShard], requests: dict[str, _ClaimRequest], until_s: float) -> None:
        with self._changed:
            for held in found:
                if self._requests.get(held.lease.device) is requests[held.lease.device]:
                    del self._requests[held.lease.device]
        for held in found:
            self._ledger.add(held)
            self._claimed(held, until_s)


# Heartbeats of an agent and its leases, at an interval and at urgent hints; their answers carry requests to it.


"""Seconds between two tries while the database is away."""


class HeartbeatSender:
    """Thread that sends heartbeats and listens for hints."""

    def __init__(
        self,
        store: Store,
        ledger: Ledger,
        facts: Callable[[], AgentFacts],
        *,
        on_reply: Callable[[HeartbeatReply, float], None],
        on_hints: Callable[[set[str]], bool],
        ttl_s: float,
        heartbeat_s: float,
    ) -> None:
        """`on_reply` receives the answer to every heartbeat and the end of the leases, on the clock of `now_s`.

        `on_hints` receives notifications, and returns whether a heartbeat should follow at once.
        """
        self._store, self._ledger, self._facts = store, ledger, facts
        self._on_reply, self._on_hints = on_reply, on_hints
        self._ttl_s, self._heartbeat_s = ttl_s, heartbeat_s
        self._agent: AgentId | None = None
        self._sent: AgentFacts | None = None
        self._problem = ""
        self._answers = Answers()
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._is_ending = False
        self._thread = threading.Thread(target=self._run, daemon=True, name="heartbeats")

    def begin(self, agent: AgentId) -> None:
        """Start heartbeats for `agent`, whose facts the store has from its registration."""
        self._agent, self._sent = agent, self._facts()
        self._answers.begin()
        self._thread.start()

    def is_stable(self) -> bool:
        """Return whether the store has answered for one lease duration: an agent without a heartbeat is dead then."""
        return self._answers.is_stable(self._ttl_s)

    def wake(self) -> None:
        """Send a heartbeat at once: the facts of the agent have changed."""
        with contextlib.suppress(OSError):
            os.write(self._wake_write, b".")

    def close(self) -> None:
        """End the thread, waiting at most 5 s for it."""
        self._is_ending = True
        self.wake()
        if self._thread.ident is not None:
            self._thread.join(5.0)
        if not self._thread.is_alive():
            os.close(self._wake_read)
            os.close(self._wake_write)

    def _run(self) -> None:
        due_s = time.monotonic()
        with contextlib.closing(Hints(self._store)) as hints:
            while not self._is_ending:
                received = hints.wait(max(0.0, due_s - time.monotonic()), self._wake_read)
                was_woken = self._was_woken()
                is_urgent = bool(received) and self._on_hints(received)
                if was_woken or is_urgent or time.monotonic() >= due_s:
                    was_answered = self._send()
                    due_s = time.monotonic() + (self._heartbeat_s if was_answered else _RETRY_SECONDS)

    def _was_woken(self) -> bool:
        try:
            return bool(os.read(self._wake_read, 1024))
        except BlockingIOError:
            return False

    def _send(self) -> bool:
        if self._agent is None:
            return False
        facts = self._facts()
        # The answer may take any time: count the lease from the request, not from the answer.
        until_s = now_s() + self._ttl_s
        changed_facts = None if facts == self._sent else facts
        try:
            with self._ledger.changing:
                leases, claimed = list(self._ledger.leases.values()), self._ledger.claimed
                reply = self._store.cluster.heartbeat(self._agent, changed_facts, self._ttl_s, leases, claimed)
                self._ledger.apply(reply)
                self._on_reply(reply, until_s)
        except FarmError as error:
            if str(error) != self._problem:
                self._problem = str(error)
                logger.warning("no heartbeat: %s", error)
            return False
        self._answers.note(self._ttl_s)
        if self._problem:
            self._problem = ""
            logger.info("heartbeats reach the store again")
        self._sent = facts
        return True


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
        claimer: Claimer,
        preparer: Preparer,
        *,
        device_of: Callable[[str], Device],
        changed: Callable[[], None],
    ) -> None:
        """`device_of` returns a device by its id; `changed` is called when a device rests."""
        self._host, self._store, self._recorder, self._claimer, self._preparer = (
            host, store, recorder, claimer, preparer
        )  # fmt: skip
        self._device_of, self._changed = device_of, changed
        self._fetchers = ThreadPoolExecutor(_FETCHING, "prepare")
        self._recorded: set[tuple[str, str]] = set()
        """Run and device of each recorded device of a run."""
        self.has_quarantined = False
        """True once a device was quarantined, so that a notice may be due."""

    def request(self, device: str, keep: Lease | None) -> None:
        """Claim a shard for a device."""
        self._claimer.request(device, self._device_of(device).soc, keep)

    def cancel_request(self, device: str) -> None:
        """Claim nothing for a device."""
        self._claimer.cancel_request(device)

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
        self._recorder.put_back(held, jobs, why)

    def release(self, lease: Lease, done: Callable[[], None]) -> None:
        """End a lease after all results are recorded, then call `done`."""
        self._recorder.release(lease, partial(self._host.post, done))

    def health(self, event: HealthEvent) -> None:
        """Record a health event of a device."""
        self._recorder.health(event)
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
