"""Files of this machine that a transfer reads and writes: never seen half written, and their errors are the farm's."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from farm.errors import InfraError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import BinaryIO


@contextlib.contextmanager
def local_errors(path: Path) -> Iterator[None]:
    """Turn an OSError of the block into an InfraError that names `path`."""
    try:
        yield
    except OSError as error:
        raise InfraError(f"{path}: {error.strerror or error}") from None


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Give a new file that takes the place of `path` when the block ends well, and is gone when it does not."""
    with local_errors(path):
        number, name = tempfile.mkstemp(prefix=f".{path.name[:32]}.", dir=path.parent)
    try:
        with local_errors(path), os.fdopen(number, "wb") as file:
            yield file
        with local_errors(path):
            Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
