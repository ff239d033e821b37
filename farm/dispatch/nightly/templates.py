"""Texts of notifications: farm's templates, or a user's file, rendered in a sandbox from plain values."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jinja2
import msgspec
from jinja2.sandbox import ImmutableSandboxedEnvironment

from farm.base.errors import UsageError
from farm.base.resources import data_folder
from farm.base.text import one_line
from farm.dispatch.nightly.record import CellResult, DebuggedJob, Findings, JobNote, Night, counted, meaning
from farm.dispatch.notify.webhook import slack_text
from farm.report.model import format as fmt

BUILT_IN = ("json", "slack")
"""Templates for webhooks, by name."""
_MAIL = {"text": "mail.txt", "html": "mail.html"}

SHOWN = 20
"""Most jobs of a kind in a notification."""
_REASON_CHARS = 300


def render(template: str, form: str, night: Night) -> str:
    """Return the text of a notification; `template` is a name in BUILT_IN, a file, or empty for the template of mail.

    `form` is `json` (the text must be JSON), `text` or `html` (output of devices is escaped). Raises UsageError.
    """
    try:
        text = _load(template, form).render(night=context(night))
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


def check_template(template: str, form: str) -> list[str]:
    """Return the problem of a template, from rendering a sample with all kinds of findings; empty for none."""
    try:
        render(template, form, SAMPLE)
    except UsageError as error:
        return [str(error)]
    return []


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


def context(night: Night) -> dict[str, Any]:
    """Return the variable `night` of a template: plain values, with output of devices as one line of visible text."""
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
        "new_failures": _notes(night.new_failures),
        "still_failing": _notes(night.still_failing),
        "debugged": _notes(night.debugged),
        "regressions": _notes(night.regressions),
        "infra": _notes(night.troubles),
        "totals": {
            "new_failures": len(night.new_failures),
            "still_failing": len(night.still_failing),
            "debugged": len(night.debugged),
            "regressions": len(night.regressions),
            "infra": len(night.troubles),
            "fixed": sum(len(cell.fixed) for cell in night.cells),
            "not_tested": sum(cell.not_tested for cell in night.cells),
        },
        "report": one_line(night.report),
        "report_url": night.report_url,
    }


def subject(night: Night) -> str:
    """Return a notification's title: one line."""
    found = [
        f"{len(notes)} {word}{'' if len(notes) == 1 else 's'}"
        for word, notes in (("new failure", night.new_failures), ("regression", night.regressions))
        if notes
    ]
    return one_line(f"[farm] {night.name}: {night.word.lower()}: {', '.join([*found, counted(night.counts)])}", 200)


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
    return [{"job": one_line(one.job_id, 200), "said": one_line(one.reason, _REASON_CHARS)} for one in shown]


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
