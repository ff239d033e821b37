from __future__ import annotations

import hashlib
import os
from pathlib import Path

from farm.runtime.native.hashes import hash_files


def test_a_file_is_read_again_only_when_it_changed(tmp_path: Path) -> None:
    file, cache = tmp_path / "library.so", tmp_path / "cache"
    file.write_bytes(b"one")
    one = hashlib.sha256(b"one").hexdigest()
    assert hash_files(cache, [file]) == {file: one}
    stat = file.stat()
    file.write_bytes(b"two")
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    # Same size and time: remembered, which is what makes it cheap.
    assert hash_files(cache, [file]) == {file: one}
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    assert hash_files(cache, [file]) == {file: hashlib.sha256(b"two").hexdigest()}


def test_a_link_is_its_target_and_a_damaged_memory_is_forgotten(tmp_path: Path) -> None:
    file, link, cache = tmp_path / "library.so", tmp_path / "link.so", tmp_path / "cache"
    file.write_bytes(b"one")
    link.symlink_to(file)
    cache.mkdir()
    (cache / "hashes.json").write_text('{"x": ')
    assert hash_files(cache, [link]) == {link: hashlib.sha256(b"one").hexdigest()}
    assert [path.name for path in cache.iterdir()] == ["hashes.json"]
