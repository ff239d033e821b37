"""Output of native code in a builder: each line is in the log of the job that printed it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TWO_JOBS = """
import ctypes, os, pathlib, signal, sys
from farm.builds.compile.builder import _printing_to
from farm.builds.compile.protocol import reply_pipe
reply_pipe()
native = ctypes.CDLL(None)
for name in ("first", "second"):
    with _printing_to(pathlib.Path(name)):
        native.printf(f"{name} from C\\n".encode())
        if name == "second":
            os.kill(os.getpid(), signal.SIGKILL)
"""


def test_lines_of_native_code_are_in_the_log_of_their_job_also_after_a_crash(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    subprocess.run([sys.executable, "-c", TWO_JOBS], cwd=tmp_path, env=environment, capture_output=True, check=False)
    assert (tmp_path / "first").read_text() == "first from C\n"
    assert (tmp_path / "second").read_text() == "second from C\n"
