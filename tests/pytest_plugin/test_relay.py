"""Child process that goes on writing without a reader."""

from __future__ import annotations

import subprocess
import sys

RELAYING = """
import subprocess, sys
from farm.dispatch.pytest_plugin.launch import relayed_output

child = "import sys; [print(n, flush=n == 0) for n in range(20000)]; print('error', file=sys.stderr); sys.exit(7)"
with relayed_output() as relay:
    process = subprocess.Popen([sys.executable, "-c", child])
code = process.wait()
relay.finish()
sys.exit(code)
"""


def start(stderr: int) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", RELAYING], stdout=subprocess.PIPE, stderr=stderr, text=True)


def test_all_that_it_writes_arrives() -> None:
    with start(subprocess.PIPE) as process:
        out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (7, "error\n")
    assert out.split() == [str(n) for n in range(20000)]


def test_output_and_errors_in_one_pipe_stay_in_their_order() -> None:
    with start(subprocess.STDOUT) as process:
        out, _ = process.communicate(timeout=60)
    assert out.split() == [*map(str, range(20000)), "error"]


def test_it_goes_on_and_ends_as_it_would_when_its_reader_has_left() -> None:
    with start(subprocess.STDOUT) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "0\n"
        process.stdout.close()
        assert process.wait(60) == 7
