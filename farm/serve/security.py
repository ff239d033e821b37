"""Headers of every response, the token, and the addresses that only this machine reaches."""

from __future__ import annotations

import ipaddress
import socket
import stat
from typing import TYPE_CHECKING

from farm.base.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

TOKEN_VARIABLE = "FARM_SERVE_TOKEN"  # noqa: S105 - the name of one
_LEAST_TOKEN = 16
_MOST_TOKEN = 1024
_MAKE_ONE = "python3 -c 'import secrets; print(secrets.token_urlsafe(32))'"

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


def local_path(path: str) -> str:
    r"""Return a path of this server for a redirect; `/` for anything else: `//elsewhere`, `/\elsewhere`, a URL."""
    plain = path.isascii() and path.isprintable() and "\\" not in path
    return path if plain and path.startswith("/") and not path.startswith("//") and len(path) < 2000 else "/"
