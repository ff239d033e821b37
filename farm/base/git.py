"""git without programs that a repository or its user configures: no hook, file watcher, pager or signer.

The search for edited files runs their filters, as of git-lfs: without filters each file would look edited.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from farm.base.errors import InfraError, MissingToolError, UsageError

# Prefix of variables that name another repository than the folder's: hooks set them for farm.
_OTHER_REPOSITORY = "GIT_"
_KEPT = ("GIT_CONFIG", "GIT_TRACE")
_ALONE = {
    "GIT_TERMINAL_PROMPT": "0",
    # A look at a repository does not write its index.
    "GIT_OPTIONAL_LOCKS": "0",
    # A partial clone would fetch missing objects from the network.
    "GIT_NO_LAZY_FETCH": "1",
    "GIT_ALLOW_PROTOCOL": "file",
    "LC_ALL": "C",
}
_OFF = (
    "-c", "core.hooksPath=/dev/null",
    "-c", "core.fsmonitor=false",
    "-c", "core.untrackedCache=keep",
    "-c", "log.showSignature=false",
    "-c", "color.ui=false",
    "-c", "core.quotePath=false",
)  # fmt: skip
# The user's configuration does not apply to a repository of farm: no filter, attribute or template.
_OWN = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1", "GIT_ATTR_NOSYSTEM": "1"}
_REASON_CHARS = 400


def git(folder: Path, *arguments: str, timeout_s: float = 60.0, own: bool = False, okay: tuple[int, ...] = (0,)) -> str:
    """Return what `git ARGUMENTS` prints in `folder`; `own`: a repository that farm made, without the user's settings.

    Raises UsageError with git's words for an exit code that is not `okay`, MissingToolError, InfraError where it takes
    too long.
    """
    return ask_git(folder, *arguments, timeout_s=timeout_s, own=own, okay=okay)[1]


def ask_git(
    folder: Path, *arguments: str, timeout_s: float = 60.0, own: bool = False, okay: tuple[int, ...] = (0,)
) -> tuple[int, str]:
    """Return the exit code as well, otherwise as `git`."""
    argv = ["git", *_OFF, "-C", os.fspath(folder), *arguments]
    try:
        done = subprocess.run(
            argv, capture_output=True, check=False, timeout=timeout_s, env=_environment(own=own),
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except FileNotFoundError:
        raise MissingToolError("git is not on PATH: it is needed to read a checkout's commits") from None
    except subprocess.TimeoutExpired:
        raise InfraError(f"git {arguments[0]} did not finish in {timeout_s:g} s in {folder}") from None
    if done.returncode not in okay:
        words = done.stderr.decode(errors="replace").strip().splitlines() or [f"exit code {done.returncode}"]
        reason = next((line for line in words if line.startswith(("fatal:", "error:"))), words[-1])
        raise UsageError(f"{folder}: git {arguments[0]}: {reason[:_REASON_CHARS]}")
    return done.returncode, done.stdout.decode(errors="surrogateescape")


def _environment(*, own: bool) -> Mapping[str, str]:
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(_OTHER_REPOSITORY) or name.startswith(_KEPT)
    }
    return kept | _ALONE | (_OWN if own else {})
