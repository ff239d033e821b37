from __future__ import annotations

import fcntl
import multiprocessing
import signal
from pathlib import Path
from typing import IO

import pytest

from farm.base.errors import InfraError
from farm.base.files import own_folder, published, sweep_own, without_owner


def test_what_is_made_anew_takes_the_place_of_the_old_when_it_is_whole_and_not_before(tmp_path: Path) -> None:
    def fill(folder: Path, content: str = "old") -> None:
        (folder / "file").write_text(content)

    def fail(folder: Path) -> None:
        fill(folder, "new")
        assert (tmp_path / "key" / "file").read_text() == "old"
        raise ValueError("no")

    published(tmp_path / "key", fill)
    with pytest.raises(ValueError, match="no"):
        published(tmp_path / "key", fail, anew=True)
    assert (tmp_path / "key" / "file").read_text() == "old"
    published(tmp_path / "key", lambda folder: fill(folder, "new"), anew=True)
    assert (tmp_path / "key" / "file").read_text() == "new"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["key", "key.lock"]


def test_a_cache_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "cache").touch()
    with pytest.raises(InfraError, match="cannot write the cache: .*FARM_CACHE_DIR"):
        published(tmp_path / "cache" / "key", lambda _folder: None)


def test_a_folder_of_ones_own_goes_with_its_process_and_not_before(tmp_path: Path) -> None:
    def own() -> None:
        with own_folder(tmp_path, "one") as folder:
            (folder / "file").touch()
            made.set()
            signal.pause()

    context = multiprocessing.get_context("fork")
    made = context.Event()
    one = context.Process(target=own)
    one.start()
    assert made.wait(60)
    sweep_own(tmp_path)
    assert without_owner(tmp_path) == []
    one.kill()
    one.join()
    assert without_owner(tmp_path) == [tmp_path / "one"]
    with own_folder(tmp_path, "other"):
        assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["other"]
    assert list(tmp_path.iterdir()) == []


def test_a_folder_whose_lock_was_taken_for_left_over_has_one_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process may look at a lock between its making and its locking."""
    flock = fcntl.flock
    swept: list[bool] = []

    def sweep_first(file: IO[str], how: int) -> None:
        if how == fcntl.LOCK_EX and not swept:
            swept.append(True)
            sweep_own(tmp_path)
        flock(file, how)

    monkeypatch.setattr("farm.base.files.fcntl.flock", sweep_first)
    with own_folder(tmp_path, "one"):
        assert swept
        assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "one.lock"]
        sweep_own(tmp_path)
        assert (tmp_path / "one").is_dir()
    assert list(tmp_path.iterdir()) == []
