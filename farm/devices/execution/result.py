"""Execution in progress that becomes a RawResult, and the pull of its files, whose names farm chose."""

from __future__ import annotations

import time
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Literal

from farm.base.errors import DeviceError
from farm.devices.execution.content_store import OUTPUTS, Workspace
from farm.devices.execution.liveness import LostError, cause_of, staging_error
from farm.devices.execution.raw import (
    DEBUG_BYTES,
    DEBUG_FILE,
    ETDUMP_FILE,
    HEAP_FILE,
    HEAP_LIMIT,
    RESULT_FILE,
    TOKENS_FILE,
    TOKENS_LIMIT,
    ErrorCause,
    RawResult,
    RunnerOptions,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from farm.devices.execution.runner_process import RunnerEnding
    from farm.devices.transport import Transport

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


def collect_heap(transport: Transport, execution: Execution) -> None:
    """Pull the heap file if it exists, also of a crashed job."""
    _collect_text(transport, execution, HEAP_FILE, HEAP_LIMIT)


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
