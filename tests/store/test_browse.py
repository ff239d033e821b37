"""Lists for the web page and `farm runs list`, and the grid of nightly runs, on both databases."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest

from farm.base.errors import StoreError, UnknownNameError
from farm.devices.health import HealthEvent
from farm.results.attempt import Stage, Verdict
from farm.serve.pages.all import PAGES
from farm.serve.pages.devices import DeviceQuery, device_page
from farm.serve.pages.progress import ProgressQuery, progress_page
from farm.serve.render import Address, html_of
from farm.store.leases.registry import Seen
from farm.store.queries.browse import RunFilter
from farm.store.queries.grid import JobFilter
from farm.store.records import ArtifactRecord
from farm.store.rows import now_ms
from farm.store.store import Store, open_store
from farm.store.view import RunToolchain, SkipReason

if TYPE_CHECKING:
    from conftest import Make

P, F, I = Verdict.PASSED, Verdict.FAILED, Verdict.INFRA  # noqa: E741 - read as a table


def test_runs_are_listed_newest_first_in_pages(store: Store, make: Make) -> None:
    old = make.run(store, 3, (make.job("a", soc="SM8750"), ""))
    mine = make.run(store, 2, (make.job("a"), ""), (make.job("b"), ""), user="grace", finished=False)
    store.finish_run(mine, 4)
    new = make.run(store, 1, finished=False)
    runs, total = store.browse.runs(RunFilter(), 2)
    assert ([run.run_id for run in runs], total) == ([new, mine], 3)
    assert [run.run_id for run in store.browse.runs(RunFilter(), 2, 2)[0]] == [old]
    assert (runs[0].socs, runs[0].progress.planned, runs[1].socs, runs[1].suites) == (
        (), 0, ("SM8650",), ("quantized_ops",),
    )  # fmt: skip
    for wanted, found in (
        (RunFilter(user="grace"), [mine]),
        (RunFilter(soc="SM8650", suite="quantized_ops"), [mine]),
        (RunFilter(soc="SM8650", suite="fp_ops"), []),
        (RunFilter(state="other"), [mine]),
        (RunFilter(state="passed"), [old]),
        (RunFilter(state="unfinished"), [new]),
        (RunFilter(user="' OR 1=1 --\0"), []),
    ):
        listed, total = store.browse.runs(wanted, 10)
        assert ([run.run_id for run in listed], total) == (found, len(found)), wanted
    known = store.browse.known()
    assert (known.users, known.socs, known.suites) == (("ada", "grace"), ("SM8650", "SM8750"), ("quantized_ops",))


def test_progress_counts_the_attempt_that_decides(store: Store, make: Make) -> None:
    tries = {"a": (I, P), "b": (F, I), "c": (I, I), "d": (Verdict.SKIPPED,), "f": ("",)}
    results = [(make.job(case), verdict) for case, verdicts in tries.items() for verdict in verdicts]
    run_id = make.run(store, 1, *results, (make.job("e"), F, {"known_issue": "wrong scale"}), finished=False)
    store.mark_skipped(run_id, {make.job("f").id: SkipReason("no time")})
    (progress,) = store.browse.progress()
    assert progress.counts == {"failed": 1, "infra": 1, "known": 1, "passed": 1, "skipped": 1}
    assert (progress.planned, progress.done, progress.skipped, progress.exit_code) == (6, 5, 1, None)
    assert abs(progress.last_ms - now_ms()) < 3_600_000
    store.finish_run(run_id, 1)
    assert store.browse.progress()[0].exit_code == 1
    make.run(store, 30, (make.job("a"), ""))
    assert [one.run_id for one in store.browse.progress()] == [run_id]


def test_attempts_on_a_device_and_files_of_a_run(store: Store, make: Make) -> None:
    a, b = make.job("a"), make.job("b")
    first = make.run(store, 2, (a, P))
    second = make.run(store, 1, (a, ""), (b, F, {"reason": "sqnr", "measurements": ()}))
    store.record_attempt(second, make.attempt(a, device="phone-9"), make.device("phone-9", "hardware"))
    found = store.browse.on_device("virtual-1", "virtual", 10)
    assert [(one.run_id, one.verdict, one.latency_ns, one.reason) for one in found] == [
        (second, "failed", None, "sqnr"), (first, "passed", 2.0, ""),
    ]  # fmt: skip
    assert len(store.browse.on_device("virtual-1", "virtual", 1)) == 1
    assert store.browse.on_device("virtual-1", "hardware", 10) == []

    sha = "0" * 64
    store.record_attempt(second, make.attempt(b), artifacts=[ArtifactRecord(sha, 7, "etdump")])
    (file,) = store.browse.files(second, 10)
    assert (file.job_id, file.kind, file.size, file.sha256) == (b.id, "etdump", 7, sha)
    assert store.browse.runs(RunFilter(), 1)[0][0].files == 1
    assert (store.browse.file_kind(sha), store.browse.file_kind("1" * 64)) == ("etdump", None)
    assert store.history.job_names("quantized_ops/*", None) == [a.id, b.id]
    assert store.browse.cases(1) == ["quantized_ops/a"]
    for pattern, soc in (("*?" * 40 + "!", None), ("quantized_ops/a", "SM1")):
        with pytest.raises(UnknownNameError):
            store.history.job_names(pattern, soc)


def test_a_reader_sees_what_another_process_writes_and_writes_nothing(store: Store, make: Make, address: str) -> None:
    run_id = make.run(store, 1, (make.job("a"), ""), finished=False)
    with open_store(address, readonly=True) as reader:
        assert reader.browse.progress()[0].done == 0
        store.record_attempt(run_id, make.attempt(make.job("a")))
        assert reader.browse.progress()[0].done == 1
        with pytest.raises(StoreError, match="read.only"):
            reader.finish_run(run_id, 0)


@pytest.mark.parametrize("address", ["postgresql"], indirect=True)
def test_every_page_is_made_of_postgresql(store: Store, make: Make) -> None:
    device = make.device()
    store.devices.see([Seen(device, "device", None)])
    store.devices.record_health(HealthEvent(device.id, "check_passed", "healthy", "", {}, (1e6, 2e6)))
    for hours_ago in (3, 2, 1):
        verdict = F if hours_ago == 1 else P
        run_id = make.run(store, hours_ago, (make.job("a"), P), (make.job("b"), verdict), finished=False)
    known = {page.path.partition("{")[0]: page for page in PAGES if "files" not in page.path}
    for path, query, shown in (
        ("/", {}, "New failures"),
        ("/runs", {"soc": "SM8650", "suite": "quantized_ops", "state": "unfinished"}, run_id),
        ("/diff", {}, "ended as before"),
        ("/devices", {}, device.id),
        ("/devices/", {"device": device.id}, device.id),
        ("/history", {"job": "quantized_ops/a"}, "latency"),
    ):
        page = known[path]
        facts = page.make(store, page.query(**query))
        assert shown in html_of(facts, None, Address(path, query), may=lambda _: False)
        assert msgspec.json.encode(facts)
    assert len(device_page(store, DeviceQuery(device=device.id)).attempts) == 6
    assert progress_page(store, ProgressQuery()).runs[0].text == "2 of 2 jobs: 1 failed, 1 passed"


def nightly_run(store: Store, make: Make, days_ago: int, name: str, branch: str = "", **verdicts: str) -> str:
    """Record a nightly run; a verdict is a word, `known` or `skipped`."""
    jobs = {case: make.job(case) for case in verdicts}
    words = {"known": "failed", "skipped": ""}
    results = [
        (jobs[case], words.get(word, word), {"stage": Stage.NUMERICS, "known_issue": "#12" * (word == "known")})
        for case, word in verdicts.items()
    ]
    toolchain = RunToolchain(branch=branch)
    run_id = make.run(
        store,
        24 * days_ago,
        *results,
        toolchain=toolchain,
        nightly_run=name,
        priority="nightly",
        qnn=f"2.{50 - days_ago}",
    )
    skipped = {jobs[case].id: SkipReason("no time") for case, word in verdicts.items() if word == "skipped"}
    store.mark_skipped(run_id, skipped)
    return run_id


def test_each_nightly_run_is_a_column_and_the_newest_run_of_a_job_counts(store: Store, make: Make) -> None:
    nightly_run(store, make, 2, "n1", add="passed", relu_1="passed", relu12="infra", pad="skipped")
    first = nightly_run(store, make, 1, "n2", add="failed", relu_1="known", relu12="", pad="skipped")
    second = nightly_run(store, make, 1, "n2", add="passed")
    nightly_run(store, make, 1, "other", branch="release", add="passed")
    nightly_runs = store.grid.nightly_runs("", 10)
    assert [one.id for one in nightly_runs] == ["n2", "n1"]
    assert [run.run_id for run in nightly_runs[0].runs] == [first, second]
    assert nightly_runs[1].facts["qnn"] == "2.48"
    cells = {job.case: job.cells for job in store.grid.jobs(nightly_runs, JobFilter())}
    assert cells == {"add": "pp", "relu_1": "kp", "relu12": "ni", "pad": "ss"}
    assert [one.id for one in store.grid.nightly_runs("", 1)] == ["n2"]
    assert [one.id for one in store.grid.nightly_runs(None, 10)] == ["other", "n2", "n1"]
    assert [one.id for one in store.grid.nightly_runs("", 10, before_ms=nightly_runs[0].started_ms)] == ["n1"]
    assert store.grid.nightly_run("n2") == nightly_runs[0]
    assert store.grid.nightly_run("n' OR 1=1 --\0") is None

    # Jobs are filtered by target and by words.
    def cases(**wanted: str) -> list[str]:
        return [job.case for job in store.grid.jobs(nightly_runs, JobFilter(**wanted))]

    assert cases() == ["add", "pad", "relu12", "relu_1"]
    assert cases(text="RELU") == ["relu12", "relu_1"]
    assert cases(text="u_1 SM8650") == ["relu_1"]
    assert cases(soc="SM8750") == cases(suite="' OR 1=1 --\0") == []
    assert cases(soc="SM8650", suite="quantized_ops", backend="htp", precision="8a8w") == cases()
    targets = store.grid.targets()
    assert (targets.socs, targets.suites, targets.precisions) == (("SM8650",), ("quantized_ops",), ("8a8w",))
    assert store.grid.jobs([], JobFilter()) == []
