"""Use of the Hexagon SDK's elfsigner without a prompt: it signs one file, and only the signed file is kept.

The tool asks for agreement to its license terms until the answer is y or n. It writes a log and intermediate files,
keys among them, into its output folder. Its exit code is 0 for a signed file, 1 for a failure, 2 for the answer n.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from farm.base.errors import InfraError, MissingToolError
from farm.base.processes import Child, Supervisor
from farm.base.text import visible

ELFSIGNER = Path("tools/elfsigner/elfsigner.py")
# The tool's own messages name three minutes for signing by a server.
SIGNING_SECONDS = 300.0

# The tool repeats its question after an invalid answer; more repetitions mean that it asks another question.
_ANSWERS = b"y\n" * 8
# Variables that a Python program needs. Others may hold tokens and passwords, which the tool must not get.
_KEPT = ("PATH", "HOME", "USER", "LANG", "LC_ALL", "TZ")
# The tool imports `imp`, which Python 3.12 does not have.
_LAST_PYTHON = (3, 11)
_OUTPUT_BYTES = 1 << 20
_LINE_BYTES = 4096


def find_elfsigner(hexagon_sdk: Path | None) -> Path:
    """Return the tool of a Hexagon SDK. Raises MissingToolError."""
    tool = hexagon_sdk / ELFSIGNER if hexagon_sdk is not None else None
    if tool is None or not tool.is_file():
        problem = f"{tool} is not there" if tool is not None else "HEXAGON_SDK_ROOT is not set"
        raise MissingToolError(
            f"signing needs the Hexagon SDK and {problem}: set HEXAGON_SDK_ROOT to a Hexagon SDK from Qualcomm, or "
            "hexagon_sdk_root in the [qnn] table of farm.toml"
        )
    return tool


def find_python(wanted: Path | None = None) -> Path:
    """Return an interpreter for the tool. Raises MissingToolError."""
    if wanted is not None:
        return wanted
    if sys.version_info[:2] <= _LAST_PYTHON:
        return Path(sys.executable)
    for minor in range(_LAST_PYTHON[1], 6, -1):
        if found := shutil.which(f"python3.{minor}"):
            return Path(found)
    raise MissingToolError(
        "elfsigner needs a Python older than 3.12 (it imports the module imp) and none is in PATH: name one with "
        "--python"
    )


def run_elfsigner(
    tool: Path,
    source: Path,
    folder: Path,
    *,
    python: Path,
    show: Callable[[str], None],
    timeout_s: float = SIGNING_SECONDS,
) -> Path:
    """Sign `source` into the empty `folder`, which no other call uses, and return the file that the tool left there.

    The caller removes the tool's other files in `folder`. `show` gets the tool's output, line by line. Raises
    InfraError after `timeout_s`, for an exit code other than 0, and without a signed file. The content of the file is
    not checked.
    """
    signed, scratch = folder / "signed", folder / "scratch"
    for path in (signed, scratch):
        path.mkdir(mode=0o700)
    env = {name: value for name, value in os.environ.items() if name in _KEPT}
    env |= {"TMPDIR": str(scratch), "PYTHONDONTWRITEBYTECODE": "1", "PYTHONUNBUFFERED": "1"}
    env["HEXAGON_SDK_ROOT"] = str(tool.parents[2])
    with Supervisor() as supervisor:
        child = supervisor.spawn(
            # -E: PYTHONPATH and the like are for farm only. A separate standard error would need its own pipe.
            [python, "-c", _BOTH_TO_ONE, tool, "-i", source, "-o", signed],
            name="elfsigner",
            env=env,
            cwd=scratch,
            stdin_pipe=True,
            stdout_pipe=True,
        )
        code = _converse(child, show, timeout_s)
    if code is None:
        raise InfraError(
            f"elfsigner did not sign {source.name} in {timeout_s:g} s and was ended: does it wait for a server, or ask "
            "something else than whether its license terms are agreed to? Its last lines are above"
        )
    if code != 0:
        raise InfraError(f"elfsigner did not sign {source.name}: it ended with exit code {code}; its lines are above")
    made = signed / source.name
    if made.is_symlink() or not made.is_file():
        raise InfraError(f"elfsigner signed {source.name} with exit code 0, and wrote no {made.name}")
    return made


# Program that starts the tool with both output streams in one pipe, which keeps the order of their lines.
_BOTH_TO_ONE = "import os, sys; os.dup2(1, 2); os.execv(sys.executable, [sys.executable, '-E', '-B', *sys.argv[1:]])"


def _converse(child: Child, show: Callable[[str], None], timeout_s: float) -> int | None:
    """Answer the tool's question, show its output, and return its exit code; None after `timeout_s`."""
    with child.limited(timeout_s) as late:
        with contextlib.suppress(BrokenPipeError):
            child.process.stdin.write(_ANSWERS)  # type: ignore[union-attr]
        with contextlib.suppress(BrokenPipeError):
            child.process.stdin.close()  # type: ignore[union-attr]
        _show_lines(child, show)
        code = child.process.wait()
    return None if late.is_set() else code


def _show_lines(child: Child, show: Callable[[str], None]) -> None:
    room = _OUTPUT_BYTES
    pipe = child.process.stdout
    if pipe is None:
        return
    while line := pipe.readline(_LINE_BYTES):
        room -= len(line)
        if room > 0:
            show(visible(line.decode(errors="replace").rstrip("\r\n")))
