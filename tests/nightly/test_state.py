from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from farm.base.errors import InfraError, UsageError
from farm.dispatch.nightly.state import Nights, new_id, write_whole
from farm.dispatch.nightly.templates import SAMPLE


def test_one_night_of_a_name_at_a_time(tmp_path: Path) -> None:
    one, other = Nights(tmp_path / "n"), Nights(tmp_path / "n")
    with one.alone(), pytest.raises(UsageError, match=r"'n' is running already \(process \d+\)"), other.alone():
        pass
    with other.alone():
        pass


def test_only_an_unfinished_night_with_the_same_runs_is_resumed(tmp_path: Path) -> None:
    nights = Nights(tmp_path / "n")
    nights.folder.mkdir()
    with pytest.raises(UsageError, match="there is none yet called 'n'"):
        nights.unfinished("d")
    killed = msgspec.structs.replace(SAMPLE, code=None, digest="d", finished_ms=None)
    nights.save(killed)
    assert nights.unfinished("d") == killed
    with pytest.raises(UsageError, match="the file has changed since"):
        nights.unfinished("e")
    nights.save(msgspec.structs.replace(killed, code=130))
    assert nights.unfinished("d").code == 130
    nights.save(msgspec.structs.replace(killed, code=1))
    with pytest.raises(UsageError, match="is finished"):
        nights.unfinished("d")


def test_old_nights_and_their_pages_are_removed_and_nothing_else(tmp_path: Path) -> None:
    nights, reports = Nights(tmp_path / "n"), tmp_path / "reports"
    ids = [f"2026030{day}-020000-00000{day}" for day in range(1, 6)]
    for number, one in enumerate(ids):
        write_whole(reports / one / "index.html", b"")
        nights.save(msgspec.structs.replace(SAMPLE, id=one, started_ms=number))
    (reports / "mine").mkdir()
    nights.forget(2, reports)
    assert [night.id for night in nights.all()] == ids[3:]
    assert sorted(path.name for path in reports.iterdir()) == [*ids[3:], "mine"]
    (nights.folder / f"{new_id()}.json").write_text("half of a ni")
    assert len(nights.all()) == 2


def test_what_cannot_be_written_is_said(tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full")
    (tmp_path / "n").mkdir()
    (tmp_path / "n" / "lock").symlink_to("/dev/full")
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(InfraError, match="cannot write .*File exists"):
        write_whole(blocked / "x.json", b"{}")
    with pytest.raises(InfraError, match="cannot write .*/n: "), Nights(tmp_path / "n").alone():
        pass
