"""Entry of the server: access control, headers of every response, and a log line for each response."""

from __future__ import annotations

import asyncio
import sys
import time
from contextlib import suppress
from http.cookies import CookieError, SimpleCookie
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response

from farm.base.text import one_line
from farm.serve.address import link
from farm.serve.limits import network_of
from farm.serve.security import COOKIE, HEADERS, Attempts, Sessions, names_this_machine

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

LOGIN = "/login"
_OPEN = (LOGIN, "/assets/")
_QUIET = "/api/progress"
_BEARER = "bearer "
AT_ONCE = 8
"""Requests of one peer that are processed at once; further ones wait, which leaves server threads to other peers."""
_UNAUTHORIZED, _MISDIRECTED, _TOO_MANY, _ENDING = 401, 421, 429, 503


class Gate:
    """ASGI middleware that passes only permitted requests to the application."""

    def __init__(self, app: ASGIApp, host: str, sessions: Sessions | None, *, loopback: bool) -> None:
        self._app, self._host, self._loopback = app, host, loopback
        self._sessions, self.attempts = sessions, Attempts()
        # An entry lives as long as a request of the peer is in progress.
        self._turns: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            return
        began, status = time.monotonic(), 0
        turn = self._turns.setdefault(_peer(scope), asyncio.Semaphore(AT_ONCE))
        working = False

        async def start(message: Message) -> None:
            nonlocal status, working
            if message["type"] == "http.response.start":
                if working:
                    # The response has started: free the slot, since a slow client may take long to read the rest.
                    turn.release()
                    working = False
                status = message["status"]
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        try:
            answer: ASGIApp | None = self._refused(scope)
            if answer is None:
                await turn.acquire()
                answer, working = self._app, True
            await answer(scope, receive, start)
        except asyncio.CancelledError:
            # The server is stopping and cancelled this request: answer 503 if no response has started.
            if not status:
                await PlainTextResponse("the server is ending\n", _ENDING)(scope, receive, start)
        finally:
            if working:
                turn.release()
            if scope["path"] != _QUIET or status >= 400:
                _log(scope, status, time.monotonic() - began)

    def _refused(self, scope: Scope) -> Response | None:
        headers, path = Headers(scope=scope), scope["path"]
        if self._loopback and not names_this_machine(headers.get("host", ""), self._host):
            return PlainTextResponse("this server answers to localhost and 127.0.0.1 alone\n", _MISDIRECTED)
        if self._sessions is None or path.startswith(_OPEN):
            return None
        credentials = headers.get("authorization", "")
        if credentials[: len(_BEARER)].casefold() == _BEARER:
            return self._bearer(credentials[len(_BEARER) :].strip(), address_of(scope))
        if self._sessions.is_live(_cookie(headers)):
            return None
        if path.startswith("/api/") or "text/html" not in headers.get("accept", ""):
            return _json(
                "a token is needed: Authorization: Bearer TOKEN", _UNAUTHORIZED, {"www-authenticate": "Bearer"}
            )
        asked = scope["query_string"].decode("latin-1")
        return RedirectResponse(link("login", next=f"{path}?{asked}" if asked else path), 303)

    def _bearer(self, token: str, address: str) -> Response | None:
        assert self._sessions is not None  # noqa: S101 - asked before
        wait_s = self.attempts.wait_s(address)
        if wait_s:
            return _json("too many wrong tokens", _TOO_MANY, {"retry-after": str(wait_s)})
        if self._sessions.is_token(token):
            return None
        self.attempts.wrong(address)
        return _json("this is not the token", _UNAUTHORIZED, {"www-authenticate": "Bearer"})


def address_of(scope: Scope) -> str:
    """Return the client address of a request; for IPv6 the network, since a machine has many addresses in one."""
    return network_of(str((scope.get("client") or ("", 0))[0]))


def _peer(scope: Scope) -> str:
    return str(scope.get("state", {}).get("peer") or address_of(scope))


def _cookie(headers: Headers) -> str:
    jar: SimpleCookie = SimpleCookie()
    try:
        jar.load(headers.get("cookie", ""))
    except CookieError:
        return ""
    return jar[COOKIE].value if COOKIE in jar else ""


def _json(error: str, status: int, headers: dict[str, str]) -> Response:
    return JSONResponse({"schema": 1, "error": error}, status, headers)


def _log(scope: Scope, status: int, seconds: float) -> None:
    # Without the query, which may contain secrets of a user.
    path = one_line(scope.get("raw_path", b"").decode("latin-1"), 120)
    line = f"{address_of(scope)} {scope['method']} {path} {status or 'aborted'} {1000 * seconds:.0f} ms\n"
    # The reader of the log may have closed the pipe.
    with suppress(OSError):
        sys.stderr.write(line)
