"""QNN for Android from a Maven repository: the AAR `com.qualcomm.qti:qnn-runtime` as an SDK without compiler.

An AAR is a zip file; its libraries and skels are in `jni/arm64-v8a`. Layout of a repository: versions in
`maven-metadata.xml`, then VERSION/NAME-VERSION.aar and .pom, each with a file per checksum.
"""

from __future__ import annotations

import hashlib
import io
import re
import shutil
from typing import TYPE_CHECKING
from xml.etree import ElementTree

from farm.base.errors import ConfigError, InfraError, MissingToolError
from farm.base.text import one_line
from farm.builds.runtime.native.elf import AARCH64, HEXAGON, read_elf
from farm.builds.runtime.qnn_sdk import ANDROID_FOLDER, MAVEN
from farm.builds.toolchains.sdk.archive import refused, unpack
from farm.builds.toolchains.sdk.download import SdkOffer, fetch_offer, read_small, require_safe
from farm.builds.toolchains.sdks import is_version, sdks_folder, version_numbers

if TYPE_CHECKING:
    from pathlib import Path

    from farm.base.config.settings import Config

_GROUP, _ARTIFACT = MAVEN.split(":")
_LIBRARIES = "jni/arm64-v8a/"
_NEEDED = ("libQnnHtp.so", "libQnnSystem.so")
# Limits far above the artifact, which has about 100 MB.
_MOST_BYTES, _MOST_UNPACKED = 2 << 30, 8 << 30
_MOST_TEXT = 1 << 20
# Maven Central has the first two for newer artifacts, and the third for all.
_CHECKSUMS = ("sha512", "sha256", "sha1")
_VERSION = re.compile(r"\d{1,6}(\.\d{1,6}){1,3}")


def offered_release(config: Config, wanted: str) -> SdkOffer:
    """Return the newest release of version `wanted`, or of all for "". Raises MissingToolError, InfraError."""
    repository = require_safe(config.maven_url, "maven_url in the [qnn] table:")
    folder = f"{repository}/{_GROUP.replace('.', '/')}/{_ARTIFACT}"
    try:
        metadata = _parse(read_small(f"{folder}/maven-metadata.xml", _MOST_TEXT), f"{folder}/maven-metadata.xml")
    except FileNotFoundError:
        raise MissingToolError(
            f"the repository {config.maven_url} has no {MAVEN}: name another one by maven_url in the [qnn] table"
        ) from None
    texts = (one.text or "" for one in metadata.iterfind("versioning/versions/version"))
    versions = sorted((text for text in texts if _VERSION.fullmatch(text)), key=version_numbers)
    found = [one for one in versions if not wanted or is_version(one, wanted)]
    if not found:
        known = ", ".join(versions[-5:]) or "none"
        raise MissingToolError(f"{config.maven_url} has no {MAVEN} {wanted}: the newest are {known}")
    version = found[-1]
    url = f"{folder}/{version}/{_ARTIFACT}-{version}.aar"
    return SdkOffer(MAVEN, version, url, _licence(url, version), f"{MAVEN} {version}")


def fetch_release(config: Config, release: SdkOffer, sha256: str = "") -> Path:
    """Return the folder of the release in the cache, downloaded and verified on the first call.

    The repository's own checksum is verified besides `sha256`. Raises as `fetch_offer`.
    """

    def unpack_aar(archive: Path, folder: Path) -> None:
        with archive.open("rb") as file:
            _require_checksum(release.url, file)
        unpack(archive, folder / "aar", "", _MOST_UNPACKED)
        _lay_out(folder)
        about = f"# {MAVEN} {release.version}: libraries for Android, without a compiler.\nversion: {release.version}\n"
        (folder / "sdk.yaml").write_text(about)

    return fetch_offer(release, release_folder(config, release.version), unpack_aar, sha256, _MOST_BYTES)


def release_folder(config: Config, version: str) -> Path:
    """Return the folder of a release in the cache, present or not."""
    return sdks_folder(config.cache_dir) / f"{_ARTIFACT}-{version}"


def _licence(url: str, version: str) -> str:
    """Return the licence in the POM of an AAR. Raises InfraError for a POM of something else."""
    place = url.removesuffix(".aar") + ".pom"
    try:
        data = read_small(place, _MOST_TEXT)
    except FileNotFoundError:
        raise InfraError(f"{place} is missing: the repository is incomplete") from None
    _require_checksum(place, io.BytesIO(data))
    pom = _parse(data, place)
    described = tuple(
        pom.findtext(f"{{*}}{name}", "").strip() for name in ("groupId", "artifactId", "version", "packaging")
    )
    if described != (_GROUP, _ARTIFACT, version, "aar"):
        raise InfraError(f"{place} describes {one_line(':'.join(described), 200)}, expected {MAVEN}:{version}:aar")
    licences = pom.iterfind(".//{*}license")
    texts = [" ".join(filter(None, (one.findtext("{*}name"), one.findtext("{*}url")))) for one in licences]
    return one_line(", ".join(filter(None, texts)), 400) or "no licence is named in its POM"


def _require_checksum(url: str, file: io.BufferedIOBase) -> None:
    name, expected = _checksum(url)
    if (found := hashlib.file_digest(file, name).hexdigest()) != expected:
        raise InfraError(f"{url} was damaged on the way: its {name} is {found}, expected {expected}: fetch it again")


def _checksum(url: str) -> tuple[str, str]:
    """Return name and value of the strongest checksum of a file in a repository. Raises InfraError without one."""
    for name in _CHECKSUMS:
        try:
            words = read_small(f"{url}.{name}", 4096).decode(errors="replace").split()
        except FileNotFoundError:
            continue
        digits = 2 * hashlib.new(name, usedforsecurity=False).digest_size
        if not words or not re.fullmatch(rf"[0-9a-fA-F]{{{digits}}}", words[0]):
            raise InfraError(f"{url}.{name} is no checksum: the repository is damaged")
        return name, words[0].lower()
    raise InfraError(f"{url} has no checksum ({', '.join(_CHECKSUMS)}) and cannot be verified")


def _lay_out(folder: Path) -> None:
    """Move libraries and skels of the unpacked AAR to their places in an SDK, and keep its licence files."""
    unpacked = folder / "aar"
    # An AAR has no links, and a moved link could lead out of the folder.
    if link := next((path for path in unpacked.rglob("*") if path.is_symlink()), None):
        raise refused(f"{one_line(str(link.relative_to(unpacked)), 200)!r} in it is a link")
    libraries = sorted(path for path in (unpacked / _LIBRARIES).glob("*.so") if path.is_file())
    missing = [name for name in _NEEDED if not (unpacked / _LIBRARIES / name).is_file()]
    if missing:
        raise refused(f"it has no {_LIBRARIES}{missing[0]}")
    for library in libraries:
        try:
            header = read_elf(library)
        except ConfigError as error:
            raise refused(f"{_LIBRARIES}{library.name} {error.problem}") from None
        if header.machine == HEXAGON and header.hexagon_arch:
            target = folder / f"lib/hexagon-v{header.hexagon_arch}/unsigned"
        elif header.machine == AARCH64:
            target = folder / "lib" / ANDROID_FOLDER
        else:
            raise refused(f"{_LIBRARIES}{library.name} is made for {header.machine_name}")
        target.mkdir(parents=True, exist_ok=True)
        library.rename(target / library.name)
    for path in sorted(unpacked.rglob("*")):
        if path.is_file() and re.match(r"(?i)(licen[cs]e|notice)", path.name) and not (folder / path.name).exists():
            path.rename(folder / path.name)
    shutil.rmtree(unpacked)


def _parse(data: bytes, url: str) -> ElementTree.Element:
    """Return the root of an XML file in UTF-8 without a document type, which could define entities without bound."""
    try:
        if b"<!" in data.replace(b"<!--", b""):
            raise InfraError(f"{url} has a document type or CDATA: it is not the expected file")
        data.decode()
        if b"\0" in data:
            raise InfraError(f"{url} has NUL bytes: it is not the expected file")
        # The check above would miss a document type in UTF-16. The parser ignores the encoding in the file.
        parser = ElementTree.XMLParser(encoding="utf-8")  # noqa: S314 - without entities, and of bounded size
        return ElementTree.fromstring(data, parser)  # noqa: S314 - without entities, and of bounded size
    except (ElementTree.ParseError, UnicodeDecodeError) as error:
        raise InfraError(f"{url} is no XML ({error}): it is not the expected file") from None
