from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from farm.base.errors import InfraError, UsageError
from farm.dispatch.nightly.state import NightlyRuns, new_id, write_whole
from farm.dispatch.nightly.templates import SAMPLE


def test_one_nightly_run_of_a_name_at_a_time(tmp_path: Path) -> None:
    one, other = NightlyRuns(tmp_path / "n"), NightlyRuns(tmp_path / "n")
    with one.alone(), pytest.raises(UsageError, match=r"'n' is running already \(process \d+\)"), other.alone():
        pass
    with other.alone():
        pass


def test_only_an_unfinished_nightly_run_with_the_same_runs_is_resumed(tmp_path: Path) -> None:
    nightly_runs = NightlyRuns(tmp_path / "n")
    nightly_runs.folder.mkdir()
    with pytest.raises(UsageError, match="there is none yet called 'n'"):
        nightly_runs.unfinished("d")
    killed = msgspec.structs.replace(SAMPLE, code=None, digest="d", finished_ms=None)
    nightly_runs.save(killed)
    assert nightly_runs.unfinished("d") == killed
    with pytest.raises(UsageError, match="the file has changed since"):
        nightly_runs.unfinished("e")
    nightly_runs.save(msgspec.structs.replace(killed, code=130))
    assert nightly_runs.unfinished("d").code == 130
    nightly_runs.save(msgspec.structs.replace(killed, code=1))
    with pytest.raises(UsageError, match="is finished"):
        nightly_runs.unfinished("d")


def test_old_nightly_runs_and_their_pages_are_removed_and_nothing_else(tmp_path: Path) -> None:
    nightly_runs, reports = NightlyRuns(tmp_path / "n"), tmp_path / "reports"
    ids = [f"2026030{day}-020000-00000{day}" for day in range(1, 6)]
    for number, one in enumerate(ids):
        write_whole(reports / one / "index.html", b"")
        nightly_runs.save(msgspec.structs.replace(SAMPLE, id=one, started_ms=number))
    (reports / "mine").mkdir()
    nightly_runs.forget(2, reports)
    assert [nightly_run.id for nightly_run in nightly_runs.all()] == ids[3:]
    assert sorted(path.name for path in reports.iterdir()) == [*ids[3:], "mine"]
    (nightly_runs.folder / f"{new_id()}.json").write_text("half of a ni")
    assert len(nightly_runs.all()) == 2


def test_what_cannot_be_written_is_said(tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full")
    (tmp_path / "n").mkdir()
    (tmp_path / "n" / "lock").symlink_to("/dev/full")
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(InfraError, match="cannot write .*File exists"):
        write_whole(blocked / "x.json", b"{}")
    with pytest.raises(InfraError, match="cannot write .*/n: "), NightlyRuns(tmp_path / "n").alone():
        pass
