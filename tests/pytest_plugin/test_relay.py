"""Child process that goes on writing without a reader."""

from __future__ import annotations

import subprocess
import sys

RELAYING = """
import subprocess, sys
from farm.dispatch.pytest_plugin.launch import relayed_output

child = "import sys; [print(n, flush=n == 0) for n in range(20000)]; print('error', file=sys.stderr); sys.exit(7)"
with relayed_output() as threads:
    process = subprocess.Popen([sys.executable, "-c", child])
code = process.wait()
for thread in threads:
    thread.join(5)
sys.exit(code)
"""


def start(stderr: int) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", RELAYING], stdout=subprocess.PIPE, stderr=stderr, text=True)


def test_all_that_it_writes_arrives_and_in_one_pipe_in_its_order() -> None:
    for stderr, out, err in ((subprocess.PIPE, [], "error\n"), (subprocess.STDOUT, ["error"], None)):
        with start(stderr) as process:
            found = process.communicate(timeout=60)
        assert process.returncode == 7
        assert found[0].split() == [*map(str, range(20000)), *out]
        assert found[1] == err


def test_it_goes_on_and_ends_as_it_would_when_its_reader_has_left() -> None:
    with start(subprocess.STDOUT) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "0\n"
        process.stdout.close()
        assert process.wait(60) == 7
