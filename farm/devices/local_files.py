"""Files of this machine that a transfer reads and writes: never seen half written, and their errors are the farm's."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from farm.base import atomic
from farm.base.errors import LocalError

_DISK = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO})
_LIMITS = frozenset({errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EAGAIN})


def local_error(error: OSError, path: Path | None = None) -> LocalError:
    """Return an OSError of this machine's files, memory or processes as a LocalError that names the file."""
    where = path or error.filename
    problem = error.strerror or str(error)
    return LocalError(
        f"this machine: {f'{where}: ' if where else ''}{problem}",
        cause="disk" if error.errno in _DISK else "local",
        is_general=error.errno in _DISK | _LIMITS,
    )


@contextlib.contextmanager
def local_errors(path: Path) -> Iterator[None]:
    """Turn an OSError of the block into a LocalError that names `path`."""
    try:
        yield
    except OSError as error:
        raise local_error(error, path) from None


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Give a new file that takes the place of `path` when the block ends well, and is gone when it does not."""
    with local_errors(path), atomic.replacing(path, mode=0o600) as file:
        yield file
