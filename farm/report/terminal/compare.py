"""CompareReport -> lines for a terminal. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from farm.base.text import one_line
from farm.report.model import format as fmt
from farm.report.model.compare import CompareGroup, CompareReport, CompareSide
from farm.report.model.compare_totals import overview, sentence
from farm.report.terminal.layout import LEAST_WIDTH, SIMULATED, STUBBED, columns, fitted, titled, wrapped

TITLES = {
    CompareGroup.NEWLY_FAILING: "Newly failing",
    CompareGroup.WORSE: "Worse",
    CompareGroup.NOT_COMPARED: "Not compared",
    CompareGroup.NEWLY_PASSING: "Newly passing",
    CompareGroup.BETTER: "Better",
    CompareGroup.FAILING: "Failing on both",
}
# Most characters of a reason; the page shows the whole text.
_MOST_TEXT = 240
_VERSIONS = ("executorch", "torch", "torchao", "qnn")


def side_line(side: CompareSide) -> str:
    """Return name and versions of a side in one line."""
    facts = side.facts
    known = [f"{name} {facts[name]}" for name in _VERSIONS if facts.get(name)]
    if commit := facts.get("commit"):
        known.append(f"commit {commit[:12]}{' with changes' if facts.get('dirty') else ''}")
    return f"{side.label}: {side.name}: {', '.join(known)}"


def compare_lines(report: CompareReport, limit: int, width: int = 80) -> list[str]:
    """Return the comparison, urgent groups first; at most `limit` jobs a group, no line wider than `width`."""
    lines = [line for side in report.sides for line in wrapped(side_line(side), width)]
    lines += ["", *wrapped(sentence(report), width)]
    if report.interrupted:
        lines.append("interrupted: missing jobs were not compared")
    for group, title in TITLES.items():
        blocks = [(job.name, *wrapped(one_line(job.text, _MOST_TEXT), width - 4)) for job in report.having(group)]
        jobs = titled(title.upper(), blocks, limit)
        lines += [fitted(line, max(width, LEAST_WIDTH)) for line in jobs]
    lines += ["", *_overview(report), ""]
    lines += [line for note in report.notes for line in wrapped(note, width)]
    if report.stub:
        return lines + wrapped(STUBBED, width)
    return lines + [SIMULATED] * (report.kind == "virtual")


def _overview(report: CompareReport) -> Iterator[str]:
    total = len(report.jobs)
    verb = "is" if total == 1 else "are"
    yield f"{report.same_programs} of {fmt.plural(total, 'program')} {verb} the same"
    rows = overview(report)
    if rows:
        yield from columns([("", "A", "B", "change"), *((row.what, row.a, row.b, row.change) for row in rows)])
