"""The address of a store on PostgreSQL: what of it is a secret, which files it names, how the server is checked."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from urllib.parse import parse_qsl, quote, unquote, urlencode

from farm.base.errors import UnknownNameError, UsageError
from farm.base.paths import beside

_SECRETS = ("password", "sslpassword")
_FILES = ("sslrootcert", "sslcert", "sslkey", "sslcrl", "passfile")
# libpq's, "SSL Mode Descriptions".
_MODES = ("disable", "allow", "prefer", "require", "verify-ca", "verify-full")
_CHECKING = ("require", "verify-ca", "verify-full")
_SYSTEM = "system"
"""In the place of a file: the authorities that this machine trusts."""


def with_files_beside(base: Path, url: str) -> str:
    """Return the address with the paths of its certificates and password file made absolute, relative to `base`."""
    return _with_query(
        url, lambda key, value: str(beside(base, value)) if key in _FILES and value not in ("", _SYSTEM) else value
    )


def shown_address(url: str) -> str:
    """Return the address without its passwords."""
    if url.startswith("sqlite"):
        return url
    if _is_ambiguous(url):
        # The end of the password is ambiguous.
        return f"{url.partition('://')[0]}://***"
    head, login, place = _login(url)
    user, colon, _ = login.partition(":")
    shown = f"{head}{user}{colon and ':***'}{place}"
    return _with_query(shown, lambda key, value: "***" if key in _SECRETS else value)


def secrets_of(url: str) -> tuple[str, ...]:
    """Return the passwords in the address."""
    own = unquote(_login(url)[1].partition(":")[2])
    return tuple(filter(None, (own, *(value for key, value in _query(url) if key in _SECRETS))))


def require_one_login(url: str) -> None:
    """Raise UsageError without a quote for an address whose password has no clear end."""
    if _is_ambiguous(url):
        raise UsageError(
            "store: the address has an @, or a / or # before it, that is part of the user or password: write %40 for "
            "@, %2F for / and %23 for # there"
        )


def require_tls_files(url: str) -> None:
    """Raise UsageError for a named certificate that is missing or would not be used, and for no `sslmode`."""
    query = dict(_query(url))
    for key in _FILES:
        name = query.get(key, "")
        if name and not (key == "sslrootcert" and name == _SYSTEM) and not Path(name).is_file():
            raise UsageError(f"store: {key}: there is no file {name}")
    mode = query.get("sslmode") or os.environ.get("PGSSLMODE") or "prefer"
    if mode not in _MODES:
        raise UsageError(f"store: {UnknownNameError('sslmode', mode, _MODES)}")
    if query.get("sslrootcert") and mode not in _CHECKING:
        problem = f"sslmode={mode} goes on without it"
        raise UsageError(f"store: sslrootcert is to check the server, and {problem}: add sslmode=verify-full")


def _is_ambiguous(url: str) -> bool:
    login, at, place = url.partition("://")[2].partition("?")[0].partition("@")
    return bool(at) and not url.startswith("sqlite") and ("@" in place or "/" in login or "#" in login)


def _login(url: str) -> tuple[str, str, str]:
    """Return the address up to its login, the login, and the rest, which begins with `@` after a login."""
    scheme, mark, rest = url.partition("://")
    end = min((at for at in map(rest.find, "/?#") if at >= 0), default=len(rest))
    login, at, host = rest[:end].rpartition("@")
    return scheme + mark, login, at + host + rest[end:]


def _query(url: str) -> list[tuple[str, str]]:
    return parse_qsl(url.partition("?")[2], keep_blank_values=True)


def _with_query(url: str, change: Callable[[str, str], str]) -> str:
    head, mark, query = url.partition("?")
    if not query:
        return url
    changed = [(key, change(key, value)) for key, value in _query(url)]
    return head + mark + urlencode(changed, quote_via=quote, safe="/*:,")
