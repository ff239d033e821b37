"""Presentation of a nightly run: terminal lines, Markdown, annotations and pages, and the texts of notifications."""

from __future__ import annotations

import functools
import itertools
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jinja2
import msgspec
from jinja2.sandbox import ImmutableSandboxedEnvironment

from farm.base.errors import UsageError
from farm.base.paths import data_folder
from farm.base.text import one_line
from farm.dispatch.nightly import record
from farm.dispatch.nightly.record import (
    CellResult,
    DebuggedJob,
    Findings,
    JobNote,
    NightlyRun,
    counted,
    meaning,
    write_whole,
)
from farm.dispatch.notify.channels import slack_text
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
from farm.report.html.templates import render_page
from farm.report.model import format as fmt

# Presentation of a nightly run: terminal lines, Markdown and annotations for GitHub, and a page with its runs.


LEAST_WIDTH = 40
_LINES, _ROWS, _PAGE_JOBS, _PAGE_NIGHTLY_RUNS = 10, 200, 100, 30
_TONES = {0: "passed", 1: "failed", 3: "failed", 4: "infra", 5: "skipped"}


def nightly_lines(nightly_run: NightlyRun, width: int = 80) -> list[str]:
    """Return the outcome of a nightly run as lines of at most `width` characters.

    No line begins with output of a device: in a log on GitHub, that could be a command to its runner.
    """
    width = max(width, LEAST_WIDTH)
    lines = [
        *textwrap.wrap(
            f"nightly run {nightly_run.name} ({nightly_run.id}): {nightly_run.word}", width, subsequent_indent="  "
        ),
        f"  exit code {nightly_run.code}: {meaning(nightly_run.code)}",
        f"  {counted(nightly_run.counts)} in {fmt.duration(nightly_run.seconds)}",
        "",
    ]
    room = min(max(len(cell.name) for cell in nightly_run.cells), width // 2)
    for cell in nightly_run.cells:
        virtual = "VIRTUAL, " if cell.virtual else ""
        text = f"  {one_line(cell.name, room):{room}}  {cell.word}: {virtual}{counted(cell.counts)}"
        lines += textwrap.wrap(text, width, subsequent_indent=" " * 6)
        lines += textwrap.wrap(one_line(cell.problem, 400), width, initial_indent="    - ", subsequent_indent="    | ")
    # This section lists jobs alone: the problems of cells are above.
    infra = tuple(one for cell in nightly_run.cells for one in cell.infra)
    for title, notes in (nightly_run.sections | {"Infra": infra}).items():
        if notes:
            lines += ["", f"{title.upper()}: {len(notes)}"]
            for one in notes[:_LINES]:
                lines += [f"  {one_line(one.job_id, width - 2)}", f"    - {one_line(one.reason, width - 6)}"]
            if len(notes) > _LINES:
                lines.append(f"  and {len(notes) - _LINES} more: the report has them")
    if undecided := sum(cell.findings.unknown + cell.findings.not_measured for cell in nightly_run.cells):
        lines += ["", f"suspected regressions that are neither confirmed nor refuted: {undecided}"]
    if nightly_run.undelivered:
        lines += ["", f"NOT NOTIFIED: {len(nightly_run.undelivered)}"]
        for delivery in nightly_run.undelivered:
            text = one_line(f"{delivery.to}: {delivery.problem}")
            lines += textwrap.wrap(text, width, initial_indent="  - ", subsequent_indent="  | ")
    # The last line is not wrapped: users copy the path.
    return [*lines, "", f"report: {nightly_run.report}"]


def nightly_markdown(nightly_run: NightlyRun) -> str:
    """Return the summary of a nightly run for GitHub."""
    cells = (
        (cell.name, cell.word + (" (virtual)" if cell.virtual else ""), counted(cell.counts), cell.problem)
        for cell in nightly_run.cells
    )
    parts = [
        f"### {escaped(nightly_run.name)}: {escaped(nightly_run.word)}\n",
        f"Exit code {nightly_run.code}: {escaped(meaning(nightly_run.code))}.\n",
        f"{escaped(counted(nightly_run.counts))} in {escaped(fmt.duration(nightly_run.seconds))}.\n",
        table(["run", "verdict", "jobs", "trouble"], cells),
    ]
    for title, notes in nightly_run.sections.items():
        more = f"\nand {len(notes) - _ROWS} more\n" if len(notes) > _ROWS else ""
        rows = ((one.job_id, one.reason) for one in notes[:_ROWS])
        parts.append(f"#### {title}: {len(notes)}\n\n{table(['what', 'why'], rows)}{more}")
    if nightly_run.undelivered:
        rows = ((one.to, one.problem) for one in nightly_run.undelivered)
        parts.append(f"#### Not notified: {len(nightly_run.undelivered)}\n\n{table(['whom', 'why'], rows)}")
    return "\n".join(parts) + "\n"


def nightly_review(nightly_run: NightlyRun) -> Review:
    """Return the review of a nightly run for a pull request."""
    commands: list[str] = []
    for cell in nightly_run.cells:
        jobs = [one.job_id for one in (*cell.new_failures, *cell.findings.regressions)]
        commands += rerun_commands(cell.run_id, jobs) if cell.run_id else ()
    virtual = any(cell.virtual for cell in nightly_run.cells)
    notes = {
        NEW: nightly_run.new_failures,
        REGRESSED: nightly_run.regressions,
        FAILING_BEFORE: nightly_run.still_failing,
        NOT_YOURS: nightly_run.troubles,
    }
    return Review(
        name=f"farm nightly {nightly_run.name}",
        state="passed"
        if nightly_run.code == 0
        else "failed"
        if nightly_run.code in (record.FAILED, record.REGRESSED)
        else "infra",
        sentence=f"{nightly_run.word}: {counted(nightly_run.counts)} in {fmt.duration(nightly_run.seconds)}",
        facts=(SIMULATED,) if virtual else (),
        sections={title: [(one.job_id, one.reason) for one in found] for title, found in notes.items()},
        commands=tuple(commands[:MOST_COMMANDS]),
        url=nightly_run.report_url,
    )


def nightly_annotations(nightly_run: NightlyRun) -> list[str]:
    """Return GitHub's workflow commands for new findings: failures are errors, regressions warnings."""

    def titled(kind: str, notes: Iterable[JobNote]) -> list[tuple[str, str]]:
        return [(f"{kind}: {one.job_id}", one.reason) for one in notes]

    return [
        *workflow_commands("error", titled("new failure", nightly_run.new_failures)),
        *workflow_commands("warning", titled("regression", nightly_run.regressions)),
    ]


def write_pages(nightly_run: NightlyRun, known: Iterable[NightlyRun], reports: Path) -> None:
    """Write the page of a nightly run into its folder below `reports`, and into `reports` as the newest.

    Raises InfraError.
    """
    earlier = [one for one in known if one.started_ms < nightly_run.started_ms and one.code is not None]
    write_whole(reports / nightly_run.id / "index.html", render_nightly_run(nightly_run, earlier, "", "../").encode())
    write_whole(reports / "index.html", render_nightly_run(nightly_run, earlier, f"{nightly_run.id}/", "").encode())


def render_nightly_run(nightly_run: NightlyRun, earlier: Iterable[NightlyRun], here: str, nightly_runs: str) -> str:
    """Return the page; links to its runs begin with `here`, links to other nightly runs with `nightly_runs`."""
    return render_page(
        "nightly_run.html.j2",
        nightly_run=nightly_run,
        tone=_tone(nightly_run.code),
        tones=_tone,
        meaning=meaning(nightly_run.code),
        counted=counted,
        earlier=list(reversed(list(earlier)))[:_PAGE_NIGHTLY_RUNS],
        here=here,
        nightly_runs=nightly_runs,
        most=_PAGE_JOBS,
    )


def _tone(code: int | None) -> str:
    """Return the class of the style sheet for an exit code."""
    return "unfinished" if code is None else _TONES.get(code, "infra")


# Texts of notifications: farm's templates, or a user's file, rendered in a sandbox from plain values.


BUILT_IN = ("json", "slack")
"""Templates for webhooks, by name."""
_MAIL = {"text": "mail.txt", "html": "mail.html"}

SHOWN = 20
"""Most jobs of a kind in a notification."""
_REASON_CHARS = 300


def render(template: str, form: str, nightly_run: NightlyRun) -> str:
    """Return the text of a notification; `template` is a name in BUILT_IN, a file, or empty for the template of mail.

    `form` is `json` (the text must be JSON), `text` or `html` (output of devices is escaped). Raises UsageError.
    """
    try:
        text = _load(template, form).render(nightly_run=context(nightly_run))
        if form == "json":
            msgspec.json.decode(text)
    except jinja2.TemplateSyntaxError as error:
        raise UsageError(f"{template or _MAIL[form]}: line {error.lineno}: {error.message}") from None
    except jinja2.TemplateError as error:
        raise UsageError(f"{template or _MAIL[form]}: {error}") from None
    except msgspec.DecodeError as error:
        raise UsageError(
            f"{template}: does not give JSON: {error}; '{{{{ VALUE | tojson }}}}' quotes a value"
        ) from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{template}: is no text in UTF-8: {error}") from None
    except OSError as error:
        known = f"; farm has {' and '.join(BUILT_IN)}" if form == "json" else ""
        raise UsageError(f"{template}: {error.strerror or error}{known}") from None
    except (TypeError, ValueError, ArithmeticError, LookupError) as error:
        # Errors of an expression in a template.
        raise UsageError(f"{template or _MAIL[form]}: {type(error).__name__}: {error}") from None
    return text


def _load(template: str, form: str) -> jinja2.Template:
    environment = _environment(html=form == "html")
    if not template or template in BUILT_IN:
        name = template or _MAIL[form]
        text = (data_folder("reports") / "notify" / f"{name}.j2").read_text(encoding="utf-8")
    else:
        text = Path(template).read_text(encoding="utf-8")
    return environment.from_string(text)


@functools.cache
def _environment(*, html: bool) -> jinja2.Environment:
    # Without a loader: no template includes a file.
    environment = ImmutableSandboxedEnvironment(
        autoescape=html, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["slack"] = slack_text
    return environment


def context(nightly_run: NightlyRun) -> dict[str, Any]:
    """Return the variable `nightly_run` of a template: plain values; output of devices is one line of visible text."""
    found = {
        "new_failures": nightly_run.new_failures,
        "still_failing": nightly_run.still_failing,
        "debugged": nightly_run.debugged,
        "regressions": nightly_run.regressions,
        "infra": nightly_run.troubles,
    }
    return {
        "schema": 2,
        "name": nightly_run.name,
        "id": nightly_run.id,
        "verdict": nightly_run.word.lower(),
        "exit_code": nightly_run.code,
        "meaning": meaning(nightly_run.code),
        "user": one_line(nightly_run.user, 80),
        "host": one_line(nightly_run.host, 80),
        "started_ms": nightly_run.started_ms,
        "started": fmt.clock(nightly_run.started_ms),
        "seconds": round(nightly_run.seconds, 1),
        "duration": fmt.duration(nightly_run.seconds),
        "counts": nightly_run.counts,
        "counted": counted(nightly_run.counts),
        "runs": [_cell(cell) for cell in nightly_run.cells],
        **{name: _notes(notes) for name, notes in found.items()},
        "totals": {
            **{name: len(notes) for name, notes in found.items()},
            "fixed": sum(len(cell.fixed) for cell in nightly_run.cells),
            "not_tested": sum(cell.not_tested for cell in nightly_run.cells),
        },
        "report": one_line(nightly_run.report),
        "report_url": nightly_run.report_url,
    }


def subject(nightly_run: NightlyRun) -> str:
    """Return a notification's title: one line."""
    found = [
        fmt.plural(len(notes), word)
        for word, notes in (("new failure", nightly_run.new_failures), ("regression", nightly_run.regressions))
        if notes
    ]
    return one_line(
        f"[farm] {nightly_run.name}: {nightly_run.word.lower()}: {', '.join([*found, counted(nightly_run.counts)])}",
        200,
    )


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
        "problem": one_line(cell.problem, _REASON_CHARS),
    }


def _notes(notes: Iterable[JobNote]) -> list[dict[str, str]]:
    shown = itertools.islice(notes, SHOWN)
    return [{"job": one_line(one.job_id, 200), "reason": one_line(one.reason, _REASON_CHARS)} for one in shown]


SAMPLE = NightlyRun(
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
            new_failures=(JobNote("smoke/add[SM8650-htp-8a8w]", 'numerics: <b>"sqnr"</b> is 12 dB & less\\'),),
            still_failing=(JobNote("smoke/gelu[SM8650-htp-8a8w]", "execute: crashed"),),
            debugged=(
                DebuggedJob(
                    "smoke/add[SM8650-htp-8a8w]",
                    "first divergence: aten_add_tensor (aten.add.Tensor), likely cause: compiler: SQNR 12.0 dB",
                    layer="aten_add_tensor",
                ),
            ),
            findings=Findings((JobNote("smoke/conv2d[SM8650-htp-8a8w]", "latency: 8 % slower"),), confirmed=1),
            report="smoke-htp.html",
        ),
        CellResult(
            name="smoke-gpu", socs=("SM8650",), suites=("smoke",), backend="gpu", virtual=False, code=4,
            problem="no attached device",
        ),
    ),
    report="/reports/index.html",
)  # fmt: skip
"""Nightly run with all kinds of findings, for a check of templates before the first cell."""
