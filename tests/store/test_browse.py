"""Lists for the web page and `farm runs list`, on both databases."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest

from farm.base.errors import StoreError, UnknownNameError
from farm.results.attempt import Verdict
from farm.serve.address import Address
from farm.serve.pages.all import PAGES
from farm.serve.pages.devices import DeviceQuery, device_page
from farm.serve.pages.progress import ProgressQuery, progress_page
from farm.serve.render import html_of
from farm.store.queries.browse import RunFilter
from farm.store.records import ArtifactRecord, RunRecord
from farm.store.rows import now_ms
from farm.store.store import Store, open_store
from farm.store.view import SkipReason

if TYPE_CHECKING:
    from conftest import Make

HOUR = 3_600_000


def begin(store: Store, make: Make, hours_ago: float, *cases: str, user: str = "ada", soc: str = "SM8650") -> str:
    record = RunRecord("farm run", user, "bench", {"executorch": "1.5.1"}, round(now_ms() - hours_ago * HOUR))
    run_id = store.begin_run(record)
    store.plan_jobs(run_id, [make.job(case, soc=soc) for case in cases])
    store.record_device(run_id, make.device())
    return run_id


def test_runs_are_listed_newest_first_in_pages(store: Store, make: Make) -> None:
    old = begin(store, make, 3, "a", soc="SM8750")
    store.finish_run(old, 0)
    mine = begin(store, make, 2, "a", "b", user="grace")
    store.finish_run(mine, 4)
    new = begin(store, make, 1)
    runs, total = store.browse.runs(RunFilter(), 2)
    assert ([run.run_id for run in runs], total) == ([new, mine], 3)
    assert [run.run_id for run in store.browse.runs(RunFilter(), 2, 2)[0]] == [old]
    assert (runs[0].socs, runs[0].progress.planned, runs[1].socs, runs[1].suites) == (
        (), 0, ("SM8650",), ("quantized_ops",),
    )  # fmt: skip
    for wanted, found in (
        (RunFilter(user="grace"), [mine]),
        (RunFilter(soc="SM8750"), [old]),
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
    run_id = begin(store, make, 1, *"abcdef")
    verdicts = {
        "a": (Verdict.INFRA, Verdict.PASSED), "b": (Verdict.FAILED, Verdict.INFRA), "c": (Verdict.INFRA,) * 2,
        "d": (Verdict.SKIPPED,),
    }  # fmt: skip
    for case, tries in verdicts.items():
        for number, verdict in enumerate(tries):
            store.record_attempt(run_id, make.attempt(make.job(case), verdict=verdict, started_ms=number + 1))
    known = make.attempt(make.job("e"), verdict=Verdict.FAILED, known_issue="wrong scale")
    store.record_attempt(run_id, known)
    store.mark_skipped(run_id, {make.job("f").id: SkipReason("no time")})
    (progress,) = store.browse.progress()
    assert progress.counts == {"failed": 1, "infra": 1, "known": 1, "passed": 1, "skipped": 1}
    assert (progress.planned, progress.done, progress.skipped, progress.exit_code) == (6, 5, 1, None)
    assert abs(progress.last_ms - now_ms()) < HOUR
    store.finish_run(run_id, 1)
    assert store.browse.progress()[0].exit_code == 1
    begin(store, make, 30, "a")
    assert [one.run_id for one in store.browse.progress()] == [run_id]


def test_what_ran_on_a_device(store: Store, make: Make) -> None:
    first = begin(store, make, 2, "a")
    store.record_attempt(first, make.attempt(make.job("a")))
    second = begin(store, make, 1, "a", "b")
    failed = make.attempt(make.job("b"), verdict=Verdict.FAILED, reason="sqnr", measurements=())
    store.record_attempt(second, failed)
    store.record_attempt(second, make.attempt(make.job("a"), device="phone-9"), make.device("phone-9", "hardware"))
    found = store.browse.on_device("virtual-1", "virtual", 10)
    assert [(one.run_id, one.verdict, one.latency_ns) for one in found] == [
        (second, "failed", None), (first, "passed", 2.0),
    ]  # fmt: skip
    assert found[0].reason == "sqnr"
    assert len(store.browse.on_device("virtual-1", "virtual", 1)) == 1
    assert store.browse.on_device("virtual-1", "hardware", 10) == []


def test_files_and_names(store: Store, make: Make) -> None:
    run_id = begin(store, make, 1, "a", "b")
    sha = "0" * 64
    store.record_attempt(run_id, make.attempt(make.job("b")), artifacts=[ArtifactRecord(sha, 7, "etdump")])
    (file,) = store.browse.files(run_id, 10)
    assert (file.job_id, file.kind, file.size, file.sha256) == (make.job("b").id, "etdump", 7, sha)
    assert store.browse.runs(RunFilter(), 1)[0][0].files == 1
    assert (store.browse.file_kind(sha), store.browse.file_kind("1" * 64)) == ("etdump", None)
    with pytest.raises(UnknownNameError):
        store.history.job_names("*?" * 40 + "!", None)
    assert store.history.job_names("quantized_ops/*", None) == [make.job("a").id, make.job("b").id]
    assert store.browse.cases(1) == ["quantized_ops/a"]
    with pytest.raises(UnknownNameError):
        store.history.job_names("quantized_ops/a", "SM1")


def test_all_of_it_works_in_a_store_that_is_open_to_read_only_while_another_writes(
    store: Store, make: Make, address: str
) -> None:
    run_id = begin(store, make, 1, "a", "b")
    with open_store(address, readonly=True) as reader:
        assert reader.browse.progress()[0].done == 0
        store.record_attempt(run_id, make.attempt(make.job("a")))
        assert reader.browse.progress()[0].done == 1
        with pytest.raises(StoreError):
            reader.finish_run(run_id, 0)


def test_every_page_is_made_of_either_database(store: Store, make: Make) -> None:
    from farm.devices.health import HealthEvent
    from farm.store.leases.registry import Seen

    device = make.device()
    store.devices.see([Seen(device, "device", None)])
    store.devices.record_health(HealthEvent(device.id, "check_passed", "healthy", "", {}, (1e6, 2e6)))
    for hours_ago in (3, 2, 1):
        run_id = begin(store, make, hours_ago, "a", "b")
        store.record_attempt(run_id, make.attempt(make.job("a"), started_ms=hours_ago))
        failed = make.attempt(make.job("b"), verdict=Verdict.FAILED, reason="sqnr", started_ms=hours_ago)
        store.record_attempt(run_id, failed)
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
