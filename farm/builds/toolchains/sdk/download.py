"""Downloads over HTTPS of bounded size, without a fallback to an address that another machine could change."""

from __future__ import annotations

import http.client
import logging
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import IO
from urllib.parse import urlsplit

from farm.base.errors import InfraError, UsageError
from farm.base.text import one_line

logger = logging.getLogger(__name__)

_SECONDS = 60.0
_CHUNK = 1 << 20
_TRIES = 5
_PAUSE_SECONDS = 1.0
_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_PARTIAL_CONTENT = 206


def is_safe(url: str) -> bool:
    """Tell whether files from `url` may be executed: over HTTPS, or from this machine."""
    address = urlsplit(url)
    return (address.scheme == "https" and bool(address.hostname)) or (
        address.scheme == "http" and address.hostname in _LOOPBACK
    )


def require_safe(url: str, named: str) -> str:
    """Return `url` without its last slash. Raises UsageError, with the name of the setting, for an unsafe address."""
    if not is_safe(url) or not url.isprintable() or " " in url:
        raise UsageError(f"{named} {one_line(url, 200)!r}: expected an https address")
    return url.rstrip("/")


class _SafeRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: http.client.HTTPMessage,
        newurl: str,
    ) -> urllib.request.Request | None:
        if not is_safe(newurl):
            raise InfraError(f"{req.full_url} leads to {one_line(newurl, 200)}, which is no https address")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def read_small(url: str, most_bytes: int) -> bytes:
    """Return a small file. Raises InfraError for a missing or larger file; FileNotFoundError for code 404."""
    try:
        with _open(url) as answer:
            data: bytes = answer.read(most_bytes + 1)
    except urllib.error.HTTPError as error:
        if error.code == http.client.NOT_FOUND:
            raise FileNotFoundError(url) from None
        raise _failed(url, error) from None
    except (OSError, http.client.HTTPException) as error:
        raise _failed(url, error) from None
    if len(data) > most_bytes:
        raise InfraError(f"{url} has more than {most_bytes} bytes: it is not the expected file")
    return data


def size_of(url: str) -> int:
    """Return the size of a file in bytes; 0 if its server does not report the size."""
    try:
        with _open(url, method="HEAD") as answer:
            text = answer.headers.get("Content-Length", "")
    except (OSError, http.client.HTTPException):
        return 0
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 16 else 0


def download(url: str, path: Path, most_bytes: int) -> None:
    """Write the file of `url` to `path`, and continue after a broken connection. Raises InfraError, OSError."""
    with path.open("wb") as file:
        for number in range(_TRIES):
            try:
                _append(url, file, most_bytes)
            except urllib.error.HTTPError as error:
                raise _failed(url, error) from None
            except (urllib.error.URLError, http.client.HTTPException, ConnectionError, TimeoutError) as error:
                if number == _TRIES - 1:
                    raise _failed(url, error) from None
                logger.info("the download broke at %d MB and continues", file.tell() >> 20)
                time.sleep(_PAUSE_SECONDS * number)
            else:
                return


def _append(url: str, file: IO[bytes], most_bytes: int) -> None:
    """Append the rest of a file to its beginning; a server without ranges sends all of it."""
    with _open(url, start=file.tell()) as answer:
        if answer.status != _PARTIAL_CONTENT:
            file.seek(0)
            file.truncate()
        while data := answer.read(_CHUNK):
            file.write(data)
            if file.tell() > most_bytes:
                raise InfraError(f"{url} has more than {most_bytes >> 20} MB: it is not the expected file")
        if answer.length:
            # http.client returns a short body without an error.
            raise ConnectionError(f"{answer.length} bytes are missing")


def _open(url: str, *, method: str = "GET", start: int = 0) -> http.client.HTTPResponse:
    headers = {"Range": f"bytes={start}-"} if start else {}
    request = urllib.request.Request(url, headers=headers, method=method)  # noqa: S310 - checked by require_safe
    opened: http.client.HTTPResponse = urllib.request.build_opener(_SafeRedirect).open(request, timeout=_SECONDS)
    return opened


def _failed(url: str, error: Exception) -> InfraError:
    return InfraError(f"cannot fetch {url}: {one_line(str(error), 200)}: check the network, the proxy or the address")
