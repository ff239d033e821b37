"""What is known so far of one execution, on its way to a RawResult."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Literal

from farm.errors import DeviceError
from farm.execution.raw import RawResult
from farm.execution.trouble import LostError, cause_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from farm.execution.raw import ErrorCause
    from farm.execution.runner_process import RunnerEnding
    from farm.execution.workspace import Workspace

_Stage = Literal["push", "execute", "pull"]


class Execution:
    """One execution while it happens."""

    def __init__(self, job_id: str, serial: str, workspace: Workspace, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.workspace, self.folder = workspace, folder
        self.ending: RunnerEnding | None = None
        self.notes: list[str] = []
        self.heap = self.simulated = False
        self._job_id, self._serial = job_id, serial
        self._started_ms = time.time_ns() // 1_000_000
        self._seconds = {"push": workspace.seconds, "execute": 0.0, "pull": 0.0}
        self._error = workspace.error
        self._error_stage: Literal["", "push", "execute", "pull"] = "push" if workspace.error else ""
        self._error_cause: ErrorCause = workspace.cause
        self._asked = False

    @property
    def process_ended(self) -> bool:
        """Whether the runner's process ended, or has to be ended, with this execution."""
        ending = self.ending
        return ending is None or ending.answer is None or ending.answer.last or ending.code is not None

    def step(self, stage: _Stage, action: Callable[[], None]) -> None:
        """Do one step and take its time; none after the first that raised a DeviceError."""
        if self._error:
            return
        started = time.perf_counter()
        try:
            action()
        except DeviceError as problem:
            self._error, self._error_stage, self._error_cause = str(problem), stage, cause_of(problem)
            self._asked = isinstance(problem, LostError)
        self._seconds[stage] += time.perf_counter() - started

    def fail(self, workspace: Workspace) -> None:
        """Let it end with the error of a workspace that could not be made anew."""
        self._error, self._error_stage, self._error_cause = workspace.error, "execute", workspace.cause

    @property
    def cause(self) -> ErrorCause:
        """What kind of trouble there was, as far as it is known."""
        return self._error_cause

    @property
    def in_doubt(self) -> bool:
        """Whether the device has to be asked if it is still there before anybody is blamed."""
        if self._error:
            return not self._asked and self._error_cause in {"", "connection", "gone"}
        return self.ending is not None and self.ending.answer is None

    def resolve(self, demand: Callable[[], None]) -> None:
        """Settle a doubt: `demand` raises a DeviceError for a device that is gone, or has started anew.

        What broke while it was gone is no wonder; what broke although it is there was the connection.
        """
        try:
            demand()
        except DeviceError as problem:
            reason = str(problem).removeprefix(f"{self._serial}: ")
            self._error_cause = cause_of(problem)
            self._error_stage = self._error_stage or "execute"
            self._error = f"{self._error}; {reason}" if self._error else f"{problem} ({self._ended_how()})"
        else:
            if self._error_cause == "gone":
                self._error_cause = "connection"

    def _ended_how(self) -> str:
        code = self.ending.code if self.ending else None
        return "the runner did not end in its time" if code is None else f"the runner ended with exit code {code}"

    def result(self) -> RawResult:
        """Return all of it."""
        ending = self.ending
        code = ending.code if ending else None
        if ending and ending.answer:
            code = ending.answer.exit_code
        return RawResult(
            job_id=self._job_id,
            serial=self._serial,
            workspace=self.workspace.folder,
            folder=self.folder,
            started_ms=self._started_ms,
            exit_code=code,
            stderr=ending.stderr if ending else "",
            push_seconds=self._seconds["push"],
            run_seconds=self._seconds["execute"],
            pull_seconds=self._seconds["pull"],
            timed_out=bool(ending and not ending.answer and code is None and not self._error),
            process_ended=not self._error and self.process_ended,
            heap=self.heap,
            simulated=self.simulated,
            notes=tuple(self.notes),
            error=self._error,
            error_stage=self._error_stage,
            error_cause=self._error_cause,
        )
