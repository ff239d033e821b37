"""Storage of virtual devices: private to a command, but the next command finds the pushed objects, as on a phone."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING

from farm.base.publish import make_folders, own_folder, withdraw
from farm.base.trust import require_own_place
from farm.builds.bundles.cache import Leftover, folder_size
from farm.devices.adb.names import VIRTUAL_PREFIX
from farm.devices.adb.transport import STORAGE
from farm.devices.execution.content_store import OBJECTS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_VIRTUAL = "virtual"
_MOST_BYTES = 1 << 30
"""Size of the objects of one device that stay after a command; the least recently used objects go first."""
_LEAST_FREE_BYTES = 4 << 30
"""Free space of the cache's disk without which no object stays."""


@contextlib.contextmanager
def virtual_storage(cache_dir: Path, name: str) -> Iterator[Path]:
    """Yield a new private folder for virtual devices, removed at the end; their objects stay in the cache.

    Raises UntrustedError if other users could replace the folder.
    """
    with own_folder(cache_dir / _VIRTUAL, name) as folder:
        try:
            yield folder
        finally:
            for device in folder.glob(f"*{STORAGE}/{OBJECTS}"):
                _keep_objects(device, _kept(cache_dir, device.relative_to(folder).parts[0]))


def take_objects(cache_dir: Path, folder: Path) -> None:
    """Move the kept objects of a device into its new folder, which has its name; none if another command has them.

    A session on the device hashes an object before its first use, as on a phone. Raises UntrustedError for objects
    that another user could have written.
    """
    kept = _kept(cache_dir, folder.name)
    if not kept.is_dir():
        return
    require_own_place(kept.parent)
    place = folder.joinpath(*STORAGE.parts[1:])
    # Another command may have taken the objects meanwhile, and without them a session pushes its own.
    with contextlib.suppress(OSError):
        place.mkdir(parents=True, exist_ok=True)
        kept.rename(place / OBJECTS)


def kept_objects(cache_dir: Path, unused_s: float = 0.0) -> list[Leftover]:
    """Return the folders of objects that wait for a command, one per device, if unused for `unused_s`."""
    horizon_s = time.time() - unused_s
    found = []
    for folder in sorted(_kept(cache_dir, "").glob(f"{VIRTUAL_PREFIX}*")):
        # A command may take the folder meanwhile.
        with contextlib.suppress(FileNotFoundError):
            if not folder.suffix and folder.stat().st_mtime <= horizon_s:
                found.append(Leftover(str(folder), *folder_size(folder)))
    return found


def remove_kept(kept: Iterable[Leftover]) -> None:
    """Remove folders of `kept_objects`; a command meanwhile finds all of a folder or nothing."""
    for one in kept:
        withdraw(Path(one.path))


def _kept(cache_dir: Path, serial: str) -> Path:
    return cache_dir / _VIRTUAL / OBJECTS / serial


def _keep_objects(objects: Path, kept: Path) -> None:
    """Move `objects` to `kept`, unless another command has left some there; errors cost a push in the next command."""
    with contextlib.suppress(OSError):
        if shutil.disk_usage(objects).free < _LEAST_FREE_BYTES:
            return
        with os.scandir(objects) as entries:
            found = sorted(((entry.stat(), entry.path) for entry in entries), key=lambda one: -one[0].st_mtime)
        room = _MOST_BYTES
        for status, path in found:
            room -= status.st_size
            if room < 0:
                os.unlink(path)  # noqa: PTH108
        make_folders(kept.parent)
        kept.parent.chmod(0o700)
        # Devices let all users write.
        objects.chmod(0o700)
        os.utime(objects)
        objects.rename(kept)
