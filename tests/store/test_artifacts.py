"""Artifacts are kept once, whole, under their hash, and exported unchanged."""

from __future__ import annotations

import errno
import hashlib
import itertools
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farm.base.errors import StoreError, UsageError
from farm.store.artifacts import ArtifactStore
from farm.store.records import ArtifactRecord
from farm.store.transfer.runs import export, file_names

# Artifacts are kept once, whole, under their hash.


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
    assert artifacts.path(from_file) == tmp_path / "artifacts" / from_file[:2] / from_file[2:4] / from_file
    assert artifacts.put(b"") == hashlib.sha256(b"").hexdigest()
    assert len(_files(tmp_path / "artifacts")) == 2


def test_puts_of_the_same_at_once_keep_one(tmp_path: Path) -> None:
    contents = [bytes([n]) * 100_000 for n in range(3)]

    def put(_: int) -> None:
        artifacts = ArtifactStore(tmp_path)
        for content in contents * 3:
            artifacts.put(content)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(put, range(4)))

    assert sorted(path.read_bytes() for path in _files(tmp_path)) == contents


def test_a_put_replaces_a_damaged_file(tmp_path: Path) -> None:
    artifacts = ArtifactStore(tmp_path / "artifacts")
    content = b"what was right "
    (tmp_path / "file").write_bytes(content)
    for damage, source in itertools.product((b"", b"another content"), (content, tmp_path / "file")):
        sha256 = artifacts.put(content)
        artifacts.path(sha256).chmod(0o644)
        artifacts.path(sha256).write_bytes(damage)
        assert artifacts.put(source) == sha256
        assert artifacts.path(sha256).read_bytes() == content


def test_a_killed_put_publishes_nothing(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path; from farm.store.artifacts import ArtifactStore\n"
        "os.mkfifo(sys.argv[2]); print('ready', flush=True)\n"
        "ArtifactStore(Path(sys.argv[1])).put(Path(sys.argv[2]))"
    )
    fifo = tmp_path / "fifo"
    argv = [sys.executable, "-c", code, str(tmp_path / "root"), str(fifo)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stdout.readline() == "ready\n"
        with fifo.open("wb") as pipe:
            pipe.write(b"x" * 3_000_000)
            process.kill()
            process.wait()

    left = _files(tmp_path / "root")
    assert {path.parent.name for path in left} <= {"incoming"}
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
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="the artifact is not kept: Not a directory"):
        ArtifactStore(tmp_path / "file" / "artifacts").put(b"x")


# Kept files are written unchanged, under names that lead nowhere else.


def kinds(*names: str) -> list[ArtifactRecord]:
    return [ArtifactRecord(f"{n:064x}", 1, name) for n, name in enumerate(names)]


def test_names_are_those_of_the_sdk_and_two_of_one_name_are_two_files() -> None:
    found = file_names(kinds("etdump", "optrace:optrace_0.json", "output", "optrace:x", "qhas:x", "x"))
    assert list(found) == ["etdump.etdp", "optrace_0.json", "output", "x", "2-x", "3-x"]


@given(st.lists(st.text(max_size=300), max_size=6))
def test_no_name_leads_elsewhere(names: list[str]) -> None:
    found = file_names(kinds(*(f"optrace:{name}" for name in names)))
    assert len(found) == len(names)
    for name in found:
        assert Path(name).name == name
        assert name not in ("", ".", "..")
        assert name.isascii()
        assert not name.startswith(".")
        assert len(name) < 130


def test_files_are_written_unchanged_and_nothing_is_overwritten(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path / "artifacts")
    contents = {"etdump": b"\0\xff" * 1000, "qhas:../../../evil": b"{}"}
    records = [ArtifactRecord(store.put(content), len(content), kind) for kind, content in contents.items()]
    folder = tmp_path / "to" / "here"
    written = export(store, records, folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
        "etdump.etdp": contents["etdump"],
        "_.._.._evil": contents["qhas:../../../evil"],
    }
    assert written == [folder / "etdump.etdp", folder / "_.._.._evil"]
    with pytest.raises(UsageError, match=r"etdump\.etdp is there already: name another folder"):
        export(store, records, folder)
    link = tmp_path / "linked"
    link.mkdir()
    (link / "etdump.etdp").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match="is there already"):
        export(store, records, link)
    assert not (tmp_path / "elsewhere").exists()


def test_a_full_disk_leaves_no_part_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = ArtifactStore(tmp_path / "artifacts")
    records = [ArtifactRecord(store.put(b"x" * 1000), 1000, "etdump")]

    def full(source: BinaryIO, target: BinaryIO) -> None:
        target.write(source.read(10))
        target.flush()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    folder = tmp_path / "to"
    with monkeypatch.context() as patch:
        patch.setattr("farm.store.transfer.runs.shutil.copyfileobj", full)
        with pytest.raises(UsageError, match="to: cannot be written: No space left on device"):
            export(store, records, folder)
    assert list(folder.iterdir()) == []
    assert export(store, records, folder) == [folder / "etdump.etdp"]


def test_what_is_gone_or_cannot_be_written_is_said(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path / "artifacts")
    with pytest.raises(StoreError, match="cannot be read"):
        export(store, kinds("etdump"), tmp_path / "a")
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be written: Not a directory"):
        export(store, kinds("etdump"), tmp_path / "file" / "folder")
