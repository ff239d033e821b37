"""Path and parameters of a page, and links with changed parameters."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import quote, urlencode


class Address:
    """Path of a page and its parameters."""

    def __init__(self, path: str, parameters: Mapping[str, str]) -> None:
        self.path = path
        self._parameters = {name: value.strip() for name, value in parameters.items() if value.strip()}

    def text(self, name: str) -> str:
        """Return the text of a parameter; "" without it."""
        return self._parameters.get(name, "")

    def but(self, **changes: str | int) -> str:
        """Return the address with parameters changed; a parameter with an empty value is left out."""
        found = self._parameters | {name: str(value) for name, value in changes.items()}
        parameters = urlencode([(name, value) for name, value in found.items() if value], errors="replace")
        return f"{quote(self.path)}?{parameters}" if parameters else quote(self.path)


def link(*parts: str, **parameters: str | int) -> str:
    """Return the address of a page: `link("runs", run_id)`. Names may contain any character."""
    asked = urlencode([(name, str(value)) for name, value in parameters.items() if value != ""], errors="replace")
    path = "/" + "/".join(quote(part, safe="@:", errors="replace") for part in parts)
    return f"{path}?{asked}" if asked else path
