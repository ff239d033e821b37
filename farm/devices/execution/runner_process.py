"""The host's end of a runner that stays up: `farm_runner --serve`, docs/reference/native_runner.md."""

from __future__ import annotations

import shlex
import time
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from farm.base.errors import DeviceError
from farm.devices.text import clean_text
from farm.devices.transport import SILENCE_SECONDS, Transport

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import PurePosixPath

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
