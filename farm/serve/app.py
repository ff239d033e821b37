"""Routes of the server; all of them are read-only."""

from __future__ import annotations

import hashlib
import threading
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

import msgspec
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, RedirectResponse, Response
from starlette.routing import Route

from farm.base.errors import FarmError, StoreError, UnknownNameError, UsageError
from farm.base.resources import data_folder
from farm.base.text import json_document
from farm.dispatch.request.ending import report_context
from farm.report.formats.run_json import render_json
from farm.report.html.page import PAGE_SCRIPTS, PAGE_STYLES, Served, render
from farm.report.html.page_of_run import EARLY_SCRIPT, assets, render_html
from farm.serve import pages
from farm.serve.address import Address, link
from farm.serve.gate import LOGIN, Gate, address_of
from farm.serve.kept import Content, KeptPages, hashed
from farm.serve.security import COOKIE, SESSION_S, Sessions, is_loopback, local_path
from farm.store.artifacts import open_artifacts
from farm.store.store import open_store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from farm.base.config.settings import Config
    from farm.store.records import Background
    from farm.store.store import Store

_FOREVER = "public, max-age=31536000, immutable"
_LONGEST_BODY = 8192
_TYPES = {"css": "text/css; charset=utf-8", "js": "text/javascript; charset=utf-8"}
_TITLES = {404: "Not found", 400: "Invalid request", 405: "Method not allowed", 503: "No answer from the store"}


def create_app(config: Config, host: str, token: str) -> Gate:
    """Return the server as an ASGI application that listens on `host`."""
    return _App(config, host, token).gate


class _App:
    def __init__(self, config: Config, host: str, token: str) -> None:
        self._store = _StoreHolder(config.store_url)
        self._artifacts = open_artifacts(config)
        self._sessions = Sessions(token) if token else None
        self._kept = KeptPages(config.cache_dir / "serve")
        self._assets = _read_assets()
        names = {name.partition(".")[0] + name[name.rindex(".") :]: name for name in self._assets}
        self._served = Served(
            styles=tuple(f"/assets/{names[name]}" for name in PAGE_STYLES),
            early_script=f"/assets/{names[EARLY_SCRIPT]}",
            scripts=tuple(f"/assets/{names[name]}" for name in PAGE_SCRIPTS),
            session=self._sessions is not None,
        )
        routes = [
            Route("/", self._page(pages.status_page)),
            Route("/runs", self._page(pages.runs_page)),
            Route("/runs/{run}/files", self._page(pages.files_page)),
            Route("/runs/{run}", self._run),
            Route("/diff", self._page(pages.diff_page)),
            Route("/devices", self._page(pages.devices_page)),
            Route("/devices/{device:path}", self._page(pages.device_page)),
            Route("/history", self._page(pages.history_page)),
            Route("/artifacts/{sha256}", self._artifact),
            Route("/api/progress", self._progress),
            Route("/assets/{name}", self._asset),
            Route(LOGIN, self._login, methods=["GET"]),
            Route(LOGIN, self._log_in, methods=["POST"]),
            Route("/logout", self._log_out, methods=["POST"]),
        ]
        handlers: dict[Any, Callable[[Request, Any], Response]] = {
            FarmError: self._refuse,
            HTTPException: self._refuse_http,
            Exception: self._broken,
        }
        self.gate = Gate(
            Starlette(routes=routes, exception_handlers=handlers), host, self._sessions, loopback=is_loopback(host)
        )

    def _page(self, make: Callable[..., pages.PageAnswer]) -> Callable[[Request], Response]:
        def answer(request: Request) -> Response:
            address = Address(request.scope["path"], request.query_params)
            with self._store.opened() as store:
                page = make(store, address, **request.path_params)
                if _wants_json(request):
                    return _json(page.answer())
            return self._html(page.template, address, **page.values)

        return answer

    def _html(self, template: str, address: Address, code: int = 200, **values: Any) -> Response:
        text = render(template, self._served, address=address, link=link, **values)
        return Response(text, code, media_type="text/html")

    async def _run(self, request: Request) -> Response:
        run_id = await run_in_threadpool(self._run_id, request.path_params["run"])
        if _wants_json(request):
            headers = {"content-type": "application/json"}
            read = partial(self._run_json, run_id)
            return await self._kept.answer(request, f"{run_id}.json", self._version, read, headers)
        policy = f"{assets()['policy']}; frame-ancestors 'none'"
        headers = {"content-type": "text/html; charset=utf-8", "content-security-policy": policy}
        return await self._kept.answer(request, run_id, self._version, partial(self._run_page, run_id), headers)

    def _run_id(self, ref: str) -> str:
        with self._store.opened() as store:
            # The viewer of a page is another user than the owner of the server process.
            return store.runs.resolve(ref, own=False)

    def _version(self) -> object:
        with self._store.opened() as store:
            # A new store object may hold another database, so the object is part of the version.
            return store, store.browse.version()

    def _run_json(self, run_id: str) -> Content:
        with self._store.opened() as store:
            view = store.runs.view(run_id)
        return Content(hashed(msgspec.msgpack.encode(view)), lambda: render_json(view).encode(), lambda: True)

    def _run_page(self, run_id: str) -> Content:
        with self._store.opened() as store:
            view = store.runs.view(run_id)
            context = report_context(store, view, self._artifacts, lambda known: self._links(_hashes(known)))
        # The closures keep hashes and links alone, so that a kept page does not hold its whole context in memory.
        hashes, links = _hashes(context.background), context.links
        return Content(
            hashed(msgspec.msgpack.encode(view), msgspec.msgpack.encode(context)),
            lambda: render_html(view, context, home="/").encode(),
            lambda: self._links(hashes) == links,
        )

    def _links(self, hashes: Iterable[str]) -> dict[str, str]:
        return {sha256: link("artifacts", sha256) for sha256 in hashes if self._artifacts.may_find(sha256)}

    def _artifact(self, request: Request) -> Response:
        sha256 = request.path_params["sha256"]
        with self._store.opened() as store:
            kind = store.browse.file_kind(sha256)
        if kind is None:
            raise HTTPException(404, "no attempt has an artifact with this hash")
        path = self._artifacts.find(sha256)
        if path is None:
            raise HTTPException(404, "the artifact is not here: it was pruned, or is on another machine")
        name = "".join(c if c.isascii() and c.isalnum() else "-" for c in kind) or "artifact"
        return FileResponse(path, media_type="application/octet-stream", filename=f"{name}-{sha256[:12]}.bin")

    def _progress(self, request: Request) -> Response:
        with self._store.opened() as store:
            body = _encoded(pages.progress_answer(store))
        tag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers={"etag": tag})
        return Response(body, media_type="application/json", headers={"etag": tag})

    def _asset(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in self._assets:
            raise HTTPException(404, "no such file: reload the page")
        kind = _TYPES[name.rpartition(".")[2]]
        return Response(self._assets[name], headers={"cache-control": _FOREVER, "content-type": kind})

    def _login(self, request: Request) -> Response:
        if self._sessions is None:
            return RedirectResponse("/", 303)
        return self._login_page(request, local_path(request.query_params.get("next", "/")), "", 200)

    async def _log_in(self, request: Request) -> Response:
        if self._sessions is None:
            return RedirectResponse("/", 303)
        fields = parse_qs((await _body(request)).decode("utf-8", "replace"), max_num_fields=8)
        token, path = (fields.get(name, [""])[0] for name in ("token", "next"))
        path, who = local_path(path), address_of(request.scope)
        if request.headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
            return self._login_page(request, "/", "Log in from this page.", 403)
        wait_s = self.gate.attempts.wait_s(who)
        if wait_s:
            page = self._login_page(request, path, f"Too many wrong tokens: wait {wait_s} s.", 429)
            page.headers["retry-after"] = str(wait_s)
            return page
        if not self._sessions.is_token(token.strip()):
            self.gate.attempts.wrong(who)
            return self._login_page(request, path, "This is not the token.", 401)
        answer = RedirectResponse(path, 303)
        secure = request.scope["scheme"] == "https"
        answer.set_cookie(
            COOKIE, self._sessions.new(), max_age=SESSION_S, httponly=True, samesite="strict", secure=secure
        )
        return answer

    def _login_page(self, request: Request, path: str, problem: str, status: int) -> Response:
        address = Address(request.scope["path"], {})
        return self._html("login.html.j2", address, status, next=path, problem=problem, anonymous=True)

    def _log_out(self, request: Request) -> Response:
        del request
        answer = RedirectResponse(LOGIN, 303)
        answer.delete_cookie(COOKIE, httponly=True, samesite="strict")
        return answer

    def _refuse(self, request: Request, error: FarmError) -> Response:
        if isinstance(error, UnknownNameError):
            status = 404
        elif isinstance(error, UsageError):
            status = 400
        else:
            status = 503 if isinstance(error, StoreError) else 500
        return self._error(request, status, str(error))

    def _refuse_http(self, request: Request, error: HTTPException) -> Response:
        answer = self._error(request, error.status_code, error.detail)
        for name, value in (error.headers or {}).items():
            answer.headers[name] = value
        return answer

    def _broken(self, request: Request, error: Exception) -> Response:
        # The traceback goes to the server's output, which only the operator reads.
        return self._error(
            request, 500, f"{type(error).__name__}: this is a bug in farm; the server's output has the traceback"
        )

    def _error(self, request: Request, status: int, problem: str) -> Response:
        if _wants_json(request) or request.scope["path"].startswith("/api/"):
            return _json({"error": problem}, status)
        address = Address(request.scope["path"], {})
        title = _TITLES.get(status, "Something went wrong")
        anonymous = self._sessions is not None and request.scope["path"] == LOGIN
        return self._html("error.html.j2", address, status, title=title, problem=problem, anonymous=anonymous)


class _StoreHolder:
    """Store that is opened on first use and again after an error, since a database may appear or be replaced."""

    def __init__(self, url: str) -> None:
        self._url, self._lock = url, threading.Lock()
        self._store: Store | None = None

    @contextmanager
    def opened(self) -> Iterator[Store]:
        with self._lock:
            if self._store is None:
                self._store = open_store(self._url, readonly=True)
            store = self._store
        try:
            yield store
        except StoreError:
            with self._lock:
                if self._store is store:
                    self._store = None
            store.close()
            raise


def _hashes(known: Background) -> frozenset[str]:
    return frozenset(record.sha256 for records in known.artifacts.values() for record in records)


def _read_assets() -> dict[str, bytes]:
    """Return style sheets and scripts by a name with their hash: `report.0123456789abcdef.css`."""
    found = {}
    for name in (*PAGE_STYLES, EARLY_SCRIPT, *PAGE_SCRIPTS):
        content = (data_folder("reports") / name).read_bytes()
        stem, _, kind = name.rpartition(".")
        found[f"{stem}.{hashlib.sha256(content).hexdigest()[:16]}.{kind}"] = content
    return found


async def _body(request: Request) -> bytes:
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > _LONGEST_BODY:
            raise HTTPException(413, "this is too long for a token")
    return body


def _wants_json(request: Request) -> bool:
    asked, accept = request.query_params.get("format", ""), request.headers.get("accept", "")
    return asked == "json" or (not asked and "application/json" in accept and "text/html" not in accept)


def _json(answer: dict[str, Any], status: int = 200) -> Response:
    return Response(_encoded(answer), status, media_type="application/json")


def _encoded(answer: dict[str, Any]) -> bytes:
    return json_document({"schema": 1, **answer})
