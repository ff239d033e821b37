"""The seam between farm and a device: run a program, push files, pull files. Nothing above it knows about adb."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path, PurePosixPath

# A runner's log and a listing are far below; above it a program has gone mad, or somebody wants a file: pull it.
OUTPUT_BYTES = 16 << 20
# Linux gives a program no argument of 128 KiB or more, and a shell's command is one.
COMMAND_BYTES = 120 * 1024


@dataclass(frozen=True)
class Completed:
    """A program that ran to its end on a device. What it wrote is hostile, and bounded."""

    code: int
    """128 + n when signal n ended it."""
    stdout: bytes
    stderr: bytes
    seconds: float
    """Wall time, seen from the host."""


class Output(NamedTuple):
    """What a running program wrote since it was asked last; hostile, and as much as one read gives."""

    stdout: bytes
    stderr: bytes
    code: int | None
    """Set once it has ended and everything it wrote was handed out: 128 + n for signal n."""


class Process(Protocol):
    """A program that runs on a device, and the pipes to it. Belongs to one thread."""

    def send(self, data: bytes) -> None:
        """Write to its standard input, now or while `receive` waits. Raises DeviceError when the device is gone."""

    def close_stdin(self) -> None:
        """Let the program read the end of its input, after what was sent."""

    def receive(self, timeout_s: float) -> Output:
        """Return what comes within `timeout_s`, as soon as something does; empty when nothing came.

        Raises DeviceError when the connection ends before the program.
        """

    def close(self) -> None:
        """Hang up; the device ends the program. May be called again."""


@dataclass(frozen=True)
class Link:
    """A symbolic link that a push makes; `target` is as in `ln -s`, and need not be there."""

    target: PurePosixPath


class Transport(Protocol):
    """The way to one device. Several threads may use it, each call as if it were alone.

    Every method raises DeviceError: DeviceTimeoutError when the device does not answer in time, DeviceGoneError when
    it is not there any more, DeviceSpaceError when its storage is full, AdbServerError when not it but the adb server
    before it is to blame, and DeviceError itself for what broke while the device is still there.
    """

    @property
    def serial(self) -> str:
        """The device's name."""

    @property
    def storage(self) -> PurePosixPath:
        """Folder of farm on the device, an absolute path where programs may be kept; made by the first push."""

    def run(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        timeout_s: float,
        cwd: PurePosixPath | None = None,
        env: Mapping[str, str] | None = None,
        max_output: int = OUTPUT_BYTES,
    ) -> Completed:
        """Run the program `argv[0]` and wait for it; `env` adds to the device's environment.

        `argv` is never read by a shell; for a script write ["sh", "-c", script, "sh", *words]. An exit code other
        than 0 is an answer, not an error. When the time is over, or standard output and error together exceed
        `max_output` bytes, the program is ended and that is an error.
        """

    def start(
        self, argv: Sequence[str], *, cwd: PurePosixPath | None = None, env: Mapping[str, str] | None = None
    ) -> Process:
        """Start a program as `run` does and return its pipes. It ends when they are closed."""

    def push(self, files: Mapping[PurePosixPath, Path | bytes | Link]) -> None:
        """Write local files, or bytes, or links, to absolute paths on the device; folders on the way are made.

        What is there already, a link too, is replaced. A local file that is executable is so on the device. A push
        that breaks may leave some files unwritten and, behind adb or SSH, the one it was writing incomplete: push
        beside the place and rename.
        """

    def pull(self, files: Mapping[PurePosixPath, Path], *, max_bytes: int | Mapping[PurePosixPath, int]) -> None:
        """Read files from the device into local ones, whose folders exist; each is there whole, or not at all.

        A file that is missing, or has more than `max_bytes` (of its own, when a mapping), is an error.
        """

    def close(self) -> None:
        """Let go of what is kept open between calls. May be called again, and so may every other method."""


def shell_command(argv: Sequence[str], cwd: PurePosixPath | None, env: Mapping[str, str] | None) -> str:
    """Return `argv` as text for a device's shell: the only place where something is quoted for one.

    The program replaces the shell, so that the hangup adbd sends when a stream closes reaches it.
    Raises ValueError for what no shell can be told: NUL, and names that are no environment variables.
    """
    if not argv or any("\0" in word for word in argv):
        raise ValueError("a command needs a program, and no word of it holds NUL")
    steps = []
    if cwd is not None:
        steps.append(f"cd -- {shlex.quote(str(cwd))}")
    for name, value in (env or {}).items():
        if not name.isidentifier() or not name.isascii() or "\0" in value:
            raise ValueError(f"{name!r} cannot be an environment variable")
        steps.append(f"export {name}={shlex.quote(value)}")
    steps.append(f"exec {shlex.join(argv)}")
    return " && ".join(steps)
