from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from farm.errors import InfraError
from farm.publish import published


def test_of_many_that_want_a_folder_one_makes_it(tmp_path: Path) -> None:
    made: list[Path] = []

    def fill(folder: Path) -> None:
        made.append(folder)
        (folder / "file").write_text("whole")

    threads = [threading.Thread(target=published, args=(tmp_path / "cache" / "key", fill)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1
    assert (tmp_path / "cache" / "key" / "file").read_text() == "whole"


def test_a_failed_attempt_leaves_nothing_and_the_next_one_makes_it(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "half").touch()
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        published(tmp_path / "key", fail)
    assert [path.name for path in tmp_path.iterdir()] == ["key.lock"]
    assert published(tmp_path / "key", lambda folder: (folder / "whole").touch()) == tmp_path / "key"


def test_what_a_killed_process_left_is_removed_and_made_anew(tmp_path: Path) -> None:
    program = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from farm.publish import published\n"
        "def fill(folder):\n"
        "    (folder / 'half').touch()\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "published(Path(sys.argv[1]), fill)\n"
    )
    killed = subprocess.run([sys.executable, "-c", program, str(tmp_path / "key")], check=False, timeout=60)
    assert killed.returncode == -9
    assert not (tmp_path / "key").exists()
    published(tmp_path / "key", lambda folder: (folder / "whole").touch())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["key", "key.lock"]
    assert [path.name for path in (tmp_path / "key").iterdir()] == ["whole"]


def test_a_cache_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "cache").touch()
    with pytest.raises(InfraError, match="cannot write the cache"):
        published(tmp_path / "cache" / "key", lambda _folder: None)
