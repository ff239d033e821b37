"""QNN SDK that ExecuTorch's own downloader names: version and address.

`backends/qualcomm/scripts/download_qnn_sdk.py`, ExecuTorch 1.3 to 1.5, with `qnn_config.sh` beside it in source trees.
farm downloads the archive itself: the script follows unsafe redirects, unpacks without a check of the names, and asks
for no licence.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from farm.base.errors import MissingToolError
from farm.base.processes import ask_program
from farm.base.text import one_line
from farm.builds.runtime.packages import package_folder
from farm.builds.runtime.qnn_sdk import wheel_release
from farm.builds.toolchains.sdk.archive import check_sdk, unpack_sdk
from farm.builds.toolchains.sdk.download import SdkOffer, fetch_offer, is_safe
from farm.builds.toolchains.sdks import sdks_folder

if TYPE_CHECKING:
    from farm.base.config.settings import Config

LICENCE = "LICENSE.pdf in the archive, and https://www.qualcomm.com/developer/software/qualcomm-ai-engine-direct-sdk"
"""Places of Qualcomm's licence."""

_SCRIPT = "backends/qualcomm/scripts/download_qnn_sdk.py"
# Run as a file, not imported: to import its package loads torch, and up to ExecuTorch 1.4 fetches an SDK by itself.
_DRIVER = """
import json, runpy, sys
names = runpy.run_path(sys.argv[1], run_name="download_qnn_sdk")
print(json.dumps({"version": names["QNN_VERSION"], "url": names["QNN_ZIP_URL"]}))
"""
_VERSION = re.compile(r"\d{1,4}(\.\d{1,15}){2,4}")
_COMPLETE = re.compile(r"\d{1,4}(\.\d{1,15}){3}")
_ASK_SECONDS = 60.0
# Far above any archive: the SDKs of 2025 have 2 GB.
_MOST_BYTES = 32 << 30


def offered_sdk(config: Config, version: str = "") -> SdkOffer:
    """Return the SDK that the downloader of the selected toolchain's ExecuTorch names; its interpreter runs it.

    A complete `version` replaces the version of the downloader, and `archive_url` of farm.toml replaces its address.
    Raises MissingToolError without a downloader, and for an unknown kind of downloader.
    """
    script = _script(config)
    # An environment that farm made has only the packages for compiling; the downloader needs `requests` as well.
    pythons = dict.fromkeys([config.toolchain.python or Path(sys.executable), Path(sys.executable)])
    problems = []
    for python in pythons:
        try:
            answer = ask_program([python, "-I", "-c", _DRIVER, script], _ASK_SECONDS)
        except subprocess.TimeoutExpired:
            problems.append(f"not done within {_ASK_SECONDS:g} s")
            continue
        if answer.code == 0 and answer.output.strip():
            return _offer(answer.output.splitlines()[-1], script, version, config.archive_url)
        problems.append(answer.reason)
    raise MissingToolError(
        f"{script} does not name the QNN SDK that it would fetch: {one_line(problems[0], 300)}: download the SDK "
        "yourself, unpack it and name its folder"
    )


def fetch_sdk(config: Config, offer: SdkOffer, sha256: str = "") -> Path:
    """Return the folder of the SDK in the cache, downloaded and checked on the first call. Raises as `fetch_offer`."""

    def unpack(archive: Path, folder: Path) -> None:
        unpack_sdk(archive, folder, offer.version)
        check_sdk(folder, offer.version)

    # The SDK of a wheel is not Qualcomm's archive, and has a part of its files only.
    root = sdks_folder(config.cache_dir) / offer.version
    return fetch_offer(offer, root, unpack, sha256, _MOST_BYTES, lambda folder: not wheel_release(folder))


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
    if not _VERSION.fullmatch(version) or not is_safe(url) or not urlsplit(url).path.endswith(".zip"):
        raise MissingToolError(
            f"{script} names QNN {one_line(version, 80)} at {one_line(url, 200)}: expected a version, and a zip file "
            "at an https address"
        )
    return SdkOffer("QNN SDK", version, url, LICENCE, url)
