"""Comparison of two runs, as `farm diff`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import msgspec

from farm.report.html.page import diff_values
from farm.report.model.diff import RunDiff, read_diff
from farm.report.terminal.compare import DiffPart
from farm.serve.page import Facts, Text, has_words, one_of

if TYPE_CHECKING:
    from farm.store.store import Store


class DiffQuery(msgspec.Struct, frozen=True):
    """Two runs and a selection of their differences."""

    a: Text = "latest~1"
    b: Text = "latest"
    part: Text = ""
    q: Text = ""
    """Words of the shown rows."""
    limit: Annotated[int, msgspec.Meta(ge=1, le=1000, description="Rows of each part.")] = 50


class DiffFacts(Facts, frozen=True, kw_only=True):
    """Differences between two runs."""

    path: ClassVar[str] = "/diff"
    template: ClassVar[str] = "diff.html.j2"
    diff: RunDiff
    virtual: bool
    """A device of either run is virtual."""
    query: DiffQuery

    def shown(self) -> dict[str, Any]:
        """Return the chosen rows of the page."""
        values, asked = diff_values(self.diff, virtual=self.virtual), self.query
        parts: list[DiffPart] = values["parts"]
        chosen = one_of("part", asked.part, [part.key for part in parts])
        return {
            **values,
            "choices": [(part.key, part.title, len(part.rows)) for part in parts],
            "parts": [
                part._replace(rows=[row for row in part.rows if has_words(asked.q, *row)])
                for part in parts
                if chosen in ("", part.key)
            ],
            "names": (asked.a, asked.b),
            "limit": asked.limit,
        }


def diff_page(store: Store, query: DiffQuery) -> DiffFacts:
    """Return the comparison of two runs, as `farm diff`."""
    diff, virtual = read_diff(store, *(store.runs.resolve(name, own=False) for name in (query.a, query.b)))
    return DiffFacts(title=f"{diff.before} → {diff.after}", diff=diff, virtual=virtual, query=query)
