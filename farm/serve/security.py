"""Headers of every response, and addresses that only this machine reaches."""

from __future__ import annotations

import ipaddress
import socket

from farm.base.errors import UsageError

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
