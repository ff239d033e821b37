"""Places of QNN's files: in an SDK, or in a wheel of onnxruntime-qnn, which has fewer of them in one folder."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from farm.base.errors import InfraError, MissingToolError
from farm.base.files import require_own
from farm.base.text import one_line
from farm.builds.runtime.native import OE_LINUX
from farm.builds.runtime.packages import fetch_wheel, package_version, wheel_folder

ANDROID_FOLDER = "aarch64-android"
LINUX_FOLDER = "aarch64-oe-linux-gcc*"
GET_SDK = "set QNN_SDK_ROOT to a QNN SDK from Qualcomm (Qualcomm AI Engine Direct)"

WHEEL = "onnxruntime-qnn"
"""Distribution with QNN's libraries."""
MAVEN = "com.qualcomm.qti:qnn-runtime"
"""Maven artifact with QNN's libraries for Android."""
_WHEEL_EXTRA = "simulator"
_PRODUCT_LIMIT = 60
ORIGIN = "farm-fetched.json"
"""File in the folder of an SDK that farm fetched."""


class FetchedSdk(msgspec.Struct, frozen=True):
    """Record of farm in the folder of a fetched SDK."""

    version: str
    origin: str
    """The address of the archive, or the package: `onnxruntime-qnn 2.5.0`."""
    sha256: str
    """SHA-256 of the archive or the wheel."""
    fetched_ms: int
    licence_accepted: bool = False


class QnnFiles(msgspec.Struct, frozen=True):
    """Places of QNN's files for a kind of device; all files come from one place, as versions must not be mixed."""

    get: str
    """Way to get missing files."""
    root: Path | None = None
    """Folder of the SDK; None for the wheel, or without a configured SDK."""
    libraries: Path | None = None
    """Folder of the libraries for the device's processor."""
    version: str = ""
    wheel: bool = False

    @property
    def of_sdk(self) -> QnnFiles:
        """Files of the SDK; no files in place of the wheel's, which are for HTP and GPU only."""
        return QnnFiles(f"{GET_SDK} with {LINUX_FOLDER} libraries") if self.wheel else self

    def library(self, name: str) -> Path | None:
        """Return the expected path of a library for the device's processor."""
        return self.libraries / name if self.libraries else None

    def dsp(self, folder: str, name: str, kind: str = "unsigned") -> Path | None:
        """Return the expected path of a file for a DSP; `kind` is `signed` or `unsigned`."""
        if self.root is not None:
            return self.root / "lib" / folder / kind / name
        return self.library(name) if self.wheel else None

    def get_dsp(self, folder: str) -> str:
        """Return the way to get an SDK with files in `folder`."""
        return f"{GET_SDK} with lib/{folder}/unsigned" if self.root else self.get


def android_files(sdk_root: Path | None) -> QnnFiles:
    """Return QNN's files for Android. The wheel's libraries are linked with glibc, which Android does not have."""
    get = f"{GET_SDK} with {ANDROID_FOLDER} libraries, or run 'farm setup sdk fetch --source maven'"
    if sdk_root is None:
        return QnnFiles(get)
    return QnnFiles(get, sdk_root, sdk_root / "lib" / ANDROID_FOLDER, sdk_version(sdk_root))


def linux_files(sdk_root: Path | None, cache_dir: Path) -> QnnFiles:
    """Return QNN's files for Arm Linux: the newest of the SDK; without an SDK the wheel's, even if not fetched yet.

    For an SDK that was made from a wheel, the files come from the same release of the wheel.
    """
    release = wheel_release(sdk_root)
    if sdk_root is not None and not release:
        folder = newest_linux_folder(sdk_root) or sdk_root / "lib" / LINUX_FOLDER
        return QnnFiles(f"{GET_SDK} with {LINUX_FOLDER} libraries", sdk_root, folder, sdk_version(sdk_root))
    try:
        libraries = wheel_folder(cache_dir, WHEEL, "aarch64", _WHEEL_EXTRA, release) / "onnxruntime_qnn"
        require_own(libraries.parent)
    except MissingToolError as error:
        return QnnFiles(repair_of(error))
    get, version = f"farm setup runtime build --target {OE_LINUX}", f"{WHEEL} {release or package_version(WHEEL)}"
    return QnnFiles(get, None, libraries, version, wheel=True)


def fetch_linux_files(cache_dir: Path, sdk_root: Path | None = None) -> Path:
    """Return the folder with QNN's libraries for Arm Linux: the SDK's, else the wheel's, fetched if needed.

    Raises MissingToolError, also for an SDK that has none.
    """
    keep, release = ("onnxruntime_qnn/lib",), wheel_release(sdk_root)
    if sdk_root is not None and not release:
        if (folder := newest_linux_folder(sdk_root)) is not None:
            return folder
        raise MissingToolError(f"the QNN SDK {sdk_root} has no lib/{LINUX_FOLDER}: name another SDK, or none")
    fetched = fetch_wheel(cache_dir, WHEEL, "aarch64", _WHEEL_EXTRA, keep, version=release)
    return fetched / "onnxruntime_qnn"


def fetched_sdk(root: Path) -> FetchedSdk | None:
    """Return farm's record of a fetched SDK; None for another SDK."""
    try:
        return msgspec.json.decode((root / ORIGIN).read_bytes(), type=FetchedSdk)
    except (OSError, msgspec.DecodeError):
        return None


def require_archive(root: Path, sha256: str) -> Path:
    """Return a fetched SDK; `sha256` is the expected hash of its archive, empty if unknown. Raises InfraError."""
    noted = fetched_sdk(root)
    found = noted.sha256 if noted is not None else ""
    if sha256 and found != sha256.lower():
        what = f"an archive with the SHA-256 {found}" if found else "an unknown archive"
        raise InfraError(f"{root} is from {what}, expected {sha256.lower()}: remove the folder and fetch it again")
    return root


def wheel_release(sdk_root: Path | None) -> str:
    """Return the release of the wheel that an SDK was made from, "" for another SDK."""
    noted = fetched_sdk(sdk_root) if sdk_root is not None else None
    found = re.fullmatch(rf"{WHEEL} (\d[\w.]{{0,40}})", noted.origin) if noted else None
    return found[1] if found else ""


def newest_linux_folder(sdk_root: Path | None) -> Path | None:
    """Return the library folder of an SDK for Arm Linux with the newest compiler; None without such a folder."""
    folders = [path for path in (sdk_root / "lib").glob(LINUX_FOLDER) if path.is_dir()] if sdk_root else []
    return max(folders, key=lambda path: [int(part) for part in re.findall(r"\d+", path.name)], default=None)


def sdk_version(sdk_root: Path | None) -> str:
    """Return the version in an SDK's metadata, else the name of its folder; "" without an SDK."""
    if sdk_root is None:
        return ""
    # QAIRT SDKs carry `version: 2.47.0.260601` in sdk.yaml and are unpacked into a folder named so.
    return sdk_field(sdk_root, "version") or sdk_root.name


def sdk_product(sdk_root: Path | None) -> str:
    """Return the product name in the sdk.yaml of an SDK, in one line; "" without one."""
    return one_line(sdk_field(sdk_root, "product"), _PRODUCT_LIMIT) if sdk_root is not None else ""


def sdk_field(sdk_root: Path, key: str) -> str:
    """Return the value of a key of sdk.yaml; "" without the key."""
    try:
        lines = (sdk_root / "sdk.yaml").read_text(errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip(" '\"") for line in lines if line.startswith(f"{key}:")), "")


def release_of(version: str) -> tuple[int, int] | None:
    """Return the first two numbers of a version, None for other text."""
    found = re.match(r"v?(\d{1,6})\.(\d{1,6})", version)
    return (int(found[1]), int(found[2])) if found else None


def repair_of(error: MissingToolError) -> str:
    """Return what to do about it: messages of this kind end in that."""
    return str(error).rpartition(": ")[2]
