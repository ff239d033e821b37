"""Comparison as JSON for programs, and as Markdown. Texts are treated as hostile. Pure."""

from __future__ import annotations

from typing import Any

import msgspec

from farm.base.text import json_document
from farm.report.formats.github import escaped, origin, section, table, workflow_commands
from farm.report.model.compare import (
    ComparedJob,
    CompareGroup,
    CompareReport,
    compile_cost,
    overview,
    sentence,
)
from farm.report.terminal.compare import TITLES, side_line

# Jobs per group; the page lists all of them.
_SHOWN = 50


def compare_data(report: CompareReport) -> dict[str, Any]:
    """Return the comparison and the values derived from it, as JSON types."""
    cost = compile_cost(report.jobs)
    return {
        **msgspec.to_builtins(report),
        "worse": report.is_worse,
        "sentence": sentence(report),
        "groups": {str(group): len(report.having(group)) for group in CompareGroup},
        "same_programs": report.same_programs,
        "overview": msgspec.to_builtins(overview(report)),
        "compile_cost": msgspec.to_builtins(cost),
        "jobs": [_job(job) for job in report.jobs],
    }


def compare_json(report: CompareReport) -> bytes:
    """Return the comparison as a JSON document."""
    return json_document({"schema": 1, **compare_data(report)})


def compare_markdown(report: CompareReport) -> str:
    """Return the Markdown summary of a comparison."""
    parts = [f"### farm perf compare: {report.verdict}\n\n{escaped(sentence(report))}\n"]
    parts += [f"{escaped(side_line(side))}\n" for side in report.sides]
    parts += origin(stub=report.stub, virtual=report.kind == "virtual")
    for group, title in TITLES.items():
        parts += section(title, ["job", "what"], [(job.name, job.text) for job in report.having(group)], _SHOWN)
    if totals := [(row.what, row.a, row.b, row.change, row.over) for row in overview(report)]:
        parts.append("#### In all\n\n" + table(["what", "A", "B", "change", "of"], totals))
    return "\n".join(parts) + "\n"


def compare_commands(report: CompareReport) -> list[str]:
    """Return a workflow command for each job that is worse; an empty list outside GitHub."""
    groups = (CompareGroup.NEWLY_FAILING, CompareGroup.WORSE)
    return workflow_commands("error", [(job.name, job.text) for group in groups for job in report.having(group)])


def _job(job: ComparedJob) -> dict[str, Any]:
    return {
        **msgspec.to_builtins(job),
        "group": str(job.group),
        "text": job.text,
        "same": job.same,
        "outputs_differ": job.outputs_differ,
        "fallback_changes": {name: list(counts) for name, counts in job.fallback.items()},
        "metrics": [{**msgspec.to_builtins(one), "answer": one.answer} for one in job.metrics],
    }
