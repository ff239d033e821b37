"""RunView -> one self-contained HTML file: no network, no server, no second file."""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import json
import math
import os
import shlex
import zlib
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from farm import __version__
from farm.base.atomic import write_atomically
from farm.base.resources import data_folder
from farm.base.text import one_line, visible
from farm.builds.program.layers import LayerStep
from farm.report.html.context import File, ReportContext, files_of
from farm.report.html.matrix import matrices
from farm.report.html.texts import cells_markup, letter_markup, plot_json, with_links
from farm.report.html.triage import Triage, triage
from farm.report.model import format as fmt
from farm.report.model.alerts import alert_change, change_line, change_of, is_confirmed, remark_text, word_of
from farm.report.model.chart import HEIGHT, WIDTH, distributions
from farm.report.model.commits import commit_link, range_link, short, since_text, standing_text, toolchain_text
from farm.report.model.cross_target import cross_targets
from farm.report.model.frame_grid import frame_grids, is_infeasible
from farm.report.model.generation import generating, generation_charts
from farm.report.model.profile_tables import (
    SHOWN_JOBS,
    debugged,
    layer_table,
    module_sums,
    operator_tables,
    profiled,
    row_limit,
)
from farm.report.model.rerun import fetch_command, ways_again
from farm.report.model.status import counts, ended_text, exit_meaning, progress_text, purpose_text, reasons_of
from farm.report.model.summary import (
    GLYPHS,
    WORDS,
    JobSummary,
    Outcome,
    RunSummary,
    Tone,
    beyond_comparisons,
    broken_limits,
    spread_of,
    summarize,
)
from farm.report.model.trends import SHOWN_STEPS, Trend, trends_of
from farm.results.heap import no_heap
from farm.results.profile.event_names import is_whole_call
from farm.store.toolchains import branch_text

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import jinja2
    from markupsafe import Markup

    from farm.store.records import AlertRecord
    from farm.store.view import RunView

LOG_BUDGET = 1_500_000
"""Characters of log in a whole page, so that a run in which all jobs fail still opens at once."""
LOG_LIMITS = (600, 48_000)
"""Least and most characters of one log."""

STYLES, EARLY_SCRIPT, SCRIPTS = ("report.css",), "theme.js", ("report.js",)
"""Files of every page; the early script runs before anything is drawn."""

# Jobs in one pack: unpacking as many is too fast to notice.
_AT_ONCE = 64

SHOWN_SKIPPED = 200
"""Skipped jobs that are listed by name; the table has all."""

SHOWN_OPEN = 12
"""Failures that are unfolded when the page opens; the others are one click away."""

# Words for the narrow cells of the matrix; outcomes that need attention are in capitals.
_CELL_WORDS = {
    Outcome.PASSED: "pass", Outcome.FAILED: "FAIL", Outcome.KNOWN: "known", Outcome.SKIPPED: "skip",
}  # fmt: skip

_TONES = {
    Tone.PASSED: "✓ passed",
    Tone.FAILED: "✗ failed",
    Tone.INFRA: "△ infra trouble",
    Tone.SKIPPED: "○ skipped",
    Tone.UNFINISHED: "… unfinished",
    Tone.EMPTY: "○ empty",
}


_STEPS = {
    LayerStep.QUANTIZATION: "FP32 against quantized, both on the CPU",
    LayerStep.COMPILER: "quantized on the CPU against the simulator",
    LayerStep.DEVICE: "simulator against device",
}


class _Extra(NamedTuple):
    """Facts that the page of a job shows beside the job itself."""

    before: str
    alerts: tuple[AlertRecord, ...]
    trends: tuple[Trend, ...]
    files: tuple[File, ...]


def render_html(view: RunView, context: ReportContext | None = None, *, home: str = "") -> str:
    """Return the page of one run. All text in both is treated as hostile; `home` is the link of the page's logo."""
    context = context or ReportContext()
    summary = summarize(view)
    first = triage(summary, context)
    extras = _extras(summary, context, first)
    profiles, layers = profiled(summary), debugged(summary)[:SHOWN_JOBS]
    generated = generating(summary)
    links: dict[int, dict[str, str]] = {}
    curves = tuple(job for job, _ in generated[:SHOWN_JOBS])
    for what, prefix, jobs in (
        ("layers", "l", layers),
        ("profile", "p", profiles[:SHOWN_JOBS]),
        ("rates", "g", curves),
    ):
        for job in jobs:
            links.setdefault(job.index, {})[f"{prefix}{job.index}"] = what
    trends = [(job, trend) for job in summary.jobs for trend in extras[job.index].trends]
    stepped = [one for one in trends if one[1].stepped]
    alerts = sorted(context.alerts or (), key=lambda alert: not is_confirmed(alert))
    shared = {
        "view": view,
        "cross": cross_targets(summary),
        "extras": extras,
        "links": links,
        "row_limit": row_limit(len(profiles)),
    }
    lean = [job.index for job in summary.jobs if not shown_in_full(job)]
    page = _environment().get_template("job.html.j2").make_module(shared).page  # type: ignore[attr-defined]
    return render_page(
        "run.html.j2",
        run=summary,
        triage=first,
        matrices=matrices(summary),
        frames=frame_grids(summary),
        profiled=profiles[:SHOWN_JOBS],
        more_profiles=len(profiles[SHOWN_JOBS:]),
        debugged=layers,
        generated=generated,
        shown_jobs=SHOWN_JOBS,
        chart_size=(WIDTH, HEIGHT),
        graphs=context.graphs,
        layer_places=context.places,
        outcomes=list(Outcome),
        log_limit=_log_limit(summary),
        shown_open=SHOWN_OPEN,
        shown_skipped=SHOWN_SKIPPED,
        shown_steps=SHOWN_STEPS,
        alerts=alerts,
        places={job.job.id: job.index for job in summary.jobs},
        heap=context.heap,
        no_heap=Counter(filter(None, (no_heap(job.attempt) for job in summary.jobs if job.attempt))).most_common(),
        trends=bool(trends),
        stepped=sorted(stepped, key=lambda one: (one[1].tone != "worse", -abs(one[1].size))),
        pages=packed(lean, lambda index: page(summary.jobs[index], LOG_LIMITS[0])),
        **shared,
        home=home,
    )


def render_page(template: str, **values: object) -> str:
    """Return a page of reports/ that extends base.html.j2: text in `values` is escaped, styles are inlined."""
    return _environment().get_template(template).render({"version": __version__, **assets(), **values})


def write_html(view: RunView, path: Path, context: ReportContext | None = None) -> None:
    """Write the page to `path` atomically; makes its folder. Raises OSError."""
    text = render_html(view, context)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, text)


def packed(numbers: Sequence[int], part: Callable[[int], str]) -> list[tuple[int, int, str]]:
    """Return packs of page parts that are shown on demand, each with the first and last number in it.

    `numbers` ascend. A pack is a JSON object of markup by number, in zlib's format and Base64, which browsers unpack.
    """
    packs = []
    for start in range(0, len(numbers), _AT_ONCE):
        chosen = numbers[start : start + _AT_ONCE]
        text = json.dumps({str(number): part(number) for number in chosen}, ensure_ascii=False)
        data = base64.b64encode(zlib.compress(text.encode("utf-8", "replace"), 9)).decode()
        packs.append((chosen[0], chosen[-1], data))
    return packs


def _extras(summary: RunSummary, context: ReportContext, first: Triage) -> list[_Extra]:
    alerts: dict[str, list[AlertRecord]] = {}
    for alert in context.alerts or ():
        alerts.setdefault(alert.job_id, []).append(alert)
    kind = context.status.device_kind if context.status else summary.view.fingerprint.get("device_kind", "")
    return [
        _Extra(
            before=first.standings.get(job.index, ""),
            alerts=tuple(alerts.get(job.job.id, ())),
            trends=trends_of(context.background, job.job.id, kind),
            files=files_of(context, job.job.id),
        )
        for job in summary.jobs
    ]


def keep_templates(cache_dir: Path) -> None:
    """Keep compiled templates in the cache: compiling takes longer than rendering the page of a short run."""
    import jinja2

    class Kept(jinja2.FileSystemBytecodeCache):
        def dump_bytecode(self, bucket: Any) -> None:
            # On a full disk templates are compiled for each process.
            with contextlib.suppress(OSError):
                super().dump_bytecode(bucket)

    folder = cache_dir / f"templates-{jinja2.__version__}-{__version__}"
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Compiled templates are code: use the folder only if no other user can write to it.
        if folder.stat().st_uid == os.getuid() and not folder.stat().st_mode & 0o022:
            _environment().bytecode_cache = Kept(str(folder))


@functools.cache
def _environment() -> jinja2.Environment:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(data_folder("reports")),
        autoescape=True,
        # Style and scripts are read once as well, so that a page has files of one version.
        auto_reload=False,
        undefined=jinja2.StrictUndefined,
        finalize=_shown,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    named = ("count", "decibel", "cosine", "small", "percent", "duration", "quantity", "rate", "clock", "day")
    environment.filters |= {name: getattr(fmt, name) for name in named}
    functions = (
        operator_tables, module_sums, layer_table, exit_meaning, distributions, alert_change, is_confirmed, one_line,
        generation_charts,
    )  # fmt: skip
    for function in (*functions, fetch_command, ways_again):
        environment.filters[function.__name__] = function
    environment.filters |= {
        "cells_markup": cells_markup,
        "letter_markup": letter_markup,
        "plot_json": plot_json,
        "with_links": with_links,
        "ms": fmt.milliseconds,
        "secs": fmt.seconds,
        "cut": fmt.cut_log,
        "bar_width": _bar_width,
        "quoted": shlex.quote,
        "step_meaning": lambda step: _STEPS[step],
        "isotime": _isotime,
        "sortable": _sortable,
        "spread": spread_of,
        "beyond": beyond_comparisons,
        "broken": broken_limits,
        "in_full": shown_in_full,
        "sentence": lambda text: text[:1].upper() + text[1:],
        "glyph": lambda outcome: GLYPHS[outcome],
        "word": lambda outcome: _CELL_WORDS.get(outcome, WORDS[outcome]),
        "words": lambda outcome: WORDS[outcome],
        "tone": lambda tone: _TONES[tone],
    }
    words = (commit_link, range_link, short, standing_text, since_text, toolchain_text)
    environment.filters |= {word.__name__: word for word in words}
    environment.tests |= {"whole_call": is_whole_call, "infeasible": is_infeasible}
    sentences = (
        change_line, change_of, counts, ended_text, exit_meaning, branch_text, progress_text, purpose_text, reasons_of,
        remark_text, word_of,
    )  # fmt: skip
    environment.globals |= {one.__name__: one for one in sentences}
    environment.globals |= {"Outcome": Outcome, "share": _share, "record_text": fmt.record, "clock": fmt.clock}
    return environment


@functools.cache
def assets(styles: tuple[str, ...] = STYLES, scripts: tuple[str, ...] = SCRIPTS) -> dict[str, Markup]:
    """Return our style sheets and scripts for inlining, and the policy that allows exactly these."""
    from markupsafe import Markup

    folder = data_folder("reports")
    style, early, script = (
        "".join((folder / name).read_text(encoding="utf-8") for name in names)
        for names in (styles, (EARLY_SCRIPT,), scripts)
    )
    for text in (style, early, script):
        if "</" in text or "<!--" in text:
            raise ValueError(f"{folder}: style sheets and scripts are inlined and must contain neither '</' nor '<!--'")
    policy = (
        f"default-src 'none'; style-src {_csp_hash(style)}; script-src {_csp_hash(early)} {_csp_hash(script)}; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    return {
        "policy": Markup(policy),  # noqa: S704 - made of hashes above
        "style": Markup(style),  # noqa: S704 - our own file, checked above
        "early_script": Markup(early),  # noqa: S704
        "script": Markup(script),  # noqa: S704
    }


def _csp_hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _shown(value: object) -> object:
    """Return a text of a template value with invisible characters spelled out; markup of the templates is unchanged."""
    return visible(value) if isinstance(value, str) and not hasattr(value, "__html__") else value


def _isotime(epoch_ms: int) -> str:
    moment = fmt.local_time(epoch_ms)
    return moment.isoformat(timespec="seconds") if moment else ""


def _sortable(value: float | None) -> str:
    """Return a number as the sort key of the page; "" for NaN and None, which have no place in an order."""
    if value is None or math.isnan(value):
        return ""
    return f"{value:.9g}" if math.isfinite(value) else ("Infinity" if value > 0 else "-Infinity")


def _bar_width(share: float) -> str:
    """Return a share, 0 to 1, as the width of a bar of 100."""
    return f"{100 * min(1.0, max(0.0, share)):.2f}" if math.isfinite(share) else "0"


def _log_limit(summary: RunSummary) -> int:
    logs = sum(bool(attempt.log) for job in summary.jobs if shown_in_full(job) for attempt in job.job.attempts)
    least, most = LOG_LIMITS
    return max(least, min(most, LOG_BUDGET // max(logs, 1)))


def shown_in_full(job: JobSummary) -> bool:
    """Return True when the page has a card with logs and all attempts of `job`, beyond its row in the table."""
    return job.retried or job.outcome in {Outcome.FAILED, Outcome.KNOWN, Outcome.INFRA}


def _share(summary: RunSummary) -> list[tuple[Outcome, str, str]]:
    """Return each outcome that occurred with the start and the width of its part of a bar of 100."""
    order = (
        Outcome.PASSED,
        Outcome.SKIPPED,
        Outcome.NOT_RUN,
        Outcome.KNOWN,
        Outcome.INFRA,
        Outcome.FAILED,
    )
    parts = []
    start = 0.0
    for outcome in order:
        width = 100 * summary.counts[outcome] / max(len(summary.jobs), 1)
        if width:
            parts.append((outcome, f"{start:.3f}", f"{width:.3f}"))
        start += width
    return parts
