"""Page of the server: a function that takes a store and checked parameters and returns facts.

`farm/serve/app.py` serves each page twice: at its path as HTML by the template of its facts, or as JSON with
`?format=json`; and below `/api/v1` as JSON of the same facts.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from typing import Annotated, Any, ClassVar, get_type_hints

import msgspec

from farm.base.errors import UsageError
from farm.report.html.page import Served, render
from farm.serve.address import Address, link

Text = Annotated[str, msgspec.Meta(max_length=512, pattern=r"^[^\x00-\x1f\x7f]*$")]
"""Text of a parameter, without control characters."""
PageNumber = Annotated[int, msgspec.Meta(ge=1, le=100_000, description="Number of the page, from 1.")]
"""Parameter `page` of lists."""


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts of a page; its fields are the JSON document and, with `shown`, the values of the template."""

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
    """Path of a page and the function that makes its facts."""

    def __init__(self, path: str, make: Callable[[Any, Any], Facts]) -> None:
        self.path, self.make = path, make
        # Only a type checker imports the Store.
        hints = get_type_hints(make, localns={"Store": object}, include_extras=True)
        self.facts: type[Facts] = hints["return"]
        self.query: type[msgspec.Struct] = hints[list(inspect.signature(make).parameters)[1]]


def html_of(facts: Facts, served: Served | None, address: Address, **values: Any) -> str:
    """Return facts as a page; `address` is the address of the request. Without a user in `values`, it has no forms."""
    fields = {name: getattr(facts, name) for name in facts.__struct_fields__}
    reader = {"user": None, "may": lambda _: False}
    return render(facts.template, served, address=address, link=link, **reader | fields | facts.shown() | values)


def one_of(name: str, value: str, known: Collection[str]) -> str:
    """Return a parameter that is empty or in `known`. Raises UsageError for any other value."""
    if value and value not in known:
        raise UsageError(f"{name}: {value[:40]!r}: expected {', '.join(known)}")
    return value
