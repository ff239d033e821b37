"""Output for GitHub Actions: a summary in Markdown, and annotations. Texts are treated as hostile."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from farm.base.text import one_line
from farm.report.model.summary import Outcome, summarize
from farm.report.terminal.layout import STUBBED
from farm.store.records import RunView

# docs.github.com, "Workflow commands": at most 1 MiB for a step's summary, and 10 annotations of a kind.
_MOST_BYTES = 1024 * 1024
_MOST_ANNOTATIONS = 10
_CUT = "\n\n*The summary was cut here: the report has all of it.*\n"
_SPECIAL = re.compile(r"[\\`*_{}\[\]()<>#+.!|~@&:\u200b-]")
# GitHub and GitLab replace entities before they look for mentions of people, issues and labels.
_MENTION = re.compile(r"[@#!~%$&](?=\S)|(?<=GH)-(?=\d)")
_SHOWN = 100


def escaped(text: str) -> str:
    """Return text as literal Markdown: no link, mention, table cell or HTML takes effect."""
    apart = _MENTION.sub("\\g<0>\u200b", one_line(text, 300))
    return _SPECIAL.sub(lambda match: f"&#{ord(match.group())};", apart)


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table; the cells of `rows` are escaped."""
    lines = [f"| {' | '.join(heads)} |", f"|{' --- |' * len(heads)}"]
    lines += [f"| {' | '.join(escaped(cell) for cell in row)} |" for row in rows]
    return "\n".join(lines) + "\n"


def section(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]], most: int) -> list[str]:
    """Return a table of the first `most` rows below its title with their number; [] without rows."""
    return [f"#### {title}: {len(rows)}\n\n{table(heads, rows[:most])}"] if rows else []


def origin(*, stub: object, virtual: object) -> list[str]:
    """Return the warning about the origin of numbers; [] for numbers of hardware."""
    if stub:
        return [f"**{STUBBED}**.\n"]
    return ["Virtual devices: times are of a simulator.\n"] if virtual else []


def add_summary(make: Callable[[], str]) -> None:
    """Append the result of `make` to the summary of the current GitHub step, if there is one.

    Text beyond the size limit is cut at a line.
    A file that cannot be written is ignored: the summary must not fail the run.
    """
    name = os.environ.get("GITHUB_STEP_SUMMARY")
    if not name:
        return
    path = Path(name)
    try:
        room = _MOST_BYTES - (path.stat().st_size if path.exists() else 0) - 1
        data = make().encode()
        if len(data) > room:
            cut = data[: max(0, room - len(_CUT))]
            data = cut[: cut.rfind(b"\n") + 1] + _CUT.encode() if b"\n" in cut else b""
        with path.open("ab") as file:
            file.write(data)
    except OSError:
        return


def workflow_commands(level: str, items: Iterable[tuple[str, str]]) -> list[str]:
    """Return workflow commands, `error` or `warning`, for titles and messages, at most ten; none outside GitHub."""
    if os.environ.get("GITHUB_ACTIONS") != "true":
        return []
    return [
        f"::{level} title={_property(title)}::{_data(message)}" for title, message in list(items)[:_MOST_ANNOTATIONS]
    ]


def run_markdown(view: RunView) -> str:
    """Return the Markdown summary of one run."""
    summary = summarize(view)
    parts = [f"### farm run: {escaped(summary.tone)}\n\n{escaped(summary.verdict_line)}\n"]
    parts += origin(stub=summary.stub, virtual=summary.virtual_devices)
    failed, infra = summary.having(Outcome.FAILED), summary.having(Outcome.INFRA)
    for title, jobs in (("Failed", failed), ("Infra", infra), ("Skipped", summary.out_of_time)):
        parts += section(title, ["job", "why"], [(one.job.id, one.reason) for one in jobs], _SHOWN)
    return "\n".join(parts) + "\n"


def _data(text: str) -> str:
    return one_line(text, 500).replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
