"""The seam between farm and a device: run a program, push files, pull files. Nothing above it knows about adb."""

from __future__ import annotations

import abc
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from farm.base.errors import DeviceError, DeviceTimeoutError, UsageError
from farm.base.text import clean_text, count_of
from farm.devices.files import pull_archive, push_archive
from farm.devices.process import TAIL_BYTES, Link, Output, Process

# Bound of a program's output: a runner's log and a listing are far below; large data belongs into pulled files.
OUTPUT_BYTES = 16 << 20
# Linux gives a program no argument of 128 KiB or more, and a shell's command is one.
COMMAND_BYTES = 120 * 1024
# For a program that `start` starts.
_START_SECONDS = 30.0
# After so long without a word of a program the device is asked whether it is there: see Transport.demand.
SILENCE_SECONDS = 30.0
# Limits of commands that a device answers at once in a few lines.
ASK_SECONDS = 10.0
ANSWER_BYTES = 4096


@dataclass(frozen=True)
class Completed:
    """Program that ended on a device. Its output is hostile and bounded."""

    code: int
    """128 + n when signal n ended it."""
    stdout: bytes
    stderr: bytes
    seconds: float
    """Wall time, seen from the host."""


_NOTHING = Output(b"", b"", None)


class Transport(abc.ABC):
    """Transport to one device. Several threads may use it independently.

    Every method raises DeviceError: DeviceTimeoutError for a late answer, DeviceGoneError for an absent device,
    DeviceSpaceError for full storage, AdbServerError for a failure of the adb server, and DeviceError itself for a
    failure with the device still present.

    A kind of transport implements `spawn`, names the folder `storage`, and overrides other methods as needed:
    docs/developers/recipes.md, "Adding a transport".
    """

    is_android = False
    """True for devices with Android's version number; no other program writes beside `storage` there."""
    no_reboot = "its transport cannot"
    """Reason why its devices cannot be rebooted; empty if `reboot` works."""
    stall_s = 30.0
    """Seconds after which a device is gone that moves no byte of a file; flash storage that stalls recovers sooner."""

    def __init__(self, serial: str, storage: PurePosixPath) -> None:
        self.serial = serial
        """The device's name."""
        self.storage = storage
        """Folder of farm on the device, an absolute path where programs may be kept; made by the first push."""
        self.elevation: tuple[str, ...] = ()
        """Command that runs a script, its last word, as root if commands are not root's; set by `become_root`."""

    @abc.abstractmethod
    def spawn(self, argv: Sequence[str], command: str, timeout_s: float, *, stdin: bool) -> Process:
        """Start `command`, which is `argv` for a POSIX shell, and return its pipes.

        Without `stdin` the program is sent nothing. `timeout_s` is how long it may take to start.
        """

    def push(self, files: Mapping[PurePosixPath, Path | bytes | Link]) -> None:
        """Write local files, bytes or links to absolute paths on the device; missing folders are made.

        Existing files and links are replaced. An executable local file is executable on the device. A broken push may
        leave some files unwritten and the last file incomplete: push beside the target and rename.
        """
        push_archive(self.start, self.serial, self.stall_s, files)

    def pull(self, files: Mapping[PurePosixPath, Path], *, max_bytes: int | Mapping[PurePosixPath, int]) -> None:
        """Read files from the device into local ones, whose folders exist; each is there whole, or not at all.

        A file that is missing, or has more than `max_bytes` (of its own, when a mapping), is an error.
        """
        limits = max_bytes if isinstance(max_bytes, Mapping) else dict.fromkeys(files, max_bytes)
        pull_archive(self.start, self.serial, self.stall_s, files, limits)

    def close(self) -> None:  # noqa: B027 - nothing is kept open unless a transport says so
        """Close connections kept between calls. Every method may be called afterwards."""

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
        process = self.spawn(argv, self._command(argv, cwd, env), timeout_s, stdin=bool(stdin))
        try:
            return communicate(
                process, self.serial, argv, stdin=stdin, timeout_s=timeout_s, max_output=max_output, demand=self.demand
            )
        finally:
            process.close()

    def start(
        self, argv: Sequence[str], *, cwd: PurePosixPath | None = None, env: Mapping[str, str] | None = None
    ) -> Process:
        """Start a program as `run` does and return its pipes. It ends when they are closed."""
        return self.spawn(argv, self._command(argv, cwd, env), _START_SECONDS, stdin=True)

    def shell_argv(self, words: Sequence[str], *, terminal: bool) -> tuple[list[str], dict[str, str]]:
        """Return the local program that opens a shell on the device or runs `words` there, and its environment.

        With `terminal` the program on the device gets a terminal. Raises UsageError for a transport without one.
        """
        del words, terminal
        raise UsageError(f"{self.serial}: there is no program that opens a shell on it")

    def tool_environment(self) -> dict[str, str]:
        """Return what programs that reach the device by themselves, such as `adb`, need in their environment."""
        return {}

    def server_answers(self) -> bool:
        """Tell whether the server that leads to the device answers; where there is none, that it does."""
        return True

    def demand(self) -> None:  # noqa: B027
        """Raise DeviceError for an unanswering device, in kinds whose streams survive its loss.

        A silent program is no proof: the connection may be cut behind a machine that acknowledges.
        """

    def user_id(self) -> int:
        """Return the user that commands run as, 0 for root."""
        done = self.run(["id", "-u"], timeout_s=ASK_SECONDS, max_output=ANSWER_BYTES)
        answer = clean_text(done.stdout)
        if done.code != 0 or (user := count_of(answer)) is None:
            problem = f"does not report the user of its commands, but {answer!r}"
            raise DeviceError(self.serial, problem, argv=["id", "-u"], code=done.code, stderr=done.stderr)
        return user

    def ensure_root(self) -> bool:
        """Make commands run as root; return whether that changed, in which case programs on the device may have ended.

        Raises DeviceError with the reason, DeviceTimeoutError for a device that does not come back.
        """
        if self.user_id() == 0:
            return False
        self.become_root()
        return True

    def become_root(self) -> None:
        """Make commands run as root, which they do not yet; what runs there may end."""
        raise DeviceError(self.serial, f"{self.root_refusal()}, or use another device")

    def root_refusal(self) -> str:
        """Return why `become_root` could not make commands run as root; empty where it could."""
        return "root is needed: log in as root"

    def reconnect(self) -> None:  # noqa: B027 - asking a device is connecting, unless a transport says otherwise
        """Look for the device again: the first step of the recovery ladder."""

    def restart(self) -> None:  # noqa: B027
        """Begin the connection to the device anew: the second step."""

    def reboot(self) -> None:
        """Let the device start anew, and do not wait for it: the last step, where `no_reboot` is empty."""
        raise NotImplementedError

    def nudge(self) -> None:  # noqa: B027
        """Help a device that is coming back to be found; asked again and again."""

    def _command(self, argv: Sequence[str], cwd: PurePosixPath | None, env: Mapping[str, str] | None) -> str:
        try:
            command = shell_command(argv, cwd, env)
            return shell_command([*self.elevation, f"umask 0; {command}"], None, None) if self.elevation else command
        except ValueError as error:
            raise DeviceError(self.serial, str(error)) from None


def communicate(
    process: Process,
    serial: str,
    argv: Sequence[str],
    *,
    stdin: bytes,
    timeout_s: float,
    max_output: int,
    demand: Callable[[], None] = lambda: None,
) -> Completed:
    """Send all of standard input, take in the output and return the result; the caller closes `process`.

    `demand`, which raises DeviceError for a device that is gone, is called in every long silence. Raises
    DeviceTimeoutError when the time is over, DeviceError when the output is too large or the connection breaks.
    """
    started = heard = time.monotonic()
    process.send(stdin)
    process.close_stdin()
    pieces: list[Output] = []
    size, tail = 0, b""
    while not pieces or pieces[-1].code is None:
        left = timeout_s - (time.monotonic() - started)
        if left <= 0:
            problem = f"did not finish in {timeout_s:g} s and was ended"
            raise DeviceTimeoutError(serial, problem, argv=argv, stderr=tail)
        pieces.append(process.receive(min(left, max(0.0, heard + SILENCE_SECONDS - time.monotonic()))))
        if pieces[-1] != _NOTHING:
            heard = time.monotonic()
        elif time.monotonic() >= heard + SILENCE_SECONDS:
            demand()
            heard = time.monotonic()
        size += len(pieces[-1].stdout) + len(pieces[-1].stderr)
        tail = (tail + pieces[-1].stderr[-TAIL_BYTES:])[-TAIL_BYTES:]
        if size > max_output:
            problem = f"wrote more than {max_output} bytes and was ended"
            raise DeviceError(serial, problem, argv=argv, stderr=tail)
    stdout, stderr = (b"".join(part) for part in ((p.stdout for p in pieces), (p.stderr for p in pieces)))
    return Completed(pieces[-1].code or 0, stdout, stderr, time.monotonic() - started)


def shell_command(argv: Sequence[str], cwd: PurePosixPath | None, env: Mapping[str, str] | None) -> str:
    """Return `argv` as text for a device's shell: the only place of shell quoting.

    The program replaces the shell, so that adbd's hangup at the end of a stream reaches it. Raises ValueError for NUL
    characters and for invalid names of environment variables.
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
