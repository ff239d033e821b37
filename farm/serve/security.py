"""Access control: host names, the token, its session cookie, and the headers of every response."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import socket
import stat
import time
from collections import deque
from typing import TYPE_CHECKING

from farm.base.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

COOKIE = "farm_session"
SESSION_S = 7 * 86_400
TOKEN_VARIABLE = "FARM_SERVE_TOKEN"  # noqa: S105 - the name of one
_LEAST_TOKEN = 16
_MOST_TOKEN = 1024
_MAKE_ONE = "python3 -c 'import secrets; print(secrets.token_urlsafe(32))'"

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    "cache-control": "no-store",
}
"""Headers of every response that does not set them itself."""


def read_token(file: Path | None, environment: Mapping[str, str]) -> str:
    """Return the token of `file`, or else of the environment; "" without either.

    Raises UsageError for a token that is too short or too long, or a file that other users can read.
    """
    if file is None:
        token, where = environment.get(TOKEN_VARIABLE, "").strip(), f"${TOKEN_VARIABLE}"
        if not token:
            return ""
    else:
        where = str(file)
        try:
            if file.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
                raise UsageError(f"{file}: others can read the token: chmod 600 {file}")
            token = file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            problem = error.strerror if isinstance(error, OSError) else "is no text"
            raise UsageError(f"{file}: the token cannot be read: {problem}") from None
    if not _LEAST_TOKEN <= len(token) <= _MOST_TOKEN or not token.isascii() or not token.isprintable():
        raise UsageError(
            f"{where}: a token has {_LEAST_TOKEN} to {_MOST_TOKEN} printable ASCII characters: {_MAKE_ONE} makes one"
        )
    return token


def require_token(host: str, token: str) -> None:
    """Raise UsageError when `host` is reachable from other machines and no token is set."""
    if not token and not is_loopback(host):
        raise UsageError(
            f"{host} can be reached from other machines, and no token is set: put one into ${TOKEN_VARIABLE}, or into "
            f"a file of yours alone (--token-file); {_MAKE_ONE} makes one"
        )


def is_loopback(host: str) -> bool:
    """Return True when only this machine reaches `host`. Raises UsageError for a name that does not resolve."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError):
        raise UsageError(f"--host {host[:200]!r}: no such address: 127.0.0.1 is this machine alone") from None
    return all(ipaddress.ip_address(str(one[4][0]).partition("%")[0]).is_loopback for one in found)


# Starlette's TrustedHostMiddleware is unfit: releases before 1.0, which are allowed here, refuse [::1], and its
# refusal does not name the address to open instead.
def names_this_machine(header: str, host: str) -> bool:
    """Return True when a Host header names this machine on any port.

    The check stops DNS rebinding: a foreign page whose name resolves to 127.0.0.1 sends another Host header.
    """
    name = header.strip()
    name = name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0]
    return name.casefold().rstrip(".") in {"127.0.0.1", "::1", "localhost", host.casefold()}


# Starlette's SessionMiddleware needs another package and prolongs a session with every response, so that a page that
# polls for progress every second would stay logged in for ever.
class Sessions:
    """Session cookies: the time of login and an HMAC of it, keyed by the token."""

    def __init__(self, token: str, clock: Callable[[], float] = time.time) -> None:
        self._token, self._clock = token.encode(), clock
        self._key = hmac.digest(self._token, b"farm serve: session", hashlib.sha256)

    def is_token(self, token: str) -> bool:
        """Return True for the token, in a time that does not depend on how many characters agree."""
        return hmac.compare_digest(_digest(token.encode("utf-8", "replace")), _digest(self._token))

    def new(self) -> str:
        """Return the value of a new cookie."""
        began = str(int(self._clock()))
        return f"{began}.{self._proof(began)}"

    def is_live(self, cookie: str) -> bool:
        """Return True for a cookie that this token signed less than 7 days ago."""
        began, _, proof = cookie.partition(".")
        if not (began.isascii() and began.isdigit() and len(began) < 16 and proof.isascii()):
            return False
        mine = hmac.compare_digest(proof, self._proof(began))
        return mine and 0 <= self._clock() - int(began) + 60 < SESSION_S

    def _proof(self, began: str) -> str:
        return hmac.new(self._key, began.encode(), hashlib.sha256).hexdigest()


class Attempts:
    """Wrong tokens of the last 60 s: at most five of one address and thirty of all, then attempts are refused."""

    WINDOW_S = 60.0
    OF_ONE = 5
    OF_ALL = 30

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._wrong: deque[tuple[float, str]] = deque(maxlen=self.OF_ALL)

    def wait_s(self, address: str) -> int:
        """Return the seconds until this address may try a token; 0 when it may try now."""
        now = self._clock()
        while self._wrong and self._wrong[0][0] <= now - self.WINDOW_S:
            self._wrong.popleft()
        own = [when for when, who in self._wrong if who == address]
        if len(self._wrong) >= self.OF_ALL:
            own = [self._wrong[0][0]]
        elif len(own) < self.OF_ONE:
            return 0
        return max(1, round(own[0] + self.WINDOW_S - now))

    def wrong(self, address: str) -> None:
        """Record a wrong token."""
        self._wrong.append((self._clock(), address))


def local_path(path: str) -> str:
    r"""Return a path of this server for a redirect; `/` for anything else: `//elsewhere`, `/\elsewhere`, a URL."""
    plain = path.isascii() and path.isprintable() and "\\" not in path
    return path if plain and path.startswith("/") and not path.startswith("//") and len(path) < 2000 else "/"


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()
