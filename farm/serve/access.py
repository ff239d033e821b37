"""Access to the server: store, addresses and headers, sign-in and roles, the user of a request."""

from __future__ import annotations

import hashlib
import ipaddress
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal
from urllib.parse import urlsplit

import msgspec
from litestar import Request, Response, get, post
from litestar.concurrency import sync_to_thread
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

from farm.base.errors import MissingToolError, NoStoreError, StoreError, UsageError
from farm.serve.render import API, Renderer
from farm.store.accounts import Account, Role
from farm.store.store import Store, open_store

if TYPE_CHECKING:
    from litestar.connection import ASGIConnection
    from litestar.handlers import HTTPRouteHandler
    from litestar.types import ASGIApp

    from farm.base.config.settings import Config
    from farm.serve.openid import OpenId


# Store of the server, opened on first use.


class StoreHolder:
    """Store that is opened on first use and again after an error, since a database may appear or be replaced."""

    def __init__(self, url: str, *, readonly: bool = True) -> None:
        self._url, self._lock, self._readonly = url, threading.Lock(), readonly
        self._store: Store | None = None

    @contextmanager
    def opened(self) -> Iterator[Store]:
        """Lend the store; after a StoreError the next caller gets a new one."""
        with self._lock:
            if self._store is None:
                self._store = open_store(self._url, readonly=self._readonly, existing=True)
            store = self._store
        try:
            yield store
        except StoreError:
            with self._lock:
                if self._store is store:
                    self._store = None
            store.close()
            raise


# Headers of every response, and addresses that only this machine reaches.


# The hash is of an empty style element, which Plotly adds its rules to by script.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'sha256-47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU='; "
    "img-src 'self' data:; connect-src 'self'; "
    "form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
)
HEADERS = (
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"permissions-policy", b"camera=(), geolocation=(), microphone=()"),
    (b"cache-control", b"no-store"),
)
"""Headers of every response that does not set them itself."""


def is_loopback(host: str) -> bool:
    """Return True when only this machine reaches `host`. Raises UsageError for a name that does not resolve."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError):
        raise UsageError(f"--host {host[:200]!r}: no such address: 127.0.0.1 is this machine alone") from None
    return all(ipaddress.ip_address(str(one[4][0]).partition("%")[0]).is_loopback for one in found)


def local_path(path: str) -> str:
    r"""Return a path of this server for a redirect; `/` for anything else: `//elsewhere`, `/\elsewhere`, a URL."""
    plain = path.isascii() and path.isprintable() and "\\" not in path
    return path if plain and path.startswith("/") and not path.startswith("//") and len(path) < 2000 else "/"


# Sign-in and roles: the user of a request, by a bearer token or a session cookie.


SESSION_S = 7 * 86_400
_OPENID_SESSION_S = 8 * 3600
_SIGN_IN_S = 600
_BEARER = "bearer "
_LOGIN = "/login"
_OPENID = "/login/openid"
_LOGINS: tuple[Literal["minute"], int] = ("minute", 10)
_CHALLENGE = {"www-authenticate": "Bearer"}


class User(msgspec.Struct, frozen=True):
    """User of a request."""

    name: str
    """Empty on a server without accounts."""
    role: Role
    session: bool = False
    """True for a user who has signed in with a browser, and can sign out."""

    def may(self, role: str) -> bool:
        """Return True for a user with an account whose role includes `role`."""
        return bool(self.name) and self.role.may(Role(role))


_ANYBODY = User("", Role.VIEWER)


class LoginForm(msgspec.Struct, frozen=True):
    """Fields of the form."""

    token: str = ""
    next: str = "/"


class Access:
    """Middleware and routes of the sign-in."""

    def __init__(self, config: Config, stores: StoreHolder, host: str) -> None:
        self._stores, self._loopback, self._url = stores, is_loopback(host), config.serve.url
        self._openid = None
        if config.serve.openid is not None:
            try:
                from farm.serve.openid import OpenId
            except ImportError:
                raise MissingToolError("[serve.openid] needs: pip install 'snapdragon-farm[openid]'") from None

            self._openid = OpenId(config.serve.openid, config.serve.url)
        secure = config.serve.url.startswith("https:")
        # A key of this process: sessions end with it. Sessions on the server's side would be kept for every client that
        # sends no cookie, under the id that a cookie chose. Not strict: a provider's page leads back to this server.
        # Browsers send a cookie to every port of a host: two servers need two names.
        key = os.urandom(32)
        name = f"farm-session-{hashlib.sha256(key).hexdigest()[:8]}"
        session = _Cookies(secret=key, key=name, max_age=SESSION_S, samesite="lax", secure=secure)
        self.middleware = [session.middleware, DefineMiddleware(_Authentication, access=self)]
        self._ended: dict[str, float] = {}
        """Sessions that were signed out, by id, until their cookies end."""
        if self._loopback:
            self.middleware.insert(0, DefineMiddleware(_LocalHosts, names=(host, urlsplit(self._url).hostname or host)))
        secret = os.urandom(32).hex()
        # Litestar keeps any cookie of this name: a cookie signed by an earlier process would fail for ever.
        name = f"farm-csrf-{hashlib.sha256(secret.encode()).hexdigest()[:8]}"
        self.csrf = CSRFConfig(
            secret=secret, cookie_name=name, cookie_samesite="strict", cookie_httponly=True, cookie_secure=secure,
            exclude=[f"^{API}"],
        )  # fmt: skip

    def require_accounts(self) -> None:
        """Raise UsageError for a server that other machines reach and that has no account to sign in with."""
        if not self._loopback and not self.has_accounts():
            raise UsageError(
                "other machines can reach this address, and there is no account: "
                "'farm lab accounts --add NAME --role operator' makes one, or [serve.openid] of farm.toml"
            )

    def has_accounts(self) -> bool:
        """Return True if requests need an account."""
        if self._openid is not None:
            return True
        with suppress(NoStoreError), self._stores.opened() as store:
            return bool(store.accounts.all())
        return False

    def user_of(self, connection: ASGIConnection[Any, Any, Any, Any]) -> User:
        """Return the user of a request. Raises NotAuthorizedException."""
        credentials = connection.headers.get("authorization", "")
        if credentials[: len(_BEARER)].casefold() == _BEARER:
            account = self._of_token(credentials[len(_BEARER) :].strip())
            if account is None:
                raise NotAuthorizedException("this is no token of an account", headers=_CHALLENGE)
            return User(account.name, account.role)
        session = connection.session or {}
        if session.get("id") in self._ended:
            session = {}
        # Browsers send cookies with requests that other pages make; the API has no other protection against them.
        if 0 <= time.time() - session.get("began", 0) < session.get("seconds", SESSION_S) and (
            not connection.scope["path"].startswith(API) or connection.scope.get("method") == "GET"
        ):
            name, role = session["name"], session.get("role")
            if role is not None:
                return User(name, Role(role), session=True)
            with self._stores.opened() as store:
                known = store.accounts.named(name)
            # A new account of the same name is not the account that signed in.
            if known is not None and known.created_ms == session["created_ms"]:
                return User(name, known.role, session=True)
        elif self._loopback and not self.has_accounts():
            return _ANYBODY
        raise NotAuthorizedException("a token is needed: Authorization: Bearer TOKEN", headers=_CHALLENGE)

    def _of_token(self, token: str) -> Account | None:
        with self._stores.opened() as store:
            return store.accounts.of_token(token)

    def handlers(self, renderer: Renderer) -> list[HTTPRouteHandler]:
        """Return the routes that sign in and out."""

        def page(request: Request[Any, Any, Any], path: str, problem: str, status: int) -> Response[bytes]:
            openid = _OPENID if self._openid else ""
            return renderer.html(
                request, "login.html.j2", status, title="Sign in", next=path, problem=problem, openid=openid
            )

        @get(_LOGIN, opt={"open": True}, sync_to_thread=True)
        def login(request: Request[Any, Any, Any]) -> Response[Any]:
            if not self.has_accounts():
                return Redirect("/", status_code=303)
            return page(request, local_path(request.query_params.get("next", "/")), "", 200)

        @post(_LOGIN, opt={"open": True}, sync_to_thread=True, middleware=[RateLimitConfig(_LOGINS).middleware])
        def log_in(
            request: Request[Any, Any, Any],
            data: Annotated[LoginForm, Body(media_type=RequestEncodingType.URL_ENCODED)],
        ) -> Response[Any]:
            path, account = local_path(data.next), self._of_token(data.token.strip())
            if account is None:
                return page(request, path, "This is no token of an account.", 401)
            request.set_session(_began(account.name, created_ms=account.created_ms))
            return Redirect(path, status_code=303)

        @post("/logout", sync_to_thread=False)
        def log_out(request: Request[Any, Any, Any]) -> Redirect:
            now = time.time()
            self._ended = {one: until for one, until in self._ended.items() if until > now}
            if session := request.session:
                self._ended[str(session.get("id"))] = now + SESSION_S
            request.clear_session()
            return Redirect(_LOGIN, status_code=303)

        found: list[HTTPRouteHandler] = [login, log_in, log_out]
        return found if self._openid is None else [*found, *self._of_provider(self._openid, page)]

    def _of_provider(self, openid: OpenId, page: Callable[..., Response[bytes]]) -> list[HTTPRouteHandler]:
        """Return the routes of a sign-in by OpenID Connect."""

        @get(_OPENID, opt={"open": True}, sync_to_thread=True)
        def begin(request: Request[Any, Any, Any]) -> Redirect:
            address, memory = openid.begin()
            # A link to this page changes no session that exists: the sign-in has a field of its own.
            request.set_session({**(request.session or {}), "openid": {**memory, "began": time.time()}})
            return Redirect(address, status_code=303)

        @get(f"{_OPENID}/callback", opt={"open": True}, sync_to_thread=True)
        def end(request: Request[Any, Any, Any]) -> Response[Any]:
            session = dict(request.session or {})
            memory = session.pop("openid", {})
            # A link to this page with a wrong state ends no session.
            request.set_session(session)
            if time.time() - memory.get("began", 0) > _SIGN_IN_S:
                memory = {}
            try:
                name, role = openid.end(memory, dict(request.query_params))
                with self._stores.opened() as store:
                    if store.accounts.named(name) is not None:
                        raise UsageError(f"{name} is the name of an account: sign in with its token")
            except UsageError as error:
                return page(request, "/", str(error), 401)
            request.set_session(_began(name, role=role, seconds=_OPENID_SESSION_S))
            return Redirect("/", status_code=303)

        return [begin, end]


def _began(name: str, **facts: Any) -> dict[str, Any]:
    """Return a new session of a user; the provider's roles are asked again after `seconds`."""
    return {"id": os.urandom(16).hex(), "began": time.time(), "name": name, **facts}


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
        return AuthenticationResult(user=await sync_to_thread(self._access.user_of, connection), auth=None)


class _LocalHosts(AllowedHostsMiddleware):
    """Middleware that refuses requests for hosts other than this machine and the server's address, on any port.

    The check stops DNS rebinding: a foreign page whose name resolves to 127.0.0.1 sends another Host header.
    """

    def __init__(self, app: ASGIApp, names: tuple[str, ...]) -> None:
        super().__init__(app, AllowedHostsConfig())
        known = "|".join(map(re.escape, {"127.0.0.1", "localhost", "[::1]", *names, *(f"[{one}]" for one in names)}))
        self.allowed_hosts_regex = re.compile(rf"({known})\.?(:\d+)?", re.IGNORECASE)
