"""Cache of a run's report: made once for all requests, and never older than the store at the time of a request."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from farm.report.html.page_of_run import render_html
from farm.serve import app, kept
from farm.store.records import Remark
from farm.store.store import open_store

from .conftest import attempt

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from conftest import Filled, Server

    from farm.base.config.settings import Config


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The runs whose report was made, in order."""
    found: list[str] = []

    def counted(view: Any, *arguments: Any, **more: Any) -> str:
        found.append(view.id)
        return render_html(view, *arguments, **more)

    monkeypatch.setattr(app, "render_html", counted)
    return found


def together(count: int, ask: Callable[[], Any]) -> list[Any]:
    """Return the results of `count` simultaneous calls of `ask`."""
    answers: list[Any] = []
    barrier = threading.Barrier(count)

    def one() -> None:
        barrier.wait(30)
        answers.append(ask())

    threads = [threading.Thread(target=one) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == count
    return answers


def test_many_readers_get_one_page_that_was_made_once(server: Server, filled: Filled, made: list[str]) -> None:
    run_id = filled.runs[-1]
    answers = together(20, lambda: server.get(f"/runs/{run_id}"))
    assert {answer.status for answer in answers} == {200}
    [page] = {answer.body for answer in answers}
    assert page.startswith(b"<!DOCTYPE html>")
    assert page.rstrip().endswith(b"</html>")
    assert made == [run_id]
    assert server.get(f"/runs/{run_id[:-2]}").body == page
    assert made == [run_id]
    assert int(answers[0].headers["content-length"]) == len(page)
    assert answers[0].headers["cache-control"] == "no-store"
    assert "script-src 'sha256-" in answers[0].headers["content-security-policy"]


def test_a_reader_who_has_it_is_told_so(server: Server, filled: Filled) -> None:
    path = f"/runs/{filled.runs[0]}"
    tag = server.get(path).headers["etag"]
    again = server.get(path, If_None_Match=tag)
    assert (again.status, again.body) == (304, b"")
    assert server.get(path, method="HEAD").body == b""
    filled.store.alerts.remark(f"job:{filled.jobs[0].id}", Remark("acknowledged", "ada", "grace", "known"))
    assert server.get(path, If_None_Match='"another"').status == 200


def test_a_run_that_goes_on_is_shown_as_it_stands(server: Server, filled: Filled, made: list[str]) -> None:
    def shown() -> tuple[int, int]:
        answer = server.json(f"/runs/{filled.live}")
        assert server.get(f"/runs/{filled.live}").status == 200
        return len(answer["jobs"]), sum(bool(job["attempts"]) for job in answer["jobs"])

    jobs = len(filled.jobs)
    for done in range(1, jobs):
        assert shown() == (jobs, done)
        assert len(made) == done
        filled.finish_one()
    assert shown() == (jobs, jobs)
    filled.store.finish_run(filled.live, 0)
    assert server.json(f"/runs/{filled.live}")["exit_code"] == 0


def test_what_others_record_does_not_make_it_anew_and_what_it_shows_does(
    server: Server, filled: Filled, made: list[str]
) -> None:
    old = f"/runs/{filled.runs[0]}"
    before = server.get(old).body
    filled.finish_one()
    assert server.get(old).body == before
    assert made == [filled.runs[0]]
    # A second attempt, as of a run that is resumed.
    late = attempt(filled.jobs[0], 7e6, reason="once more", notes=("of late",))
    filled.store.record_attempt(filled.runs[0], late, filled.device)
    assert server.get(old).body != before
    assert made == [filled.runs[0]] * 2


def test_what_somebody_says_of_an_alert_is_shown_at_once(server: Server, filled: Filled) -> None:
    path = f"/runs/{filled.runs[-1]}"
    assert "a better compiler" not in server.get(path).text
    filled.store.alerts.remark("alert:1", Remark("acknowledged", "ada", "grace", "a better compiler"))
    assert "a better compiler" in server.get(path).text


def test_a_file_that_is_removed_is_no_longer_linked(server: Server, filled: Filled, config: Config) -> None:
    path, link = f"/runs/{filled.runs[-1]}", f'href="/artifacts/{filled.sha256}"'
    text = server.get(path).text
    assert link in text
    file = config.state_dir / "artifacts" / filled.sha256[:2] / filled.sha256[2:4] / filled.sha256
    file.unlink()
    assert link not in server.get(path).text


def test_another_store_in_its_place_is_another_page(
    start: Callable[..., AbstractContextManager[Server]], filled: Filled, config: Config, tmp_path: Path
) -> None:
    run_id = filled.runs[0]
    with start() as server:
        assert server.get(f"/runs/{run_id}").status == 200
        filled.store.close()
        with open_store(tmp_path / "new.db") as store:
            assert store.runs.latest_id() is None
        place = config.state_dir / "farm.db"
        for suffix in ("-wal", "-shm"):
            Path(f"{place}{suffix}").unlink(missing_ok=True)
        (tmp_path / "new.db").replace(place)
        # The first answer may be the error about the replaced store.
        server.get(f"/runs/{run_id}")
        assert server.get(f"/runs/{run_id}").status == 404


def unnamed(folder: Path) -> int:
    """Return how many files without a name this process has open in a folder."""
    return sum(
        os.readlink(f"/proc/self/fd/{name}").startswith(str(folder))
        for name in os.listdir("/proc/self/fd")
        if os.path.lexists(f"/proc/self/fd/{name}")
    )


def test_pages_have_no_name_and_only_so_many_are_kept(
    server: Server, filled: Filled, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = config.cache_dir / "serve"
    monkeypatch.setattr(kept, "MOST_PAGES", 2)
    for run_id in (*filled.runs, filled.live):
        server.get(f"/runs/{run_id}")
        assert list(folder.iterdir()) == []
    assert unnamed(folder) == 2
    monkeypatch.setattr(kept, "MOST_BYTES", 1)
    server.get(f"/runs/{filled.runs[0]}")
    assert unnamed(folder) == 1
    assert server.get(f"/runs/{filled.runs[0]}").status == 200


def test_readers_of_several_runs_do_not_take_each_others_pages(
    server: Server, filled: Filled, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept, "MOST_PAGES", 1)
    runs = iter([*filled.runs, filled.live] * 6)
    lock = threading.Lock()

    def ask() -> bool:
        with lock:
            run_id = next(runs)
        answer = server.get(f"/runs/{run_id}")
        return answer.status == 200 and run_id in answer.text.partition("</title>")[0]

    assert all(together(30, ask))


def test_without_a_place_for_files_it_is_shown_all_the_same(
    server: Server, filled: Filled, config: Config, made: list[str]
) -> None:
    config.cache_dir.mkdir(parents=True, exist_ok=True)
    (config.cache_dir / "serve").write_text("in the way")
    for _ in range(2):
        assert server.get(f"/runs/{filled.runs[0]}").status == 200
    assert made == [filled.runs[0]] * 2


def test_an_unknown_run_is_not_found_by_many(server: Server) -> None:
    assert {answer.status for answer in together(10, lambda: server.get("/runs/20200101-000000-abcdef"))} == {404}
