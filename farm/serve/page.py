"""Page of the server: a function that takes a store and checked parameters and returns facts.

`farm/serve/app.py` serves each page twice: at its path as HTML by the template of its facts, and below
`/api/v1` as JSON of the same facts.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from typing import Annotated, Any, ClassVar, get_type_hints

import msgspec

from farm.base.errors import UsageError

Text = Annotated[str, msgspec.Meta(max_length=512, pattern=r"^[^\x00-\x1f\x7f]*$")]
"""Text of a parameter, without control characters."""
PageNumber = Annotated[int, msgspec.Meta(ge=1, le=100_000, description="Number of the page, from 1.")]
"""Parameter `page` of lists."""


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts of a page; its fields are the JSON document and, with `shown`, the values of the template."""

    path: ClassVar[str] = ""
    """Path of the page, with fields of its query in braces."""
    template: ClassVar[str] = ""
    """File in reports/; "" for facts that only the API has."""

    schema: int = 1
    """Version of the JSON document."""
    title: str
    """Title of the page, which names its object: it is the text of a link in a chat."""

    def shown(self) -> dict[str, Any]:
        """Return values of the template beside the fields, made of the fields alone."""
        return {}


class Page:
    """Page by the function that makes its facts, with path, query and facts from its types."""

    def __init__(self, make: Callable[[Any, Any], Facts]) -> None:
        self.make = make
        # Only a type checker imports the Store.
        hints = get_type_hints(make, localns={"Store": object}, include_extras=True)
        self.facts: type[Facts] = hints["return"]
        self.query: type[msgspec.Struct] = hints[list(inspect.signature(make).parameters)[1]]
        self.path = self.facts.path


def has_words(words: str, *texts: str) -> bool:
    """Return True if `texts` have each of the blank-separated `words`, in any case."""
    text = " ".join(texts).casefold()
    return all(word in text for word in words.casefold().split())


def one_of(name: str, value: str, known: Collection[str]) -> str:
    """Return a parameter that is empty or in `known`. Raises UsageError for any other value."""
    if value and value not in known:
        raise UsageError(f"{name}: {value[:40]!r}: expected {', '.join(known)}")
    return value
