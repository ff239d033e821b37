"""Job source of a run on this machine: gives jobs in memory to the devices of its pool, and takes their results."""

from __future__ import annotations

import itertools
import logging
import time
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from farm.base.errors import FarmError, LeaseLostError
from farm.dispatch.device_link import own_fault
from farm.dispatch.dispatcher import Dispatcher, Prepared, ProgressListener
from farm.policy.retries import Tried, avoided, is_failure
from farm.policy.situation import Lease, Priority
from farm.policy.waits import fits
from farm.store.cluster.records import HeldShard, PlannedJob, ShardResult

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from farm.devices.device import Device, HealthEvent
    from farm.dispatch.device_runner import DeviceRunner
    from farm.dispatch.pool.device_pool import DevicePool
    from farm.dispatch.recorder import Recorder
    from farm.dispatch.request.request import RunPlan
    from farm.results.attempt import Attempt

logger = logging.getLogger(__name__)


class _LocalJob:
    """Job of the run, with its attempts so far."""

    def __init__(self, planned: PlannedJob) -> None:
        self.planned = planned
        self.history: tuple[Tried, ...] = ()
        self.avoid: frozenset[str] = frozenset()
        """Ids of devices that do not get the job."""
        self.attempt: Attempt | None = None
        """Last attempt, if another device is to try the job."""
        self.is_refused = False
        """The store has refused a result of the job."""

    @property
    def id(self) -> str:
        return self.planned.job.id

    @property
    def soc(self) -> str:
        return self.planned.job.target.soc


class LocalJobs:
    """A `JobSource` that also decides when the run ends.

    Only the decision thread calls it, except for the methods below 'Calls of other threads'.
    """

    def __init__(
        self,
        plan: RunPlan,
        pool: DevicePool,
        dispatcher: Dispatcher,
        listener: ProgressListener,
        most_failures: int = 0,
    ) -> None:
        """Take the jobs of `plan`; after `most_failures` failed jobs no other begins, 0 sets no limit."""
        self._plan, self._pool, self._dispatcher, self._listener = plan, pool, dispatcher, listener
        self._most_failures = most_failures
        self._jobs = {planned.job.id: _LocalJob(planned) for planned in plan.jobs}
        self._pending = list(self._jobs)
        """Ids of jobs to give to a device, in order."""
        self._position = {job_id: number for number, job_id in enumerate(self._jobs)}
        self._unfinished = Counter(job.soc for job in self._jobs.values())
        self._requests: dict[str, Lease | None] = {}
        self._runners: dict[str, DeviceRunner] = {}
        self._shard_numbers = itertools.count(1)
        self._failures = 0
        self._usable: tuple[tuple[bool, bool], ...] = ()
        """For each device: whether it may get jobs and whether the run holds it, when these were last compared."""
        self._is_serving = self._is_stopped = self._is_halted = False
        self._shown: dict[str, str] = {}
        self.abandoned: set[str] = set()
        """Ids of jobs for which no device was left."""

    def begin(
        self, runners: Sequence[DeviceRunner], recorder: Recorder, record_health: Callable[[HealthEvent], None]
    ) -> None:
        """Begin to give jobs to `runners` and results to `recorder`; `record_health` writes into the store."""
        self._recorder, self._record_health = recorder, record_health
        self._runners = {runner.device.id: runner for runner in runners}
        for soc in {runner.device.soc for runner in runners}:
            self._leave_done(soc)
        for runner in runners:
            if self._unfinished[runner.device.soc]:
                runner.open()

    # The end of a run.

    @property
    def is_over(self) -> bool:
        """True when the run has given back all devices, and no job is left to begin."""
        if self._is_halted:
            # Without the store no lease can be ended: wait only for the devices.
            return all(runner.has_left for runner in self._runners.values())
        is_done = self._is_stopped or not self._unfinished.total()
        return is_done and all(runner.is_free for runner in self._runners.values())

    def finish_running(self) -> None:
        """Begin no other job; running jobs are finished."""
        if self._is_stopped:
            return
        self._is_stopped = True
        self._pending.clear()
        self._pool.stop_waiting()
        for runner in self._runners.values():
            runner.drain("no other job of the run may begin")

    def halt(self, reason: str) -> None:
        """Stop the run for a fault that no other device can avoid, such as a full disk of this machine."""
        if not self._is_halted:
            self._is_halted = True
            resume = f"'farm run --resume {self._plan.run_id}' runs the missing jobs"
            run = {"run": self._plan.run_id}
            logger.warning("the run stops: %s; when this is repaired, %s", reason, resume, extra=run)
        self.finish_running()

    # JobSource.

    def request(self, device: str, keep: Lease | None) -> None:
        """Give a job to a device as soon as one fits it."""
        self._requests[device] = keep
        self._serve_soon()

    def cancel_request(self, device: str) -> None:
        """Withdraw the request of a device for a job."""
        self._requests.pop(device, None)

    def prepare(self, held: HeldShard, device: Device, done: Callable[[Prepared | FarmError], None]) -> None:
        """Call `done` at once: files are on this machine, and the device process waits for bundles in the making."""
        done(Prepared(self._plan, held.jobs, self._plan.devices.index(device)))

    def others(self, held: HeldShard) -> tuple[str, ...]:
        """Return the ids of the other devices of an SoC that the run may use."""
        soc = held.jobs[0].job.target.soc
        return tuple(
            id_
            for id_, runner in self._runners.items()
            if runner.device.soc == soc and id_ != held.lease.device and self._is_ours(runner)
        )

    def result(self, result: ShardResult) -> None:
        """Record a result."""
        self._recorder.result(result)
        if self._is_stopped or not (result.repeat or result.avoid):
            self._count(result.attempts[-1])
        self._serve_soon()

    def put_back(self, held: HeldShard, jobs: Sequence[PlannedJob], why: str) -> None:
        """Give the jobs that are left to other devices."""
        del held, why
        self._put_back([job.job.id for job in jobs])

    def release(self, lease: Lease, done: Callable[[], None]) -> None:
        """End a lease after all results are recorded, then call `done` in the decision thread."""
        let_go = partial(self._pool.let_go, lease.device, lease.fence)
        self._recorder.after(lease.device, let_go, partial(self._dispatcher.post, done))

    def health(self, event: HealthEvent) -> None:
        """Record a health event of a device."""
        self._recorder.after("", partial(self._record_health, event))

    def resting(self, device: str, why: str, *, halts: bool) -> None:
        """End the use of a device; stop the run if the fault is this machine's."""
        if halts:
            self.halt(why)
        else:
            self._pool.retire(device, why)
            self._abandon()

    # Calls of other threads.

    def recorded(self, results: Sequence[ShardResult], refused: Mapping[int, FarmError]) -> None:
        """Take recorded results; `refused` has errors of the store by index. Any thread may call it."""
        self._dispatcher.post(partial(self._recorded, results, refused))

    def store_failing(self, error: FarmError, seconds: float) -> None:
        """Stop the run if the store has given no answer for too long. Any thread may call it."""
        if seconds > self._plan.health.store_wait_s:
            self._dispatcher.post(partial(self.halt, f"the store: {error}"))

    def pool_changed(self) -> None:
        """Take over changes of the pool's leases. Any thread may call it."""
        self._dispatcher.post(self._look_at_pool)

    # Choices.

    def _serve_soon(self) -> None:
        if not self._is_serving:
            self._is_serving = True
            self._dispatcher.post(self._serve)

    def _serve(self) -> None:
        """Give jobs to the devices that asked for one, idle devices first."""
        self._is_serving = False
        for device in sorted(self._requests, key=lambda id_: bool(self._runners[id_].runs)):
            runner = self._runners[device]
            # With a limit of failures, a device gets its next job only after the result of its last one.
            is_early = self._most_failures > 0 and bool(runner.runs)
            if not self._is_ours(runner) or device not in self._requests or is_early:
                continue
            mine = (one for one in self._pending if self._may_have(device, self._jobs[one]))
            job_id = next((one for one in mine if _fits(self._jobs[one], runner.device)), None)
            if job_id is not None:
                self._pending.remove(job_id)
                self._give(runner, self._jobs[job_id])
            elif runner.device.until_s:
                self._leave_ending(runner)
        self._show()

    def _give(self, runner: DeviceRunner, job: _LocalJob) -> None:
        device, planned = runner.device, job.planned
        lease = self._requests.pop(device.id) or self._lease_of(device)
        jobs = (msgspec.structs.replace(planned, history=job.history),)
        held = HeldShard(next(self._shard_numbers), self._plan.run_id, jobs, lease, b"")
        runner.claimed(held, self._pool.until_s(device.id))

    def _lease_of(self, device: Device) -> Lease:
        return Lease(device.id, self._pool.fence(device.id), "", "", "", 0, "", Priority.PERSON, 0, 0)

    def _is_ours(self, runner: DeviceRunner) -> bool:
        return not runner.resting and self._pool.is_ours(runner.device.id)

    def _may_have(self, device: str, job: _LocalJob) -> bool:
        is_possible = self._runners[device].device.soc == job.soc and device not in job.avoid
        return is_possible and self._is_usable(device)

    def _leave_ending(self, runner: DeviceRunner) -> None:
        """End the use of a rented device that has time for none of the jobs that are left for it."""
        left = [self._jobs[one] for one in self._pending if self._may_have(runner.device.id, self._jobs[one])]
        if left and not any(_fits(job, runner.device) for job in left):
            end = time.strftime("%H:%M", time.localtime(runner.device.until_s))
            why = f"its rented session ends at {end}, and {len(left)} jobs do not fit into the rest"
            self._pool.retire(runner.device.id, why)
            runner.drain(why)
            self._abandon()

    def _is_usable(self, device: str) -> bool:
        return not self._pool.is_retired(device) and not self._runners[device].resting

    def _put_back(self, job_ids: Collection[str]) -> None:
        if not self._is_stopped:
            # Jobs that another device has tried go first; all others keep the order of the plan.
            self._pending = sorted(
                {*self._pending, *job_ids}, key=lambda one: (not self._jobs[one].history, self._position[one])
            )
            self._abandon()
            self._serve_soon()

    def _abandon(self) -> None:
        """Finish the jobs for which the run has no device left."""
        usable = [runner for id_, runner in self._runners.items() if self._is_usable(id_)]
        socs = {runner.device.soc for runner in usable}
        for job_id in list(self._pending):
            job = self._jobs[job_id]
            # A job that avoids a device needs a device that the run holds now: others may never become free.
            if job.soc not in socs or not (
                not job.avoid
                or any(self._may_have(runner.device.id, job) and self._is_ours(runner) for runner in usable)
            ):
                self._pending.remove(job_id)
                self.abandoned.add(job_id)
                if job.attempt is not None:
                    self._listener.job_ended(shown(job.attempt))
                    self._count(job.attempt)
                self._finish(job)

    def _recorded(self, results: Sequence[ShardResult], refused: Mapping[int, FarmError]) -> None:
        for index, result in enumerate(results):
            job = self._jobs[result.job_id]
            if isinstance(refused.get(index), LeaseLostError):
                self._put_back([job.id])
            elif index in refused:
                self._take_refused(job, result, refused[index])
            else:
                self._take(job, result)
        self._show()

    def _take(self, job: _LocalJob, result: ShardResult) -> None:
        attempt = result.attempts[-1]
        for device in result.outvoted:
            self._outvote(device, job.id)
        if (result.repeat or result.avoid) and not self._is_stopped:
            job.history, job.attempt = result.repeat, attempt
            job.avoid |= {*result.avoid, *avoided(result.repeat, result.device)}
            self._listener.job_repeated(shown(attempt))
            self._put_back([job.id])
            return
        self._listener.job_ended(shown(attempt))
        self._finish(job)

    def _count(self, attempt: Attempt) -> None:
        """Count the last attempt of a job, and stop the run after too many failures."""
        if is_failure(attempt):
            self._failures += 1
            if 0 < self._most_failures <= self._failures:
                self.finish_running()

    def _take_refused(self, job: _LocalJob, result: ShardResult, error: FarmError) -> None:
        """Record an infra attempt for a result that the store refused; if refused too, finish the job."""
        if job.is_refused:
            self._finish(job)
            return
        job.is_refused = True
        log = "\n".join(attempt.log for attempt in result.attempts)
        attempt = own_fault(result.job_id, job.planned.key, result.attempts[-1].device, f"not recorded: {error}", log)
        self._recorder.result(
            msgspec.structs.replace(result, attempts=(attempt,), artifacts=(), repeat=(), avoid=(), outvoted=())
        )

    def _outvote(self, device: str, job_id: str) -> None:
        if (runner := self._runners.get(device)) is not None:
            fields = {"run": self._plan.run_id, "job": job_id, "device": runner.device.called}
            logger.warning(
                "%s: %s failed on it and passed on another device", runner.device.called, job_id, extra=fields
            )
            runner.outvoted(1)

    def _finish(self, job: _LocalJob) -> None:
        """Count a job as finished; after the last job of an SoC, give its devices back."""
        self._unfinished[job.soc] -= 1
        self._leave_done(job.soc)

    def _leave_done(self, soc: str) -> None:
        for runner in self._runners.values() if not self._unfinished[soc] else ():
            if runner.device.soc == soc:
                self._pool.retire(runner.device.id)
                runner.drain("no job is left for its SoC")

    def _look_at_pool(self) -> None:
        """Pass to the runners which leases were renewed, lost, or are wanted by other users."""
        if self._pool.lost_store:
            self.halt(f"the store: {self._pool.lost_store}")
        for id_, runner in self._runners.items():
            is_leaving = id_ in self._pool.leaving
            fence = self._pool.fence(id_)
            if runner.is_free and fence and (self._pool.is_retired(id_) or is_leaving):
                # A lease ends without a job.
                self._recorder.after(id_, partial(self._pool.let_go, id_, fence))
            if runner.lease is None or not self._pool.is_leased:
                continue
            if fence != runner.lease.fence:
                runner.lease_lost()
            elif is_leaving:
                runner.wanted("another user")
            else:
                runner.renewed(self._pool.until_s(id_))
        usable = tuple((self._is_usable(id_), self._is_ours(runner)) for id_, runner in self._runners.items())
        if usable != self._usable:
            self._usable = usable
            self._abandon()
            self._serve_soon()

    def _show(self) -> None:
        running = {one.device.called: one.running_job for one in self._runners.values() if one.running_job}
        if running != self._shown:
            self._shown = running
            self._listener.devices(running)


def _fits(job: _LocalJob, device: Device) -> bool:
    """Return whether a job ends before the rented session of a device."""
    return fits(job.planned.expected_s, device.until_s, time.time())


def shown(attempt: Attempt) -> dict[str, str | float]:
    """Return the facts of an attempt for a progress listener."""
    return {
        "job_id": attempt.job_id,
        "verdict": str(attempt.verdict),
        "stage": str(attempt.stage),
        "reason": attempt.reason,
        "device": attempt.device,
        "seconds": attempt.seconds,
        "known_issue": attempt.known_issue,
    }
