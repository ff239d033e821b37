"""Presentation of a nightly run: terminal lines, Markdown and annotations for GitHub, and a page with its runs."""

from __future__ import annotations

import contextlib
import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path

from farm.base.text import one_line
from farm.dispatch.nightly import record
from farm.dispatch.nightly.record import JobNote, Night, counted, meaning
from farm.dispatch.nightly.state import write_whole
from farm.report.formats.github import escaped, table, workflow_commands
from farm.report.formats.review import (
    FAILING_BEFORE,
    MOST_COMMANDS,
    NEW,
    NOT_YOURS,
    REGRESSED,
    SIMULATED,
    Review,
    rerun_commands,
)
from farm.report.html.layer_graph import image_address
from farm.report.html.page_of_run import render_page
from farm.report.model import format as fmt

LEAST_WIDTH = 40
_LINES, _ROWS, _PAGE_JOBS, _PAGE_NIGHTS = 10, 200, 100, 30
_TONES = {0: "passed", 1: "failed", 3: "failed", 4: "infra", 5: "not_tested"}


def night_lines(night: Night, width: int = 80) -> list[str]:
    """Return the outcome of a nightly run as lines of at most `width` characters.

    No line begins with output of a device: in a log on GitHub, that could be a command to its runner.
    """
    width = max(width, LEAST_WIDTH)
    lines = [
        *textwrap.wrap(f"night {night.name} ({night.id}): {night.word}", width, subsequent_indent="  "),
        f"  exit code {night.code}: {meaning(night.code)}",
        f"  {counted(night.counts)} in {fmt.duration(night.seconds)}",
        "",
    ]
    room = min(max(len(cell.name) for cell in night.cells), width // 2)
    for cell in night.cells:
        virtual = "VIRTUAL, " if cell.virtual else ""
        text = f"  {one_line(cell.name, room):{room}}  {cell.word}: {virtual}{counted(cell.counts)}"
        lines += textwrap.wrap(text, width, subsequent_indent=" " * 6)
        lines += textwrap.wrap(one_line(cell.problem, 400), width, initial_indent="    - ", subsequent_indent="    | ")
    # This section lists jobs alone: the problems of cells are above.
    infra = tuple(one for cell in night.cells for one in cell.infra)
    for title, notes in (night.sections | {"Infra": infra}).items():
        if notes:
            lines += ["", f"{title.upper()}: {len(notes)}"]
            for one in notes[:_LINES]:
                lines += [f"  {one_line(one.job_id, width - 2)}", f"    - {one_line(one.reason, width - 6)}"]
            if len(notes) > _LINES:
                lines.append(f"  and {len(notes) - _LINES} more: the report has them")
    if undecided := sum(cell.findings.unknown + cell.findings.not_measured for cell in night.cells):
        lines += ["", f"suspected regressions that are neither confirmed nor refuted: {undecided}"]
    if night.undelivered:
        lines += ["", f"NOT NOTIFIED: {len(night.undelivered)}"]
        for delivery in night.undelivered:
            text = one_line(f"{delivery.to}: {delivery.problem}")
            lines += textwrap.wrap(text, width, initial_indent="  - ", subsequent_indent="  | ")
    # The last line is not wrapped: users copy the path.
    return [*lines, "", f"report: {night.report}"]


def night_markdown(night: Night) -> str:
    """Return the summary of a nightly run for GitHub."""
    cells = (
        (cell.name, cell.word + (" (virtual)" if cell.virtual else ""), counted(cell.counts), cell.problem)
        for cell in night.cells
    )
    parts = [
        f"### {escaped(night.name)}: {escaped(night.word)}\n",
        f"Exit code {night.code}: {escaped(meaning(night.code))}.\n",
        f"{escaped(counted(night.counts))} in {escaped(fmt.duration(night.seconds))}.\n",
        table(["run", "verdict", "jobs", "trouble"], cells),
    ]
    for title, notes in night.sections.items():
        more = f"\nand {len(notes) - _ROWS} more\n" if len(notes) > _ROWS else ""
        rows = ((one.job_id, one.reason) for one in notes[:_ROWS])
        parts.append(f"#### {title}: {len(notes)}\n\n{table(['what', 'why'], rows)}{more}")
    if night.undelivered:
        rows = ((one.to, one.problem) for one in night.undelivered)
        parts.append(f"#### Not notified: {len(night.undelivered)}\n\n{table(['whom', 'why'], rows)}")
    return "\n".join(parts) + "\n"


def night_review(night: Night) -> Review:
    """Return the review of a nightly run for a pull request."""
    commands: list[str] = []
    for cell in night.cells:
        jobs = [one.job_id for one in (*cell.new_failures, *cell.findings.regressions)]
        commands += rerun_commands(cell.run_id, jobs) if cell.run_id else ()
    virtual = any(cell.virtual for cell in night.cells)
    notes = {
        NEW: night.new_failures,
        REGRESSED: night.regressions,
        FAILING_BEFORE: night.still_failing,
        NOT_YOURS: night.troubles,
    }
    return Review(
        name=f"farm nightly {night.name}",
        state="passed" if night.code == 0 else "failed" if night.code in (record.FAILED, record.REGRESSED) else "infra",
        sentence=f"{night.word}: {counted(night.counts)} in {fmt.duration(night.seconds)}",
        facts=(SIMULATED,) if virtual else (),
        sections={title: [(one.job_id, one.reason) for one in found] for title, found in notes.items()},
        commands=tuple(commands[:MOST_COMMANDS]),
        url=night.report_url,
    )


def night_annotations(night: Night) -> list[str]:
    """Return GitHub's workflow commands for new findings: failures are errors, regressions warnings."""

    def titled(kind: str, notes: Iterable[JobNote]) -> list[tuple[str, str]]:
        return [(f"{kind}: {one.job_id}", one.reason) for one in notes]

    return [
        *workflow_commands("error", titled("new failure", night.new_failures)),
        *workflow_commands("warning", titled("regression", night.regressions)),
    ]


def write_pages(night: Night, known: Iterable[Night], reports: Path) -> None:
    """Write the page of a nightly run into its folder below `reports`, and into `reports` as the newest.

    Raises InfraError.
    """
    earlier = [one for one in known if one.started_ms < night.started_ms and one.code is not None]
    pictures = _pictures(night, reports / night.id)
    write_whole(reports / night.id / "index.html", render_night(night, earlier, "", "../", pictures).encode())
    write_whole(reports / "index.html", render_night(night, earlier, f"{night.id}/", "", pictures).encode())


def _pictures(night: Night, folder: Path) -> dict[str, str]:
    """Return the pictures of first wrong layers, by their path in `folder`, as addresses of images."""
    found = {}
    for one in night.debugged:
        # A missing picture does not keep the page from being written.
        with contextlib.suppress(OSError):
            if one.picture:
                found[one.picture] = image_address((folder / one.picture).read_bytes())
    return found


def render_night(
    night: Night, earlier: Iterable[Night], here: str, nights: str, pictures: Mapping[str, str] = {}
) -> str:
    """Return the page; links to its runs begin with `here`, links to other nightly runs with `nights`.

    `pictures` has addresses of images by the path of a picture.
    """
    return render_page(
        "night.html.j2",
        night=night,
        tone=_tone(night.code),
        tones=_tone,
        meaning=meaning(night.code),
        counted=counted,
        earlier=list(reversed(list(earlier)))[:_PAGE_NIGHTS],
        here=here,
        nights=nights,
        most=_PAGE_JOBS,
        pictures=pictures,
    )


def _tone(code: int | None) -> str:
    """Return the class of the style sheet for an exit code."""
    return "unfinished" if code is None else _TONES.get(code, "infra")
