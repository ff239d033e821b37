"""Permission of a pytest worker to use its device: a file for each device, which `farm pytest` keeps up to date."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from farm.dispatch.messages import Grant
from farm.system.atomic import write_atomically

if TYPE_CHECKING:
    from pathlib import Path

    from farm.pool.device_pool import DevicePool


class FileGrant(Grant, frozen=True):
    """A grant in a file."""

    wanted: bool = False
    """Another user with a better right waits for the device."""


class GrantFiles:
    """The grants of the devices of a pool."""

    def __init__(self, folder: Path, pool: DevicePool, count: int) -> None:
        """`count` is the number of devices."""
        self._folder, self._pool, self._count = folder, pool, count
        self._written: dict[int, FileGrant] = {}

    def update(self) -> None:
        """Write the grants that have changed; a grant that cannot be written ends with its lease. Raises OSError."""
        leases = self._pool.leases
        for number in range(self._count):
            go, wanted = self._pool.is_ours(number), number in leases.leaving
            grant = FileGrant(go, leases.fence(number), leases.until_s(number), wanted=wanted)
            if grant != self._written.get(number):
                file = _file(self._folder, number)
                file.parent.mkdir(exist_ok=True)
                write_atomically(file, msgspec.json.encode(grant))
                self._written[number] = grant


def read_grant(folder: Path, device: int) -> FileGrant:
    """Return the newest grant of a device, by its number; before the first one no test may begin."""
    try:
        return msgspec.json.decode(_file(folder, device).read_bytes(), type=FileGrant)
    except FileNotFoundError:
        return FileGrant(go=False)


def _file(folder: Path, device: int) -> Path:
    return folder / "grants" / f"{device}.json"
