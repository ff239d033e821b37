"""Server of files on loopback, such as a Maven repository with `com.qualcomm.qti:qnn-runtime` in miniature."""

from __future__ import annotations

import hashlib
import http.server
import io
import stat
import threading
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from elf_maker import make_elf
from networks import serving

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
