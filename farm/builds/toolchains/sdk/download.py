"""Archives of QNN: consent to their licences, and downloads of bounded size.

Downloads use HTTPS, without a fallback to an address that another machine could change.
"""

from __future__ import annotations

import io
import logging
import ssl
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, TYPE_CHECKING
from urllib.parse import urlsplit

import httpx
import msgspec

from farm.base.atomic import replacing
from farm.base.errors import InfraError, UsageError
from farm.base.hashes import sha256_of
from farm.base.publish import published
from farm.base.text import one_line
from farm.builds.runtime.qnn_sdk import ORIGIN, FetchedSdk, require_archive

if TYPE_CHECKING:
    from farm.base.config.settings import Config

logger = logging.getLogger(__name__)

_SECONDS = 60.0
_CHUNK = 1 << 20
_TRIES = 5
_PAUSE_SECONDS = 1.0
# httpx passes on the UnicodeError (a ValueError) of a host name that cannot be one. It raises ValueError for a proxy of
# an unknown kind in the environment, and ImportError for a SOCKS proxy without the package for it.
_ERRORS = (httpx.HTTPError, httpx.InvalidURL, ValueError, ImportError)
_LOOPBACK = ("127.0.0.1", "::1", "localhost")


class SdkOffer(msgspec.Struct, frozen=True):
    """Archive of QNN that can be fetched."""

    name: str
    version: str
    url: str
    licence: str
    """Name and places of the licence."""
    origin: str
    """Origin in the record of the fetched SDK."""

    @property
    def nbytes(self) -> int:
        """Size of the archive; 0 if its server does not report the size."""
        try:
            with _client(self.url) as client:
                text = client.head(self.url).raise_for_status().headers.get("Content-Length", "")
        except _ERRORS:
            return 0
        return int(text) if text.isascii() and text.isdecimal() and len(text) < 16 else 0


def fetch_offer(
    offer: SdkOffer,
    root: Path,
    unpack: Callable[[Path, Path], None],
    sha256: str,
    most_bytes: int,
    is_whole: Callable[[Path], bool] = lambda _: True,
) -> Path:
    """Return `root` with the SDK of an offer, downloaded on the first call; `unpack` checks and unpacks its archive.

    The caller must have the user's consent to the licence. `sha256` is the expected hash of the archive, empty if
    unknown. Raises InfraError for a failed download and for an archive that differs from the offer.
    """

    def fetch(folder: Path) -> None:
        archive = folder / "archive.zip"
        logger.info("fetching %s %s from %s", offer.name, offer.version, offer.url)
        download(offer.url, archive, most_bytes)
        found = sha256_of(archive)
        if sha256 and found != sha256.lower():
            raise InfraError(f"the archive from {offer.url} has the SHA-256 {found}, expected {sha256.lower()}")
        unpack(archive, folder)
        archive.unlink()
        fetched = FetchedSdk(offer.version, offer.origin, found, int(time.time() * 1000), licence_accepted=True)
        (folder / ORIGIN).write_bytes(msgspec.json.encode(fetched))

    return require_archive(published(root, fetch, is_whole), sha256)


class Consent(msgspec.Struct, frozen=True):
    """Consent of a user to a licence."""

    accepted_ms: int
    for_files: str
    """Address of the files that the user was shown."""


def is_accepted(config: Config, licence: str) -> bool:
    """Return whether the user has accepted a licence before."""
    return licence in _consents(config)


def record_consent(config: Config, offer: SdkOffer) -> None:
    """Record the user's consent to the licence of an offer. Raises UsageError for an unwritable state folder."""
    path = _consent_file(config)
    consents = {**_consents(config), offer.licence: Consent(int(time.time() * 1000), offer.url)}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            file.write(msgspec.json.format(msgspec.json.encode(consents)))
    except OSError as error:
        raise UsageError(f"cannot record the consent in {path}: {error.strerror}: make it writable for you") from None


def _consent_file(config: Config) -> Path:
    return config.state_dir / "licences.json"


def _consents(config: Config) -> dict[str, Consent]:
    """Return the recorded consents by licence."""
    try:
        return msgspec.json.decode(_consent_file(config).read_bytes(), type=dict[str, Consent])
    except (OSError, msgspec.DecodeError):
        return {}


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


def read_small(url: str, most_bytes: int) -> bytes:
    """Return a small file. Raises InfraError for a missing or larger file; FileNotFoundError for code 404."""
    file = io.BytesIO()
    try:
        _append(url, file, most_bytes)
    except httpx.HTTPStatusError as error:
        if error.response.status_code == httpx.codes.NOT_FOUND:
            raise FileNotFoundError(url) from None
        raise _failed(url, error) from None
    except _ERRORS as error:
        raise _failed(url, error) from None
    return file.getvalue()


def download(url: str, path: Path, most_bytes: int) -> None:
    """Write the file of `url` to `path`, and continue after a broken connection. Raises InfraError, OSError."""
    with path.open("wb") as file:
        for number in range(_TRIES):
            try:
                _append(url, file, most_bytes)
            except _ERRORS as error:
                if number == _TRIES - 1 or not isinstance(error, httpx.TransportError):
                    raise _failed(url, error) from None
                logger.info("the download broke at %d MB and continues", file.tell() >> 20)
                time.sleep(_PAUSE_SECONDS * number)
            else:
                return


def _append(url: str, file: IO[bytes], most_bytes: int) -> None:
    """Append the rest of a file to its beginning; a server without ranges sends all of it."""
    headers = {"Range": f"bytes={file.tell()}-"} if file.tell() else {}
    with _client(url) as client, client.stream("GET", url, headers=headers) as answer:
        answer.raise_for_status()
        if answer.status_code != httpx.codes.PARTIAL_CONTENT:
            file.seek(0)
            file.truncate()
        for data in answer.iter_raw(_CHUNK):
            file.write(data)
            if file.tell() > most_bytes:
                raise InfraError(f"{url} has more than {most_bytes} bytes: it is not the expected file")


def _client(url: str) -> httpx.Client:
    """Return a client for `url` that refuses, with InfraError, a redirect to an unsafe address."""

    def refuse_unsafe(request: httpx.Request) -> None:
        if not is_safe(str(request.url)):
            raise InfraError(f"{url} leads to {one_line(str(request.url), 200)}, which is no https address")

    return httpx.Client(
        follow_redirects=True,
        timeout=_SECONDS,
        # Certificates of this machine: httpx by itself does not know the certificate of a private mirror.
        verify=ssl.create_default_context(),
        headers={"Accept-Encoding": "identity"},
        event_hooks={"request": [refuse_unsafe]},
    )


def _failed(url: str, error: Exception) -> InfraError:
    return InfraError(f"cannot fetch {url}: {one_line(str(error), 200)}: check the network, the proxy or the address")
