"""What a device's logs say after a crash: whatever there is, bounded and made fit to read."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from farm.execution.crash_logs import collect_crash_logs
from farm.virtual.faults import Fault, FaultKind, clear, inject

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from watched_transport import Watched

LOGCAT = """#!/bin/sh
# Says what it was asked for, and one line of a crash.
echo "asked: $*"
printf 'F DEBUG: signal 11 (SIGSEGV)\\033[31m\\n'
"""


@pytest.fixture
def tools(storage: Path) -> Iterator[Callable[[str, str], None]]:
    """Give the device a command, for the time of a test."""
    folder = storage.parents[3] / "system/bin"
    made = []

    def make(name: str, script: str) -> None:
        made.append(folder / name)
        made[-1].write_text(script)
        made[-1].chmod(0o755)

    yield make
    for path in made:
        path.unlink()


def test_there_is_what_the_device_has_made_fit_to_read(
    transport: Watched, tools: Callable[[str, str], None], tmp_path: Path
) -> None:
    tools("logcat", LOGCAT)
    tools("dmesg", "#!/bin/sh\nprintf '[1.0] adsprpc: restart \\377\\n'\n")
    found = collect_crash_logs(transport, "android", tmp_path / "evidence", since=time.time() - 90)
    assert set(found) == {"logcat", "dmesg"}
    text = found["logcat"].read_text()
    assert "signal 11 (SIGSEGV)" in text
    assert "\033" not in text
    assert "asked: -d -v threadtime -t " in text
    assert found["dmesg"].read_text().startswith("[1.0] adsprpc: restart")
    assert sorted(path.name for path in (tmp_path / "evidence").iterdir()) == ["dmesg.txt", "logcat.txt"]


def test_a_logcat_that_takes_no_time_is_asked_for_its_last_lines(
    transport: Watched, tools: Callable[[str, str], None], tmp_path: Path
) -> None:
    tools("logcat", '#!/bin/sh\n[ "$5" = 3000 ] || exit 1\necho the last lines\n')
    tools("dmesg", "#!/bin/sh\necho 'dmesg: klogctl: Operation not permitted' >&2; exit 1\n")
    found = collect_crash_logs(transport, "android", tmp_path, since=time.time())
    assert {kind: path.read_text() for kind, path in found.items()} == {"logcat": "the last lines"}


def test_all_of_it_together_is_bounded(transport: Watched, tools: Callable[[str, str], None], tmp_path: Path) -> None:
    # What is not UTF-8 becomes longer when it is made fit to read.
    flood = "#!/bin/sh\nhead -c 3000000 /dev/zero | tr '\\0' '\\377'\n"
    for name in ("logcat", "dmesg"):
        tools(name, flood)
    found = collect_crash_logs(transport, "android", tmp_path, since=time.time(), max_bytes=100_000)
    assert set(found) == {"logcat", "dmesg"}
    assert sum(path.stat().st_size for path in found.values()) <= 100_000


def test_a_linux_device_has_other_logs(transport: Watched, tools: Callable[[str, str], None], tmp_path: Path) -> None:
    tools("dmesg", "#!/bin/sh\necho from the kernel\n")
    tools("journalctl", '#!/bin/sh\necho "asked: $*"\n')
    found = collect_crash_logs(transport, "linux", tmp_path, since=time.time() - 9)
    assert found["dmesg"].read_text() == "from the kernel"
    assert found["journal"].read_text() == "asked: -k -n 1000 --no-pager --since -10 seconds"


def test_it_never_raises(transport: Watched, storage: Path, tools: Callable[[str, str], None], tmp_path: Path) -> None:
    root = storage.parents[3]
    tools("logcat", LOGCAT)
    tools("dmesg", "#!/bin/sh\necho from the kernel\n")
    inject(root, Fault(FaultKind.ENDLESS_OUTPUT, match="logcat", times=1, text="again and "))
    found = collect_crash_logs(transport, "android", tmp_path / "a", since=time.time())
    assert set(found) == {"dmesg"}, "what says too much is left out, the rest is there"
    clear(root)
    (tmp_path / "file").write_text("in the way")
    assert collect_crash_logs(transport, "android", tmp_path / "file", since=time.time()) == {}
    gone = type(transport)("virtual-none", 1)
    assert collect_crash_logs(gone, "android", tmp_path / "b", since=time.time()) == {}
    assert not (tmp_path / "b").exists()
