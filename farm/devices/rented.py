"""Hosts with an end time: rented devices, recorded by user in the state folder and found by every scan until then."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from farm.base.atomic import replacing
from farm.base.config.devices import DeviceTables, HostConfig, HostTable
from farm.base.errors import ConfigError, UsageError
from farm.base.ids import NAME
from farm.base.paths import beside
from farm.base.reaper import read_stat

if TYPE_CHECKING:
    from collections.abc import Iterator

    from farm.base.config.settings import Config

_FOLDER = "rented-hosts"


class RentedHost(msgspec.Struct, frozen=True):
    """Record of a host with an end time."""

    host: HostTable
    until_s: float
    """End of the rented session, epoch seconds."""
    owner: tuple[int, int] | None = None
    """Process id and start of the process that the host belongs to; None for a host until its end time."""

    @property
    def is_over(self) -> bool:
        """True after the end time, and after the end of the process that the host belongs to."""
        if time.time() >= self.until_s:
            return True
        if self.owner is None:
            return False
        pid, start = self.owner
        stat = read_stat(pid)
        return stat is None or stat.start != start or stat.state in "ZX"

    def config(self) -> HostConfig:
        """Return the host as scans need it. Raises ConfigError for an invalid record."""
        tables = DeviceTables(Path("host"), lambda text: beside(Path.cwd(), text) if text else None)
        (host,) = tables.hosts([self.host])
        return msgspec.structs.replace(host, until_s=self.until_s)


def rented_hosts(config: Config) -> list[RentedHost]:
    """Return the hosts whose time is not over, by name; records of the others are removed."""
    found = []
    for path in sorted((config.state_dir / _FOLDER).glob("*.json")):
        try:
            rented = msgspec.json.decode(path.read_bytes(), type=RentedHost)
        except (OSError, msgspec.DecodeError):
            continue
        if rented.is_over:
            path.unlink(missing_ok=True)
        else:
            found.append(rented)
    return found


def find_rented(config: Config, name: str) -> RentedHost | None:
    """Return the host of that name whose time is not over; None without one."""
    return next((one for one in rented_hosts(config) if one.host.name == name), None)


def host_configs(config: Config) -> Iterator[HostConfig]:
    """Yield the hosts of farm.toml, then the rented ones."""
    yield from config.hosts
    named = {host.name for host in config.hosts}
    for rented in rented_hosts(config):
        # A name of farm.toml that was added later has priority.
        if rented.host.name not in named:
            with contextlib.suppress(ConfigError):
                yield rented.config()


def add_rented(config: Config, rented: RentedHost) -> None:
    """Record a host. Raises UsageError for a name in use, and for an unwritable state folder."""
    name = rented.host.name
    if any(host.name == name for host in config.hosts):
        raise UsageError(f"{name} is a host of farm.toml: choose another name")
    if find_rented(config, name) is not None:
        raise UsageError(f"{name} is a rented host already: remove it first ('farm devices host remove {name} --yes')")
    path = _file(config, name)
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with replacing(path) as file:
            file.write(msgspec.json.encode(rented))
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}: make it writable for you") from None


def remove_rented(config: Config, name: str) -> bool:
    """Remove a host; return whether there was one."""
    try:
        _file(config, name).unlink()
    except FileNotFoundError:
        return False
    return True


def this_process() -> tuple[int, int] | None:
    """Return id and start of this process, the owner of a host."""
    stat = read_stat(os.getpid())
    return (os.getpid(), stat.start) if stat is not None else None


def _file(config: Config, name: str) -> Path:
    if not NAME.fullmatch(name):
        raise UsageError(f"{name!r} is no name of a host: expected letters, digits, '.', '_', '-', at most 64")
    return config.state_dir / _FOLDER / f"{name}.json"
