"""Programs in turns on one warm device: the pairs of docs/explanation/statistics.md. Nothing of it is recorded."""

from __future__ import annotations

import logging
import math
import shutil
from contextlib import ExitStack
from enum import StrEnum
from typing import Self

import msgspec

from farm.base.config.settings import Config
from farm.base.errors import InfraError, LeaseLostError, UsageError
from farm.base.hashes import sha256_of
from farm.builds.bundles.bundle import Bundle
from farm.builds.runtime.kept import find_kept, with_runner_of
from farm.builds.runtime.runtime import Runtime
from farm.builds.toolchains.toolchain import Toolchain
from farm.devices.execution.raw import RESULT_FILE, RawResult, RunnerOptions
from farm.devices.execution.runner_process import reduced, too_many
from farm.dispatch.device_run.device_run import DeviceRun, HeatGate
from farm.dispatch.pool.fleet import Choice, DeviceAcquirer
from farm.dispatch.request.profiling import Profile
from farm.replay.stored_result import StoredResult, find_bundle, find_job
from farm.results.analysis.confirmation import INFERENCES, PAIRS, Pair, add_pairs
from farm.results.attempt import Attempt, Ending, Measurement, Verdict
from farm.results.generation import report_problem
from farm.results.heap import heap_measurements, read_heaps
from farm.results.measurements import rate_measurements, time_measurements
from farm.results.outcome import outcome
from farm.results.profile.etdump import read_profile
from farm.store.store import Store
from farm.suites.suite import Job, Target

logger = logging.getLogger(__name__)

# A side that ended so often the wrong way is not asked again.
_MOST_FAILURES = 3
# Warm-up executions of every turn.
_WARM_UP = 1
_TURN_SECONDS = 300.0


class Role(StrEnum):
    """Side of a pair."""

    GOOD = "good"
    NEW = "new"


class Side(msgspec.Struct, frozen=True):
    """Program and settings of a side."""

    job: Job
    bundle: Bundle
    profile: Profile = Profile.AUTO
    """As in the run that it is of: `htp_cycles` are there only where there is one."""
    heap: bool = False
    """True to measure the DSP heap alone, as in its run: every turn has its own process."""
    seconds: int | None = None
    """Seconds of generation in every turn, as in its run."""
    runtime: Runtime | None = None
    """Runtime of the side; None for the bench's."""
    is_whole: bool = True
    """False if the runtime of its run is not kept, so that the side has only the program of the run."""

    @property
    def place(self) -> str:
        """Digest of its own runtime: sides with an equal place share a process."""
        return self.runtime.digest if self.runtime else ""

    @property
    def key(self) -> tuple[str, ...]:
        """Values that distinguish the side from other sides."""
        return self.job.id, self.bundle.manifest.key, self.place


class Turn(msgspec.Struct, frozen=True):
    """Result of a side in a pair."""

    role: Role
    pair: int
    """From 0; -1 is warming up, which is in no pair."""
    bundle_key: str
    runtime: str
    """Digest."""
    device: str
    """Serial."""
    started_ms: int
    """Epoch, milliseconds."""
    measurements: tuple[Measurement, ...] = ()
    """All samples of this turn; none where it failed."""
    failure: str = ""
    """Reason of exclusion from pairs: a crash or wrong numbers."""


class InterleavedBench:
    """Device of an SoC and kind with the sides compared on it. Use it as a context manager, in one thread."""

    def __init__(
        self,
        config: Config,
        store: Store,
        target: Target,
        *,
        virtual: bool,
        choice: Choice | None = None,
        purpose: str,
        until_s: float = math.inf,
        least_inferences: int = 0,
    ) -> None:
        """Take a virtual device of its own with `virtual`, else lease an attached device of `choice`.

        `store` gives leases only. The bench waits for a busy device until `until_s` on the clock of `time.monotonic`.
        `least_inferences` of a turn come from the user: a side whose runner cannot make as many is refused.
        """
        self.config, self.virtual = config, virtual
        self._store, self._choice = store, choice or Choice()
        self._least_inferences = least_inferences
        self._stack = ExitStack()
        self._acquirer = DeviceAcquirer(
            config, store, target, name="ab", purpose=purpose, otherwise="--virtual", until_s=until_s
        )
        self._gate = HeatGate(config.health)
        self._runs: dict[str, DeviceRun] = {}
        self._proven: dict[tuple[str, ...], str] = {}
        self.judged: dict[tuple[str, ...], Attempt] = {}
        """Newest turn with compared outputs, by the key of its side."""
        self.outputs: dict[tuple[str, ...], tuple[str, ...]] = {}
        """SHA-256 of each output file of the same turn, by sample and number; none for a turn without all of them."""
        self._logged: set[tuple[str, ...]] = set()
        self._count = 0
        self.turns: list[Turn] = []
        """All that was measured so far, with every sample."""

    def __enter__(self) -> Self:
        """Acquire the first device, its runtime and fence. Raises NoDeviceError, UnknownNameError, MissingToolError."""
        from farm.builds.toolchains.selection import prepare

        self.tools: Toolchain = prepare(self.config, virtual=self.virtual)
        with self._stack:
            self._stack.enter_context(self._acquirer)
            # Files and sessions leave the devices before their leases end.
            self._open = self._stack.enter_context(ExitStack())
            self.device, self.runtime, self.fence = self._acquirer.acquire(None if self.virtual else self._choice)
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def side(self, stored: StoredResult) -> Side:
        """Return the side of a stored result, with the runtime that executed it if that is kept.

        Raises UsageError for a pruned bundle that cannot be made again.
        """
        job = find_job(self.config, stored)
        bundle = find_bundle(self.config, stored, job, self.tools, self._acquirer.supervisor)
        is_here = stored.runtime == self.runtime.versions
        runtime = None if is_here else find_kept(self.config.cache_dir, stored.runtime)
        is_whole = is_here or runtime is not None
        return Side(job, bundle, stored.profile, stored.is_heap, stored.seconds, runtime, is_whole)

    def mixed(self, base: Side, runner: Side) -> Runtime | None:
        """Return the runtime of `base` with the runner of another side; None for runners that take different jobs."""
        return with_runner_of(self.config.cache_dir, base.runtime or self.runtime, runner.runtime or self.runtime)

    def measure(
        self,
        good: Side,
        new: Side,
        pairs: int = PAIRS,
        inferences: int = INFERENCES,
        *,
        numerics: bool = False,
        begin: int = 0,
        renew: bool = False,
        fresh: bool = False,
    ) -> dict[str, list[Pair]]:
        """Run both sides in turns and return the samples of each pair by metric; the first side alternates.

        `numerics` compares outputs in every turn, not only in the first. `begin` is the number of the first pair: the
        good side begins even pairs. `renew` uses new processes, `fresh` new ones in every turn. If a side fails, the
        pair has no samples and `turns` has the reason. A new side is warmed up first and judged as by its run; after a
        failure no pair is measured. Raises InfraError for trouble of farm and device.
        """
        # Profiling costs time and long executions heat the device: both sides use the new side's settings.
        alike = msgspec.structs.replace(good, profile=new.profile, heap=new.heap, seconds=new.seconds)
        sides = {Role.GOOD: alike, Role.NEW: new}
        found: dict[str, list[Pair]] = {}
        # Both, so that both problems are reported.
        problems = [self._prove(role, side) for role, side in sides.items()]
        if any(problems):
            return found
        # A process may have its own luck, as with where its memory lies: what runs in two gets new ones in every pair.
        fresh = fresh or good.place != new.place
        if renew:
            for run in self._runs.values():
                run.end_process()
        failures = 0
        for number in range(begin, begin + pairs):
            order = list(sides) if number % 2 == 0 else list(sides)[::-1]
            turns: dict[Role, Turn] = {}
            for role in order:
                turns[role] = self._turn(role, sides[role], number, inferences, full=numerics, fresh=fresh)
                if turns[role].failure:
                    failures += 1
                    break
            else:
                _add(found, number - begin, turns[Role.GOOD], turns[Role.NEW])
            if failures >= _MOST_FAILURES:
                break
        self._require_lease()
        for measured in found.values():
            add_pairs(measured, pairs, ())
        return found

    def problems(self, good: Side, new: Side, *, since: int = 0) -> tuple[str, ...]:
        """Return why pairs of these sides are missing: of their first turns, and of those from number `since` on."""
        found = [
            f"{role}: {self._proven[side.key]}"
            for role, side in zip(Role, (good, new), strict=True)
            if self._proven.get(side.key)
        ]
        found += [f"{turn.role}: {turn.failure}" for turn in self.turns[since:] if turn.failure and turn.pair >= 0]
        return tuple(dict.fromkeys(found))

    def _prove(self, role: Role, side: Side) -> str:
        """Return why a side cannot be measured, empty when it can; it is run and judged once, and warm after that."""
        if side.key not in self._proven:
            failure = self._turn(role, side, -1, 1, full=True).failure
            # As in a run, a job that ends the runner is tried once more.
            self._proven[side.key] = failure and self._turn(role, side, -1, 1, full=True).failure
        return self._proven[side.key]

    def _turn(self, role: Role, side: Side, pair: int, inferences: int, *, full: bool, fresh: bool = False) -> Turn:
        runtime = side.runtime or self.runtime
        try:
            started_ms, measured, failure = self._run(side, runtime, inferences, full=full, fresh=fresh)
        except InfraError as error:
            self._recover(runtime, error)
            started_ms, measured, failure = self._run(side, runtime, inferences, full=full, fresh=fresh)
        key, serial = side.bundle.manifest.key, self.device.serial
        self.turns.append(Turn(role, pair, key, runtime.digest, serial, started_ms, measured, failure))
        return self.turns[-1]

    def _recover(self, runtime: Runtime, error: InfraError) -> None:
        """Begin anew on a device that may have been away: that is no reason to measure all again. Raises `error`."""
        from farm.devices.recovery import Step, recover

        if (run := self._runs.pop(runtime.digest, None)) is not None:
            run.close()
        # A reboot would leave it cold.
        if not recover(self.device, max_step=Step.RESTART).ok:
            raise error
        logger.warning("once more: %s", error)

    def _run(
        self, side: Side, runtime: Runtime, inferences: int, *, full: bool, fresh: bool
    ) -> tuple[int, tuple[Measurement, ...], str]:
        """Return the begin of a turn, its measurements, and the reason of its failure. Raises InfraError."""
        self._count += 1
        folder = self._acquirer.folder / "raw" / str(self._count)
        run = self._device_run(runtime)
        options = RunnerOptions(
            iterations=1 if side.heap else inferences,
            warm_up=0 if side.heap else _WARM_UP,
            timeout_s=_TURN_SECONDS,
            flags=run.flags(side.job.target, None if side.heap else side.profile),
            outputs=full,
            repeats=side.job.case.deterministic is True,
            heap=side.heap,
            seconds=side.seconds,
        )
        if runtime.one_shot:
            options = self._reduced(options, side, runtime)
        raw = run.run(side.job.id, side.bundle, folder, options, alone=fresh or side.heap)
        if full:
            # A side's own runtime may come from an older farm.
            attempt = run.judge(side.job, side.bundle, raw, any_runner=side.runtime is not None)
            self.judged[side.key] = attempt
            self.outputs[side.key] = _output_hashes(raw, side.bundle)
            measured = _judged(attempt)
        else:
            measured = _timed(side, raw)
        shutil.rmtree(folder, ignore_errors=True)
        return (raw.started_ms, *measured)

    def require_inferences(self, side: Side) -> None:
        """Raise UsageError if the user named more inferences per turn than a side's runner can make."""
        manifest, runtime = side.bundle.manifest, side.runtime or self.runtime
        times, named = self._least_inferences + _WARM_UP, f"--inferences and {_WARM_UP} to warm up"
        problem = too_many(runtime.runner, manifest.samples, len(manifest.outputs), times, named)
        if problem and self._least_inferences and runtime.one_shot and not side.heap:
            raise UsageError(f"{side.job.id}: {problem}")

    def _reduced(self, options: RunnerOptions, side: Side, runtime: Runtime) -> RunnerOptions:
        """Return options with at most the inferences that `runtime` can make; a reduction is logged once."""
        made = reduced(options, side.bundle.manifest)
        if made.iterations < options.iterations:
            self.require_inferences(side)
        if made != options and side.key not in self._logged:
            self._logged.add(side.key)
            why = f"{runtime.runner} writes the outputs of each"
            logger.info("%s: %s inferences a turn, not %s: %s", side.job.id, made.iterations, options.iterations, why)
        return made

    def _device_run(self, runtime: Runtime) -> DeviceRun:
        """Return what runs programs with `runtime`, which stays up: a runner each."""
        if runtime.digest not in self._runs:
            takeover = not self._runs and self.fence is not None
            name = f"{self._acquirer.folder.name}.{self._count}"
            run = DeviceRun(self.device, runtime, name, takeover=takeover, gate=self._gate)
            self._runs[runtime.digest] = self._open.enter_context(run)
        return self._runs[runtime.digest]

    def _require_lease(self) -> None:
        """Raise LeaseLostError if another user may have used the device meanwhile."""
        fences = {lease.device: lease.fence for lease in self._store.leases.all() if lease.token}
        if self.fence is not None and fences.get(self.fence[0]) != self.fence[1]:
            raise LeaseLostError(f"the lease of {self.device.serial} was lost meanwhile: measure again")


def _output_hashes(raw: RawResult, bundle: Bundle) -> tuple[str, ...]:
    """Return the SHA-256 of each output file of an execution; none where one is missing."""
    manifest = bundle.manifest
    paths = [raw.output(sample, index) for sample in range(manifest.samples) for index in range(len(manifest.outputs))]
    return tuple(map(sha256_of, paths)) if all(path.is_file() for path in paths) else ()


def _judged(attempt: Attempt) -> tuple[tuple[Measurement, ...], str]:
    """Return the measurements of a turn with its figures, or the reason of its failure. Raises InfraError."""
    # Skipped is a heap that cannot be measured.
    if attempt.verdict in {Verdict.INFRA, Verdict.SKIPPED}:
        raise InfraError(attempt.reason)
    if attempt.verdict is Verdict.FAILED and not attempt.known_issue:
        return (), f"{attempt.stage}: {attempt.reason}"
    return tuple(one for one in attempt.measurements if not one.exact), ""


def _timed(side: Side, raw: RawResult) -> tuple[tuple[Measurement, ...], str]:
    """Return the times, or the heap, of a turn without outputs, or why it failed. Raises InfraError."""
    report = outcome(raw)
    if isinstance(report, Ending):
        if report.verdict is Verdict.INFRA:
            raise InfraError(report.reason)
        return (), f"{report.stage}: {report.reason}"
    if side.heap:
        return heap_measurements(read_heaps(raw)), ""
    generation = side.bundle.manifest.generation
    if generation is not None:
        if problem := report_problem(generation, report):
            raise InfraError(f"{RESULT_FILE} is refused: {problem}")
        return (*time_measurements(report), *rate_measurements(generation, report)), ""
    profile = read_profile(raw.folder, report, side.bundle.manifest.delegates)
    return (*time_measurements(report), *profile.measurements), ""


def _add(found: dict[str, list[Pair]], place: int, good: Turn, new: Turn) -> None:
    """Add a pair, at its place, to every metric that both sides have."""
    samples = {one.metric: one.samples for one in new.measurements}
    for one in good.measurements:
        if one.metric in samples:
            add_pairs(found.setdefault(one.metric, []), place, [(one.samples, samples[one.metric])])
