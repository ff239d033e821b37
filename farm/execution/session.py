"""Bundle + Device -> RawResult: stage the files, run the runner, collect what it left. No judgement.

A runner process stays up as long as jobs want the same backend options, which are global to a process; a job that ends
it, or that exceeds its time, costs one start.
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from farm.build.bundle import MODEL
from farm.devices.text import clean_text
from farm.errors import DeviceError
from farm.execution.objects import DEVICE_ROOT, SESSION_PREFIX, ObjectStore
from farm.execution.raw import DEBUG_FILE, ETDUMP_FILE, HEAP_FILE, HEAP_LIMIT, RESULT_FILE
from farm.execution.result import Execution
from farm.execution.runner_process import RunnerProcess
from farm.execution.workspace import ANCHOR, INPUT_LIST, OUTPUTS, Workspace, job_layout, object_hashes, runtime_layout

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from farm.build.bundle import Bundle
    from farm.devices.transport import Completed, Transport
    from farm.execution.raw import RawResult
    from farm.execution.runner_process import Ending
    from farm.runtime.runtime import Runtime

# An ETDump of a whole model with per-operator events is a few MB.
_ETDUMP_BYTES = 256 << 20
# Intermediate outputs of a whole model: the runner takes memory for them as they come.
_DEBUG_BYTES = 1 << 30
_DEBUG_FLAGS = {
    "dump_intermediate_outputs": "true",
    "debug_output_path": DEBUG_FILE,
    "debug_buffer_size": str(_DEBUG_BYTES),
}
_SHELL_SECONDS = 30.0
# What the runner, which minds the time itself, may take to say that it is over.
_GRACE_SECONDS = 10.0
# A process that ends before it begins with a job is started again so often.
_STARTS = 2
# What is pushed ahead for a whole run: another device may turn out to run some of it.
_BATCH_BYTES = 32 << 20
_SMALL_OBJECT_BYTES = 1 << 20
# ExecuTorch 1.5's QNN library keeps 1.5 KB of every program that was loaded: a process gives them back by its end.
_JOBS_OF_A_PROCESS = 2000
_NO_FILE = 3
# Workspaces that are removed at a time.
_SWEEP = 16
# Where a damaged file on the device would show.
_FILE_STAGES = ("load", "inputs")


@dataclass(frozen=True)
class RunnerOptions:
    """How often the runner executes each sample, and its backend options."""

    iterations: int = 3
    warm_up: int = 1
    timeout_s: float = 300.0
    flags: Mapping[str, str] = field(default_factory=dict)
    etdump: bool = False
    """Bring an ETDump although no flag asks for a profile: what was compiled in is in it."""
    debug: bool = False
    """Bring intermediate outputs, of a program that was compiled to write them, as DEBUG_FILE."""
    heap: bool = False
    """Measure the DSP's heap, as HEAP_FILE: for `execute_alone` only, as it takes a process of its own."""

    @property
    def profiles(self) -> bool:
        """Whether there is anything that only an ETDump tells."""
        return self.etdump or self.debug or self.flags.get("profile_level", "0") != "0"

    @property
    def process_flags(self) -> dict[str, str]:
        """Flags that hold for a whole process of the runner."""
        if not self.heap:
            return dict(self.flags)
        # ExecuTorch 1.5 looks at the heap only where it profiles. The path is in the workspace of the job.
        return {**self.flags, "profile_level": "1", "heap_profiling_path": HEAP_FILE}


class DeviceSession:
    """What one worker does on one device: runtime and bundles are staged once, every execution has its own workspace.

    `stage` may be called in another thread than the rest.
    """

    def __init__(self, transport: Transport, runtime: Runtime, run_id: str, serial: str) -> None:
        self._transport, self._runtime, self._serial = transport, runtime, serial
        # With the process id, as a worker that replaces one that died must not meet what that left.
        self._folder = DEVICE_ROOT / f"{SESSION_PREFIX}{run_id}-{os.getpid()}"
        self._runtime_folder = self._folder / "runtime"
        self._objects = ObjectStore(transport, self._folder, self._sweep)
        self._staging = threading.Lock()
        self._count = 0
        self._done: list[PurePosixPath] = []
        self._anchor: Bundle | None = None
        self._runtime_staged = False
        self._runner: RunnerProcess | None = None
        self._runner_flags: dict[str, str] = {}

    @property
    def serial(self) -> str:
        """The device's."""
        return self._serial

    @property
    def pushed_bytes(self) -> int:
        """Bytes of objects (runtime, models, large inputs) that were pushed so far."""
        return self._objects.pushed_bytes

    def keep_loaded(self, anchor: Bundle) -> None:
        """Keep the program of `anchor`, which is that of no job, loaded in every runner from now on."""
        self._anchor = anchor
        self._runtime_staged = False

    def prepare(self, bundles: Iterable[Bundle], options: RunnerOptions | None = None) -> None:
        """Find out in one round trip what the device has of the runtime and of `bundles`, and whether it is whole.

        With `options` the runner is started, so that QNN starts while files are pushed. Small objects that the device
        lacks are pushed together, as many as one batch takes: each alone costs several times as much. Raises
        DeviceError. No job may run meanwhile.
        """
        wanted: dict[str, Path] = {}
        for bundle in bundles:
            wanted |= job_layout(bundle, self._folder).objects
        small: dict[str, Path] = {}
        room = _BATCH_BYTES
        for sha256, path in wanted.items():
            room -= (size := path.stat().st_size)
            if size <= _SMALL_OBJECT_BYTES and room > 0:
                small[sha256] = path
        with self._staging:
            self._objects.survey([*self._runtime.hashes.values(), *wanted])
            self._stage_runtime()
            if options is not None:
                self._start_runner(options)
            self._objects.ensure(small)

    def stage(self, bundle: Bundle) -> Workspace:
        """Make a workspace for one execution of `bundle`. Never raises for what the device does."""
        started = time.perf_counter()
        with self._staging:
            self._count += 1
            folder = self._folder / str(self._count)
            error = ""
            try:
                if len(self._done) >= _SWEEP:
                    self._sweep()
                self._stage_runtime()
                layout = job_layout(bundle, folder)
                self._objects.ensure(layout.objects)
                self._transport.push(layout.files)
            except DeviceError as problem:
                error = str(problem)
        return Workspace(bundle, folder, time.perf_counter() - started, error)

    def execute(self, job_id: str, workspace: Workspace, folder: Path, options: RunnerOptions) -> RawResult:
        """Run a staged bundle in the session's runner and leave what came back in the local `folder`, which is made.

        Never raises for what the device does: a DeviceError becomes `error` and `error_stage` of the result.
        """
        execution = Execution(job_id, self._serial, workspace, folder)
        execution.heap = options.heap
        execution.simulated = self._runtime.kind == "simulator"
        execution.step("execute", lambda: self._execute(execution, options))
        execution.step("pull", lambda: self._collect(execution, options))
        if options.heap:
            execution.step("pull", lambda: self._collect_heap(execution))
        self._done.append(execution.workspace.folder)
        return execution.result()

    def execute_alone(self, job_id: str, workspace: Workspace, folder: Path, options: RunnerOptions) -> RawResult:
        """Do the same in a process that begins anew and runs nothing else."""
        self._hang_up()
        anchor, self._anchor = self._anchor, None
        try:
            return self.execute(job_id, workspace, folder, options)
        finally:
            self._hang_up()
            self._anchor = anchor

    def run_tool(
        self,
        files: Mapping[str, Path | bytes],
        argv: Sequence[str],
        made: Mapping[str, Path],
        *,
        timeout_s: float,
        max_bytes: int,
    ) -> Completed:
        """Run another program than the runner, with `files` beside it and the runtime's libraries.

        What it made, where it ends with 0, is left in local files. Raises DeviceError.
        """
        self._hang_up()
        with self._staging:
            self._count += 1
            folder = self._folder / str(self._count)
            self._stage_runtime()
            self._transport.push({folder / name: content for name, content in files.items()})
        libraries = f"{folder}:{self._runtime_folder}"
        done = self._transport.run(
            argv, cwd=folder, env={"LD_LIBRARY_PATH": libraries, "ADSP_LIBRARY_PATH": libraries}, timeout_s=timeout_s
        )
        if done.code == 0:
            self._transport.pull({folder / name: path for name, path in made.items()}, max_bytes=max_bytes)
        self._done.append(folder)
        return done

    def close(self) -> None:
        """End the runner and remove what this session made on the device. A device that does not answer keeps it."""
        self._hang_up()
        try:
            with self._staging:
                self._remove([self._folder])
        except DeviceError:
            return
        finally:
            self._transport.close()

    def _execute(self, execution: Execution, options: RunnerOptions) -> None:
        execution.ending = self._run(execution.workspace, options)
        bundle = execution.workspace.bundle
        if _may_be_damage(execution.ending) and self._damaged(bundle):
            self._hang_up()
            execution.notes.append("files on the device were damaged; they were replaced and the job run again")
            self._done.append(execution.workspace.folder)
            execution.workspace = self.stage(bundle)
            if execution.workspace.error:
                raise DeviceError(self._serial, execution.workspace.error)
            execution.ending = self._run(execution.workspace, options)
        if execution.process_ended:
            self._hang_up()

    def _run(self, workspace: Workspace, options: RunnerOptions) -> Ending:
        words = _words(
            {
                "working_folder": workspace.folder.name,
                "model_path": MODEL,
                "input_list_path": INPUT_LIST,
                "output_folder_path": OUTPUTS,
                "iteration": str(options.iterations),
                "warm_up": str(options.warm_up),
                "timeout_ms": str(round(options.timeout_s * 1000)),
                **({"etdump_path": ETDUMP_FILE} if options.profiles else {}),
                **(_DEBUG_FLAGS if options.debug else {}),
            }
        )
        try:
            for _ in range(_STARTS):
                runner = self._start_runner(options)
                ending = runner.run(words, options.timeout_s + _GRACE_SECONDS)
                if ending.answer or ending.began:
                    return ending
                # It ended between two jobs: this one is not to blame.
                self._hang_up()
        except DeviceError:
            self._hang_up()
            raise
        problem = "the runner takes no job: it does not answer" if ending.code is None else "the runner did not start"
        raise DeviceError(
            self._serial, problem, argv=[self._runtime.runner, "--serve"], code=ending.code, stderr=ending.stderr
        )

    def _start_runner(self, options: RunnerOptions) -> RunnerProcess:
        flags = options.process_flags
        if self._anchor is not None:
            flags["keep_loaded"] = str(self._runtime_folder / ANCHOR)
        if self._runner is None or self._runner_flags != flags or self._runner.jobs >= _JOBS_OF_A_PROCESS:
            self._hang_up()
            folder = str(self._runtime_folder)
            self._runner = RunnerProcess(
                self._transport,
                [str(self._runtime_folder / self._runtime.runner), "--serve", *_words(flags)],
                cwd=self._folder,
                env={"LD_LIBRARY_PATH": folder, "ADSP_LIBRARY_PATH": folder},
            )
            self._runner_flags = flags
        return self._runner

    def _hang_up(self) -> None:
        runner, self._runner = self._runner, None
        if runner is not None:
            runner.close()

    def _stage_runtime(self) -> None:
        if self._runtime_staged:
            return
        layout = runtime_layout(self._runtime, self._runtime_folder, self._anchor)
        self._objects.ensure(layout.objects)
        self._transport.push(layout.files)
        # Where it was built or unpacked it may not have been executable.
        runner = self._objects.path(self._runtime.hashes[self._runtime.runner])
        self._shell(["chmod", "755", str(runner)])
        self._runtime_staged = True

    def _damaged(self, bundle: Bundle) -> bool:
        """Hash again what the job used; damaged objects are gone from the device after that."""
        with self._staging:
            if self._objects.verify([*self._runtime.hashes.values(), *object_hashes(bundle)]):
                return False
            self._runtime_staged = False
            return True

    def _collect(self, execution: Execution, options: RunnerOptions) -> None:
        ending, workspace = execution.ending, execution.workspace
        if ending is None or ending.answer is None:
            return
        (execution.folder / RESULT_FILE).write_bytes(ending.line)
        if not ending.answer.ok:
            return
        # Names that we chose and sizes that we know, no more of them than the runner says there are.
        manifest, answer = workspace.bundle.manifest, ending.answer
        sizes = {
            PurePosixPath(OUTPUTS, f"output_{sample}_{index}.raw"): spec.nbytes + 1
            for sample in range(min(manifest.samples, len(answer.inferences)))
            for index, spec in enumerate(manifest.outputs[: len(answer.outputs)])
        }
        if options.profiles:
            sizes[PurePosixPath(ETDUMP_FILE)] = _ETDUMP_BYTES
        if options.debug:
            sizes[PurePosixPath(DEBUG_FILE)] = _DEBUG_BYTES
        self._transport.pull(
            {workspace.folder / name: execution.folder / name.name for name in sizes},
            max_bytes={workspace.folder / name: size for name, size in sizes.items()},
        )

    def _collect_heap(self, execution: Execution) -> None:
        """Bring what there is of the heap's file, also of a job that crashed; none is an answer as well."""
        script = 'if [ -e "$1" ]; then exec head -c "$2" -- "$1"; fi; exit "$3"'
        done = self._transport.run(
            ["sh", "-c", script, "sh", HEAP_FILE, str(HEAP_LIMIT + 1), str(_NO_FILE)],
            cwd=execution.workspace.folder,
            timeout_s=_SHELL_SECONDS,
        )
        if done.code == 0:
            (execution.folder / HEAP_FILE).write_bytes(done.stdout)
        elif done.code != _NO_FILE:
            raise DeviceError(
                self._serial, f"{HEAP_FILE} cannot be read", code=done.code, stderr=clean_text(done.stderr)
            )

    def _sweep(self) -> None:
        """Remove the workspaces of executions that are over."""
        done, self._done = self._done, []
        if done:
            self._remove(done)

    def _remove(self, folders: list[PurePosixPath]) -> None:
        self._shell(["rm", "-rf", "--", *map(str, folders)])

    def _shell(self, argv: list[str]) -> None:
        done = self._transport.run(argv, timeout_s=_SHELL_SECONDS)
        if done.code != 0:
            stderr = done.stderr.decode(errors="replace")
            raise DeviceError(self._serial, "staging failed", argv=argv, code=done.code, stderr=stderr)


def _words(flags: Mapping[str, str]) -> list[str]:
    return [f"--{name}={value}" for name, value in flags.items()]


def _may_be_damage(ending: Ending) -> bool:
    """Tell whether an execution ended as it would with a damaged model, input or library. Pure."""
    if ending.answer is None:
        return ending.code is not None
    return ending.answer.error is not None and ending.answer.error.stage in _FILE_STAGES
