from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest
from waiting import await_later_file_time

from farm.base import hashes
from farm.base.hashes import hash_files, hash_tree


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Files that are read."""
    read: list[Path] = []
    original = hashes.sha256_of

    def spy(path: Path) -> str:
        read.append(path)
        return original(path)

    monkeypatch.setattr(hashes, "sha256_of", spy)
    return read


def test_a_file_is_read_again_only_when_it_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reads: list[Path]
) -> None:
    file, cache = tmp_path / "library.so", tmp_path / "cache"
    file.write_bytes(b"one")
    monkeypatch.setattr(hashes, "_YOUNG_S", 0.0)
    await_later_file_time(tmp_path)
    assert hash_files(cache, [file]) == hash_files(cache, [file]) == {file: sha256(b"one")}
    assert len(reads) == 1
    stat = file.stat()
    file.write_bytes(b"two")
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    # Same size and modification time: the time of the change cannot be put back.
    assert hash_files(cache, [file]) == {file: sha256(b"two")}


def test_what_has_just_changed_is_not_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reads: list[Path]
) -> None:
    monkeypatch.setattr(hashes, "_YOUNG_S", 600.0)
    file, cache = tmp_path / "library.so", tmp_path / "cache"
    file.write_bytes(b"one")
    assert hash_files(cache, [file]) == hash_files(cache, [file]) == {file: sha256(b"one")}
    assert len(reads) == 2


def test_a_link_is_its_target_and_a_damaged_memory_is_forgotten(tmp_path: Path) -> None:
    file, link, cache = tmp_path / "library.so", tmp_path / "link.so", tmp_path / "cache"
    file.write_bytes(b"one")
    link.symlink_to(file)
    (cache / "hashes").mkdir(parents=True)
    for damage in (b'{"x": ', b"\xff\xfe", b"{}\n[]", b""):
        (cache / "hashes" / "files.json").write_bytes(damage)
        assert hash_files(cache, [link]) == {link: sha256(b"one")}
    assert [path.name for path in (cache / "hashes").iterdir()] == ["files.json"]


def test_a_memory_that_others_could_have_written_is_not_believed(tmp_path: Path, reads: list[Path]) -> None:
    file, cache = tmp_path / "library.so", tmp_path / "cache"
    file.write_bytes(b"one")
    hash_files(cache, [file])
    memory = cache / "hashes" / "files.json"
    memory.write_bytes(memory.read_bytes().replace(sha256(b"one").encode(), sha256(b"two").encode()))
    memory.chmod(0o666)
    reads.clear()
    assert hash_files(cache, [file]) == {file: sha256(b"one")}
    assert len(reads) == 1


@pytest.mark.parametrize(
    ("built_in", "edited", "counts"),
    [
        (".", "exir/passes.py", True),
        (".", "schema/program.fbs", True),
        ("exir", "exir/tables.json", True),
        ("cmake-out", "cmake-out/generated/ops.json", True),
        ("cmake-out", "cmake-out/lib/libops.so", True),
        ("cmake-out", "cmake-out/x/flags.make", False),
    ],
)
def test_what_can_be_imported_counts_wherever_cmake_builds(
    built_in: str, edited: str, tmp_path: Path, *, counts: bool
) -> None:
    tree = tmp_path / "executorch"
    for name in ("exir/passes.py", "cmake-out/generated/ops.py", f"{built_in}/CMakeCache.txt", edited):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text("one")
    before = hash_tree(tmp_path / "cache", tree).digest
    (tree / edited).write_text("another")
    assert (hash_tree(tmp_path / "cache", tree).digest != before) == counts
