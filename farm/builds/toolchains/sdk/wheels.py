"""Wheels of onnxruntime-qnn as SDKs of the compiler and the simulator: their QNN versions, and their layout."""

from __future__ import annotations

import logging
import re
import secrets
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import msgspec

from farm.base.errors import InfraError, MissingToolError
from farm.base.hashes import sha256_of
from farm.base.processes import ask_program
from farm.base.publish import own_folder, published
from farm.base.trust import require_own
from farm.builds.runtime.native.wheels import pip_download
from farm.builds.runtime.qnn_sdk import ORIGIN, WHEEL, FetchedSdk, fetched_sdk
from farm.builds.runtime.simulator import LIBRARY, TARGET, library_version
from farm.builds.toolchains.sdk.archive import check_machines
from farm.builds.toolchains.sdks import is_version, sdks_folder, version_in_wheel, version_numbers

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
        packed = pip_download(f"{WHEEL}=={wheel}", "", [], scratch)
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
