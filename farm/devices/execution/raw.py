"""What one execution of a job on a device is asked for, and what it left: files and timings, no judgement."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Literal

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping

RESULT_FILE = "result.json"
ETDUMP_FILE = "etdump.etdp"
DEBUG_FILE = "debug_output.bin"
HEAP_FILE = "heap.txt"
HEAP_LIMIT = 64 * 1024
"""Greatest size of HEAP_FILE that is read, in bytes: two lines take a hundred."""
HEAP_PROCESS = "process"
"""Beginning of the names of local folders, of the processes before the last that measures the heap."""
TOKENS_FILE = "tokens.txt"
TOKENS_LIMIT = 1 << 20
"""Greatest size of TOKENS_FILE that is read, in bytes: a hundred thousand tokens."""

MOST_SECONDS = 600
"""Longest that a program may be asked to go on for: a phone throttles in minutes, and a report has room for so many
steps."""

ErrorCause = Literal["", "connection", "gone", "adb_server", "space", "damage"]


@dataclass(frozen=True)
class RunnerOptions:
    """How often the runner executes each sample, and its backend options."""

    iterations: int = 3
    warm_up: int = 1
    timeout_s: float = 300.0
    flags: Mapping[str, str] = field(default_factory=dict)
    etdump: bool = False
    """Bring an ETDump although no flag asks for a profile: what was compiled in is in it."""
    reducible: bool = False
    """Nobody named how many executions: a runner that leaves files of each may make fewer."""
    outputs: bool = True
    """Bring the outputs, unless only times are wanted."""
    repeats: bool = False
    """The case demands equal outputs of all executions, also of a program with a state."""
    debug: bool = False
    """Bring intermediate outputs, of a program that was compiled to write them, as DEBUG_FILE."""
    heap: bool = False
    """Measure the DSP's heap, as HEAP_FILE: for `execute_alone` only, in as many processes as there are `iterations`,
    with one inference each."""
    seconds: int | None = None
    """A program that generates goes on, prompt after prompt, for so long, which is not in `timeout_s`; None: every
    prompt once."""

    @property
    def profiles(self) -> bool:
        """Whether there is anything that only an ETDump has."""
        return self.etdump or self.debug or self.flags.get("profile_level", "0") != "0"

    @property
    def process_flags(self) -> dict[str, str]:
        """Flags that hold for a whole process of the runner."""
        if not self.heap:
            return dict(self.flags)
        # ExecuTorch 1.5 looks at the heap only where it profiles, and was only ever tried with level 2. The path is in
        # the workspace of the job.
        return {**self.flags, "profile_level": "2", "heap_profiling_path": HEAP_FILE}


class RawResult(msgspec.Struct, frozen=True, kw_only=True):
    """One execution, not judged yet. Everything in it that came from a device is hostile."""

    job_id: str
    serial: str
    """Serial of the device."""
    workspace: PurePosixPath
    """Folder on the device where it ran, which stays until its session ends or makes room."""
    folder: Path
    """Local folder with what was pulled: `output_{sample}_{index}.raw`, and RESULT_FILE, ETDUMP_FILE, DEBUG_FILE
    and HEAP_FILE where they were asked for and the device had them; TOKENS_FILE of what ended while it generated."""
    started_ms: int
    """Epoch, milliseconds."""
    exit_code: int | None = None
    """Of the job, as a process of its own would have had it, or of the process that it ended; -n or 128 + n for signal
    n; None when the device never reported one."""
    stderr: str = ""
    """What the runner wrote to standard error, cut to a bounded size by whoever pulled it."""
    push_seconds: float = 0.0
    run_seconds: float = 0.0
    """Wall time from the job to its answer, seen from the host; the start of the runner is in it where it had to be
    started."""
    pull_seconds: float = 0.0
    timed_out: bool = False
    """The runner was alive and reachable and did not finish in its time, nor report so; `error` stays empty then."""
    process_ended: bool = False
    """The runner's process crashed, hung or gave up during this execution: try it once in a process of its own."""
    refused: bool = False
    """The runner answered with an error; the next execution has a new process."""
    heap: bool = False
    """It was for the DSP's heap alone: no time of it is a measurement."""
    simulated: bool = False
    """It ran on the simulator."""
    temperatures_c: tuple[float, ...] = ()
    """Of the device, in the order of time, where it went on for a time and the device said so."""
    notes: tuple[str, ...] = ()
    """What a reader of the result should know."""
    error: str = ""
    """What the farm or the device did wrong, in one line; empty when nothing."""
    error_stage: Literal["", "push", "execute", "pull"] = ""
    """Where `error` happened; empty exactly when `error` is."""
    error_cause: ErrorCause = ""
    """What kind of trouble `error` is: a value of `farm.results.attempt.Cause`; empty for one without a name."""

    @property
    def seconds(self) -> float:
        """Wall time on the device, staging included."""
        return self.push_seconds + self.run_seconds + self.pull_seconds

    def output(self, sample: int, index: int) -> Path:
        """Return where output `index` of inference `sample` is, if it was pulled."""
        return self.folder / f"output_{sample}_{index}.raw"


def heap_folders(folder: Path) -> list[Path]:
    """Return the local folders of the processes of an execution in their order, the last being `folder`."""
    earlier = sorted(folder.glob(f"{HEAP_PROCESS}*"), key=lambda one: (len(one.name), one.name))
    return [*earlier, folder]
