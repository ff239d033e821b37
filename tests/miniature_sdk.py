"""QNN SDKs and wheels of onnxruntime-qnn in miniature: small ELF files in the layout of the real ones."""

from __future__ import annotations

import shutil
import subprocess
import zipfile
from collections.abc import Mapping
from pathlib import Path

import made_environments
import maven_server
from elf_maker import make_elf
from executorch_checkout import installed

VERSION = "2.37.0.250724"
STUB = Path(__file__).resolve().parent / "native_runner" / "qnn_stub.cpp"
HOST = "lib/x86_64-linux-clang"
_X86_64, _AARCH64, _HEXAGON = 62, 183, 164


def sdk_files(version: str = VERSION) -> dict[str, bytes]:
    """Files of an SDK by path: for this machine, Android and one Hexagon."""
    host, android = make_elf(_X86_64, wide=True), make_elf(_AARCH64, wide=True)
    return {
        "sdk.yaml": f"product: QAIRT\nversion: {version}\n".encode(),
        "LICENSE.pdf": b"%PDF miniature",
        f"{HOST}/libQnnHtp.so": host,
        f"{HOST}/libQnnSystem.so": host,
        "lib/aarch64-android/libQnnHtp.so": android,
        "lib/hexagon-v75/unsigned/libQnnHtpV75Skel.so": make_elf(_HEXAGON, 0x75),
        "bin/x86_64-linux-clang/qnn-net-run": host,
    }


def zipped(files: Mapping[str, bytes], links: Mapping[str, str] = {}, version: str = VERSION) -> bytes:
    """An archive as Qualcomm's are, with the files below `qairt/VERSION/`, and links."""

    def place(name: str) -> str:
        return name if name.startswith("/") else f"qairt/{version}/{name}"

    placed = {place(name): data for name, data in files.items()}
    return maven_server.zipped(placed, {place(name): target for name, target in links.items()}, zipfile.ZIP_STORED)


def give_downloader(executorch: Path, url: str, version: str = VERSION) -> None:
    """Put ExecuTorch's real downloader into a source tree, with a configuration that names `url`."""
    scripts = executorch / "backends" / "qualcomm" / "scripts"
    scripts.mkdir(parents=True, exist_ok=True)
    shutil.copy(installed() / "backends/qualcomm/scripts/download_qnn_sdk.py", scripts)
    text = f'#!/bin/bash\nQNN_VERSION="{version}"\nQNN_ZIP_URL="{url}/v${{QNN_VERSION}}.zip"\n'
    (scripts / "qnn_config.sh").write_text(text)


def make_library(path: Path, build_id: str) -> Path:
    """Make a real library that loads and returns `build_id` as its version."""
    path.parent.mkdir(parents=True, exist_ok=True)
    flags = ["-DCORE_MINOR=40", f'-DBUILD_ID="{build_id}"']
    subprocess.run(["c++", "-shared", "-fPIC", *flags, str(STUB), "-o", str(path)], check=True, timeout=120)
    return path


def make_wheel(folder: Path, release: str, library: Path, qnn: str) -> None:
    """A wheel of onnxruntime-qnn for pip, with one real library."""
    system = make_elf(_X86_64, wide=True)
    files = {
        "onnxruntime_qnn/build_and_package_info.py": f"qnn_version = '{qnn}'\n".encode(),
        "onnxruntime_qnn/libQnnHtp.so": library.read_bytes(),
        "onnxruntime_qnn/libQnnSystem.so": system,
        "onnxruntime_qnn/libonnxruntime_providers_qnn.so": system,
        "onnxruntime_qnn.libs/libc++-1234.so.1.0": system,
    }
    made_environments.make_wheel(folder, "onnxruntime-qnn", release, files)
