"""Files that others see as they were before, or whole: the one way in which farm replaces a file."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

# A name has at most 255 bytes.
_NAME_CHARS = 50


@contextlib.contextmanager
def replacing(path: Path, *, mode: int = 0o666, durable: bool = False) -> Iterator[BinaryIO]:
    """Yield a new file beside `path` that takes its place when the block ends well, and is gone when it does not.

    `mode` are its permissions before the umask; `durable`, its content is on the disk by then. Raises OSError.
    """
    part = path.with_name(f".{path.name[:_NAME_CHARS]}.{os.urandom(6).hex()}.part")
    number = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with os.fdopen(number, "wb") as file:
            yield file
            if durable:
                file.flush()
                os.fsync(number)
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def write_atomically(path: Path, content: bytes | str, *, mode: int = 0o666, durable: bool = False) -> None:
    """Write `content` into `path`, as `replacing` does; the folder must be there. Raises OSError."""
    with replacing(path, mode=mode, durable=durable) as file:
        file.write(content.encode() if isinstance(content, str) else content)
