"""Answer of a page: facts as HTML by their template, or as JSON."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from importlib.metadata import distribution
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import msgspec
from litestar import MediaType, Request, Response
from litestar.openapi.datastructures import ResponseSpec
from litestar.template.base import csrf_token

from farm.base.paths import data_folder
from farm.base.text import json_document
from farm.report.html.page import PAGE_SCRIPTS, PAGE_STYLES, Served, render
from farm.report.html.templates import EARLY_SCRIPT
from farm.serve.actions import ROLES
from farm.serve.page import Facts

API = "/api/"


class Problem(msgspec.Struct, frozen=True):
    """Answer to a request that is refused or fails."""

    error: str
    schema: int = 1


PROBLEMS = {status: ResponseSpec(Problem, generate_examples=False) for status in (400, 401, 403, 404, 409, 429, 503)}
"""Answers of each operation beside its result."""
DEMO = "demo data"
"""Beginning of the titles in the JSON of a demo store."""
# The script that Plotly's Python package contains; importing the package itself would take a second.
_PLOTLY = Path(str(distribution("plotly").locate_file("plotly/package_data/plotly.min.js")))


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


class Renderer:
    """Templates, style sheets and scripts of the server's pages."""

    def __init__(self, *, demo: bool = False) -> None:
        self._demo = demo
        self.assets = _read_assets()
        address = {f"{name.partition('.')[0]}{Path(name).suffix}": f"/assets/{name}" for name in self.assets}
        self._served = Served(
            styles=tuple(address[name] for name in PAGE_STYLES),
            early_script=address[EARLY_SCRIPT],
            scripts=tuple(address[name] for name in PAGE_SCRIPTS),
            plot_script=address["plotly.js"],
            plot_style=_style_of_maps(_PLOTLY.read_text(encoding="utf-8")),
            demo=demo,
        )

    def facts(self, request: Request[Any, Any, Any], facts: Facts) -> Response[bytes]:
        """Return facts in the format that the request asks for."""
        if wants_json(request):
            return json_answer(msgspec.structs.replace(facts, title=f"{DEMO}: {facts.title}") if self._demo else facts)
        return _html(html_of(facts, self._served, _address(request), **_who(request)))

    def html(self, request: Request[Any, Any, Any], template: str, status: int, **values: Any) -> Response[bytes]:
        """Return a template of reports/ as a page of the server."""
        page = render(template, self._served, address=_address(request), link=link, **_who(request), **values)
        return _html(page, status)

    def error(self, request: Request[Any, Any, Any], status: int, title: str, problem: str) -> Response[bytes]:
        """Return an error as a page or as JSON."""
        if wants_json(request):
            return json_answer(Problem(problem), status)
        return self.html(request, "error.html.j2", status, title=title, problem=problem)


def html_of(facts: Facts, served: Served | None, address: Address, **values: Any) -> str:
    """Return facts as a page; `address` is the address of the request. Without a user in `values`, it has no forms."""
    fields = {name: getattr(facts, name) for name in facts.__struct_fields__}
    reader = {"user": None, "may": lambda _: False}
    return render(facts.template, served, address=address, link=link, **reader | fields | facts.shown() | values)


def _html(page: str, status: int = 200) -> Response[bytes]:
    return Response(page.encode("utf-8", "replace"), status_code=status, media_type=MediaType.HTML)


def _address(request: Request[Any, Any, Any]) -> Address:
    return Address(request.scope["path"], dict(request.query_params))


def _who(request: Request[Any, Any, Any]) -> dict[str, Any]:
    """Return the template values of the user of a request."""
    user = request.scope.get("user")

    def may(action: str) -> bool:
        """Return True for a user whose browser may send the form of an action."""
        return user is not None and user.session and user.may(ROLES[action])

    # An error of a form leads back to its page.
    back = request.state.get("back", "")
    return {"user": user, "may": may, "back": back, "csrf": csrf_token({"request": request})}


def wants_json(request: Request[Any, Any, Any]) -> bool:
    """Return True for the API, and programs that accept JSON and no HTML."""
    if request.scope["path"].startswith(API):
        return True
    accept = request.headers.get("accept", "")
    return "application/json" in accept and "text/html" not in accept


def json_answer(answer: Any, status: int = 200) -> Response[bytes]:
    """Return a JSON document that a terminal can show."""
    return Response(json_document(answer), status_code=status, media_type=MediaType.JSON)


def _style_of_maps(script: str) -> str:
    """Return the id of the element with the styles of maps, which Plotly adds unless the page has it."""
    found = re.search(r'getElementById\("([0-9a-f]{64})"\)', script)
    return found[1] if found else "no-maps"


def _read_assets() -> dict[str, bytes]:
    """Return style sheets and scripts by a name with their hash: `report.0123456789abcdef.css`."""
    found = {}
    folder = data_folder("reports")
    for path in (*(folder / name for name in (*PAGE_STYLES, EARLY_SCRIPT, *PAGE_SCRIPTS)), _PLOTLY):
        content = path.read_bytes()
        stem, _, kind = path.name.rpartition(".")
        found[f"{stem}.{hashlib.sha256(content).hexdigest()[:16]}.{kind}"] = content
    return found
