"""Artifacts are kept once, whole, under their hash."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from farm.base.errors import StoreError
from farm.store.artifacts import ArtifactStore


def _files(root: Path) -> list[Path]:
    return [path for path in root.rglob("*") if path.is_file()]


def test_bytes_and_files_come_back(tmp_path: Path) -> None:
    artifacts = ArtifactStore(tmp_path / "artifacts")
    content = os.urandom(3_000_000)
    (tmp_path / "file").write_bytes(content)

    from_file, from_bytes = artifacts.put(tmp_path / "file"), artifacts.put(content)

    assert from_file == from_bytes == hashlib.sha256(content).hexdigest()
    with artifacts.open(from_file) as file:
        assert file.read() == content
    assert artifacts.put(b"") == hashlib.sha256(b"").hexdigest()
    assert (
        _files(tmp_path / "artifacts") == [artifacts.path(from_file), artifacts.path(artifacts.put(b""))]
        or len(_files(tmp_path / "artifacts")) == 2
    )
    assert artifacts.path(from_file).relative_to(tmp_path / "artifacts").parts == (
        from_file[:2],
        from_file[2:4],
        from_file,
    )


def test_puts_of_the_same_at_once_keep_one(tmp_path: Path) -> None:
    contents = [bytes([n]) * 100_000 for n in range(3)]

    def put() -> None:
        artifacts = ArtifactStore(tmp_path)
        for content in contents * 3:
            artifacts.put(content)

    threads = [threading.Thread(target=put) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert sorted(path.read_bytes() for path in _files(tmp_path)) == contents


def test_a_killed_put_publishes_nothing(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path; from farm.store.artifacts import ArtifactStore\n"
        "os.mkfifo(sys.argv[2]); print('ready', flush=True)\n"
        "ArtifactStore(Path(sys.argv[1])).put(Path(sys.argv[2]))"
    )
    fifo = tmp_path / "fifo"
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "root"), str(fifo)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout
    assert process.stdout.readline() == "ready\n"
    with fifo.open("wb") as pipe:
        pipe.write(b"x" * 3_000_000)
        process.kill()
        process.wait()
    process.stdout.close()

    published = [path for path in _files(tmp_path / "root") if path.parent.name != "incoming"]
    assert published == []
    left = _files(tmp_path / "root")
    for path in left:
        os.utime(path, (0, 0))
    sha256 = ArtifactStore(tmp_path / "root").put(b"the next one")
    assert [path.name for path in _files(tmp_path / "root")] == [sha256]


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    artifacts = ArtifactStore(tmp_path / "artifacts")
    with pytest.raises(StoreError, match="cannot be read: No such file"):
        artifacts.open("a" * 64)
    with pytest.raises(StoreError, match="No such file"):
        artifacts.put(tmp_path / "missing")
    for hostile in ("../../etc/passwd", "a" * 63, "A" * 64, "", "a" * 64 + "\n", "\0" * 64):
        with pytest.raises(StoreError, match="is not the SHA-256"):
            artifacts.open(hostile)


def test_a_root_that_cannot_be_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="the artifact is not kept: Not a directory"):
        ArtifactStore(tmp_path / "file" / "artifacts").put(b"x")
