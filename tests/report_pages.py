"""Data of a store beyond one run for tests of reports, and access to packed parts of a report."""

from __future__ import annotations

import base64
import json
import random
import re
import zlib
from html.parser import HTMLParser

import msgspec

from farm.report.html.page_of_run import ReportContext
from farm.store.records import (
    AlertRecord,
    Background,
    Before,
    JobFile,
    JobStatus,
    RunStatus,
    RunView,
    SkipReason,
    TrendPoint,
    TrendSeries,
)

# Data of a store beyond one run, for tests of reports. Example data without measurements.


DAY_MS = 86_400_000
FACTS = {
    "old": {"executorch": "1.5.0", "qnn": "2.51", "device_kind": "virtual"},
    "new": {"executorch": "1.5.1", "qnn": "2.51", "device_kind": "virtual"},
}


def with_skipped(view: RunView) -> RunView:
    """Return a run whose seventh job was left out."""
    skipped = SkipReason("no time left of the budget of 2 min", view.started_ms - 5 * DAY_MS, "passed", "r20")
    jobs = list(view.jobs)
    jobs[6] = msgspec.structs.replace(jobs[6], attempts=(), decisive_attempt=0, skipped=skipped)
    return msgspec.structs.replace(view, jobs=tuple(jobs))


def series(view: RunView, metric: str, unit: str, direction: str, *values: float | None) -> TrendSeries:
    """Return values of runs a day apart, the last of them `view`; the newer half is of another toolchain."""
    count = len(values)
    points = tuple(
        TrendPoint(
            f"r{place:02}",
            view.started_ms - (count - 1 - place) * DAY_MS,
            "old" if place < count // 2 else "new",
            "1",
            value,
        )
        for place, value in enumerate(values)
    )
    return TrendSeries(metric, unit, direction, points)


def alert(view: RunView, job_id: str, **changes: object) -> AlertRecord:
    """Return a confirmed regression of the latency."""
    facts: dict[str, object] = {
        "id": 1, "series_id": 1, "job_id": job_id, "metric": "latency", "unit": "ns", "direction": "lower",
        "exact": False, "device_kind": "virtual", "run_id": view.id, "finding": "regression", "state": "confirmed",
        "last_good": "r20", "first_bad": "r21", "change": 0.11, "low": 0.1, "high": 0.12, "p_value": 0.001,
        "reason": "7.1 ms, was 6.4 ms over 21 runs", "likely_cause": "runtime", "device": "",
        "found_ms": view.started_ms,
        **changes,
    }  # fmt: skip
    return AlertRecord(**facts)  # type: ignore[arg-type]


def status(view: RunView, *, failed_before: str = "") -> RunStatus:
    """Return the results of the jobs three days before: passed, except jobs with `failed_before` in their name."""
    jobs = []
    for job in view.jobs:
        last = job.attempts[-1] if job.attempts else None
        was = "failed" if failed_before and failed_before in job.id else "passed"
        before = Before("20251229-120000-aaaaaa", view.started_ms - 3 * DAY_MS, was, "")
        jobs.append(
            JobStatus(job.id, last.verdict, last.known_issue, last.stage, last.reason, before=before)
            if last
            else JobStatus(job.id, "", "", "", "", skipped=job.skipped is not None, before=before)
        )
    return RunStatus(
        view.id, view.command, view.user, view.priority, "virtual", view.started_ms, view.finished_ms, view.exit_code,
        tuple(jobs),
    )  # fmt: skip


def context(view: RunView) -> ReportContext:
    """Return all that can be known: the first job got slower, every job has a history, some have files."""
    rng = random.Random(2)
    trends = {}
    for place, job in enumerate(view.jobs):
        base = rng.uniform(1e5, 4e6)
        cycles = [base * rng.uniform(0.995, 1.005) * (1.12 if not place and run >= 20 else 1.0) for run in range(30)]
        trends[job.id] = (
            series(view, "htp_cycles", "cycles", "lower", *cycles),
            series(view, "sqnr_fp32[0]", "dB", "higher", *[40.0] * 30),
        )
    here, gone = JobFile("ab" * 32, 123_456, "etdump"), JobFile("cd" * 32, 1_234, "output")
    return ReportContext(
        status=status(view, failed_before="index_select"),
        alerts=(alert(view, view.jobs[4].id), alert(view, view.jobs[8].id, id=2, state="suspected")),
        background=Background(trends, FACTS, {view.jobs[0].id: (here, gone)}),
        links={here.sha256: f"../../artifacts/ab/ab/{here.sha256}"},
    )


def hostile_context(view: RunView) -> ReportContext:
    """Return the facts of a store about a run in which every text is hostile."""
    evil, job = view.id, view.jobs[0].id
    regression = alert(view, job, metric=evil, reason=evil, likely_cause=evil, last_good=evil)
    files = Background(artifacts={job: (JobFile(evil, 1, evil),)})
    return ReportContext(status=status(view), alerts=(regression,), background=files)


# Access to the packed parts of a report, for tests.


_PACK = re.compile(r'<script type="application/octet-stream" class="pages"[^>]*>([^<]*)</script>')


def unpacked(html: str) -> dict[int, str]:
    """Return the pages of jobs that a report shows on demand, by the job's place."""
    pages: dict[int, str] = {}
    for data in _PACK.findall(html):
        pages |= {int(place): page for place, page in json.loads(zlib.decompress(base64.b64decode(data))).items()}
    return pages


def in_full(html: str) -> str:
    """Return a report followed by its unpacked parts."""
    return html + "".join(unpacked(html).values())


def section(html: str, name: str) -> str:
    """Return the section of a page with this id."""
    return html[html.index(f'<section id="{name}"') :].partition("</section>")[0]


VOID = {"meta", "link", "input", "br", "img", "hr"}


class Page(HTMLParser):
    """A page as a parser sees it: which elements there are, and whether they are closed in order."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open:
            self.texts.setdefault(self.open[-1], []).append(data)

    @property
    def ids(self) -> list[str]:
        return [attrs["id"] or "" for _, attrs in self.tags if "id" in attrs]

    @property
    def links(self) -> list[str]:
        return [attrs.get("href") or "" for attrs in self.all("a")]

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attrs for name, attrs in self.tags if name == tag]
