"""Folders of a cache that are made once, by whichever process comes first, and are never seen half done."""

from __future__ import annotations

import contextlib
import fcntl
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from farm.errors import InfraError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def published(folder: Path, fill: Callable[[Path], None]) -> Path:
    """Return `folder`, made by `fill` (which gets an empty folder on the same file system) unless it is there.

    Other processes wait while one makes it. What `fill` raises is passed on and leaves nothing behind; what a
    killed one left is removed by the next. Raises InfraError when the cache cannot be written.
    """
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.with_name(f"{folder.name}.lock")):
            if folder.is_dir():
                return folder
            for left in folder.parent.glob(f"{folder.name}.*.partial"):
                shutil.rmtree(left, ignore_errors=True)
            partial = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", suffix=".partial", dir=folder.parent))
            try:
                fill(partial)
                # mkdtemp lets nobody else in; a cache may be shared.
                partial.chmod(0o755)
                partial.rename(folder)
            except BaseException:
                shutil.rmtree(partial, ignore_errors=True)
                raise
    except OSError as error:
        raise InfraError(f"cannot write the cache: {folder}: {error.strerror or error}") from error
    return folder


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    # The file stays: to remove it would let two processes hold locks on two files of one name.
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
