"""Bundle + device -> RawResult: staging, execution, collection of files. No judgement.

A runner process takes jobs with equal backend options, which are global to a process; a job that ends it, exceeds its
time or is refused costs one start. ExecuTorch's own runners have no session: each job has its own process
(`runner_process.py`).
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Literal

from farm.base.errors import DeviceError, DeviceSpaceError
from farm.builds.bundles.bundle import Bundle
from farm.builds.runtime.runtime import LLAMA_RUNNER, Runtime
from farm.devices.execution.content_store import (
    ANCHOR,
    OBJECTS,
    OUTPUTS,
    SESSION_PREFIX,
    SMALL_BYTES,
    ContentStore,
    Layout,
    Workspace,
    differing,
    expected_content,
    hashes_of,
    job_layout,
    library_paths,
    options_for,
    packages_folder,
    program_and_profile,
    runtime_layout,
    seconds_of,
    session_flags,
)
from farm.devices.execution.liveness import Liveness, LostError, StagingError, cause_of, staging_error, take_over
from farm.devices.execution.raw import (
    DEBUG_BYTES,
    DEBUG_FILE,
    ETDUMP_FILE,
    HEAP_FILE,
    HEAP_LIMIT,
    HEAP_PROCESS,
    RESULT_FILE,
    TOKENS_FILE,
    TOKENS_LIMIT,
    ErrorCause,
    RawResult,
    RunnerOptions,
)
from farm.devices.execution.runner_process import OneShot, RunnerEnding, RunnerProcess, reduced, run_once
from farm.devices.facts import PRINT_BOOT
from farm.devices.transport import Completed, Transport

# Execution in progress that becomes a RawResult, and the pull of its files, whose names farm chose.


_Stage = Literal["", "push", "execute", "pull"]

# An ETDump of a whole model with per-operator events is a few MB.
_ETDUMP_BYTES = 256 << 20
_SHELL_SECONDS = 30.0
_NO_FILE = 3


class Execution:
    """Execution in progress."""

    def __init__(self, job_id: str, serial: str, workspace: Workspace, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        # Health checks, and jobs after trouble of this machine, use a folder again. Files of the earlier execution
        # would be judged as results.
        for path in folder.iterdir():
            if not path.is_dir():
                path.unlink()
        self.workspace, self.folder = workspace, folder
        self.ending: RunnerEnding | None = None
        self.notes: list[str] = []
        self._job_id, self._serial = job_id, serial
        self._started_ms = time.time_ns() // 1_000_000
        self._seconds = {"push": workspace.seconds, "execute": 0.0, "pull": 0.0}
        self._error = workspace.error
        self._error_stage: _Stage = "push" if workspace.error else ""
        self.cause: ErrorCause = workspace.cause
        """Known cause of the failure."""
        self._was_asked = False

    @property
    def process_ended(self) -> bool:
        """True if the runner's process ended, or has to end, with this execution."""
        ending = self.ending
        return ending is None or ending.answer is None or ending.answer.last or ending.code is not None

    @property
    def refused(self) -> bool:
        """True after an answer with an error, which ends the trust in the runner's DSP session."""
        return self.ending is not None and self.ending.answer is not None and not self.ending.answer.ok

    def step(self, stage: _Stage, action: Callable[[], None]) -> None:
        """Do one step and take its time; none after the first that raised a DeviceError."""
        if self._error:
            return
        started = time.perf_counter()
        try:
            action()
        except DeviceError as problem:
            self._error, self._error_stage, self.cause = str(problem), stage, cause_of(problem)
            self._was_asked = isinstance(problem, LostError)
        self._seconds[stage] += time.perf_counter() - started

    def fail(self, workspace: Workspace) -> None:
        """Let it end with the error of a workspace that could not be made anew."""
        self._error, self._error_stage, self.cause = workspace.error, "execute", workspace.cause

    def resolve(self, demand: Callable[[], None]) -> None:
        """Ask the device after a failure: `demand` raises DeviceError for an absent or rebooted device.

        A failure while the device was absent has that cause; a failure with the device present is the connection's.
        """
        ending = self.ending
        unsure = not self._was_asked and self.cause in {"", "connection", "gone"}
        if not (unsure if self._error else ending is not None and ending.answer is None):
            return
        try:
            demand()
        except DeviceError as problem:
            reason = str(problem).removeprefix(f"{self._serial}: ")
            code = ending.code if ending else None
            how = "the runner did not end in its time" if code is None else f"the runner ended with exit code {code}"
            self._error = f"{self._error}; {reason}" if self._error else f"{problem} ({how})"
            self._error_stage, self.cause = self._error_stage or "execute", cause_of(problem)
        else:
            if self.cause == "gone":
                self.cause = "connection"

    def result(self, *, executions: int, heap: bool, simulated: bool) -> RawResult:
        """Return all that is known; arguments as in RawResult."""
        ending = self.ending
        code = ending.code if ending else None
        return RawResult(
            job_id=self._job_id,
            serial=self._serial,
            workspace=self.workspace.folder,
            folder=self.folder,
            started_ms=self._started_ms,
            exit_code=ending.answer.exit_code if ending and ending.answer else code,
            stderr=ending.stderr if ending else "",
            push_seconds=self._seconds["push"],
            run_seconds=self._seconds["execute"],
            pull_seconds=self._seconds["pull"],
            timed_out=bool(ending and not ending.answer and code is None and not self._error),
            process_ended=not self._error and self.process_ended,
            refused=not self._error and self.refused,
            executions=executions,
            heap=heap,
            simulated=simulated,
            notes=tuple(self.notes),
            error=self._error,
            error_stage=self._error_stage,
            error_cause=self.cause,
        )


def collect(transport: Transport, execution: Execution, options: RunnerOptions) -> None:
    """Leave the answer of an execution that answered, and what else is wanted, in its folder. Raises DeviceError."""
    ending, workspace = execution.ending, execution.workspace
    if ending is None or ending.answer is None:
        return
    (execution.folder / RESULT_FILE).write_bytes(ending.line)
    if not ending.answer.ok:
        return
    # The runner's answer bounds the number of outputs.
    manifest, answer = workspace.bundle.manifest, ending.answer
    sizes = {
        PurePosixPath(OUTPUTS, f"output_{sample}_{index}.raw"): spec.nbytes + 1
        for sample in range(min(manifest.samples, len(answer.inferences)) if options.outputs else 0)
        for index, spec in enumerate(manifest.outputs[: len(answer.outputs)])
    }
    if options.profiles:
        sizes[PurePosixPath(ETDUMP_FILE)] = _ETDUMP_BYTES
    if options.debug:
        sizes[PurePosixPath(DEBUG_FILE)] = DEBUG_BYTES
    if not sizes:
        return
    transport.pull(
        {workspace.folder / name: execution.folder / name.name for name in sizes},
        max_bytes={workspace.folder / name: size for name, size in sizes.items()},
    )


def collect_tokens(transport: Transport, execution: Execution) -> None:
    """Bring the tokens that were chosen before a job crashed, hung or failed; none is an answer as well."""
    ending = execution.ending
    if ending is not None and (ending.answer is None or not ending.answer.ok):
        _collect_text(transport, execution, TOKENS_FILE, TOKENS_LIMIT)
        tokens = execution.folder / TOKENS_FILE
        if tokens.is_file():
            # A runner that ended early left room for more.
            tokens.write_bytes(tokens.read_bytes().rstrip(b"\n") + b"\n")


def _collect_text(transport: Transport, execution: Execution, name: str, limit: int) -> None:
    script = 'if [ -e "$1" ]; then exec head -c "$2" -- "$1"; fi; exit "$3"'
    done = transport.run(
        ["sh", "-c", script, "sh", name, str(limit + 1), str(_NO_FILE)],
        cwd=execution.workspace.folder,
        timeout_s=_SHELL_SECONDS,
    )
    if done.code == 0:
        (execution.folder / name).write_bytes(done.stdout)
    elif done.code != _NO_FILE:
        raise staging_error(transport.serial, f"{name} cannot be read", done)


# Bundle + device -> RawResult: staging, execution, collection of files. No judgement.
#
# A runner process takes jobs with equal backend options, which are global to a process; a job that ends it, exceeds
# its time or is refused costs one start. ExecuTorch's own runners have no session: each job has its own process
# (`runner_process.py`).


# Seconds for a device that did not answer before.
_LOST_SECONDS = 3.0
# Seconds beyond the limit for the runner's answer, as the runner checks the time itself.
_GRACE_SECONDS = 10.0
# Most starts of a process that ends before its job begins.
_STARTS = 2
# Bytes pushed ahead for a run: another device may get some of its jobs.
_BATCH_BYTES = 32 << 20
_SMALL_OBJECT_BYTES = 1 << 20
# ExecuTorch 1.5's QNN library keeps 1.5 KB of every program that was loaded: a process gives them back by its end.
_JOBS_OF_A_PROCESS = 2000
# Workspaces that are removed at a time, and the bytes of their small inputs and outputs; with a file in each that is as
# large as its program, one workspace.
_SWEEP = 32
_SWEEP_BYTES = 64 << 20
_LARGE_FILE = "packed_cache_path"
# Stages in which a damaged file on the device becomes visible.
_FILE_STAGES = ("load", "inputs")


class DeviceSession:
    """Session of one worker on one device: runtime and bundles are staged once, each execution has its own workspace.

    `stage` may be called in another thread than the rest.
    """

    def __init__(
        self, transport: Transport, runtime: Runtime, run_id: str, serial: str, *, takeover: bool = False
    ) -> None:
        """`takeover`: end and remove what other sessions left on the device; for the holder of its lease."""
        self._transport, self._runtime, self.serial = transport, runtime, serial
        # The process id keeps a new worker away from the files of a dead one.
        self._folder = transport.storage / f"{SESSION_PREFIX}{run_id}-{os.getpid()}"
        self.runtime_folder = self._folder / "runtime"
        """Folder of the staged runtime on the device."""
        self._objects = ContentStore(transport, self._folder, self._sweep)
        self._liveness = Liveness(transport)
        self._takeover = takeover
        self._last: Execution | None = None
        self._staging = threading.Lock()
        self._count = 0
        self._done: list[PurePosixPath] = []
        self._done_bytes = 0
        self._anchor: Bundle | None = None
        self._runtime_staged = False
        self._runner: RunnerProcess | None = None
        self._runner_flags: dict[str, str] = {}
        self._runner_env: dict[str, str] = {}
        self._aborted = threading.Event()

    @property
    def pushed_bytes(self) -> int:
        """Bytes of objects (runtime, models, large inputs) that were pushed so far."""
        return self._objects.pushed_bytes

    def keep_loaded(self, anchor: Bundle) -> None:
        """Keep the program of `anchor`, which belongs to no job, loaded in every later runner."""
        self._anchor = anchor
        self._runtime_staged = False

    def prepare(self, bundles: Iterable[Bundle], *, share: int | None = None) -> None:
        """Survey the device's objects of runtime and `bundles` in at most one round trip, damage included.

        Small missing objects of the first `share` bundles, or of all, are pushed as one batch, which costs a fraction
        of single pushes. Raises DeviceError. No job may run meanwhile.
        """
        objects = [job_layout(bundle, self._folder, self._runtime.kind).objects for bundle in bundles]
        wanted = {sha256 for one in objects for sha256 in one}
        small: dict[str, Path] = {}
        room = _BATCH_BYTES
        for sha256, path in dict(item for one in objects[:share] for item in one.items()).items():
            room -= (size := path.stat().st_size)
            if size <= _SMALL_OBJECT_BYTES and room > 0:
                small[sha256] = path
        with self._staging:
            self._begin()
            self._objects.look_for([*self._runtime.hashes.values(), *wanted])
            self._stage_runtime()
            self._objects.ensure(small)

    def stage(self, bundle: Bundle) -> Workspace:
        """Make a workspace for one execution of `bundle`. Device failures become its `error`; never raises."""
        started = time.perf_counter()
        with self._staging:
            self._count += 1
            folder = self._folder / str(self._count)
            error = ""
            cause: ErrorCause = ""
            try:
                most = 1 if _LARGE_FILE in self._runner_flags else _SWEEP
                if len(self._done) >= most or self._done_bytes > _SWEEP_BYTES:
                    self._sweep()
                self._stage_runtime()
                self._place(job_layout(bundle, folder, self._runtime.kind))
            except DeviceError as problem:
                error, cause = str(problem), cause_of(problem)
        return Workspace(bundle, folder, time.perf_counter() - started, error, cause)

    def execute(self, job_id: str, workspace: Workspace, folder: Path, options: RunnerOptions) -> RawResult:
        """Run a staged bundle in the session's runner and pull its files into the local `folder`, which is made.

        A DeviceError becomes `error` and `error_stage` of the result; never raises for the device.
        """
        manifest = workspace.bundle.manifest
        wanted, options = options, options_for(manifest, options)
        if self._last is not None and self._last.workspace.folder != workspace.folder:
            self._leave(self._last.workspace)
        self._last = execution = Execution(job_id, self.serial, workspace, folder)
        if self._runtime.one_shot and options.reducible:
            asked, options = options, reduced(options, manifest)
            if options != asked:
                execution.notes.append(
                    f"{asked.iterations + asked.warm_up} executions of each sample were due, and "
                    f"{options.iterations + options.warm_up} made: {self._runtime.runner} writes the outputs of each"
                )
        if wanted.etdump and not options.etdump:
            execution.notes.append("no profile: a program that generates has none")
        execution.step("execute", lambda: self._execute(execution, options))
        execution.step("pull", lambda: collect(self._transport, execution, options))
        if options.heap:
            # If it exists, also of a crashed job.
            execution.step("pull", lambda: _collect_text(self._transport, execution, HEAP_FILE, HEAP_LIMIT))
        if manifest.generation is not None:
            execution.step("pull", lambda: collect_tokens(self._transport, execution))
        execution.resolve(self._liveness.demand)
        executions = 0 if manifest.generation is not None else options.warm_up + options.iterations
        return execution.result(executions=executions, heap=options.heap, simulated=self._runtime.kind == "simulator")

    def execute_alone(self, job_id: str, workspace: Workspace, folder: Path, options: RunnerOptions) -> RawResult:
        """Do the same in a process that begins anew and runs nothing else; the heap in a process for each iteration."""
        self.end_process()
        anchor, self._anchor = self._anchor, None
        try:
            if options.heap:
                processes, options = options.iterations, replace(options, iterations=1)
                for number in range(1, processes):
                    raw = self.execute(job_id, workspace, folder / f"{HEAP_PROCESS}{number}", options)
                    if raw.error or raw.exit_code != 0:
                        return raw
                    self.end_process()
            return self.execute(job_id, workspace, folder, options)
        finally:
            self.end_process()
            self._anchor = anchor

    def abort(self) -> None:
        """End executions at once with an error, also in another thread."""
        self._aborted.set()

    def find_damage(self, bundle: Bundle, raw: RawResult) -> str:
        """Return the names of damaged files of an execution of `bundle`; empty for none.

        The function hashes the files of a recent execution with wrong numbers: its files on the device and the outputs
        in its local folder. An unanswering device counts as damage; never raises. Damaged objects are pushed again for
        the next execution. No job may run meanwhile.
        """
        try:
            # Not the runtime: all jobs would be wrong, and it is large.
            outputs = hashes_of(raw.folder.glob("output_*.raw"))
            wrong = self._damaged(bundle, raw.workspace, (), outputs)
        except DeviceError as problem:
            return f"its files could not be checked for damage: {problem}"
        if spoilt := [name for name in wrong if name not in outputs]:
            return f"files on the device differed from the pushed ones ({', '.join(spoilt[:3])})"
        return f"{', '.join(wrong[:3])} did not arrive as the device has it" if wrong else ""

    def run_tool(
        self,
        files: Mapping[str, Path | bytes],
        argv: Sequence[str],
        made: Mapping[str, Path],
        *,
        timeout_s: float,
        max_bytes: int,
    ) -> Completed:
        """Run a program other than the runner, with `files` beside it and the runtime's libraries.

        With exit code 0 its files are pulled. Raises DeviceError.
        """
        self.end_process()
        with self._staging:
            self._count += 1
            folder = self._folder / str(self._count)
            self._stage_runtime()
            self._transport.push({folder / name: content for name, content in files.items()})
        done = self._transport.run(
            argv, cwd=folder, env=library_paths(folder, self.runtime_folder), timeout_s=timeout_s
        )
        if done.code == 0:
            self._transport.pull({folder / name: path for name, path in made.items()}, max_bytes=max_bytes)
        self._done.append(folder)
        return done

    def close(self, *, free: bool = False) -> None:
        """End the runner and remove the session's files from the device, if the device answers.

        With `free` every object without another session is removed to make room.
        """
        self.end_process()
        is_lost = self._last is not None and self._last.cause == "gone"
        with contextlib.closing(self._transport), contextlib.suppress(DeviceError), self._staging:
            self._remove([self._folder], timeout_s=_LOST_SECONDS if is_lost else _SHELL_SECONDS)
            if free:
                self._objects.free(keep=())

    def _begin(self) -> None:
        """Once: make the device ours."""
        if self._takeover:
            take_over(self._transport, self._folder.name)
            self._takeover = False

    def _place(self, layout: Layout) -> None:
        """Push a folder, and the objects that its links lead to; what no session uses makes room for it, once."""
        self._objects.ensure(layout.objects)
        try:
            self._transport.push(layout.files)
        except DeviceSpaceError:
            if not self._objects.free(keep=layout.objects):
                raise
            self._transport.push(layout.files)

    def _execute(self, execution: Execution, options: RunnerOptions) -> None:
        execution.ending = self._run(execution.workspace, options)
        bundle = execution.workspace.bundle
        if _may_be_damage(execution.ending) and self._damaged(
            bundle, execution.workspace.folder, self._runtime.hashes.values(), {}
        ):
            self.end_process()
            execution.notes.append("files on the device were damaged; they were replaced and the job run again")
            self._leave(execution.workspace)
            execution.ending = None
            execution.workspace = self.stage(bundle)
            if execution.workspace.error:
                execution.fail(execution.workspace)
                return
            execution.ending = self._run(execution.workspace, options)
        if execution.process_ended or execution.refused:
            self.end_process()

    def _run(self, workspace: Workspace, options: RunnerOptions) -> RunnerEnding:
        runtime, demand = self._runtime, self._liveness.demand
        job = OneShot(self._transport, runtime, self.runtime_folder, workspace, options, demand, self._aborted)
        if runtime.runner == LLAMA_RUNNER:
            from farm.devices.execution.llama_runner import run_prompts

            return run_prompts(job)
        flags = program_and_profile(workspace.bundle.manifest, options, runtime.kind)
        if runtime.one_shot:
            return run_once(job, flags)
        words = _words(flags | session_flags(workspace, options))
        try:
            for _ in range(_STARTS):
                runner = self._start_runner(options, packages_folder(workspace.bundle, workspace.folder))
                ending = runner.run(words, seconds_of(options) + _GRACE_SECONDS, demand)
                if ending.answer or ending.began:
                    return ending
                # The runner ended between two jobs, so this job is not the cause.
                self.end_process()
        except DeviceError:
            self.end_process()
            raise
        problem = "the runner takes no job: it does not answer" if ending.code is None else "the runner did not start"
        raise StagingError(
            self.serial, problem, argv=[self._runtime.runner, "--serve"], code=ending.code, stderr=ending.stderr
        )

    def _start_runner(self, options: RunnerOptions, packages: tuple[PurePosixPath, ...] = ()) -> RunnerProcess:
        """Return a runner for a job; one with op packages in the folders `packages` has a process of its own."""
        flags, env = options.process_flags, library_paths(self.runtime_folder, *packages)
        # ExecuTorch 1.5 registers packages when its backend starts, which a program that stays loaded keeps from it.
        if self._anchor is not None and not packages:
            flags["keep_loaded"] = str(self.runtime_folder / ANCHOR)
        known = (self._runner_flags, self._runner_env) == (flags, env)
        if self._runner is None or not known or self._runner.jobs >= _JOBS_OF_A_PROCESS:
            self.end_process()
            self._runner = RunnerProcess(
                self._transport,
                [str(self.runtime_folder / self._runtime.runner), "--serve", *_words(flags)],
                cwd=self._folder,
                env=env,
                aborted=self._aborted,
            )
            self._runner_flags, self._runner_env = flags, env
        return self._runner

    def end_process(self) -> None:
        """End the process of the runner: the next execution begins a new one."""
        runner, self._runner = self._runner, None
        if runner is not None:
            runner.close()

    def _stage_runtime(self) -> None:
        self._begin()
        if self._runtime_staged:
            return
        self._place(runtime_layout(self._runtime, self.runtime_folder, self._anchor))
        # The runner's file may lack the executable bit on this machine.
        runner = self._objects.path(self._runtime.hashes[self._runtime.runner])
        done = self._shell(["sh", "-c", f'chmod 755 -- "$1" || exit\n{PRINT_BOOT}', "sh", str(runner)])
        self._liveness.learn(done.stdout)
        self._runtime_staged = True

    def _damaged(
        self, bundle: Bundle, folder: PurePosixPath, others: Iterable[str], outputs: Mapping[str, str]
    ) -> list[str]:
        """Hash the files of an execution in `folder`, the objects `others` and `outputs`, which have these hashes.

        Return the names of damaged files and changed outputs. Damaged objects are removed from the device.
        """
        layout = job_layout(bundle, folder, self._runtime.kind)
        objects = {f"../../{OBJECTS}/{name}": name for name in (*others, *layout.objects)}
        expected = {**objects, **expected_content(layout.files, folder), **outputs}
        with self._staging:
            try:
                wrong = differing(self._transport, folder, expected)
            except StagingError:
                # The folder may have gone, and the objects with it.
                if self._objects.verify(objects.values()):
                    raise
                lost = True
            else:
                lost = not objects.keys().isdisjoint(wrong)
                if lost:
                    self._objects.verify([objects[name] for name in wrong if name in objects])
            if not lost:
                return wrong
            self._runtime_staged = False
            return ["whole files of the runtime or the job"]

    def _leave(self, workspace: Workspace) -> None:
        """Mark a workspace for the next removal."""
        manifest = workspace.bundle.manifest
        sizes = [spec.nbytes for spec in manifest.outputs]
        sizes += [spec.nbytes for spec in manifest.inputs if spec.nbytes <= SMALL_BYTES]
        self._done.append(workspace.folder)
        self._done_bytes += sum(sizes) * manifest.samples

    def _sweep(self) -> None:
        """Remove the workspaces of executions that are over."""
        done, self._done, self._done_bytes = self._done, [], 0
        if done:
            self._remove(done)

    def _remove(self, folders: list[PurePosixPath], *, timeout_s: float = _SHELL_SECONDS) -> None:
        self._shell(["rm", "-rf", "--", *map(str, folders)], timeout_s=timeout_s)

    def _shell(self, argv: list[str], *, timeout_s: float = _SHELL_SECONDS) -> Completed:
        done = self._transport.run(argv, timeout_s=timeout_s)
        if done.code != 0:
            raise staging_error(self.serial, "staging failed", done, argv)
        return done


def _words(flags: Mapping[str, str]) -> list[str]:
    return [f"--{name}={value}" for name, value in flags.items()]


def _may_be_damage(ending: RunnerEnding) -> bool:
    """Tell whether an execution ended as it would with a damaged model, input or library. Pure."""
    if ending.answer is None:
        return ending.code is not None
    return ending.answer.error is not None and ending.answer.error.stage in _FILE_STAGES
