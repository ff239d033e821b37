"""Starts virtual devices, attaches them to an adb server, keeps them up, and stores their pushed objects."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from farm.base.errors import FarmError, InfraError
from farm.base.files import make_folders, own_folder, require_own_place, withdraw
from farm.base.processes import Child, Supervisor, ending
from farm.base.socs import find_soc
from farm.builds.bundles.cache import Leftover, folder_size
from farm.devices.adb.protocol import VIRTUAL_PREFIX
from farm.devices.adb.transport import STORAGE
from farm.devices.device import LOOPBACK, AdbAddress, Device
from farm.devices.execution.content_store import OBJECTS
from farm.devices.facts import identify
from farm.devices.virtual.tree import BUILDS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from farm.devices.adb.server import AdbServer


# Storage of virtual devices: private to a command, but the next command finds the pushed objects, as on a phone.


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


# Starts virtual devices, attaches them to an adb server, and keeps them up.


# Takes a fifth of a second on an idle machine.
_BOOT_SECONDS = 30.0

MOST_STARTS = 5
"""Most starts of a device after its end; then the device stays away."""

# Delay before a new start, as the cause of the end, such as a full disk, may be temporary.
_PAUSE_SECONDS = 2.0


def boot(
    supervisor: Supervisor,
    adb_server: AdbServer,
    socs: Sequence[str],
    root: Path,
    *,
    build: str = BUILDS[0],
    before: Callable[[Path], None] = lambda _: None,
) -> list[Device]:
    """Start one virtual device per entry of `socs` and return them, in that order, ready to be used.

    The n-th device of an SoC is `virtual-SM8650-n`; the folder of that name in `root` keeps the files of all its
    starts; `before` is called with it before the first start. `build` is an entry of `tree.BUILDS`. Raises
    UnknownNameError before the first start, and InfraError with the log of a device that does not start.
    """
    seen: Counter[str] = Counter()
    serials: dict[str, str] = {}
    for name in socs:
        soc = find_soc(name).name
        serials[f"{VIRTUAL_PREFIX}{soc}-{seen[soc]}"] = soc
        seen[soc] += 1
    if not serials:
        return []
    for serial in serials:
        before(root / serial)
    children = [start_device(supervisor, serial, soc, root, build) for serial, soc in serials.items()]
    try:
        with ThreadPoolExecutor(max_workers=min(16, len(children))) as pool:
            return list(pool.map(partial(attach_device, adb_server), children))
    except BaseException:
        for child in children:
            child.terminate()
        raise


def start_device(supervisor: Supervisor, serial: str, soc: str, root: Path, build: str) -> Child:
    """Start the daemon of a virtual device, with its files in the folder `serial` of `root`."""
    # No site packages: the daemon needs none, and looking through them doubles its start.
    argv: list[str | Path] = [sys.executable, "-S", "-P", "-m", "farm.devices.virtual", "--root", root / serial]
    argv += ["--soc", soc, "--serial", serial, "--build", build]
    package = Path(__file__).resolve().parents[3]
    environment = {"PATH": os.defpath, "PYTHONPATH": str(package)}
    log = root / f"{serial}.log"
    return supervisor.spawn(argv, name=serial, env=environment, stdout_pipe=True, stderr=log)


def attach_device(adb_server: AdbServer, child: Child) -> Device:
    """Wait until a daemon listens, and return its device as `adb_server` knows it. Raises InfraError."""
    try:
        ready = msgspec.json.decode(child.first_line(_BOOT_SECONDS))
        adb_server.connect(LOOPBACK, ready["port"], timeout_s=_BOOT_SECONDS)
        address = AdbAddress(adb_server.port, attached_at=f"{LOOPBACK}:{ready['port']}")
        return identify(ready["serial"], address)
    except (InfraError, msgspec.DecodeError) as error:
        # adb's message is useless if the device ended in between.
        if isinstance(error, InfraError) and child.process.poll() is None:
            raise
        why = child.why_silent(_BOOT_SECONDS)
        child.terminate()
        raise InfraError(f"the virtual device {child.name} did not start: {why}") from None


class Reviver:
    """The virtual devices of `devices` that `supervisor` has started, with their files in `root`."""

    def __init__(self, supervisor: Supervisor, server: AdbServer, devices: Sequence[Device], root: Path) -> None:
        self._supervisor, self._server, self._root = supervisor, server, root
        self._devices = list(devices)
        self._starts: Counter[str] = Counter()
        self._next_s: dict[str, float] = {}

    def revive(self, clock: Callable[[], float] = time.monotonic) -> list[str]:
        """Start ended devices again and return a line for each. Raises InfraError for the adb server."""
        lines = []
        if self._server.revive(self._supervisor):
            lines.append("the adb server had died and was started again")
        for device in self._devices:
            child = self._supervisor.find(device.serial)
            code = child.process.poll()
            now = clock()
            if code is None or self._starts[device.serial] >= MOST_STARTS or now < self._next_s.get(device.serial, now):
                continue
            self._starts[device.serial] += 1
            self._next_s[device.serial] = now + _PAUSE_SECONDS
            how = ending(code)
            try:
                again = start_device(self._supervisor, device.serial, device.soc, self._root, BUILDS[0])
                attach_device(self._server, again)
            except (FarmError, OSError) as error:
                lines.append(f"{device.serial} had ended with {how} and does not start again: {error}")
            else:
                lines.append(f"{device.serial} had ended with {how} and was started again")
        return lines
