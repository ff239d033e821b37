"""Sign-in: who asks, by a bearer token or a session cookie."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from litestar import Request, Response, get, post
from litestar.config.allowed_hosts import AllowedHostsConfig
from litestar.config.csrf import CSRFConfig
from litestar.enums import RequestEncodingType
from litestar.exceptions import NotAuthorizedException, SerializationException
from litestar.middleware import AbstractAuthenticationMiddleware, AuthenticationResult, DefineMiddleware
from litestar.middleware.allowed_hosts import AllowedHostsMiddleware
from litestar.middleware.rate_limit import RateLimitConfig
from litestar.middleware.session.client_side import ClientSideSessionBackend, CookieBackendConfig
from litestar.params import Body
from litestar.response import Redirect

from farm.serve.render import API
from farm.serve.security import is_loopback, local_path

if TYPE_CHECKING:
    from litestar.connection import ASGIConnection
    from litestar.handlers import HTTPRouteHandler
    from litestar.types import ASGIApp

    from farm.serve.render import Renderer

SESSION_S = 7 * 86_400
_COOKIE = "farm-session"
_BEARER = "bearer "
_LOGIN = "/login"
_LOGINS: tuple[Literal["minute"], int] = ("minute", 10)


class User(msgspec.Struct, frozen=True):
    """User of a request."""

    session: bool = False
    """True for a user who has logged in, and can log out."""


class LoginForm(msgspec.Struct, frozen=True):
    """Fields of the form."""

    token: str = ""
    next: str = "/"


class Access:
    """Middleware and routes of the sign-in."""

    def __init__(self, token: str, host: str) -> None:
        self._token = token
        # A key of this process: sessions end with it. Sessions on the server's side would be kept for every client that
        # sends no cookie, under the id that a cookie chose.
        session = _Cookies(secret=os.urandom(32), key=_COOKIE, max_age=SESSION_S, samesite="strict")
        self.middleware = [session.middleware, DefineMiddleware(_Authentication, access=self)]
        if is_loopback(host):
            self.middleware.insert(0, DefineMiddleware(_LocalHosts, host=host))
        secret = os.urandom(32).hex()
        # Litestar keeps a cookie that it finds, so that one of an earlier process would fail for ever.
        name = f"farm-csrf-{hashlib.sha256(secret.encode()).hexdigest()[:8]}"
        self.csrf = CSRFConfig(
            secret=secret, cookie_name=name, cookie_samesite="strict", cookie_httponly=True, exclude=[f"^{API}"]
        )

    def user_of(self, connection: ASGIConnection[Any, Any, Any, Any]) -> User:
        """Return the user of a request. Raises NotAuthorizedException."""
        if not self._token:
            return User()
        credentials = connection.headers.get("authorization", "")
        if credentials[: len(_BEARER)].casefold() == _BEARER:
            if self._is_token(credentials[len(_BEARER) :].strip()):
                return User()
            raise NotAuthorizedException("this is not the token", headers={"www-authenticate": "Bearer"})
        began = connection.session.get("began", 0) if connection.session else 0
        if 0 <= time.time() - began < SESSION_S:
            return User(session=True)
        raise NotAuthorizedException(
            "a token is needed: Authorization: Bearer TOKEN", headers={"www-authenticate": "Bearer"}
        )

    def _is_token(self, token: str) -> bool:
        return hmac.compare_digest(token.encode("utf-8", "replace"), self._token.encode())

    def handlers(self, renderer: Renderer) -> list[HTTPRouteHandler]:
        """Return the routes that log in and out."""

        def page(request: Request[Any, Any, Any], path: str, problem: str, status: int) -> Response[bytes]:
            return renderer.html(request, "login.html.j2", status, title="Log in", next=path, problem=problem)

        @get(_LOGIN, opt={"open": True}, sync_to_thread=False)
        def login(request: Request[Any, Any, Any]) -> Response[Any]:
            if not self._token:
                return Redirect("/", status_code=303)
            return page(request, local_path(request.query_params.get("next", "/")), "", 200)

        @post(_LOGIN, opt={"open": True}, sync_to_thread=False, middleware=[RateLimitConfig(_LOGINS).middleware])
        def log_in(
            request: Request[Any, Any, Any],
            data: Annotated[LoginForm, Body(media_type=RequestEncodingType.URL_ENCODED)],
        ) -> Response[Any]:
            path = local_path(data.next)
            if not self._token or not self._is_token(data.token.strip()):
                return page(request, path, "This is not the token.", 401)
            request.set_session({"began": time.time()})
            return Redirect(path, status_code=303)

        @post("/logout", sync_to_thread=False)
        def log_out(request: Request[Any, Any, Any]) -> Redirect:
            request.clear_session()
            return Redirect(_LOGIN, status_code=303)

        return [login, log_in, log_out]


class _CookieBackend(ClientSideSessionBackend):
    """Sessions in encrypted cookies, where a damaged cookie is no session."""

    def load_data(self, data: list[bytes]) -> dict[str, Any]:
        """Return the session of a cookie."""
        try:
            return super().load_data(data)
        except (SerializationException, KeyError, TypeError, ValueError):
            return {}


@dataclass
class _Cookies(CookieBackendConfig):
    _backend_class = _CookieBackend


class _Authentication(AbstractAuthenticationMiddleware):
    """Middleware that finds the user of a request."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        super().__init__(app, exclude_from_auth_key="open")
        self._access = access

    async def authenticate_request(self, connection: ASGIConnection[Any, Any, Any, Any]) -> AuthenticationResult:
        """Return the user of a request."""
        return AuthenticationResult(user=self._access.user_of(connection), auth=None)


class _LocalHosts(AllowedHostsMiddleware):
    """Middleware that refuses requests for hosts other than this machine, on any port.

    The check stops DNS rebinding: a foreign page whose name resolves to 127.0.0.1 sends another Host header.
    """

    def __init__(self, app: ASGIApp, host: str) -> None:
        super().__init__(app, AllowedHostsConfig())
        names = "|".join(map(re.escape, ("127.0.0.1", "localhost", host)))
        self.allowed_hosts_regex = re.compile(rf"({names}|\[::1\]|\[{re.escape(host)}\])\.?(:\d+)?", re.IGNORECASE)
