"""Folders for users without farm: texts with filled in values, written completely or not at all."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from farm.base.errors import UsageError


def filled(name: str, **values: str) -> str:
    """Return the text `name` beside this module with a value in place of each `@name@`."""
    text = Path(__file__).with_name(name).read_text(encoding="utf-8")
    return re.sub(r"@(\w+)@", lambda found: values[found[1]], text)


def require_new(folder: Path, *, make: bool = False) -> None:
    """Raise UsageError unless `folder` is missing or empty, so that nothing is overwritten, and can be made."""
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UsageError(f"{folder} is there already: name another folder")
        if make:
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot write {folder}: {error.strerror}") from None


def publish_folder(folder: Path, fill: Callable[[Path], None]) -> None:
    """Make `folder`, which may exist and be empty, by `fill`; a failure leaves nothing.

    Raises UsageError for a folder that is not empty or cannot be written.
    """
    require_new(folder)
    try:
        _publish(folder.absolute(), fill)
    except OSError as error:
        raise UsageError(f"cannot write {folder}: {error.strerror or error}") from None


def _publish(folder: Path, fill: Callable[[Path], None]) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        fill(partial)
        partial.chmod(0o755)
        if folder.exists():
            folder.rmdir()
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
