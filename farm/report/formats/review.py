"""Comparison as JSON and Markdown, and reviews of pull requests. Texts are treated as hostile. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from farm.base.text import json_document, one_line
from farm.report.formats.github import escaped, origin, section, table, workflow_commands
from farm.report.model.compare import (
    ComparedJob,
    CompareGroup,
    CompareReport,
    JobState,
    compile_cost,
    overview,
    sentence,
)
from farm.report.model.status import Standing, change_line, is_confirmed
from farm.report.model.summary import Outcome, RunSummary, Tone, summarize
from farm.report.terminal.compare import TITLES, side_line
from farm.report.terminal.layout import STUBBED
from farm.results.attempt import Attempt, Verdict
from farm.store.records import AlertRecord, RunView

# Jobs per group; the page lists all of them.
_SHOWN = 50

# CompareReport -> JSON for programs, and Markdown for the summary of a GitHub step. Texts are treated as hostile.


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


# Review of a pull request: state and comment, from a comparison or a run. Texts are treated as hostile. Pure.


SIMULATED = "Virtual devices: times are of a simulator."
NEW, REGRESSED, NOT_YOURS = "Newly failing", "Regressions", "Not your commit"
# The verdict before may be about an earlier state of the same pull request: no proof.
FAILING_BEFORE = "Failed before as well"
MOST_COMMANDS = 5
# Versions that another commit or another machine may have brought along with the commit under test.
_SURROUNDINGS = ("torch", "torchao", "qnn", "python", "onnxruntime-qnn")

State = Literal["passed", "failed", "infra"]
Finding = tuple[str, str]
"""Job and its reason or proof."""


class Review(msgspec.Struct, frozen=True, kw_only=True):
    """Judgement of a commit, for a commit status and a comment."""

    name: str
    """Name of the check: a later review of the same name replaces the comment."""
    state: State
    sentence: str
    facts: tuple[str, ...] = ()
    """Sides, devices and changed versions, a line each."""
    sections: dict[str, Sequence[Finding]] = {}
    """Findings by title; empty sections are left out."""
    commands: tuple[str, ...] = ()
    """Commands that repeat the measurement."""
    url: str = ""
    """Address of the full report; empty without one."""


def compare_review(report: CompareReport) -> Review:
    """Return the review of a comparison: A is the base, B is the commit."""
    new, worse = report.having(CompareGroup.NEWLY_FAILING), report.having(CompareGroup.WORSE)
    not_compared = report.having(CompareGroup.NOT_COMPARED)
    changed = [(name, a, b) for name, a, b in report.differing_facts if name in _SURROUNDINGS]

    def is_infra(job: ComparedJob) -> bool:
        return JobState.INFRA in (job.a.state, job.b.state)

    return Review(
        name="farm perf compare",
        state="failed" if report.is_worse else "infra" if report.interrupted or not_compared else "passed",
        sentence=sentence(report),
        facts=(
            *map(side_line, report.sides),
            *([STUBBED] if report.stub else [SIMULATED] if report.kind == "virtual" else []),
            *(f"{name} changed as well: {a or 'none'} -> {b or 'none'}" for name, a, b in changed),
        ),
        sections={
            NEW: [(job.name, job.text) for job in new],
            REGRESSED: [(job.name, job.text) for job in worse],
            NOT_YOURS: [
                *((job.name, f"the base fails too: {job.text}") for job in report.having(CompareGroup.FAILING)),
                *(
                    (job.name, _infra(job.device, job.text) if is_infra(job) else f"not compared: {job.text}")
                    for job in not_compared
                ),
            ],
        },
        commands=(report.command,),
    )


def run_review(view: RunView, states: Mapping[str, Standing], alerts: Sequence[AlertRecord]) -> Review:
    """Return the review of a run from its alerts and the states of its jobs against their previous verdicts."""
    summary = summarize(view)
    failed = summary.having(Outcome.FAILED)
    old = [one for one in failed if states.get(one.job.id) is Standing.STILL_FAILING]
    new = [one for one in failed if one not in old]
    regressions = [one for one in alerts if is_confirmed(one)]
    return Review(
        name=f"farm run {view.name}".rstrip(),
        state=_state(summary, has_regressions=bool(regressions)),
        sentence=summary.verdict_line,
        facts=tuple([STUBBED] if summary.stub else [SIMULATED] if summary.virtual_devices else []),
        sections={
            NEW: [(one.job.id, one.reason) for one in new],
            REGRESSED: [(one.job_id, change_line(one)) for one in regressions],
            FAILING_BEFORE: [(one.job.id, one.reason) for one in old],
            NOT_YOURS: [
                *((one.job.id, _infra(one.device, one.reason)) for one in summary.having(Outcome.INFRA)),
                *((one.job.id, f"not run: {one.reason}") for one in summary.having(Outcome.NOT_RUN)),
                *((one.job.id, proof) for one in summary.recovered if (proof := _elsewhere(one.job.attempts))),
            ],
        },
        commands=tuple(one.rerun for one in new[:MOST_COMMANDS]) or (view.command,),
    )


def review_markdown(review: Review) -> str:
    """Return the comment of a review."""
    title = {"passed": "passed", "failed": "FAILED", "infra": "not judged: infra"}[review.state]
    parts = [f"### {escaped(review.name)}: {title}\n\n{escaped(review.sentence)}\n"]
    parts += [f"{escaped(line)}\n" for line in review.facts]
    for name, findings in review.sections.items():
        more = f"\nand {len(findings) - _SHOWN} more\n" if len(findings) > _SHOWN else ""
        heads = ["job", "proof" if name == NOT_YOURS else "what"]
        parts += [f"{text}{more}" for text in section(name, heads, findings, _SHOWN)]
    if review.commands:
        lines = "\n".join(f"    {one_line(one, 1000)}" for one in review.commands)
        parts.append(f"#### Repeat\n\n{lines}\n")
    return "\n".join(parts)


def rerun_commands(run_id: str, jobs: Sequence[str]) -> tuple[str, ...]:
    """Return commands that repeat the first of these jobs of a recorded run with their exact programs."""
    return tuple(shlex.join(["farm", "jobs", "rerun", job, "--run", run_id]) for job in jobs[:MOST_COMMANDS])


def _state(summary: RunSummary, *, has_regressions: bool) -> State:
    if summary.tone is Tone.FAILED or has_regressions:
        return "failed"
    return "passed" if summary.tone is Tone.PASSED else "infra"


def _infra(device: str, text: str) -> str:
    return f"infra{f' on {device}' if device else ''}: {text}"


def _elsewhere(attempts: Sequence[Attempt]) -> str:
    """Return the proof that a job failed because of a device: it passed on another one; empty without a proof."""
    last = attempts[-1]
    judged = [one for one in attempts if one.verdict in (Verdict.FAILED, Verdict.INFRA)]
    first = next((one for one in judged if one.device and one.device != last.device), None)
    return "" if first is None else f"passed on another device, {last.device}; on {first.device}: {first.reason}"
