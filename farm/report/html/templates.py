"""Templates in reports/: their style sheets and scripts, and the functions and words that they use."""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import inspect
import math
import os
import re
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from markupsafe import Markup, escape

from farm import __version__
from farm.base.paths import data_folder
from farm.base.text import one_line, visible
from farm.builds.program.layers import LayerStep
from farm.report.model import chart, sections, status, summary
from farm.report.model import format as fmt
from farm.report.model.sections import is_infeasible
from farm.report.model.summary import GLYPHS, WORDS, JobSummary, Outcome, RunSummary, Tone
from farm.results.profile.event_names import is_whole_call
from farm.store.values import branch_text, jsonable

if TYPE_CHECKING:
    import jinja2

    from farm.report.model.chart import Plot

STYLES, EARLY_SCRIPT, SCRIPTS = ("report.css",), "theme.js", ("report.js",)
"""Files of every page; the early script runs before anything is drawn."""

_LINK = re.compile(r"https?://[^\s<>\"']+[^\s<>\"'.,;:!?)]|#[1-9]\d{0,8}\b")
_HASH = "0" * 40
_COMMIT = f"/commit/{_HASH}"
LETTERS = {
    "p": ("passed", "●", "passed"),
    "f": ("failed", "✗", "failed"),
    "k": ("known", "◇", "known issue"),
    "i": ("infra", "△", "infra"),
    "s": ("skipped", "○", "skipped"),
    "n": ("not_run", "·", "not run"),
    "\N{MIDDLE DOT}": ("nothing", "\N{NO-BREAK SPACE}", "no result"),
}
"""Class, shape and words of each letter of `farm.store.queries.grid.CELLS`."""
_EQUAL = re.compile(r"(.)\1*")
# Words for the narrow cells of the matrix; outcomes that need attention are in capitals.
_CELL_WORDS = WORDS | {
    Outcome.PASSED: "pass", Outcome.FAILED: "FAIL", Outcome.KNOWN: "known", Outcome.SKIPPED: "skip",
}  # fmt: skip
_TONES = {
    Tone.PASSED: "✓ passed",
    Tone.FAILED: "✗ failed",
    Tone.INFRA: "△ infra trouble",
    Tone.SKIPPED: "○ skipped",
    Tone.UNFINISHED: "… unfinished",
    Tone.EMPTY: "○ nothing executed",
}
_STEPS = {
    LayerStep.QUANTIZATION: "FP32 against quantized, both on the CPU",
    LayerStep.COMPILER: "quantized on the CPU against the simulator",
    LayerStep.DEVICE: "simulator against device",
}


def render_page(template: str, **values: object) -> str:
    """Return a page of reports/ that extends base.html.j2: text in `values` is escaped, styles are inlined."""
    return environment().get_template(template).render({"version": __version__, **assets(), **values})


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
            environment().bytecode_cache = Kept(str(folder))


@functools.cache
def environment() -> jinja2.Environment:
    """Return the environment of the templates; the public functions of the modules below are filters."""
    import jinja2

    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(data_folder("reports")),
        autoescape=True,
        # Style and scripts are read once as well, so that a page has files of one version.
        auto_reload=False,
        undefined=jinja2.StrictUndefined,
        finalize=_shown,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    own = sys.modules[__name__]
    made.filters |= {
        name: function
        for module in (chart, fmt, own, sections, status, summary)
        for name, function in vars(module).items()
        if inspect.isfunction(function) and function.__module__ == module.__name__
    }
    made.filters |= {"branch_text": branch_text, "one_line": one_line, "quoted": shlex.quote}
    made.tests |= {"whole_call": is_whole_call, "infeasible": is_infeasible}
    made.globals |= {"Outcome": Outcome, "GLYPHS": GLYPHS, "WORDS": WORDS}
    made.globals |= {"CELL_WORDS": _CELL_WORDS, "STEPS": _STEPS, "TONES": _TONES}
    return made


@functools.cache
def assets(styles: tuple[str, ...] = STYLES) -> dict[str, Markup]:
    """Return our style sheets and scripts for inlining, and the policy that allows exactly these."""
    folder = data_folder("reports")
    style, early, script = (
        "".join((folder / name).read_text(encoding="utf-8") for name in names)
        for names in (styles, (EARLY_SCRIPT,), SCRIPTS)
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


def with_links(text: str, commit_url: str = "") -> Markup:
    """Return a text whose web addresses are links; `#123` links to the issue at the host of a toolchain's commits.

    Text and address are untrusted.
    """
    base = status.commit_link(commit_url, _HASH)
    issues = f"{base.removesuffix(_COMMIT)}/issues/" if base.endswith(_COMMIT) else ""
    parts, end = [], 0
    for found in _LINK.finditer(text):
        address = found[0] if not found[0].startswith("#") else f"{issues}{found[0][1:]}" if issues else ""
        parts.append(escape(visible(text[end : found.start()])))
        link = Markup('<a href="{}" rel="noreferrer">{}</a>')
        parts.append(link.format(address, found[0]) if address else escape(found[0]))
        end = found.end()
    return Markup("").join([*parts, escape(visible(text[end:]))])


def plot_json(plot: Plot) -> Markup:
    """Return a plot as JSON that is safe inside of a script element."""
    text = msgspec.json.encode(jsonable(msgspec.to_builtins(plot))).decode()
    return Markup(text.replace("<", "\\u003c"))  # noqa: S704 - no tag can begin or end in it


def cells_markup(cells: str) -> Markup:
    """Return the cells of a row with a class for each run of equal letters."""
    parts = (f"<i class={LETTERS[run[1]][0]}>{LETTERS[run[1]][1] * len(run[0])}</i>" for run in _EQUAL.finditer(cells))
    return Markup("".join(parts))  # noqa: S704 - made of constants


def letter_markup(letter: str) -> Markup:
    """Return one letter as a shape with its words."""
    name, shape, words = LETTERS[letter]
    return Markup(f'<span class="v {name}">{shape}</span> {words}')  # noqa: S704 - made of constants


def isotime(epoch_ms: int) -> str:
    """Return a time for an attribute; "" for a time outside of the calendar."""
    moment = fmt.local_time(epoch_ms)
    return moment.isoformat(timespec="seconds") if moment else ""


def sortable(value: float | None) -> str:
    """Return a number as the sort key of the page; "" for NaN and None, which have no place in an order."""
    if value is None or math.isnan(value):
        return ""
    return f"{value:.9g}" if math.isfinite(value) else ("Infinity" if value > 0 else "-Infinity")


def bar_width(share: float) -> str:
    """Return a share, 0 to 1, as the width of a bar of 100."""
    return f"{100 * min(1.0, max(0.0, share)):.2f}" if math.isfinite(share) else "0"


def sentence(text: str) -> str:
    """Return a text with a capital letter at its beginning."""
    return text[:1].upper() + text[1:]


def shown_in_full(job: JobSummary) -> bool:
    """Return True when the page has a card with logs and all attempts of `job`, beyond its row in the table."""
    return job.retried or job.outcome in {Outcome.FAILED, Outcome.KNOWN, Outcome.INFRA}


def share(summary: RunSummary) -> list[tuple[Outcome, str, str]]:
    """Return each outcome that occurred with the start and the width of its part of a bar of 100."""
    parts, start = [], 0.0
    for outcome in ("passed", "skipped", "not_run", "known", "infra", "failed"):
        if count := summary.counts[Outcome(outcome)]:
            width = 100 * count / len(summary.jobs)
            parts.append((Outcome(outcome), f"{start:.3f}", f"{width:.3f}"))
            start += width
    return parts
