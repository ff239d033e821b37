"""Options and raw result of one execution on a device: files and timings without judgement. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

RESULT_FILE = "result.json"
ETDUMP_FILE = "etdump.etdp"
DEBUG_FILE = "debug_output.bin"
# Intermediate outputs of a whole model: the runner takes memory for them as they come.
DEBUG_BYTES = 1 << 30
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
    """True to pull an ETDump without a profiling flag: it has the profile that was compiled in."""
    reducible: bool = False
    """True if no user named the number of executions: a runner with files per execution may make fewer."""
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
        """True if the options need data that only an ETDump has."""
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
    """Raw result of one execution before judgement. All content from the device is hostile."""

    job_id: str
    serial: str
    """Serial of the device."""
    workspace: PurePosixPath
    """Folder of the job on the device, which stays until the session ends or makes room."""
    folder: Path
    """Local folder of pulled files: `output_{sample}_{index}.raw`; RESULT_FILE, ETDUMP_FILE, DEBUG_FILE and HEAP_FILE
    if requested and present; TOKENS_FILE of a job that ended during generation."""
    started_ms: int
    """Epoch, milliseconds."""
    exit_code: int | None = None
    """Exit code of the job or of the process that it ended; -n or 128 + n for signal n; None if the device reported
    none."""
    stderr: str = ""
    """Standard error of the runner, cut to a bounded size."""
    push_seconds: float = 0.0
    run_seconds: float = 0.0
    """Wall time from the job to its answer on the host, including the start of the runner if it was not running."""
    pull_seconds: float = 0.0
    timed_out: bool = False
    """True for a living, reachable runner that neither finished nor reported in its time; `error` is empty then."""
    process_ended: bool = False
    """The runner's process crashed, hung or gave up during this execution: try it once in a process of its own."""
    refused: bool = False
    """The runner answered with an error; the next execution has a new process."""
    executions: int = 0
    """Executions of each sample that the runner was asked for, warm-up included; 0 where it does not count them."""
    heap: bool = False
    """True for an execution that measures the DSP heap alone; its times are no measurement."""
    simulated: bool = False
    """True for an execution on the simulator."""
    temperatures_c: tuple[float, ...] = ()
    """Temperatures of the device in order of time, for long executions on devices that report them."""
    notes: tuple[str, ...] = ()
    """Remarks for readers of the result."""
    error: str = ""
    """Failure of the farm or the device in one line; empty for none."""
    error_stage: Literal["", "push", "execute", "pull"] = ""
    """Stage of `error`; empty exactly if `error` is."""
    error_cause: ErrorCause = ""
    """Cause of `error`, a value of `farm.results.attempt.Cause`; empty for an unnamed one."""

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


# Times that ExecuTorch's `qnn_llama_runner` prints: a line `PyTorchObserver {...}`, read as hostile text. Pure.
#
# ExecuTorch 1.5, extension/llm/runner/stats.h: stamps of a clock, in whole milliseconds.


_LINE = re.compile(r"PyTorchObserver (\{[^\n]{1,4096}\})")
_Count = Annotated[int, Meta(ge=0, le=2**24)]
_Stamp = Annotated[int, Meta(ge=0, le=2**53)]
# Tolerance between two clocks, of which one has whole milliseconds.
_SLACK, _SLACK_MS = 1.2, 1000


class ObservedError(ValueError):
    """Missing or implausible line of times."""


class Observed(msgspec.Struct, frozen=True):
    """The times of one prompt."""

    prompt_tokens: _Count
    generated_tokens: _Count
    """After the first, which the prompt gives."""
    model_load_start_ms: _Stamp
    model_load_end_ms: _Stamp
    inference_start_ms: _Stamp
    prompt_eval_end_ms: _Stamp
    first_token_ms: _Stamp
    inference_end_ms: _Stamp

    @property
    def load_ms(self) -> int:
        """Time to load program and tokenizer."""
        return self.model_load_end_ms - self.model_load_start_ms

    @property
    def first_ms(self) -> int:
        """From the prompt to the first token."""
        return self.first_token_ms - self.inference_start_ms

    @property
    def decode_ms(self) -> int:
        """Time of the tokens after the first."""
        return self.inference_end_ms - self.prompt_eval_end_ms


def read_observed(log: str, prompt_tokens: int, most_new: int, seconds: float) -> Observed:
    """Return the last such line of `log`, of a process that took `seconds`. Raises ObservedError.

    `most_new`: so many tokens were asked for.
    """
    lines = _LINE.findall(log)
    if not lines:
        raise ObservedError("it printed no PyTorchObserver line")
    try:
        found = msgspec.json.decode(lines[-1], type=Observed)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise ObservedError(f"its PyTorchObserver line is refused: {error}") from None
    if problem := _problem(found, prompt_tokens, most_new, seconds):
        raise ObservedError(f"its PyTorchObserver line is refused: {problem}")
    return found


def _problem(found: Observed, prompt_tokens: int, most_new: int, seconds: float) -> str:
    if found.prompt_tokens != prompt_tokens:
        return f"it has a prompt of {found.prompt_tokens} tokens, expected {prompt_tokens}"
    if found.generated_tokens >= most_new:
        return f"it has {found.generated_tokens} tokens after the first, and {most_new} were asked for in all"
    begin, first, decoding, end = (
        found.inference_start_ms, found.first_token_ms, found.prompt_eval_end_ms, found.inference_end_ms,
    )  # fmt: skip
    if not (begin <= first <= end and begin <= decoding <= end and found.load_ms >= 0):
        return "its stamps are in no order"
    claimed = found.load_ms + end - begin
    if claimed > seconds * 1000 * _SLACK + _SLACK_MS:
        return f"it claims {claimed / 1000:.1f} s of work, and the program ran for {seconds:.1f} s"
    return ""
