"""Code of a suite runs as the user of the agent, and must not read the secrets of the agent."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from waiting import Started

from farm.base import private

NOBODY = 65534
WAIT = "print('ready', flush=True); input()"
HIDE = f"{Path(private.__file__).read_text()}\nhide_environment()"
READ = "import sys; print('of the agent' in open(f'/proc/{sys.argv[1]}/environ').read())"


PYTHON = shutil.which("python3", path="/usr/bin") or ""
"""Interpreter that another user may execute."""


def read_environment_of(code: str) -> subprocess.CompletedProcess[str]:
    """Start a process with a secret that runs `code`, and read its environment as the same user, without root."""
    user = NOBODY if not os.getuid() else None
    env = {"PGPASSWORD": "of the agent", "PYTHONDONTWRITEBYTECODE": "1", "PATH": os.environ["PATH"]}
    with Started(
        [PYTHON, "-c", f"{code}\n{WAIT}"], user=user, env=env, cwd="/", text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline()
        reading = [PYTHON, "-S", "-c", READ, str(process.pid)]
        done = subprocess.run(reading, user=user, env={}, cwd="/", capture_output=True, text=True, check=False)
        process.communicate("\n")
    return done


@pytest.mark.skipif(not PYTHON, reason="no interpreter in /usr/bin")
def test_the_environment_is_hidden_from_other_processes_of_the_user() -> None:
    assert read_environment_of("").stdout == "True\n"
    hidden = read_environment_of(HIDE)
    assert "PermissionError" in hidden.stderr
    assert hidden.stdout == ""
