from __future__ import annotations

import os
import subprocess
import sys

from waiting import Started

from farm.base.machine import own_bytes, peak_bytes, reset_peak, resident_bytes, usable_bytes

MEGABYTE = 2**20
# A grandchild of the measured process allocates memory, shares it with a child of its own, and prints a line.
SHARING = f"""
import os, subprocess, sys
held = b"x" * (64 * {MEGABYTE})
if os.fork() == 0:
    print("ready", flush=True)
sys.stdin.read()
"""
PARENT = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SHARING!r}])"


def test_what_a_process_started_counts_and_what_they_share_once_when_asked_exactly() -> None:
    with Started([sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        shared_twice, exact = resident_bytes(process.pid), own_bytes(process.pid)
        assert process.stdin is not None
        process.stdin.close()
    assert shared_twice > 128 * MEGABYTE
    assert 64 * MEGABYTE < exact < 120 * MEGABYTE


def test_a_process_that_is_gone_has_nothing() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert (resident_bytes(process.pid), own_bytes(process.pid)) == (0, 0)
    assert 0 < own_bytes(os.getpid()) < usable_bytes()


def test_the_peak_begins_anew_when_it_is_reset() -> None:
    assert reset_peak()
    settled = peak_bytes()
    block = bytearray(64 * 2**20)
    for page in range(0, len(block), 4096):
        block[page] = 1
    assert peak_bytes() >= settled + 60 * 2**20
    del block
    assert peak_bytes() >= settled + 60 * 2**20
    assert reset_peak()
    assert peak_bytes() < settled + 30 * 2**20
