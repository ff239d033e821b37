"""Calls of pip for another interpreter."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from farm.base.errors import InfraError
from farm.base.processes import Supervisor

_INSTALL_SECONDS = 1800.0
_BASE = str(getattr(sys, "_base_executable", sys.executable))
_OPTIONS = ("--quiet", "--no-input", "--disable-pip-version-check", "--no-deps", "--no-warn-script-location")


def pip_install(python: Path, requirements: Sequence[str], folder: Path | None = None) -> str:
    """Install `requirements` without their dependencies for the interpreter `python`, in `folder` or its environment.

    Return the reason of a failure in one line, empty after success. farm's own pip is used or, without one, the pip of
    `python`.
    """
    target = ["--target", str(folder)] if folder is not None else []
    problem = f"there is no pip: {sys.executable} -m ensurepip"
    # The base Python has pip more often than an environment.
    pips = [[one, "-P", "-m", "pip", "--python", str(python)] for one in dict.fromkeys((sys.executable, _BASE))]
    for command in (*pips, [str(python), "-P", "-m", "pip"]):
        try:
            code, lines = _run([*command, "install", *_OPTIONS, *target, *requirements])
        except (InfraError, subprocess.TimeoutExpired) as error:
            problem = str(error)
            continue
        if code == 0:
            return ""
        # Without pip, or with a pip that is too old to install for another interpreter, the next one is tried.
        if any("No module named pip" in line or "no such option: --python" in line for line in lines):
            continue
        errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
        return (errors or lines or [f"exit code {code}"])[0]
    return problem


def _run(argv: list[str]) -> tuple[int, list[str]]:
    """Return exit code and standard error of pip, which ends with this process, even if that is killed."""
    with Supervisor() as supervisor:
        child = supervisor.spawn(argv, name="pip", stderr_pipe=True)
        _, errors = child.process.communicate(timeout=_INSTALL_SECONDS)
        return child.process.returncode, errors.decode(errors="replace").strip().splitlines()
