"""Faults of virtual devices, and requests of faults to a running device.

Only the standard library: the daemon of a virtual device imports this at its start.
"""

from __future__ import annotations

import json
import os
import re
import socket
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from farm.base.errors import InfraError

CONTROL = ".incoming/control"
"""Socket of a device's daemon for these requests, below its root. The device's own services hide it."""
LOG = "faults.jsonl"
"""Log of faults that struck, one JSON object per line, below the device's root; also hidden."""

_ANSWER_SECONDS = 20.0
_LINE_BYTES = 64 * 1024


_COMMANDS = "shell answer"
_EVERYWHERE = "push pull shell answer link"
# Value of `is_state` below.
_STATE = True


class FaultKind(StrEnum):
    """Kind of fault: name, operations that it can strike, and effect for a user.

    Operations are the push of a file or of a link, a pull, a command, an answer of a runner that takes jobs
    (`--serve`). A condition (`_STATE`) that is drawn at random begins there.
    """

    DROP_PUSH = "drop_push", "push link", "the stream of a push ends at byte after_bytes"
    DROP_PULL = "drop_pull", "pull", "the stream of a pull ends at byte after_bytes"
    STALL = "stall", _EVERYWHERE, "no byte passes, in either direction, for the duration"
    RESET = "reset", _EVERYWHERE, "the connection to the adb server is reset"
    OFFLINE = "offline", _EVERYWHERE, "the device is away, its processes gone, for the duration"
    REBOOT = "reboot", _EVERYWHERE, "the same, with another boot id, and a file half pushed stays so"
    DISK_FULL = "disk_full", "push link", "after_bytes more fit: then pushes fail, and df shows 0", _STATE
    CORRUPT_PUSH = "corrupt_push", "push", "byte after_bytes of a file arrives changed"
    CORRUPT_PULL = "corrupt_pull", "pull", "byte after_bytes of a file that is pulled is changed"
    EXIT_CODE = "exit_code", _COMMANDS, "a command ends with code (1), and prints text"
    PARTIAL_OUTPUT = "partial_output", _COMMANDS, "a command's stream ends at byte after_bytes, without exit code"
    SLOW_LINK = "slow_link", "push pull shell", "bytes_per_s (100000) pass in either direction", _STATE
    UNAUTHORIZED = "unauthorized", "shell", "the device trusts no host: its state in adb is unauthorized", _STATE
    WRONG_SOC = "wrong_soc", "shell", "getprop names the SoC text, or another than the device's", _STATE
    OVERHEATED = "overheated", "shell", "battery and thermal zones have code (60) degrees", _STATE
    LOW_BATTERY = "low_battery", "shell", "the battery has code (5) percent", _STATE
    KILL_RUNNER = "kill_runner", "answer", "the runner dies of signal code (9) before its next answer"
    HANG_RUNNER = "hang_runner", "answer", "the runner stops, by SIGSTOP, before its next answer"
    WRONG_NUMBERS = "wrong_numbers", "answer", "outputs with more than after_bytes bytes are computed wrong"
    ENDLESS_OUTPUT = "endless_output", _COMMANDS, "a command repeats text without end"

    operations: frozenset[str]
    description: str
    is_state: bool

    def __new__(cls, name: str, operations: str = "", description: str = "", is_state: bool = False) -> FaultKind:
        """Make a kind."""
        kind = str.__new__(cls, name)
        kind._value_ = name
        kind.operations, kind.description, kind.is_state = frozenset(operations.split()), description, is_state
        return kind


CONDITIONS = frozenset(kind for kind in FaultKind if kind.is_state)
"""Kinds that are a state of the device: they hold for `seconds`, 0 until cleared, for all operations."""

LINK_KINDS = frozenset({FaultKind.STALL, FaultKind.RESET, FaultKind.OFFLINE, FaultKind.REBOOT})
"""Kinds that strike at once, unless they have `after_bytes` or `match` to wait for."""

DRAWN = frozenset(FaultKind) - {FaultKind.WRONG_NUMBERS}
"""Kinds of random faults: wrong numbers on every device would be indistinguishable from wrong code."""


@dataclass(frozen=True)
class Fault:
    """Fault to strike; the description of its kind names the fields that it uses."""

    kind: str
    after_bytes: int = 0
    """Position in a file or a command's output; a shorter operation meets the fault at its end."""
    seconds: float = 0.0
    """0: until cleared; a device that reboots takes a second."""
    code: int = 0
    """Exit code, signal, percent or degrees; 0 is the default of the kind."""
    text: str = ""
    match: str = ""
    """Regular expression, searched in the command, or in the path of the file: others are left alone."""
    times: int = 1
    """How many operations it strikes, 0: all until cleared. A condition does not count."""
    bytes_per_s: int = 0
    """Speed of a slow link."""

    def __post_init__(self) -> None:
        """Raise ValueError for what cannot be."""
        FaultKind(self.kind)
        for name in ("after_bytes", "code", "times", "bytes_per_s", "seconds"):
            value, kind = getattr(self, name), (int, float) if name == "seconds" else int
            if not isinstance(value, kind) or not 0 <= value <= 2**40:
                raise ValueError(f"{name} of a fault is {value!r}, expected a number that is not negative")
        if self.code > 255:
            raise ValueError(f"code of a fault is {self.code}, expected at most 255")
        try:
            re.compile(self.match)
        except re.error as error:
            raise ValueError(f"match of a fault is no regular expression: {error}") from None


def inject(root: Path, fault: Fault) -> None:
    """Let `fault` be in force on the running device whose folder is `root`.

    Returns once it is. Faults that wait for the same operation strike in the order in which they came. Raises
    InfraError when no device runs there.
    """
    _ask(root, {"do": "inject", "fault": asdict(fault)})


def clear(root: Path) -> None:
    """Disarm all faults and end lasting ones; past effects stay. Raises InfraError."""
    _ask(root, {"do": "clear"})


def randomize(root: Path, rate: float, seed: int) -> None:
    """Let every operation meet a fault with the probability `rate` from now on; equal seeds give equal faults.

    Raises InfraError.
    """
    _ask(root, {"do": "randomize", "rate": rate, "seed": seed})


def fired(root: Path) -> list[dict[str, Any]]:
    """Return what struck, in order: `kind`, `operation`, `subject` (command or path), `time` (epoch, seconds)."""
    try:
        lines = (root / LOG).read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in lines]


def control_address(folder: int) -> str:
    """Return the path of the control socket of the device whose root `folder` is a descriptor of.

    A socket's path has at most 107 bytes, less than some folders have.
    """
    return f"/proc/self/fd/{folder}/{CONTROL}"


def is_running(root: Path) -> bool:
    """Tell whether the daemon of a virtual device has `root` as its folder."""
    try:
        _connect(root).close()
    except OSError:
        return False
    return True


def _connect(root: Path) -> socket.socket:
    folder = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(_ANSWER_SECONDS)
        connection.connect(control_address(folder))
    except BaseException:
        connection.close()
        raise
    finally:
        os.close(folder)
    return connection


def _ask(root: Path, request: dict[str, object]) -> None:
    try:
        with _connect(root) as connection, connection.makefile("rb") as answers:
            connection.sendall(json.dumps(request).encode() + b"\n")
            answer = json.loads(answers.readline(_LINE_BYTES) or b'{"error": "it hung up"}')
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise InfraError(f"no virtual device runs in {root}: {why}") from None
    if answer.get("error"):
        raise InfraError(f"the virtual device in {root} refuses: {answer['error']}")
