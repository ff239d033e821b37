"""Night -> what templates of notifications see: plain values, cleaned and bounded. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from farm.nightly.record import CellResult, Findings, Night, Told, meaning
from farm.report.model import format as fmt
from farm.system.text import one_line

if TYPE_CHECKING:
    from collections.abc import Iterable

SHOWN = 20
"""Jobs of a kind that a notification names."""
_SAID_CHARS = 300


def context(night: Night) -> dict[str, Any]:
    """Return the variable `night` of a template. What devices said is on one line, without anything invisible."""
    return {
        "schema": 1,
        "name": night.name,
        "id": night.id,
        "verdict": night.word.lower(),
        "exit_code": night.code,
        "meaning": meaning(night.code),
        "user": one_line(night.user, 80),
        "host": one_line(night.host, 80),
        "started_ms": night.started_ms,
        "started": fmt.clock(night.started_ms),
        "seconds": round(night.seconds, 1),
        "duration": fmt.duration(night.seconds),
        "counts": night.counts,
        "counted": counted(night.counts),
        "runs": [_cell(cell) for cell in night.cells],
        "new_failures": _told(night.new_failures),
        "still_failing": _told(night.still_failing),
        "regressions": _told(night.regressions),
        "infra": _told(night.troubles),
        "totals": {
            "new_failures": len(night.new_failures),
            "still_failing": len(night.still_failing),
            "regressions": len(night.regressions),
            "infra": len(night.troubles),
            "fixed": sum(len(cell.fixed) for cell in night.cells),
            "not_tested": sum(cell.not_tested for cell in night.cells),
        },
        "report": one_line(night.report),
        "report_url": night.report_url,
    }


def counted(counts: dict[str, int]) -> str:
    """Return jobs by outcome in words."""
    words = {"stale": "NOT TESTED", "not_run": "NOT RUN", "known": "known issues"}
    order = ("failed", "infra", "passed", "known", "skipped", "stale", "not_run")
    return ", ".join(f"{counts[one]} {words.get(one, one)}" for one in order if counts.get(one)) or "no jobs"


def subject(night: Night) -> str:
    """Return a notification's title: one line."""
    told = [
        f"{len(found)} {word}{'' if len(found) == 1 else 's'}"
        for word, found in (("new failure", night.new_failures), ("regression", night.regressions))
        if found
    ]
    return one_line(f"[farm] {night.name}: {night.word.lower()}: {', '.join([*told, counted(night.counts)])}", 200)


def _cell(cell: CellResult) -> dict[str, Any]:
    return {
        "name": cell.name,
        "verdict": cell.word.lower(),
        "exit_code": cell.code,
        "run": cell.run_id,
        "socs": list(cell.socs),
        "backend": cell.backend,
        "virtual": cell.virtual,
        "counts": cell.counts,
        "counted": counted(cell.counts),
        "duration": fmt.duration(cell.seconds),
        "problem": one_line(cell.problem, _SAID_CHARS),
    }


def _told(jobs: Iterable[Told]) -> list[dict[str, str]]:
    return [{"job": one_line(one.job_id, 200), "said": one_line(one.said, _SAID_CHARS)} for one in list(jobs)[:SHOWN]]


SAMPLE = Night(
    id="20260301-020000-0a1b2c",
    name="sample",
    digest="",
    user="farm",
    host="lab",
    started_ms=1_772_330_400_000,
    finished_ms=1_772_341_200_000,
    code=1,
    cells=(
        CellResult(
            name="smoke-htp",
            socs=("SM8650",),
            suites=("smoke",),
            backend="htp",
            virtual=False,
            run_id="20260301-020001-3c4d5e",
            code=1,
            counts={"passed": 7, "failed": 1},
            seconds=61.0,
            new_failures=(Told("smoke/add[SM8650-htp-8a8w]", 'numerics: <b>"sqnr"</b> is 12 dB & less\\'),),
            still_failing=(Told("smoke/gelu[SM8650-htp-8a8w]", "execute: crashed"),),
            findings=Findings((Told("smoke/conv2d[SM8650-htp-8a8w]", "latency: 8 % slower"),), confirmed=1),
            report="smoke-htp.html",
        ),
        CellResult(
            name="smoke-gpu", socs=("SM8650",), suites=("smoke",), backend="gpu", virtual=False, code=4,
            problem="no attached device",
        ),
    ),
    report="/reports/index.html",
)  # fmt: skip
"""A night of every kind of finding, with which templates are tried before anything runs."""
