"""QNN in miniature: SDKs, wheels and archives for Android as small ELF files, and their server on loopback."""

from __future__ import annotations

import hashlib
import http.server
import io
import shutil
import stat
import subprocess
import threading
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import made_environments
from elf_maker import make_elf
from executorch_checkout import installed
from networks import serving

# Server of files on loopback, such as a Maven repository with `com.qualcomm.qti:qnn-runtime` in miniature.


AARCH64, HEXAGON = 183, 164
FOLDER = "/maven2/com/qualcomm/qti/qnn-runtime"
LICENCE = "Qualcomm AI Stack licence https://licence.example/qnn"
_POM = """<?xml version="1.0" encoding="UTF-8"?>
<!-- Published with Gradle. -->
<project xmlns="http://maven.apache.org/POM/4.0.0">
  <modelVersion>4.0.0</modelVersion>
  <groupId>com.qualcomm.qti</groupId><artifactId>qnn-runtime</artifactId>
  <version>{version}</version><packaging>aar</packaging>
  <licenses><license><name>Qualcomm AI Stack licence</name><url>https://licence.example/qnn</url></license></licenses>
</project>
"""


def aar_files() -> dict[str, bytes]:
    """Files of an AAR by path."""
    android = make_elf(AARCH64, wide=True, align=16384)
    names = ("libQnnHtp.so", "libQnnSystem.so", "libQnnHtpPrepare.so", "libQnnHtpV75Stub.so", "libQnnGpu.so")
    return {
        "AndroidManifest.xml": b"<manifest/>",
        "classes.jar": b"PK",
        "META-INF/LICENSE": b"licence",
        **{f"jni/arm64-v8a/{name}": android for name in names},
        "jni/arm64-v8a/libQnnHtpV75Skel.so": make_elf(HEXAGON, 0x75),
        "jni/arm64-v8a/libQnnHtpV73Skel.so": make_elf(HEXAGON, 0x73),
    }


def zipped(
    files: Mapping[str, bytes], links: Mapping[str, str] | None = None, compression: int = zipfile.ZIP_DEFLATED
) -> bytes:
    """Return a zip file; `links` have targets by name."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
        for name, target in (links or {}).items():
            link = zipfile.ZipInfo(name)
            link.external_attr = (stat.S_IFLNK | 0o777) << 16
            archive.writestr(link, target)
    return buffer.getvalue()


class MavenServer:
    """Files of the repository by path, and its faults."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.asked: list[str] = []
        self.url = ""
        self.break_after = 0
        """Number of bytes after which the next download of an AAR breaks; 0 for none."""
        self.ranges = True
        self.redirect = ""
        """Address that every AAR leads to."""
        self.stop = threading.Event()
        """A download of an AAR waits for this event if it is cleared."""
        self.stop.set()

    def publish(self, version: str, aar: bytes, checksums: tuple[str, ...] = ("md5", "sha1")) -> None:
        """Add a release with its POM and checksums, and list it."""
        place = f"{FOLDER}/{version}/qnn-runtime-{version}"
        for name, data in ((f"{place}.aar", aar), (f"{place}.pom", _POM.format(version=version).encode())):
            self.files[name] = data
            for kind in checksums:
                self.files[f"{name}.{kind}"] = hashlib.new(kind, data).hexdigest().encode()
        known = sorted({name.split("/")[-2] for name in self.files if name.endswith(".aar")})
        versions = "".join(f"<version>{one}</version>" for one in known)
        self.files[f"{FOLDER}/maven-metadata.xml"] = (
            f"<metadata><versioning><versions>{versions}</versions></versioning></metadata>".encode()
        )


@contextmanager
def maven_server() -> Iterator[MavenServer]:
    """Serve an empty repository on loopback."""
    server = MavenServer()

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.0"

        def do_HEAD(self) -> None:
            self._answer(body=False)

        def do_GET(self) -> None:
            server.asked.append(self.path)
            self._answer(body=True)

        def _answer(self, *, body: bool) -> None:
            data = server.files.get(self.path)
            is_aar = self.path.endswith(".aar")
            if data is None:
                self.send_error(404)
                return
            if is_aar and server.redirect:
                self.send_response(302)
                self.send_header("Location", server.redirect)
                self.end_headers()
                return
            start = 0
            asked = self.headers.get("Range", "")
            if asked and server.ranges:
                start = int(asked.removeprefix("bytes=").rstrip("-"))
                self.send_response(206)
            else:
                self.send_response(200)
            self.send_header("Content-Length", str(len(data) - start))
            self.end_headers()
            if not body:
                return
            cut = len(data)
            if is_aar and server.break_after:
                cut, server.break_after = server.break_after, 0
            half = start + (cut - start) // 2
            self.wfile.write(data[start:half])
            if is_aar:
                server.stop.wait(60)
            self.wfile.write(data[half:cut])

    with serving(Handler) as port:
        server.url = f"http://127.0.0.1:{port}/maven2"
        try:
            yield server
        finally:
            server.stop.set()


# QNN SDKs and wheels of onnxruntime-qnn in miniature: small ELF files in the layout of the real ones.


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


def zipped_sdk(files: Mapping[str, bytes], links: Mapping[str, str] = {}, version: str = VERSION) -> bytes:
    """An archive as Qualcomm's are, with the files below `qairt/VERSION/`, and links."""

    def place(name: str) -> str:
        return name if name.startswith("/") else f"qairt/{version}/{name}"

    placed = {place(name): data for name, data in files.items()}
    return zipped(placed, {place(name): target for name, target in links.items()}, zipfile.ZIP_STORED)


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
