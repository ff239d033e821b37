"""Folders that commands write for users without farm."""

from __future__ import annotations

from pathlib import Path

import pytest

from farm.replay.bundle_folder import publish_folder


@pytest.mark.parametrize("name", [".", "made", "above/made"])
def test_a_missing_or_empty_folder_is_written_however_it_is_named(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here := tmp_path / "here").mkdir()
    monkeypatch.chdir(here)
    publish_folder(Path(name), lambda folder: (folder / "README.md").touch())
    assert (here / name / "README.md").is_file()
    assert [path.name for path in tmp_path.iterdir()] == ["here"]
