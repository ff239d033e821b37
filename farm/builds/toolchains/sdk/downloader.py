"""Use of ExecuTorch's own downloader of the QNN SDK, which has address and version, and resumes a broken download.

`backends/qualcomm/scripts/download_qnn_sdk.py`, ExecuTorch 1.3 to 1.5, with `qnn_config.sh` beside it in source trees.
Only the download is used: the script unpacks archives without a check of the names, and asks for no licence.
"""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import msgspec

from farm.base.errors import InfraError, MissingToolError
from farm.base.hashes import sha256_of
from farm.base.processes import Supervisor
from farm.base.publish import published
from farm.base.text import one_line
from farm.builds.runtime.packages import package_folder
from farm.builds.runtime.qnn_sdk import ORIGIN, FetchedSdk, require_archive, wheel_release
from farm.builds.toolchains.sdk.archive import check_sdk, unpack_sdk
from farm.builds.toolchains.sdk.download import is_safe, size_of
from farm.builds.toolchains.sdks import sdks_folder

if TYPE_CHECKING:
    from farm.base.config.settings import Config

logger = logging.getLogger(__name__)

LICENCE = "LICENSE.pdf in the archive, and https://www.qualcomm.com/developer/software/qualcomm-ai-engine-direct-sdk"
"""Places of Qualcomm's licence."""

_SCRIPT = "backends/qualcomm/scripts/download_qnn_sdk.py"
# Run as a file, not imported: to import its package loads torch, and up to ExecuTorch 1.4 fetches an SDK by itself.
_DRIVER = """
import json, pathlib, runpy, sys
names = runpy.run_path(sys.argv[1], run_name="download_qnn_sdk")
if len(sys.argv) == 2:
    print(json.dumps({"version": names["QNN_VERSION"], "url": names["QNN_ZIP_URL"]}))
else:
    sys.exit(not names["_download_archive"](sys.argv[3], pathlib.Path(sys.argv[2])))
"""
_VERSION = re.compile(r"\d{1,4}(\.\d{1,15}){2,4}")
_COMPLETE_DOTS = 3
_ASK_SECONDS = 60.0
# 2 GB at 300 kB/s.
_DOWNLOAD_SECONDS = 7200.0


class SdkOffer(msgspec.Struct, frozen=True):
    """Download that an ExecuTorch's downloader offers."""

    version: str
    url: str
    script: Path
    python: Path

    @property
    def nbytes(self) -> int:
        """Size of the archive; 0 if its server does not report the size."""
        return size_of(self.url)


def offered_sdk(config: Config, version: str = "") -> SdkOffer:
    """Return the SDK that the downloader of the selected toolchain's ExecuTorch would fetch; its interpreter runs it.

    A complete `version` replaces the version of the downloader, and `archive_url` of farm.toml replaces its address.
    Raises MissingToolError without a downloader, and for an unknown kind of downloader.
    """
    script = _script(config)
    # An environment that farm made has only the packages for compiling; the downloader needs `requests` as well.
    pythons = dict.fromkeys([config.toolchain.python or Path(sys.executable), Path(sys.executable)])
    problem = ""
    for python in pythons:
        code, lines, errors = _run(python, [str(script)], _ASK_SECONDS)
        if code == 0 and lines:
            return _offer(lines[-1], script, python, version, config.archive_url)
        problem = problem or (errors or [f"exit code {code}"])[-1]
    raise MissingToolError(
        f"{script} does not say which QNN SDK it would fetch: {one_line(problem, 300)}: download the SDK yourself, "
        "unpack it and name its folder"
    )


def fetch_sdk(config: Config, offer: SdkOffer, sha256: str = "") -> Path:
    """Return the folder of the SDK in the cache, downloaded and checked on the first call.

    The caller must have the user's consent to the licence. `sha256` is the expected hash of the archive, empty if
    unknown. Raises InfraError for a failed download and for an archive that differs from the offer.
    """

    def fetch(folder: Path) -> None:
        archive = folder / "sdk.zip"
        logger.info("fetching QNN SDK %s from %s", offer.version, offer.url)
        argv = [str(offer.script), str(archive), offer.url]
        code, lines, errors = _run(offer.python, argv, _DOWNLOAD_SECONDS)
        if code != 0 or not archive.is_file():
            why = [line for line in (*errors, *lines) if line.strip()] or [f"exit code {code}"]
            raise InfraError(
                f"QNN SDK {offer.version} cannot be fetched from {offer.url}: {one_line(why[-1], 300)}: check the "
                "network and run the same again, or unpack an SDK yourself and name its folder"
            )
        found = sha256_of(archive)
        if sha256 and found != sha256.lower():
            raise InfraError(f"the archive from {offer.url} has the SHA-256 {found}, expected {sha256.lower()}")
        logger.info("unpacking it: SHA-256 %s", found)
        unpack_sdk(archive, folder, offer.version)
        archive.unlink()
        check_sdk(folder, offer.version)
        fetched = FetchedSdk(offer.version, offer.url, found, int(time.time() * 1000), licence_accepted=True)
        (folder / ORIGIN).write_bytes(msgspec.json.encode(fetched))

    # The SDK of a wheel is not Qualcomm's archive, and has a part of its files only.
    root = published(sdks_folder(config.cache_dir) / offer.version, fetch, lambda folder: not wheel_release(folder))
    return require_archive(root, sha256)


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
    return bool(_VERSION.fullmatch(version)) and version.count(".") == _COMPLETE_DOTS


def _offer(line: str, script: Path, python: Path, wanted: str, archive_url: str) -> SdkOffer:
    answer = json.loads(line)
    version, url = str(answer["version"]), str(answer["url"])
    if wanted:
        version, url = wanted, url.replace(version, wanted)
    if archive_url:
        url = archive_url.replace("{version}", version)
    # The fetched files are executed, so that the address must be a safe one.
    if not _VERSION.fullmatch(version) or not is_safe(url) or not urlsplit(url).path.endswith(".zip"):
        raise MissingToolError(
            f"{script} names QNN {one_line(version, 80)} at {one_line(url, 200)}: expected a version, and a zip file "
            "at an https address"
        )
    return SdkOffer(version, url, script, python)


def _run(python: Path, arguments: list[str], seconds: float) -> tuple[int, list[str], list[str]]:
    """Return exit code, lines and errors of the driver, which ends with this process, even if that is killed."""
    with Supervisor() as supervisor:
        argv = [str(python), "-I", "-c", _DRIVER, *arguments]
        child = supervisor.spawn(argv, name="download_qnn_sdk.py", stdout_pipe=True, stderr_pipe=True)
        try:
            output, errors = child.process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            return -1, [], [f"not done within {seconds:g} s"]
    lines = output.decode(errors="replace").replace("\r", "\n").splitlines()
    for line in lines:
        logger.debug("%s", line)
    return child.process.returncode, lines, errors.decode(errors="replace").splitlines()
