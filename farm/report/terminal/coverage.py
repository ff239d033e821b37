"""Coverage -> a table for a terminal, and one for the documentation. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import zip_longest

from farm.base.grouping import grouped
from farm.base.text import one_line
from farm.report.model import format as fmt
from farm.report.model.coverage import Coverage, CoverageRow, CoveredJob
from farm.report.model.summary import GLYPHS, WORDS, Outcome
from farm.report.terminal.layout import styled, wrapped, wrapped_in

NO_CASE, NOT_FOR = "–", "n/a"  # noqa: RUF001 - an en dash is what a table shows for nothing
_STYLES = {
    Outcome.FAILED: "bold red",
    Outcome.INFRA: "bold yellow",
    Outcome.OUTDATED: "bold yellow",
    Outcome.NOT_RUN: "bold yellow",
    Outcome.SKIPPED: "",
    Outcome.KNOWN: "cyan",
    Outcome.PASSED: "green",
}
_NAME, _GAP, _LEAST = 20, 2, 5
# Characters with a meaning in Markdown, table cells or HTML; a _ inside of a word has none.
_MARKUP = re.compile(r"([\\|<>\[\]*`~#&]|(?<!\w)_|_(?!\w))")
_SHOWN_PLACES = 12
_INTRODUCTION = (
    "A row is an op builder of ExecuTorch's Qualcomm backend, a column a precision. A program has several operators; "
    "its job counts for the operator with the fewest cases. A cell shows the worst state of its jobs, and how many "
    "have it."
)

_MADE_OF_OTHERS = (
    "No case has these ATen operators by name. The list shows the operators that torch.export makes of the modules in "
    "ExecuTorch's tests of them, and cases with each of these operators."
)


def coverage_lines(table: Coverage, about: Sequence[str], width: int = 80) -> list[str]:
    """Return the table line by line, none wider than `width`; `about` has the facts that its results depend on."""
    lines = [line for text, style in _head(table, about) for line in wrapped_in(style, text, width)]
    heads = {precision: precision.split("_") for precision in table.precisions}
    widths = {
        precision: max([_LEAST, *map(len, head), *(len(_cell(row, precision)) for row in table.rows + table.beyond)])
        for precision, head in heads.items()
    }
    room = max(12, min(_NAME, width - sum(wide + _GAP for wide in widths.values())))
    for n, words in enumerate(zip_longest(*heads.values(), fillvalue="")):
        cells = [f"{word:<{wide + _GAP}}" for word, wide in zip(words, widths.values(), strict=True)]
        lines.append(styled(f"{'' if n else 'operator':<{room}}{''.join(cells)}".rstrip(), "bold"))
    for part in (table.rows, table.beyond):
        if part and part is table.beyond:
            lines.append(styled("beyond them", "bold"))
        lines += [_row(row, widths, room) for row in part]
    lines += [line for text in _legend(table) for line in wrapped_in("dim", text, width)]
    for (state, reason), items in table.reasons().items():
        places = f"{_places(items)}: {reason}" if reason else _places(items)
        first, *more = wrapped(f"{WORDS[state]}, {places}", width - 2, whole_words=False)
        lines += [f"{styled(GLYPHS[state], _STYLES[state])} {first}", *(f"  {line}" for line in more)]
    for title, texts in (
        (f"without a case, {len(table.uncovered)} of {len(table.rows)} builders:", _uncovered(table)),
        ("made of other operators in ExecuTorch's tests, and these are in cases:", _made_of_others(table)),
    ):
        lines += wrapped_in("bold", title, width) if texts else []
        lines += [f"  {line}" for text in texts for line in wrapped_in("", text, width - 2)]
    return lines


def coverage_markdown(table: Coverage, about: Sequence[str], command: str) -> str:
    """Return the table as a page of the documentation; `command` is the command that generates the page."""
    reasons = table.reasons()
    notes = {key: number for number, key in enumerate(reasons, 1)}
    head = [text for text, _ in _head(table, about)]
    lines = [
        f"<!-- Made by `{one_line(command)}`: do not edit. -->",
        f"# Operators on {_escaped(table.soc)}, {_escaped(table.backend)}",
        "",
        _INTRODUCTION,
        "",
        *(f"* {_escaped(text)}" for text in [*head[1:], *_legend(table)]),
        f"* made by `{one_line(command)}`",
    ]
    for title, rows in (("Builders", table.rows), ("Beyond them", table.beyond)):
        if rows:
            lines += ["", f"## {title}", ""]
            lines.append(f"| operator | {' | '.join(table.precisions)} |")
            lines.append(f"|---{'|---' * len(table.precisions)}|")
            lines += [_markdown_row(row, table.precisions, notes) for row in rows]
    for title, introduction, texts in (
        ("Without a case", [], _uncovered(table)),
        ("Made of other operators in ExecuTorch's tests", [_MADE_OF_OTHERS, ""], _made_of_others(table)),
    ):
        if texts:
            lines += ["", f"## {title}", "", *introduction, *(f"* {_escaped(text)}" for text in texts)]
    lines += [""] * bool(notes)
    for (state, reason), items in reasons.items():
        places = _escaped(_places(items, len(items)))
        lines.append(f"[^{notes[state, reason]}]: {WORDS[state]}, {places}: {_escaped(reason)}")
    return "\n".join(lines) + "\n"


def _head(table: Coverage, about: Sequence[str]) -> list[tuple[str, str]]:
    counts = table.counts
    listed = [state for state in Outcome if counts[state] or state in {Outcome.FAILED, Outcome.KNOWN}]
    uncovered = len(table.uncovered)
    bad = counts[Outcome.FAILED] + counts[Outcome.INFRA] + counts[Outcome.OUTDATED] + counts[Outcome.NOT_RUN]
    jobs = fmt.plural(len(table.items), "job")
    counted = ", ".join(_counted(counts[state], state) for state in reversed(listed))
    covered = f"{len(table.rows) - uncovered} of {len(table.rows)} builders are in the program of a job"
    return [
        (f"{table.soc} {table.backend}", "bold"),
        (f"{jobs}: {counted}", "bold yellow" if bad else "bold green"),
        (covered, "" if uncovered else "green"),
        *([(_tested(table), "" if table.untested else "green")] if table.tested else []),
        *((text, "") for text in about),
    ]


def _tested(table: Coverage) -> str:
    having = len(table.tested) - len(table.made_of_others) - len(table.untested)
    text = f"{having} of {len(table.tested)} ATen operators that ExecuTorch's own tests name are in a case"
    others = f", {len(table.made_of_others)} are made of others there: below" if table.made_of_others else ""
    return text + others + (f"; not {', '.join(table.untested)}" if table.untested else "")


def _counted(count: int, state: Outcome) -> str:
    return f"{count} {WORDS[state]}{'s' if state is Outcome.KNOWN and count != 1 else ''}"


def _legend(table: Coverage) -> list[str]:
    used = {cell.state for row in table.rows + table.beyond for cell in row.cells.values()}
    signs = [f"{GLYPHS[state]} {WORDS[state]}" for state in reversed(Outcome) if state in used]
    signs.append(f"{NO_CASE} no case")
    if any(row.without for row in table.rows):
        signs.append(f"{NOT_FOR} no case can be, below is why")
    lines = [
        ", ".join(signs),
        "3: three jobs; 1/3: one job of three, the others are better; (3): only in jobs about other operators",
    ]
    if table.beyond:
        lines.append("case NAME: its operators are not known, as it was never compiled, or the backend builds none")
    if table.unused:
        lines.append(f"no case at all in {', '.join(table.unused)}")
    return lines


def _row(row: CoverageRow, widths: Mapping[str, int], room: int) -> str:
    line = f"{one_line(row.name, room - 1):<{room}}"
    for precision, wide in widths.items():
        cell, text = row.cells.get(precision), _cell(row, precision)
        line += styled(text, _STYLES[cell.state] if cell and cell.state else "dim") + " " * (wide + _GAP - len(text))
    return line.rstrip()


def _cell(row: CoverageRow, precision: str) -> str:
    cell = row.cells.get(precision)
    if cell is None or cell.state is None:
        return NOT_FOR if row.without else NO_CASE
    # An operator that jobs only contain counts where it passed.
    counted = f"{cell.count}" if cell.in_passing or cell.count == len(cell.items) else f"{cell.count}/{len(cell.items)}"
    text = f"{GLYPHS[cell.state]} {counted}"
    return f"({text})" if cell.in_passing else text


def _markdown_row(row: CoverageRow, precisions: Sequence[str], notes: Mapping[tuple[Outcome, str], int]) -> str:
    cells = []
    for precision in precisions:
        cell = row.cells.get(precision)
        numbers: list[int] = []
        if cell and not cell.in_passing:
            numbers = sorted({notes[key] for item in cell.items if (key := (item.state, item.reason)) in notes})
        cells.append(_cell(row, precision) + "".join(f" [^{number}]" for number in numbers))
    return f"| {_escaped(row.name)} | {' | '.join(cells)} |"


def _places(items: Sequence[CoveredJob], most: int = _SHOWN_PLACES) -> str:
    """Return cases and their precisions: `conv2d 8a8w 16a8w, linear 16a8w`."""
    by_case = grouped((item.case, item.precision) for item in items)
    named = [f"{case} {' '.join(dict.fromkeys(precisions))}" for case, precisions in by_case.items()]
    return fmt.first_of(named, most, "more cases")


def _uncovered(table: Coverage) -> list[str]:
    """Return a line for every builder that cannot have a case, and a line for all other builders in no program."""
    lines = [f"{row.name}: {row.without}" for row in table.uncovered if row.without]
    open_ones = [row.name for row in table.uncovered if not row.without]
    if not open_ones:
        return lines
    names, unknown = ", ".join(open_ones), {item.case for item in table.items if item.operators is None}
    if unknown:
        return [*lines, f"{names}: may be in {fmt.plural(len(unknown), 'case')} whose operators are not known"]
    return [*lines, f"no reason is given for {names}"]


def _made_of_others(table: Coverage) -> list[str]:
    return [
        f"{found.name}: {', '.join(found.operators)}, in {'case' if len(found.cases) == 1 else 'cases'} "
        f"{', '.join(found.cases)}"
        for found in table.made_of_others
    ]


def _escaped(text: str) -> str:
    return _MARKUP.sub(r"\\\1", one_line(text))
