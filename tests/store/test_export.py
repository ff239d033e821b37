"""Kept files are written unchanged, under names that lead nowhere else."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import BinaryIO

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farm.base.errors import StoreError, UsageError
from farm.store.artifacts import ArtifactStore
from farm.store.records import ArtifactRecord
from farm.store.transfer.files import export, file_names


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
        patch.setattr("farm.store.transfer.files.shutil.copyfileobj", full)
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
