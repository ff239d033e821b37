"""Routes of the server, made of the pages in `farm/serve/pages`."""

from __future__ import annotations

import asyncio
import inspect
import traceback
from collections.abc import Iterable
from os import PathLike
from pathlib import Path
from typing import Annotated, Any

import msgspec
from litestar import Litestar, MediaType, Request, Response, Router, exceptions, get, post
from litestar.concurrency import sync_to_thread
from litestar.config.compression import CompressionConfig
from litestar.enums import RequestEncodingType
from litestar.handlers import HTTPRouteHandler
from litestar.openapi import OpenAPIConfig
from litestar.openapi.plugins import JsonRenderPlugin
from litestar.params import Body, FromPath, PathParameter, QueryParameter
from litestar.response import File, Redirect
from litestar.types import Message, Scope
from prometheus_client import generate_latest

from farm import __version__
from farm.base.config.settings import Config
from farm.base.errors import FarmError, LeaseLostError, NoDeviceError, StoreError, UnknownNameError, UsageError
from farm.dispatch.request.records import report_context
from farm.report.formats.run_json import render_json
from farm.report.html.page_of_run import render_html
from farm.report.html.templates import assets
from farm.serve.access import HEADERS, Access, StoreHolder, User, local_path
from farm.serve.actions import ACTIONS, Action, Context, Done, TooManyCommandsError
from farm.serve.metrics import CONTENT_TYPE, StoreCollector
from farm.serve.page import Page
from farm.serve.pages.all import PAGES
from farm.serve.render import API, PROBLEMS, Renderer, json_answer, link, wants_json
from farm.store.accounts import Role
from farm.store.artifacts import open_artifacts

API_VERSION = f"{API}v1"
# Litestar gives `state`, `query` and other names a meaning of its own.
_ASKED = "asked_"
_FOREVER = "public, max-age=31536000, immutable"
_LONGEST_BODY = 1 << 20
# A report takes about 100 MB while it is rendered.
_REPORTS_AT_ONCE = 2
_TYPES = {"css": "text/css; charset=utf-8", "js": "text/javascript; charset=utf-8"}
# Bytes of a text that are displayed; the download has all.
_MOST_TEXT = 2**20
_MOST_IMAGE = 2**25
# Images that are displayed, by their first bytes.
_IMAGES = {
    b"\x89PNG\r\n\x1a\n": "image/png",
    b"\xff\xd8\xff": "image/jpeg",
    b"GIF87a": "image/gif",
    b"GIF89a": "image/gif",
}
# The sandbox keeps markup and scripts of a file from being executed.
_INLINE_HEADERS = {
    "content-security-policy": "default-src 'none'; sandbox; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "content-disposition": "inline",
}
# The first class that an error has counts.
_STATUS_OF = {
    UnknownNameError: 404, TooManyCommandsError: 429, UsageError: 400, NoDeviceError: 409, LeaseLostError: 409,
    StoreError: 503,
}  # fmt: skip
_TITLES = {
    400: "Invalid request",
    403: "Not permitted",
    404: "Not found",
    405: "Method not allowed",
    409: "Not now",
    429: "Too many at once",
    503: "No answer from the store",
}


def create_app(config: Config, host: str, *, demo: bool = False) -> Litestar:
    """Return the server as an ASGI application that listens on `host`.

    Raises UsageError for a host that other machines reach, without an account.
    """
    server = _Server(config, demo=demo)
    access = Access(config, server.stores, host)
    access.require_accounts()
    handlers = [server.handler(page) for page in PAGES]
    shown = [handler for page, handler in zip(PAGES, handlers, strict=True) if page.facts.template]
    shown += [*server.files(), *map(server.form, ACTIONS), *access.handlers(server.renderer)]
    return Litestar(
        [
            Router("/", route_handlers=shown, include_in_schema=False),
            Router(API_VERSION, route_handlers=[*handlers, *map(server.api, ACTIONS), me]),
        ],
        middleware=access.middleware,
        csrf_config=access.csrf,
        # Level 9 takes 184 ms for Plotly's script, in which no other request is answered; this one 74 ms.
        compression_config=CompressionConfig("gzip", minimum_size=1000, gzip_compress_level=4),
        before_send=[_add_headers],
        exception_handlers={
            FarmError: server.refuse,
            exceptions.HTTPException: server.refuse_http,
            RecursionError: server.refuse_body,
            UnicodeDecodeError: server.refuse_body,
            Exception: server.report_bug,
        },
        openapi_config=OpenAPIConfig(
            title="farm", version="1", description=f"API of farm {__version__}.", path=f"{API_VERSION}/openapi",
            render_plugins=[JsonRenderPlugin(path="/")],
        ),
        request_max_body_size=_LONGEST_BODY,
        logging_config=None,
        debug=False,
    )  # fmt: skip


class Me(msgspec.Struct, frozen=True):
    """User of a request."""

    name: str
    role: Role
    schema: int = 1


@get("/me", sync_to_thread=False, responses=PROBLEMS)
def me(request: Request[Any, Any, Any]) -> Response[Me]:
    """Return the user of the token."""
    user: User = request.scope["user"]
    return Response(Me(user.name, user.role))


class _Server:
    """Store, files and templates behind the routes."""

    def __init__(self, config: Config, *, demo: bool) -> None:
        self.renderer = Renderer(demo=demo)
        self._config = config
        self.stores, self._artifacts = StoreHolder(config.store_url), open_artifacts(config)
        # Opened with the first action: a server without accounts only reads.
        self._stores_of_actions = StoreHolder(config.store_url, readonly=False)
        self._reports = asyncio.Semaphore(_REPORTS_AT_ONCE)

    def handler(self, page: Page) -> HTTPRouteHandler:
        """Return the route of a page; its parameters are the fields of the page's query."""

        def answer(request: Request[Any, Any, Any], **values: Any) -> Response[bytes]:
            query = page.query(**{name.removeprefix(_ASKED): _plain(value) for name, value in values.items()})
            user = request.scope.get("user")
            with self.stores.opened() as store:
                facts = page.make(store.of_user(user.name) if user and user.name else store, query)
            return self.renderer.facts(request, facts)

        # Litestar reads parameters and the schema of the answer from the signature.
        fields = [_parameter(page, field) for field in msgspec.structs.fields(page.query)]
        asked = inspect.Parameter("request", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=Request)
        returned = Response[page.facts]  # type: ignore[name-defined]
        answer.__signature__ = inspect.Signature([asked, *fields], return_annotation=returned)  # type: ignore[attr-defined]
        answer.__annotations__ = {one.name: one.annotation for one in (asked, *fields)} | {"return": returned}
        answer.__name__ = page.make.__name__
        answer.__doc__ = page.make.__doc__
        return get(page.path, sync_to_thread=True, responses=PROBLEMS)(answer)

    def files(self) -> list[HTTPRouteHandler]:
        """Return the routes of reports, artifacts, style sheets, scripts and metrics."""

        @get("/runs/{run:str}/report")
        async def report(request: Request[Any, Any, Any], run: FromPath[str]) -> Response[bytes]:
            """Return the report of a run in one file, or the run as `farm report --json`."""
            async with self._reports:
                return await sync_to_thread(self._report, request, run)

        @get("/artifacts/{sha256:str}", sync_to_thread=True)
        def artifact(sha256: FromPath[str]) -> File:
            return self._artifact(sha256)

        @get("/artifacts/{sha256:str}/view", sync_to_thread=True)
        def view(sha256: FromPath[str]) -> Response[bytes]:
            return _inline(self._artifact(sha256).file_path)

        @get("/assets/{name:str}", sync_to_thread=False, opt={"open": True})
        def asset(name: FromPath[str]) -> Response[bytes]:
            content = self.renderer.assets.get(name)
            if content is None:
                raise exceptions.NotFoundException("no such file: reload the page")
            kind = _TYPES[name.rpartition(".")[2]]
            return Response(content, headers={"cache-control": _FOREVER}, media_type=kind)

        @get("/metrics", sync_to_thread=True)
        def metrics() -> Response[bytes]:
            with self.stores.opened() as store:
                return Response(generate_latest(StoreCollector(store)), media_type=CONTENT_TYPE)

        return [report, artifact, view, asset, metrics]

    def _report(self, request: Request[Any, Any, Any], run: FromPath[str]) -> Response[bytes]:
        with self.stores.opened() as store:
            # The viewer of a page is another user than the owner of the server process.
            view = store.runs.view(store.runs.resolve(run, own=False))
            if wants_json(request):
                return Response(render_json(view).encode(), media_type=MediaType.JSON)
            context = report_context(store, view, self._artifacts, lambda known: self._links(
                record.sha256 for records in known.artifacts.values() for record in records
            ))  # fmt: skip
        policy = f"{assets()['policy']}; frame-ancestors 'none'"
        page = render_html(view, context, home="/").encode("utf-8", "replace")
        return Response(page, media_type=MediaType.HTML, headers={"content-security-policy": policy})

    def _links(self, hashes: Iterable[str]) -> dict[str, str]:
        return {sha256: link("artifacts", sha256) for sha256 in set(hashes) if self._artifacts.may_find(sha256)}

    def _artifact(self, sha256: str) -> File:
        with self.stores.opened() as store:
            kind = store.browse.file_kind(sha256)
        if kind is None:
            raise exceptions.NotFoundException("no attempt has an artifact with this hash")
        path = self._artifacts.find(sha256)
        if path is None:
            raise exceptions.NotFoundException("the artifact is not here: it was pruned, or is on another machine")
        name = "".join(c if c.isascii() and c.isalnum() else "-" for c in kind) or "artifact"
        return File(path, media_type="application/octet-stream", filename=f"{name}-{sha256[:12]}.bin")

    def api(self, action: Action) -> HTTPRouteHandler:
        """Return the route of an action that takes and returns JSON."""

        def answer(request: Request[Any, Any, Any], data: Any) -> Response[bytes]:
            return json_answer(self._perform(request, action, data))

        return _action_route(action, answer, Annotated[action.asked, Body()], Response[Done])

    def form(self, action: Action) -> HTTPRouteHandler:
        """Return the route of an action's form, which leads back to the page with the form."""

        def answer(request: Request[Any, Any, Any], data: Any) -> Response[Any]:
            request.state["back"] = path = local_path(str(data.get("next", "")))
            fields = {name: value for name, value in data.items() if value != ""}
            try:
                asked = msgspec.convert(fields, action.asked, strict=False)
            except msgspec.ValidationError as error:
                raise exceptions.ValidationException(str(error)) from error
            done = self._perform(request, action, asked)
            values = {"title": action.name, "done": done, "next": path}
            return self.renderer.html(request, "done.html.j2", 200, **values)

        body = Annotated[dict[str, str], Body(media_type=RequestEncodingType.URL_ENCODED)]
        return _action_route(action, answer, body, Response[bytes])

    def _perform(self, request: Request[Any, Any, Any], action: Action, asked: msgspec.Struct) -> Done:
        """Perform an action and record it, also where it is refused."""
        user: User = request.scope["user"]
        if not user.name:
            raise exceptions.PermissionDeniedException(
                "nothing can be changed without accounts: 'farm lab accounts' makes them"
            )
        fields = msgspec.structs.asdict(asked)
        shown = {name: len(value) if isinstance(value, bytes) else value for name, value in fields.items()}
        facts = (user.name, action.name, msgspec.json.encode(shown).decode())
        with self._stores_of_actions.opened() as store:
            if not user.may(action.role):
                store.accounts.record(*facts, f"refused: needs the role {action.role}")
                problem = f"{action.name} needs the role {action.role}, this account is {user.role}"
                raise exceptions.PermissionDeniedException(problem)
            # An action that hangs, or whose server is killed, has this entry.
            begin_id, outcome = store.accounts.record(*facts), "done"
            try:
                return action.perform(Context(self._config, store, user.name, user.role), asked)
            except BaseException as error:
                outcome = f"refused: {error}" if isinstance(error, FarmError) else f"failed: {type(error).__name__}"
                raise
            finally:
                store.accounts.record(*facts, outcome, begin_id)

    def refuse(self, request: Request[Any, Any, Any], error: FarmError) -> Response[bytes]:
        """Return the answer to an error of farm."""
        status = next((number for kind, number in _STATUS_OF.items() if isinstance(error, kind)), 500)
        return self._error(request, status, str(error))

    def refuse_http(self, request: Request[Any, Any, Any], error: exceptions.HTTPException) -> Response[Any]:
        """Return the answer to an error of HTTP."""
        if isinstance(error, exceptions.NotAuthorizedException) and not wants_json(request):
            path, asked = request.scope["path"], request.scope["query_string"].decode("latin-1")
            return Redirect(link("login", next=f"{path}?{asked}" if asked else path), status_code=303)
        problem = error.detail
        if isinstance(error, exceptions.ValidationException) and isinstance(error.extra, list):
            problem = "; ".join(
                f"{one.get('key', '').removeprefix(_ASKED)}: {one.get('message', '')}" for one in error.extra
            )
        answer = self._error(request, error.status_code, problem)
        answer.headers.update(error.headers or {})
        return answer

    def refuse_body(self, request: Request[Any, Any, Any], error: Exception) -> Response[bytes]:
        """Return the answer to a body that is no UTF-8 or is nested too deep; anywhere else that is a bug."""
        if request.method != "POST":
            return self.report_bug(request, error)
        return self._error(request, 400, f"the body is not valid: {type(error).__name__}")

    def report_bug(self, request: Request[Any, Any, Any], error: Exception) -> Response[bytes]:
        """Return the answer to an unexpected error, whose traceback goes to the server's output."""
        traceback.print_exception(error)
        return self._error(
            request, 500, f"{type(error).__name__}: this is a bug in farm; the server's output has the traceback"
        )

    def _error(self, request: Request[Any, Any, Any], status: int, problem: str) -> Response[bytes]:
        return self.renderer.error(request, status, _TITLES.get(status, "Something went wrong"), problem)


def _action_route(action: Action, answer: Any, body: Any, returned: Any) -> HTTPRouteHandler:
    answer.__annotations__ = {"request": Request, "data": body, "return": returned}
    answer.__name__, answer.__doc__ = action.perform.__name__, action.perform.__doc__
    return post(f"/actions/{action.name}", sync_to_thread=True, status_code=200, responses=PROBLEMS,
                request_max_body_size=action.most_bytes)(answer)  # fmt: skip


def _inline(path: str | PathLike[str]) -> Response[bytes]:
    """Return a file for display. Raises HTTPException 415 for a file that is neither text nor a known image."""
    with Path(path).open("rb") as file:
        content = file.read(_MOST_IMAGE)
    for begin, kind in _IMAGES.items():
        if content.startswith(begin):
            return Response(content, headers=_INLINE_HEADERS, media_type=kind)
    text = content[:_MOST_TEXT].decode("utf-8", "replace")
    # The last character of a cut text may be damaged.
    if "\0" in text or "\N{REPLACEMENT CHARACTER}" in text[:-1]:
        raise exceptions.HTTPException(status_code=415, detail="the file is neither text nor an image: download it")
    if len(content) > _MOST_TEXT:
        text += "\n[cut here: the download has all]"
    return Response(text.encode(), headers=_INLINE_HEADERS, media_type="text/plain")


def _parameter(page: Page, field: msgspec.structs.FieldInfo) -> inspect.Parameter:
    """Return a field of a query as a parameter of a handler, with its limits for the API's description."""
    kind = field.type
    limits: dict[str, Any] = {}
    for one in getattr(kind, "__metadata__", ()):
        names = ("gt", "ge", "lt", "le", "min_length", "max_length", "pattern", "description")
        limits |= {limit: value for limit in names if (value := getattr(one, limit, None)) is not None}
    name = field.name
    if f"{{{name}:" in page.path:
        kind = Annotated[getattr(kind, "__origin__", kind), PathParameter(**limits)]
    else:
        name = f"{_ASKED}{name}"
        kind = Annotated[
            getattr(kind, "__origin__", kind) if limits else kind, QueryParameter(name=field.name, **limits)
        ]
    default = inspect.Parameter.empty if field.required else field.default
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=kind, default=default)


def _plain(value: Any) -> Any:
    """Return a parameter without blanks around it; Litestar begins a path with `/`."""
    return value.strip().removeprefix("/") if isinstance(value, str) else value


async def _add_headers(message: Message, scope: Scope) -> None:
    """Add the headers of every response that does not set them itself."""
    del scope
    if message["type"] == "http.response.start":
        headers = list(message["headers"])
        known = {name.lower() for name, _ in headers}
        headers += [(name, value) for name, value in HEADERS if name not in known]
        message["headers"] = headers
