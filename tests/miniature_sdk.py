"""QNN SDKs and wheels of onnxruntime-qnn in miniature: small ELF files in the layout of the real ones."""

from __future__ import annotations

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
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in files.items():
            archive.writestr(name if name.startswith("/") else f"qairt/{version}/{name}", content)
        for name, target in links.items():
            link = zipfile.ZipInfo(f"qairt/{version}/{name}")
            link.create_system, link.external_attr = 3, (stat.S_IFLNK | 0o777) << 16
            archive.writestr(link, target)
    return buffer.getvalue()


class Server:
    """HTTP server on loopback for one file, with a count of its requests."""

    def __init__(self, content: bytes) -> None:
        self.content, self.asked, self.url = content, 0, ""


@contextmanager
def served(content: bytes) -> Iterator[Server]:
    """A server that has `content` under every name."""
    server = Server(content)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            server.asked += 1
            self.send_response(200)
            self.send_header("Content-Length", str(len(server.content)))
            self.end_headers()
            self.wfile.write(server.content)

        def log_message(self, *_arguments: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        server.url = f"http://127.0.0.1:{listening.server_address[1]}"
        thread = threading.Thread(target=listening.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield server
        finally:
            listening.shutdown()
            thread.join()


def give_downloader(executorch: Path, url: str, version: str = VERSION) -> None:
    """Put ExecuTorch's real downloader into a source tree, with a configuration that names `url`."""
    scripts = executorch / "backends" / "qualcomm" / "scripts"
    scripts.mkdir(parents=True, exist_ok=True)
    shutil.copy(installed() / "backends/qualcomm/scripts/download_qnn_sdk.py", scripts)
    text = f'#!/bin/bash\nQNN_VERSION="{version}"\nQNN_ZIP_URL="{url}/v${{QNN_VERSION}}.zip"\n'
    (scripts / "qnn_config.sh").write_text(text)


def make_library(path: Path, build_id: str, core_minor: int = 40) -> Path:
    """Make a real library that loads and returns `build_id` as its version."""
    path.parent.mkdir(parents=True, exist_ok=True)
    flags = [f"-DCORE_MINOR={core_minor}", f'-DBUILD_ID="{build_id}"']
    subprocess.run(["c++", "-shared", "-fPIC", *flags, str(STUB), "-o", str(path)], check=True, timeout=120)
    return path


def make_wheel(folder: Path, release: str, library: Path, qnn: str) -> None:
    """A wheel of onnxruntime-qnn for pip, with one real library."""
    folder.mkdir(parents=True, exist_ok=True)
    about = f"Metadata-Version: 2.1\nName: onnxruntime-qnn\nVersion: {release}\n"
    info = f"onnxruntime_qnn-{release}.dist-info"
    system = make_elf(_X86_64, wide=True)
    with zipfile.ZipFile(folder / f"onnxruntime_qnn-{release}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{info}/METADATA", about)
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
        wheel.writestr("onnxruntime_qnn/build_and_package_info.py", f"qnn_version = '{qnn}'\n")
        wheel.write(library, "onnxruntime_qnn/libQnnHtp.so")
        wheel.writestr("onnxruntime_qnn/libQnnSystem.so", system)
        wheel.writestr("onnxruntime_qnn/libonnxruntime_providers_qnn.so", system)
        wheel.writestr("onnxruntime_qnn.libs/libc++-1234.so.1.0", system)
