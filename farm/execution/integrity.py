"""Whether files on a device are what was pushed, and files here what is there: adb's protocol checks neither."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from farm.devices.transport import Link
from farm.execution.shell import shell_script
from farm.execution.trouble import StagingError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import PurePosixPath

    from farm.devices.transport import Transport

_SECONDS = 300.0
_LISTING_BYTES = 16 << 20


def expected_content(files: Mapping[PurePosixPath, Path | bytes | Link]) -> dict[str, str]:
    """Return, by name, the SHA-256 of every file, and where every link leads to, of one folder as it was pushed."""
    return {path.name: _digest(source) for path, source in files.items()}


def hashes_of(paths: Iterable[Path]) -> dict[str, str]:
    """Return the SHA-256 of local files, by name."""
    return {path.name: _digest(path) for path in paths}


def differing(transport: Transport, folder: PurePosixPath, expected: Mapping[str, str]) -> list[str]:
    """Return the names of files in `folder` on the device that are not as `expected`, or not there.

    Raises DeviceError.
    """
    done = transport.run(
        ["sh", "-c", shell_script("hash_files")],
        cwd=folder,
        stdin="".join(f"{name}\n" for name in expected).encode(),
        timeout_s=_SECONDS,
        max_output=_LISTING_BYTES,
    )
    if done.code != 0:
        problem = f"cannot look at {folder}"
        stderr = done.stderr.decode(errors="replace")
        raise StagingError(transport.serial, problem, code=done.code, stderr=stderr)
    lines = done.stdout.decode(errors="replace").splitlines()
    found = dict(line.split(maxsplit=1)[::-1] for line in lines if len(line.split()) == 2)
    return [name for name, content in expected.items() if found.get(name) != content]


def _digest(source: Path | bytes | Link) -> str:
    if isinstance(source, Link):
        return str(source.target)
    if isinstance(source, bytes):
        return hashlib.sha256(source).hexdigest()
    with source.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
