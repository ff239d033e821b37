"""Runners on a device: `farm_runner --serve`, which stays up, and ExecuTorch's runners for one job per process."""

from __future__ import annotations

import re
import shlex
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from farm.base.errors import DeviceError
from farm.base.text import clean_text, count_of
from farm.devices.execution.content_store import Workspace, library_paths, packages_folder
from farm.devices.execution.liveness import staging_error
from farm.devices.execution.shell import shell_script
from farm.devices.transport import SILENCE_SECONDS, Transport

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import PurePosixPath

    from farm.builds.bundles.bundle import Manifest
    from farm.builds.runtime.runtime import Runtime
    from farm.devices.execution.raw import RunnerOptions


# The host's end of a runner that stays up: `farm_runner --serve`, docs/reference/native_runner.md.


STDERR_BYTES = 64 * 1024
_ANSWER_BYTES = 16 << 20
# A job's last words are in another pipe than its answer, and both are on their way.
_LAST_WORDS_SECONDS = 0.5
# Longest delay until a broken off job ends.
_SLICE_SECONDS = 1.0


class _AnswerError(msgspec.Struct, frozen=True):
    stage: str = ""


class RunnerAnswer(msgspec.Struct, frozen=True):
    """Fields of a runner's answer that the host needs; the rest of the line is judged later."""

    schema: int = 0
    ready: bool = False
    """Not an answer, but the greeting."""
    job: int = -1
    ok: bool = False
    exit_code: int = 0
    error: _AnswerError | None = None
    outputs: tuple[msgspec.Raw, ...] = ()
    inferences: tuple[msgspec.Raw, ...] = ()
    last: bool = False
    """The process ends after it."""


class RunnerEnding(NamedTuple):
    """How one job ended."""

    answer: RunnerAnswer | None
    """Decoded answer; None if the process ended, or was disconnected because it did not answer in time."""
    line: bytes
    """Answer as received."""
    stderr: str
    """Standard error of the runner during this job, cut in the middle if it is long."""
    code: int | None
    """Exit code of a process that ended without an answer; 128 + n for signal n."""
    began: bool
    """The job had begun: it is at fault for such an end."""


class RunnerProcess:
    """Process on a device that takes one job at a time. Belongs to one thread."""

    def __init__(
        self,
        transport: Transport,
        argv: Sequence[str],
        *,
        cwd: PurePosixPath,
        env: Mapping[str, str],
        aborted: threading.Event,
    ) -> None:
        """Start it. `aborted`, which another thread may set, ends its jobs with an error. Raises DeviceError."""
        self._serial = transport.serial
        self._process = transport.start(argv, cwd=cwd, env=env)
        self.jobs = 0
        """How many it was given."""
        self._unread = bytearray()
        self._log = _Log()
        self._silent_since = time.monotonic()
        self._aborted = aborted

    def run(self, words: Sequence[str], timeout_s: float, demand: Callable[[], None]) -> RunnerEnding:
        """Send one job as flags and wait for its end.

        A process without an answer, or with its last one, gets no further jobs. `demand` is called in every long
        silence and raises DeviceError for an absent device. Raises DeviceError also for an invalid answer.
        """
        number = self.jobs
        self.jobs += 1
        self._log.clear()
        self._silent_since = time.monotonic()
        self._process.send(shlex.join(words).encode("utf-8", errors="surrogateescape") + b"\n")
        begins, ends = (f"farm_runner: job {number} {what}\n".encode() for what in ("begins", "ends"))
        found: tuple[RunnerAnswer, bytes] | None = None
        code: int | None = None
        for code in self._slices(timeout_s, demand):  # noqa: B007 - read afterwards
            found = self._answer(number)
            if found is not None:
                break
        began = begins in self._log
        deadline = time.monotonic() + _LAST_WORDS_SECONDS
        while found and code is None and ends not in self._log and (left := deadline - time.monotonic()) > 0:
            code = self._receive(left)
        answer, line = found or (None, b"")
        return RunnerEnding(answer, line, self._log.text(begins, ends), code, began)

    def run_out(self, timeout_s: float, demand: Callable[[], None]) -> RunnerEnding:
        """Wait for the end of a process that is one job and gives no answer, as `run`."""
        self.jobs += 1
        code: int | None = None
        for code in self._slices(timeout_s, demand):  # noqa: B007 - read afterwards
            self._unread.clear()
        return RunnerEnding(None, b"", self._log.text(), code, began=True)

    def close(self) -> None:
        """Hang up; the device ends it."""
        self._process.close()

    def _slices(self, timeout_s: float, demand: Callable[[], None]) -> Iterator[int | None]:
        """Receive until the time or the process ends; yield the exit code, None for a running process."""
        deadline = time.monotonic() + timeout_s
        code: int | None = None
        while code is None and (left := deadline - time.monotonic()) > 0:
            code = self._receive(min(left, _SLICE_SECONDS))
            if self._aborted.is_set():
                raise DeviceError(self._serial, "the job was broken off")
            yield code
            if time.monotonic() > self._silent_since + SILENCE_SECONDS:
                demand()
                self._silent_since = time.monotonic()

    def _receive(self, timeout_s: float) -> int | None:
        output = self._process.receive(timeout_s)
        if output.stdout or output.stderr or output.code is not None:
            self._silent_since = time.monotonic()
        self._log.add(output.stderr)
        self._unread += output.stdout
        if len(self._unread) > _ANSWER_BYTES:
            raise DeviceError(self._serial, f"the runner's answer has more than {_ANSWER_BYTES >> 20} MiB")
        return output.code

    def _answer(self, number: int) -> tuple[RunnerAnswer, bytes] | None:
        while (end := self._unread.find(b"\n") + 1) > 0:
            line = bytes(self._unread[:end])
            del self._unread[:end]
            try:
                answer = msgspec.json.decode(line, type=RunnerAnswer)
            except (msgspec.DecodeError, UnicodeError, RecursionError):
                answer = RunnerAnswer()
            if answer.schema != 1 or (not answer.ready and answer.job != number):
                text = clean_text(line, 80)
                raise DeviceError(self._serial, f"the runner wrote {text!r}, which is no answer to job {number}")
            if not answer.ready:
                return answer, line
        return None


class _Log:
    """Standard error of one job: its beginning and its end."""

    def __init__(self) -> None:
        self._head, self._tail, self._cut = bytearray(), bytearray(), False

    def clear(self) -> None:
        self._head.clear()
        self._tail.clear()
        self._cut = False

    def add(self, data: bytes) -> None:
        room = STDERR_BYTES // 2 - len(self._head)
        self._head += data[:room]
        self._tail += data[room:]
        if len(self._tail) > STDERR_BYTES // 2:
            del self._tail[: -STDERR_BYTES // 2]
            self._cut = True

    def __contains__(self, text: bytes) -> bool:
        return text in self._head + self._tail

    def text(self, *without: bytes) -> str:
        data = bytes(self._head) + (b"\n[...]\n" if self._cut else b"") + bytes(self._tail)
        for marker in without:
            data = data.replace(marker, b"")
        return data.decode("utf-8", errors="replace")


# Runners for one job per process: ExecuTorch's `qnn_executor_runner` and `qnn_executor_direct_runner`.
#
# These runners have no sessions, and direct mode's has neither warm-up nor iterations. So every execution is a line
# of the input list: the lines of a sample are equal, and their outputs are compared on the device. The content of
# RESULT_FILE is made from outputs, log and exit code. Table: docs/guides/runtime.md.


_LINES = "repeated_list.txt"
_OUTPUTS = "outputs"
_SPEED = "inference_speed.txt"
# Names of all outputs of a job go through one command line of the device, and its log has lines for each.
_MOST_OUTPUTS = 1000
_GATHER_SECONDS = 60.0
_LISTING_BYTES = 1 << 20
NOTHING = RunnerEnding(None, b"", "", None, began=True)
"""Ending of a job for which no process was started."""
_NAMED = 32
"""Executions that differ are named up to here, as farm's runner does."""

# ExecuTorch 1.5, examples/qualcomm: lines with times in the logs of the two runners, in milliseconds.
_TOOK = re.compile(r"(?<!Total )\b1 inference took (\d{1,12}\.\d{1,9}) ms")
_TOTAL = re.compile(r"Method execution took a total of (\d{1,12}\.\d{1,9}) ms, performing (\d{1,9}) inference")
_NUMBER = re.compile(r"\d{1,12}(\.\d{1,9})?")
_LONGEST_MS = 10 * 24 * 3600 * 1000.0

_REFUSALS: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), stage)
    for pattern, stage in (
        (r"unknown command line flag|illegal value .* specified for .* flag", "flags"),
        # The DSP, its driver or the rights are missing: the error is not about the program.
        (r"Unable to find domain|remote_session_control failed|qnn_executorch_open failed", "options"),
        (r"mismatch with input (files|shapes)|Input\(\d+\) size mismatch|Failed to set input tensor", "inputs"),
        (r"FileDataLoader::from\(\) failed|Failed to parse model file|Loading of method .* failed", "load"),
        (r"qnn_executorch_load failed", "load"),
        # Direct mode's skel reports a program that cannot be loaded here as well, and nothing but a number.
        (r"qnn_executorch_execute_all failed|Execution of method .* failed", "execute"),
    )
)
"""Log texts of the runners before an abort -> stage, named as by farm's runner. The first match counts."""


def too_many(
    runner: str, samples: int, outputs: int, times: int, named: str = "--iterations and --warm-up together"
) -> str:
    """Return the reason why `runner` cannot make `times` executions of each sample; "" if it can.

    A single execution is always possible. `named` is the option with the number.
    """
    most = _most_executions(samples, outputs)
    if times <= most:
        return ""
    return (
        f"{runner} writes the outputs of every execution, and {times} (samples: {samples}, outputs: {outputs}) "
        f"are more than {_MOST_OUTPUTS} files: ask for at most {most}, with {named}"
    )


def reduced(options: RunnerOptions, manifest: Manifest) -> RunnerOptions:
    """Return `options` with at most the possible number of executions, warm-up included."""
    most = _most_executions(manifest.samples, len(manifest.outputs))
    if options.warm_up + options.iterations <= most:
        return options
    warm_up = min(options.warm_up, most - 1)
    return replace(options, warm_up=warm_up, iterations=most - warm_up)


def _most_executions(samples: int, outputs: int) -> int:
    return max(1, _MOST_OUTPUTS // max(1, samples * outputs))


@dataclass(frozen=True)
class OneShot:
    """Job for a runner whose process takes one job, with the runtime in the folder `libraries`."""

    transport: Transport
    runtime: Runtime
    libraries: PurePosixPath
    workspace: Workspace
    options: RunnerOptions
    demand: Callable[[], None]
    """As in `RunnerProcess.run`."""
    aborted: threading.Event
    """As in `RunnerProcess`."""

    def run(self, times: int, outputs: str, flags: Mapping[str, str], timeout_s: float) -> RunnerEnding:
        """Run a process with each line of the input list `times` times; after `timeout_s` the process is ended."""
        workspace, script = self.workspace, ["sh", "-c", shell_script("run_once"), "sh", str(times), _LINES, outputs]
        program = [str(self.libraries / self.runtime.runner), *(f"--{name}={value}" for name, value in flags.items())]
        process = RunnerProcess(
            self.transport,
            [*script, *program],
            cwd=workspace.folder,
            env=library_paths(self.libraries, *packages_folder(workspace.bundle, workspace.folder)),
            aborted=self.aborted,
        )
        try:
            return process.run_out(timeout_s, self.demand)
        finally:
            process.close()


def run_once(job: OneShot, flags: dict[str, str]) -> RunnerEnding:
    """Run a job in its own process and return its ending.

    `flags` are the job's flags without the places of lists and outputs. Too many executions are refused like a runner's
    refusal, because no other device could make them. Raises DeviceError.
    """
    workspace, options, runner = job.workspace, job.options, job.runtime.runner
    manifest = workspace.bundle.manifest
    times = options.warm_up + options.iterations
    if manifest.state:
        problem = f"{runner} hands no state on from one inference to the next"
    elif manifest.generation is not None:
        problem = f"{runner} generates no text"
    else:
        problem = too_many(runner, manifest.samples, len(manifest.outputs), times)
    if problem:
        return answered(NOTHING, report_of(1, error={"stage": "unsupported", "message": problem}))
    own = {"input_list_path": _LINES, **_whole_paths(workspace.folder, flags)}
    ending = job.run(times, _OUTPUTS, flags | own | job.runtime.flags | options.process_flags, options.timeout_s)
    if ending.code is None:
        return ending
    if ending.code == 0:
        return answered(ending, _gather(job.transport, workspace, options, ending.stderr))
    found = refusal(ending.stderr, ending.code)
    return ending if found is None else answered(ending, found)


def answered(ending: RunnerEnding, report: dict[str, Any]) -> RunnerEnding:
    """Return the ending of a process as the ending of a job with the answer `report`."""
    line = msgspec.json.encode(report)
    # The answer carries the exit code; a code of the process would mean that the job ended a shared runner.
    return ending._replace(answer=msgspec.json.decode(line, type=RunnerAnswer), line=line, code=None)


def _whole_paths(folder: PurePosixPath, flags: Mapping[str, str]) -> dict[str, str]:
    """Return `flags` with absolute paths of output files: in direct mode the DSP opens them."""
    written = {name: str(folder / flags[name]) for name in ("etdump_path", "debug_output_path") if name in flags}
    return {"output_folder_path": str(folder / _OUTPUTS), **written}


def refusal(log: str, code: int) -> dict[str, Any] | None:
    """Return the report of a refusal before an abort; None for a log without one, which is a crash."""
    for pattern, stage in _REFUSALS:
        if found := pattern.search(log):
            start = log.rfind("\n", 0, found.start()) + 1
            message = clean_text(log[start:].partition("\n")[0])
            return report_of(code, error={"stage": stage, "message": message})
    return None


def _gather(transport: Transport, workspace: Workspace, options: RunnerOptions, log: str) -> dict[str, Any]:
    """Return the report of a runner that ended well, with the outputs in the workspace as `collect` wants them."""
    manifest, times = workspace.bundle.manifest, options.warm_up + options.iterations
    outputs = range(len(manifest.outputs))
    last = {
        f"output_{sample * times + times - 1}_{index}.raw": f"output_{sample}_{index}.raw"
        for sample in range(manifest.samples)
        for index in outputs
    }
    done = transport.run(
        ["sh", "-c", shell_script("gather"), "sh", _OUTPUTS, _SPEED],
        cwd=workspace.folder,
        stdin="".join(f"{_OUTPUTS}/{name} {kept}\n" for name, kept in last.items()).encode(),
        timeout_s=_GATHER_SECONDS,
        max_output=_LISTING_BYTES,
    )
    if done.code != 0:
        raise staging_error(transport.serial, "the outputs cannot be looked at", done)
    sizes, hashes, speed = _listed(done.stdout.decode(errors="replace"))
    wanted = [f"output_{line}_{index}.raw" for line in range(times * manifest.samples) for index in outputs]
    if missing := [name for name in wanted if name not in sizes or name not in hashes]:
        message = f"the runner ended well and wrote {len(wanted) - len(missing)} of {len(wanted)} outputs"
        return report_of(1, error={"stage": "outputs", "message": message})
    if wrong := _wrong_size(manifest, sizes, wanted):
        return report_of(1, error={"stage": "execute", "message": wrong})
    each, mean = _times(log, len(wanted) // max(1, len(outputs)), speed)
    inferences = [
        _inference(sample, each[sample * times : (sample + 1) * times], hashes, outputs, times, options.warm_up)
        for sample in range(manifest.samples)
    ]
    shapes = [{"shape": one.shape, "dtype": one.dtype, "nbytes": one.nbytes} for one in manifest.outputs]
    return report_of(0, outputs=shapes, inferences=inferences, load_ns=None, mean_ns=mean)


def report_of(code: int, **more: Any) -> dict[str, Any]:
    """Return what farm's own runner would have written into RESULT_FILE."""
    return {"schema": 1, "job": 0, "ok": code == 0, "exit_code": code, "error": None, **more}


def _listed(text: str) -> tuple[dict[str, int], dict[str, str], str]:
    """Return sizes and hashes by name, and the printed mean time, from a device's output."""
    sizes, hashes, speed = {}, {}, ""
    for line in text.splitlines():
        match line.split():
            case ["size", text, name] if (size := count_of(text)) is not None:
                sizes[name] = size
            case ["speed", value]:
                speed = value
            case [sha256, name]:
                hashes[name] = sha256
    return sizes, hashes, speed


def _wrong_size(manifest: Manifest, sizes: Mapping[str, int], wanted: Sequence[str]) -> str:
    """Return the first difference in size of an output from its reference; "" for none, and without references."""
    for number, name in enumerate(wanted if manifest.references else ()):
        expected = manifest.outputs[number % len(manifest.outputs)].nbytes
        if sizes[name] != expected:
            return f"{name} has {sizes[name]} bytes, the reference {expected}"
    return ""


def _times(log: str, lines: int, speed: str) -> tuple[list[int], int | None]:
    """Return the time of each of `lines` executions in ns, or no times and the mean if the log has one."""
    each = [float(text) for text in _TOOK.findall(log)][:lines]
    if len(each) == lines and all(0 < value < _LONGEST_MS for value in each):
        return [max(1, round(value * 1e6)) for value in each], None
    total = _TOTAL.search(log)
    mean = 0.0
    if total and int(total[2]) == lines:
        mean = float(total[1]) / lines
    elif not total and _NUMBER.fullmatch(speed):
        mean = float(speed)
    return [], round(mean * 1e6) if 0 < mean < _LONGEST_MS else None


def _inference(
    sample: int, each: Sequence[int], hashes: Mapping[str, str], outputs: range, times: int, warm_up: int
) -> dict[str, Any]:
    """Return the entry of one sample for RESULT_FILE; `each` has the known times of its executions."""
    given = [
        tuple(hashes[f"output_{line}_{index}.raw"] for index in outputs)
        for line in range(sample * times, (sample + 1) * times)
    ]
    differing = [number for number, one in enumerate(given) if one != given[-1]]
    return {
        "line": sample,
        "warm_up_ns": each[:warm_up],
        "iterations_ns": each[warm_up:],
        "untimed": 0 if each else times,
        "differing": {"count": len(differing), "executions": differing[:_NAMED]},
    }
