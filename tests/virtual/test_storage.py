"""Pushed files that virtual devices keep from one command to the next."""

from __future__ import annotations

import os
from pathlib import Path

from farm.devices.virtual.storage import kept_objects, remove_kept, take_objects, virtual_storage

SERIAL = "virtual-SM8650-0"
OBJECTS = "data/local/tmp/farm/objects"


def _push(storage: Path, name: str, size: int = 3, used_s: int = 0) -> None:
    place = storage / SERIAL / OBJECTS
    place.mkdir(parents=True, exist_ok=True)
    with (place / name).open("wb") as file:
        file.truncate(size)
    os.utime(place / name, (used_s, used_s))


def _found(cache: Path, storage: Path) -> list[str]:
    take_objects(cache, storage / SERIAL)
    return sorted(path.name for path in storage.glob(f"{SERIAL}/{OBJECTS}/*"))


def test_the_next_command_finds_the_pushed_objects_and_nothing_else(tmp_path: Path) -> None:
    with virtual_storage(tmp_path, "first") as storage:
        assert _found(tmp_path, storage) == []
        _push(storage, "program")
        (storage / SERIAL / OBJECTS).chmod(0o777)
        (storage / SERIAL / "data/local/tmp/farm/run-1").mkdir()
    assert [(Path(one.path).name, one.files, one.nbytes) for one in kept_objects(tmp_path)] == [(SERIAL, 1, 3)]
    with virtual_storage(tmp_path, "second") as storage:
        assert _found(tmp_path, storage) == ["program"]
        assert [path.name for path in (storage / SERIAL / "data/local/tmp/farm").iterdir()] == ["objects"]
        assert kept_objects(tmp_path) == []


def test_commands_at_the_same_time_share_no_file(tmp_path: Path) -> None:
    with virtual_storage(tmp_path, "before") as storage:
        _push(storage, "program")
    with virtual_storage(tmp_path, "first") as first:
        assert _found(tmp_path, first) == ["program"]
        with virtual_storage(tmp_path, "second") as second:
            assert _found(tmp_path, second) == []
            _push(second, "other")
    with virtual_storage(tmp_path, "after") as storage:
        assert _found(tmp_path, storage) == ["other"]


def test_the_least_recently_used_objects_beyond_one_gigabyte_are_removed(tmp_path: Path) -> None:
    with virtual_storage(tmp_path, "first") as storage:
        for number in range(3):
            _push(storage, str(number), size=500 << 20, used_s=number)
    with virtual_storage(tmp_path, "second") as storage:
        assert _found(tmp_path, storage) == ["1", "2"]


def test_objects_without_a_use_for_some_time_can_be_removed(tmp_path: Path) -> None:
    with virtual_storage(tmp_path, "first") as storage:
        _push(storage, "program")
    assert kept_objects(tmp_path, unused_s=3600) == []
    remove_kept(kept_objects(tmp_path))
    assert kept_objects(tmp_path) == []
    with virtual_storage(tmp_path, "second") as storage:
        assert _found(tmp_path, storage) == []
