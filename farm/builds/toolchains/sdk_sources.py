"""Sources of QNN SDKs: ExecuTorch's downloader, a Maven repository, and wheels of onnxruntime-qnn."""

from __future__ import annotations

import hashlib
import io
import json
import logging
import re
import secrets
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from urllib.parse import urlsplit
from xml.etree import ElementTree

import msgspec

from farm.base.config.settings import Config
from farm.base.errors import ConfigError, InfraError, MissingToolError, UsageError
from farm.base.files import own_folder, published, require_own
from farm.base.hashes import sha256_of
from farm.base.processes import ask_program
from farm.base.text import one_line
from farm.builds.runtime.packages import package_folder, pip_download
from farm.builds.runtime.parts import AARCH64, HEXAGON, read_elf
from farm.builds.runtime.qnn_sdk import (
    ANDROID_FOLDER,
    LIBRARY,
    MAVEN,
    ORIGIN,
    TARGET,
    WHEEL,
    FetchedSdk,
    fetched_sdk,
    library_version,
    wheel_release,
)
from farm.builds.toolchains.sdk_archives import (
    SdkOffer,
    check_machines,
    check_sdk,
    fetch_offer,
    is_safe,
    read_small,
    refused,
    unpack,
)
from farm.builds.toolchains.sdks import is_version, sdks_folder, version_in_wheel, version_numbers

# QNN SDK that ExecuTorch's own downloader names: version and address.
#
# `backends/qualcomm/scripts/download_qnn_sdk.py`, ExecuTorch 1.3 to 1.5, with `qnn_config.sh` beside it in source
# trees. farm downloads the archive itself: the script follows unsafe redirects, unpacks without a check of the names,
# and asks for no licence.


LICENCE = "LICENSE.pdf in the archive, and https://www.qualcomm.com/developer/software/qualcomm-ai-engine-direct-sdk"
"""Places of Qualcomm's licence."""

_SCRIPT = "backends/qualcomm/scripts/download_qnn_sdk.py"
# Run as a file, not imported: to import its package loads torch, and up to ExecuTorch 1.4 fetches an SDK by itself.
_DRIVER = """
import json, runpy, sys
names = runpy.run_path(sys.argv[1], run_name="download_qnn_sdk")
print(json.dumps({"version": names["QNN_VERSION"], "url": names["QNN_ZIP_URL"]}))
"""
_SDK_VERSION = re.compile(r"\d{1,4}(\.\d{1,15}){2,4}")
_COMPLETE = re.compile(r"\d{1,4}(\.\d{1,15}){3}")
_ASK_SECONDS = 60.0
# Far above any archive: the SDKs of 2025 have 2 GB, 6 GB unpacked.
_MOST_SDK_BYTES, _MOST_SDK_UNPACKED = 32 << 30, 64 << 30


def offered_sdk(config: Config, version: str = "") -> SdkOffer:
    """Return the SDK that the downloader of the selected toolchain's ExecuTorch names; its interpreter runs it.

    A complete `version` replaces the version of the downloader, and `archive_url` of farm.toml replaces its address.
    Raises MissingToolError without a downloader, and for an unknown kind of downloader.
    """
    script = _script(config)
    python = config.toolchain.python or Path(sys.executable)
    try:
        answer = ask_program([python, "-I", "-c", _DRIVER, script], _ASK_SECONDS)
        if answer.code == 0 and answer.output.strip():
            return _offer(answer.output.splitlines()[-1], script, version, config.archive_url)
        problem = answer.reason
    except subprocess.TimeoutExpired:
        problem = f"not done within {_ASK_SECONDS:g} s"
    raise MissingToolError(
        f"{script} does not name the QNN SDK that it would fetch: {one_line(problem, 300)}: download the SDK "
        "yourself, unpack it and name its folder"
    )


def fetch_sdk(config: Config, offer: SdkOffer, sha256: str = "") -> Path:
    """Return the folder of the SDK in the cache, downloaded and checked on the first call. Raises as `fetch_offer`."""

    def unpack_sdk(archive: Path, folder: Path) -> None:
        unpack(archive, folder, f"qairt/{offer.version}/", _MOST_SDK_UNPACKED)
        check_sdk(folder, offer.version)

    # The SDK of a wheel is not Qualcomm's archive, and has a part of its files only.
    root = sdks_folder(config.cache_dir) / offer.version
    return fetch_offer(offer, root, unpack_sdk, sha256, _MOST_SDK_BYTES, lambda folder: not wheel_release(folder))


def _script(config: Config) -> Path:
    if (folder := config.toolchain.executorch) is not None:
        script = folder / _SCRIPT
        if not script.is_file():
            raise MissingToolError(
                f"the toolchain {config.toolchain.name} has no {_SCRIPT}: download a QNN SDK yourself, unpack it and "
                "name its folder"
            )
        return script
    return package_folder("executorch", _SCRIPT, "build") / _SCRIPT


def is_complete(version: str) -> bool:
    """Return whether a version is as complete as in the address of an archive, such as 2.37.0.250724."""
    return bool(_COMPLETE.fullmatch(version))


def _offer(line: str, script: Path, wanted: str, archive_url: str) -> SdkOffer:
    answer = json.loads(line)
    version, url = str(answer["version"]), str(answer["url"])
    if wanted:
        version, url = wanted, url.replace(version, wanted)
    if archive_url:
        url = archive_url.replace("{version}", version)
    # The fetched files are executed, so that the address must be a safe one.
    if not _SDK_VERSION.fullmatch(version) or not is_safe(url) or not urlsplit(url).path.endswith(".zip"):
        raise MissingToolError(
            f"{script} names QNN {one_line(version, 80)} at {one_line(url, 200)}: expected a version, and a zip file "
            "at an https address"
        )
    return SdkOffer("QNN SDK", version, url, LICENCE, url)


# QNN for Android from a Maven repository: the AAR `com.qualcomm.qti:qnn-runtime` as an SDK without compiler.
#
# An AAR is a zip file; its libraries and skels are in `jni/arm64-v8a`. Layout of a repository: versions in
# `maven-metadata.xml`, then VERSION/NAME-VERSION.aar and .pom, each with a file per checksum.


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
    """Return the newest release of version `wanted`, or of all for "".

    Raises UsageError for an unsafe address, MissingToolError, InfraError.
    """
    url = config.maven_url
    if not is_safe(url) or not url.isprintable() or " " in url:
        raise UsageError(f"maven_url in the [qnn] table: {one_line(url, 200)!r}: expected an https address")
    folder = f"{url.rstrip('/')}/{_GROUP.replace('.', '/')}/{_ARTIFACT}"
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


# Wheels of onnxruntime-qnn as SDKs of the compiler and the simulator: their QNN versions, and their layout.


logger = logging.getLogger(__name__)

# QNN version by wheel, read from the libraries of these wheels; a downloaded wheel must have the same.
KNOWN_WHEELS = {
    "2.3.0": "2.47.0",
    "2.4.0": "2.48.40",
    "2.5.0": "2.49.40",
    "2.6.0": "2.50.40",
    "2.7.0": "2.51.0",
}
"""Version of QNN by version of the wheel."""

WHEEL_MB = 100
"""Approximate download size of a wheel."""

_PACKAGE = "onnxruntime_qnn"
# Library of onnxruntime itself, which QNN does not need.
_LEFT_OUT = "libonnxruntime_providers_qnn.so"
_LICENCES = ("LICENSE", "Qualcomm_LICENSE.pdf", "ThirdPartyNotices.txt")
_AVAILABLE = re.compile(r"^Available versions: (.+)$", re.MULTILINE)
_INDEX_SECONDS = 120.0
# Most wheels newer than the known ones that are downloaded to read their version, 100 MB each.
_MOST_UNKNOWN = 3


def fetch_wheel_sdk(cache_dir: Path, wanted: str) -> Path:
    """Return the folder of the SDK that is made from the wheel with QNN `wanted`, such as `2.49`.

    Raises MissingToolError with the known versions if none fits, and InfraError for a wheel with unexpected contents.
    """
    for wheel in candidates(wanted):
        folder, version = _make(cache_dir, wheel)
        if is_version(version, wanted):
            return folder
        logger.info("%s %s has QNN %s, not %s", WHEEL, wheel, version, wanted)
    known = ", ".join(f"{qnn} ({WHEEL} {wheel})" for wheel, qnn in KNOWN_WHEELS.items())
    raise MissingToolError(f"no wheel of {WHEEL} has QNN {wanted}: there are {known}")


def candidates(wanted: str) -> list[str]:
    """Return the versions of the wheel that may have QNN `wanted`, newest first; without a known one, newer wheels."""
    # `wanted` may have fewer or more numbers than a known version.
    known = [wheel for wheel, qnn in KNOWN_WHEELS.items() if is_version(qnn, wanted) or is_version(wanted, qnn)]
    if known:
        return sorted(known, key=version_numbers, reverse=True)
    newest = max(map(version_numbers, KNOWN_WHEELS))
    unknown = [wheel for wheel in published_wheels() if version_numbers(wheel) > newest]
    return unknown[:_MOST_UNKNOWN]


def published_wheels() -> list[str]:
    """Return the versions of the wheel that pip's index has for this Python, newest first; none without an index."""
    argv = [sys.executable, "-P", "-m", "pip", "index", "versions", "--disable-pip-version-check", "--no-input", WHEEL]
    try:
        answer = ask_program(argv, _INDEX_SECONDS)
    except subprocess.TimeoutExpired:
        return []
    found = _AVAILABLE.search(answer.output)
    versions = [text.strip() for text in found[1].split(",")] if found else []
    plain = [text for text in versions if re.fullmatch(r"\d{1,6}(\.\d{1,6}){0,3}", text)]
    return sorted(plain, key=version_numbers, reverse=True)


def _make(cache_dir: Path, wheel: str) -> tuple[Path, str]:
    """Return the SDK of a wheel, and its version; the record in the SDK's folder names the wheel for later calls."""
    sdks = sdks_folder(cache_dir)
    origin = f"{WHEEL} {wheel}"
    for marker in sorted(sdks.glob(f"*/{ORIGIN}")):
        noted = fetched_sdk(marker.parent)
        if noted is not None and noted.origin == origin:
            require_own(marker.parent)
            return marker.parent, noted.version
    # The name of the folder is known only after the download.
    with own_folder(cache_dir / "fetching", secrets.token_hex(8)) as scratch:
        logger.info("fetching %s %s, about %s MB", WHEEL, wheel, WHEEL_MB)
        packed = pip_download(f"{WHEEL}=={wheel}", scratch)
        libraries = scratch / "sdk" / "lib" / TARGET
        unpacked = _unpack(packed, scratch / "sdk")
        check_machines(libraries.parent)
        version = library_version(cache_dir, libraries / LIBRARY).removeprefix("v")
        expected = KNOWN_WHEELS.get(wheel, unpacked)
        if not version or not is_version(version, expected):
            raise InfraError(f"{packed.name} has QNN {version or 'without a version'}, expected {expected}")
        about = f"# The libraries of {origin} for this machine.\nversion: {version}\n"
        (scratch / "sdk" / "sdk.yaml").write_text(about)
        fetched = FetchedSdk(version, origin, sha256_of(packed), int(time.time() * 1000))
        (scratch / "sdk" / ORIGIN).write_bytes(msgspec.json.encode(fetched))

        def fill(folder: Path) -> None:
            for path in (scratch / "sdk").iterdir():
                path.rename(folder / path.name)

        return published(sdks / version, fill), version


def _unpack(wheel: Path, folder: Path) -> str:
    """Unpack the libraries into the layout of an SDK, all in one folder; return the QNN version in the wheel's file."""
    libraries = folder / "lib" / TARGET
    libraries.mkdir(parents=True)
    try:
        with zipfile.ZipFile(wheel) as archive:
            for member in archive.infolist():
                name = member.filename.rpartition("/")[2]
                inside = member.filename in (f"{_PACKAGE}/{name}", f"{_PACKAGE}.libs/{name}")
                if not inside or not name or name == _LEFT_OUT:
                    continue
                if ".so" in Path(name).suffixes:
                    target = libraries / name
                elif name in _LICENCES or name.endswith("_info.py"):
                    target = folder / name
                else:
                    continue
                with archive.open(member) as source, target.open("xb") as file:
                    shutil.copyfileobj(source, file)
    except (zipfile.BadZipFile, EOFError, FileExistsError) as error:
        raise InfraError(f"{wheel.name} is damaged ({error}): run the same again to fetch it anew") from None
    return version_in_wheel(folder)
