"""Path and parameters of a page: filters, limits and page numbers, and links with changed parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import quote, urlencode

from farm.base.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

_MOST_TEXT = 512


class Address:
    """Path of a page and its parameters."""

    def __init__(self, path: str, parameters: Mapping[str, str]) -> None:
        self.path = path
        self._parameters = {name: value.strip() for name, value in parameters.items() if value.strip()}

    def text(self, name: str, default: str = "") -> str:
        """Return the text of a parameter. Raises UsageError for a text longer than 512 characters."""
        value = self._parameters.get(name, default)
        if len(value) > _MOST_TEXT:
            raise UsageError(f"{name}: is longer than {_MOST_TEXT} characters")
        return value

    def number(self, name: str, default: int, least: int, most: int) -> int:
        """Return a number, clamped to the bounds. Raises UsageError for a text that is not an integer."""
        value = self._parameters.get(name, str(default))
        digits = value.removeprefix("-")
        if not (digits.isascii() and digits.isdigit()):
            raise UsageError(f"{name}: {value[:40]!r} is no number: expected one from {least} to {most}")
        return least if value.startswith("-") else max(least, min(most, int(digits[:18])))

    def one_of(self, name: str, known: Collection[str]) -> str:
        """Return a parameter that is in `known`, or "" without it. Raises UsageError for any other value."""
        value = self.text(name)
        if value and value not in known:
            raise UsageError(f"{name}: {value[:40]!r}: expected {', '.join(known)}")
        return value

    def but(self, **changes: str | int) -> str:
        """Return the address with parameters changed; a parameter with an empty value is left out."""
        found = self._parameters | {name: str(value) for name, value in changes.items()}
        parameters = urlencode([(name, value) for name, value in found.items() if value])
        return f"{quote(self.path)}?{parameters}" if parameters else quote(self.path)

    def __contains__(self, name: str) -> bool:
        return name in self._parameters


def link(*parts: str, **parameters: str | int) -> str:
    """Return the address of a page: `link("runs", run_id)`. Names may contain any character."""
    asked = urlencode([(name, str(value)) for name, value in parameters.items() if value != ""], errors="replace")
    path = "/" + "/".join(quote(part, safe="@:", errors="replace") for part in parts)
    return f"{path}?{asked}" if asked else path
