"""Archives of QNN: consent to their licences, downloads of bounded size, unpacking, and checks before the first use."""

from __future__ import annotations

import errno
import io
import logging
import re
import shutil
import ssl
import stat
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import IO
from urllib.parse import urlsplit

import httpx
import msgspec

from farm.base.config.settings import Config
from farm.base.errors import ConfigError, InfraError, UsageError
from farm.base.files import published, replacing
from farm.base.hashes import sha256_of
from farm.base.text import one_line
from farm.builds.runtime.parts import AARCH64, HEXAGON, MACHINES, X86_64, read_elf
from farm.builds.runtime.qnn_sdk import LIBRARY, ORIGIN, TARGET, FetchedSdk, require_archive, sdk_field

# Archives of QNN: consent to their licences, and downloads of bounded size.
#
# Downloads use HTTPS, without a fallback to an address that another machine could change.


logger = logging.getLogger(__name__)

_SECONDS = 60.0
_DOWNLOAD_CHUNK = 1 << 20
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


def consents(config: Config) -> dict[str, Consent]:
    """Return the recorded consents by licence."""
    try:
        return msgspec.json.decode(_consent_file(config).read_bytes(), type=dict[str, Consent])
    except (OSError, msgspec.DecodeError):
        return {}


def record_consent(config: Config, offer: SdkOffer) -> None:
    """Record the user's consent to the licence of an offer. Raises UsageError for an unwritable state folder."""
    path = _consent_file(config)
    given = {**consents(config), offer.licence: Consent(int(time.time() * 1000), offer.url)}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            file.write(msgspec.json.format(msgspec.json.encode(given)))
    except OSError as error:
        raise UsageError(f"cannot record the consent in {path}: {error.strerror}: make it writable for you") from None


def _consent_file(config: Config) -> Path:
    return config.state_dir / "licences.json"


def is_safe(url: str) -> bool:
    """Tell whether files from `url` may be executed: over HTTPS, or from this machine."""
    address = urlsplit(url)
    return (address.scheme == "https" and bool(address.hostname)) or (
        address.scheme == "http" and address.hostname in _LOOPBACK
    )


def read_small(url: str, most_bytes: int) -> bytes:
    """Return a small file. Raises InfraError for a missing or larger file; FileNotFoundError for code 404."""
    file = io.BytesIO()
    try:
        _append(url, file, most_bytes)
    except _ERRORS as error:
        if isinstance(error, httpx.HTTPStatusError) and error.response.status_code == httpx.codes.NOT_FOUND:
            raise FileNotFoundError(url) from None
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
        for data in answer.iter_raw(_DOWNLOAD_CHUNK):
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


# Unpacking of a QNN SDK from an untrusted zip file, and the checks before its first use.


# Far above any SDK: the SDKs of 2025 have 20,000 files.
_MOST_FILES = 400_000
_CHUNK = 2**20
# PATH_MAX of Linux, with the closing NUL.
_MOST_LINK = 4096
_ENCRYPTED = 1
_OF_NAMES = {errno.EEXIST, errno.EISDIR, errno.EINVAL, errno.ELOOP, errno.ENAMETOOLONG, errno.ENOTDIR}
_MACHINES = (
    (re.compile(r"x86_64-linux.*"), X86_64),
    (re.compile(r"aarch64-(android|oe-linux.*|ubuntu.*)"), AARCH64),
    (re.compile(r"(hexagon|lpai)-v\d+"), HEXAGON),
)
_NEEDED = (LIBRARY, "libQnnSystem.so")


def unpack(archive: Path, folder: Path, prefix: str, most_bytes: int) -> None:
    """Unpack the files below `prefix` in a zip file into `folder`, at most `most_bytes`.

    Raises InfraError for an archive that is damaged, has a name or a link leading out of the folder, or is larger.
    """
    folder.mkdir(exist_ok=True)
    try:
        with zipfile.ZipFile(archive) as opened:
            members = [one for one in _checked(opened.infolist(), most_bytes) if one.filename.startswith(prefix)]
            if not members:
                raise refused(f"there is no {prefix} in it" if prefix else "it is empty")
            _require_space(folder, sum(one.file_size for one in members))
            names = {PurePosixPath(one.filename[len(prefix) :]): one for one in members if one.filename != prefix}
            links = {name: _target(opened, one) for name, one in names.items() if _is_link(one)}
            _check_links(names, links)
            for name, one in names.items():
                if name not in links:
                    _extract(opened, one, folder / name, name)
            # Links are made last, so that no file is written through a link.
            for name, target in links.items():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).symlink_to(target)
    except (zipfile.BadZipFile, EOFError, UnicodeDecodeError, NotImplementedError, RuntimeError) as error:
        raise refused(f"it is damaged ({error})") from None
    except OSError as error:
        # A file in the place of a folder, or a name or a path that is too long for the file system.
        if error.errno not in _OF_NAMES:
            raise
        raise refused(f"it has a name that cannot be unpacked ({error.strerror})") from None


def check_sdk(folder: Path, version: str) -> None:
    """Raise InfraError unless `folder` has the SDK of `version` for this machine, with each library in its place."""
    actual = sdk_field(folder, "version")
    if actual != version:
        raise refused(f"its sdk.yaml has version {one_line(actual, 80) or 'nothing'}, and {version} was fetched")
    missing = [name for name in _NEEDED if not (folder / "lib" / TARGET / name).is_file()]
    if missing:
        raise refused(f"it has no lib/{TARGET}/{missing[0]}")
    check_machines(folder / "lib")


def check_machines(folder: Path) -> None:
    """Raise InfraError for a library in the folder of another processor, and for a file that is no library."""
    for place in sorted(path for path in folder.iterdir() if path.is_dir()):
        machine = next((number for name, number in _MACHINES if name.fullmatch(place.name)), None)
        if machine is None:
            continue
        for library in sorted(place.rglob("*.so")):
            try:
                found = read_elf(library)
            except (ConfigError, OSError) as error:
                raise refused(f"{library.relative_to(folder.parent)}: {error}") from None
            if found.machine != machine:
                name = library.relative_to(folder.parent)
                raise refused(f"{name} is made for {found.machine_name}, expected {MACHINES[machine]}")


def _checked(members: list[zipfile.ZipInfo], most_bytes: int) -> Iterator[zipfile.ZipInfo]:
    """Yield the entries of an archive. Raises InfraError if one leads out of it, or is double or encrypted, and for an
    archive larger than any SDK.
    """
    nbytes = sum(one.file_size for one in members)
    if len(members) > _MOST_FILES or nbytes > most_bytes:
        raise refused(f"it is larger than any SDK: {len(members)} files, {nbytes} bytes")
    seen: set[str] = set()
    for one in members:
        name = one.filename
        parts = name.rstrip("/").split("/")
        if name.startswith("/") or "\\" in name or "\0" in name or any(part in ("", ".", "..") for part in parts):
            raise refused(f"{one_line(name, 200)!r} in it leads out of its folder")
        if name.rstrip("/") in seen:
            raise refused(f"{one_line(name, 200)!r} is in it twice")
        if one.flag_bits & _ENCRYPTED:
            raise refused("it is encrypted")
        seen.add(name.rstrip("/"))
        yield one


def _check_links(names: Iterable[PurePosixPath], links: dict[PurePosixPath, str]) -> None:
    for name, target in links.items():
        place = list(name.parent.parts)
        for part in PurePosixPath(target).parts:
            if PurePosixPath(*place) in links:
                # The text of a link does not show where `..` leads behind another link.
                raise refused(f"the link {one_line(str(name), 200)!r} in it leads through another one")
            if part == "/" or (part == ".." and not place):
                raise refused(f"the link {one_line(str(name), 200)!r} in it leads out of its folder")
            place = place[:-1] if part == ".." else [*place, part]
    for name in names:
        if any(parent in links for parent in name.parents):
            raise refused(f"{one_line(str(name), 200)!r} in it lies behind a link")


def _target(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> str:
    """Return the target of a link. Raises InfraError for a target that no link can have."""
    if not 0 < member.file_size < _MOST_LINK or "\0" in (target := archive.read(member).decode()):
        raise refused(f"the link {one_line(member.filename, 200)!r} in it has no target, or a damaged one")
    return target


def _is_link(member: zipfile.ZipInfo) -> bool:
    return stat.S_ISLNK(member.external_attr >> 16)


def _extract(archive: zipfile.ZipFile, member: zipfile.ZipInfo, target: Path, name: PurePosixPath) -> None:
    if member.is_dir():
        target.mkdir(parents=True, exist_ok=True)
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    # A read to the end verifies the checksum, and returns at most the announced number of bytes.
    with archive.open(member) as source, target.open("xb") as file:
        shutil.copyfileobj(source, file, _CHUNK)
    executable = member.external_attr >> 16 & 0o111 or name.parts[0] == "bin"
    target.chmod(0o755 if executable else 0o644)


def _require_space(folder: Path, nbytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if nbytes > free:
        raise InfraError(
            f"the QNN SDK needs {nbytes // 2**20} MB in the cache and {free // 2**20} MB are free: make room with "
            "'farm setup cache prune --older 30d --yes', or set FARM_CACHE_DIR to another folder"
        )


def refused(why: str) -> InfraError:
    """Return the error for fetched files that farm will not use."""
    return InfraError(f"the fetched archive is no usable QNN SDK: {why}")
