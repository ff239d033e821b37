"""Transcript of `farm devices check` for a bug report: lines, answers, versions; no names."""

from __future__ import annotations

import contextlib
import getpass
import io
import ipaddress
import os
import platform
import re
import socket
import sys
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from farm import __version__
from farm.base.errors import FarmError
from farm.base.text import json_document, visible
from farm.builds.runtime.packages import package_version
from farm.devices.device import AdbAddress, SshAddress
from farm.devices.rented import host_configs
from farm.devices.ssh.config import ssh_address

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from farm.base.config.settings import Config
    from farm.devices.device import Device
    from farm.policy.situation import Lease
    from farm.replay.check import CheckReport

# Folders of this machine, and of Linux devices, in which names of accounts and projects are.
_BELOW = r"(?:/[^\s'\":;,)]*)?"
_PATH = re.compile(
    rf"(?<![\w/.-])/(?:home|Users|Volumes|root|tmp|var|opt|work|mnt|media|srv|run){_BELOW}|\b[A-Za-z]:\\Users\\\S*"
)
_ADDRESS = re.compile(r"(?<![\d.])(?:\d{1,3}\.){3}\d{1,3}(?::\d{1,5})?(?![\d.])")
_MAC = re.compile(r"(?<![0-9A-Fa-f:-])(?:[0-9A-Fa-f]{2}[:-]){5}[0-9A-Fa-f]{2}(?![0-9A-Fa-f:-])")
_MAYBE_IPV6 = re.compile(r"(?<![\w:.])[0-9A-Fa-f]{0,4}:[0-9A-Fa-f:]*:[0-9A-Fa-f.]*(?:%\w+)?(?![\w:])")
# IMEI, IMSI and ICCID of a phone.
_NUMBER = re.compile(r"(?<!\d)\d{15,20}(?!\d)")
_EMAIL = re.compile(r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+")
_PATTERNS = (
    (_EMAIL, "<account>"), (_PATH, "<path>"), (_ADDRESS, "<address>"), (_MAC, "<address>"), (_NUMBER, "<number>"),
)  # fmt: skip
# Account of every machine, and a word of the lines.
_COMMON = frozenset({"root", "shell", ""})
_PACKAGES = ("executorch", "torch", "onnxruntime-qnn")


class Anonymizer:
    """Replacement of names in texts: devices, hosts, accounts, paths, addresses."""

    def __init__(self, config: Config, reports: Sequence[CheckReport], leases: Iterable[Lease] = ()) -> None:
        """Collect the names; `leases` name other users of the devices."""
        words: dict[str, str] = {}
        for number, report in enumerate(reports):
            words |= dict.fromkeys(_names(report), f"<device {number}>")
            words |= dict(_places(report.device)) if report.device is not None else {}
        for lease in leases:
            # Commands of other users name their folders and jobs.
            words[lease.host] = "<host>"
            words |= {repr(lease.purpose): "<command>"} if lease.purpose else {}
            words |= dict.fromkeys((lease.user, lease.reserved_for), "<account>")
        hosts = list(host_configs(config))
        for host in hosts:
            words |= dict.fromkeys((host.name, host.adb.host), "<host>")
        named = (*(host.ssh for host in hosts), *(device.ssh for device in config.devices))
        for login in (one for one in named if one is not None):
            words |= {login.host: "<host>", login.user: "<account>"}
            # Without a usable configuration of ssh no machine on the way is known.
            with contextlib.suppress(FarmError):
                words |= dict(_ssh_places(ssh_address(login)))
        words[socket.gethostname()] = "<host>"
        accounts = (getpass.getuser(), os.environ.get("USER", ""), os.environ.get("LOGNAME", ""))
        words |= dict.fromkeys(accounts, "<account>")
        folders = (config.state_dir, config.cache_dir, config.sdk_root, config.file, Path.cwd(), Path.home())
        paths = {str(folder) for folder in (*folders, sys.prefix) if folder is not None} - {"/"}
        self._words = {word.casefold(): place for word, place in words.items() if word.casefold() not in _COMMON}
        # Names as whole words, and paths with all that is below them.
        alternatives = (
            rf"{re.escape(one)}{_BELOW}" if one in paths else rf"(?<![A-Za-z0-9]){re.escape(one)}(?![A-Za-z0-9])"
            for one in sorted((*paths, *self._words), key=len, reverse=True)
        )
        self._pattern = re.compile("|".join(alternatives) or r"(?!)", re.IGNORECASE)

    def text(self, text: str) -> str:
        """Return `text` without names."""
        text = self._pattern.sub(lambda found: self._words.get(found[0].casefold(), "<path>"), visible(text))
        for pattern, place in _PATTERNS:
            text = pattern.sub(place, text)
        return _MAYBE_IPV6.sub(lambda found: "<address>" if _is_ipv6(found[0]) else found[0], text)

    def value(self, value: Any) -> Any:
        """Return a value of JSON without names, also in its keys."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, list | tuple):
            return [self.value(one) for one in value]
        if isinstance(value, dict):
            return {self.text(str(key)): self.value(one) for key, one in value.items()}
        return value


def transcript(
    config: Config, reports: Sequence[CheckReport], lines: Iterable[str], leases: Iterable[Lease] = ()
) -> bytes:
    """Return the zip file with `lines` as the command prints them, and the answers behind them, without names.

    `leases` name other users of the devices.
    """
    import msgspec

    hide = Anonymizer(config, reports, leases)
    versions = {name: package_version(name) for name in _PACKAGES}
    about = {"farm": __version__, "python": platform.python_version(), "system": platform.system(), **versions}
    files = {"check.txt": "\n".join(hide.text(line) for line in lines).encode() + b"\n"}
    devices = []
    for number, report in enumerate(reports):
        checked = msgspec.to_builtins(report.checked)
        build = report.device.build if report.device is not None else ""
        devices.append({"checked": checked, "facts": _without_boot(report.facts), "build": build})
        files |= {f"device-{number}/{kind}.txt": hide.text(text).encode() for kind, text in report.logs.items()}
    files["check.json"] = json_document({"schema": 1, "versions": about, "devices": hide.value(devices)})
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
        for name, data in files.items():
            file.writestr(name, data)
    return archive.getvalue()


def _without_boot(facts: dict[str, Any]) -> dict[str, Any]:
    """Return facts without the boot id and other names of the device."""
    left_out = ("boot_id", "addresses")
    return {
        name: {key: one for key, one in value.items() if key not in left_out} if isinstance(value, dict) else value
        for name, value in facts.items()
    }


def _names(report: CheckReport) -> Iterator[str]:
    yield from (report.checked.id, report.checked.name)
    if (device := report.device) is not None:
        yield from (device.serial, device.serialno, device.name, *device.known_as, *device.labels)


def _places(device: Device) -> Iterator[tuple[str, str]]:
    """Yield hosts and accounts on the way to a device, with their replacements."""
    address = device.address
    hosts = (address.host, address.tunnel) if isinstance(address, AdbAddress) else ()
    yield from ((host, "<host>") for host in (device.host, address.place, *hosts))
    if isinstance(address, SshAddress):
        yield from _ssh_places(address)


def _ssh_places(address: SshAddress) -> Iterator[tuple[str, str]]:
    for hop in (address, *address.jumps):
        yield from ((host, "<host>") for host in (hop.host, hop.alias, hop.host_key_alias))
        yield hop.user, "<account>"


def _is_ipv6(text: str) -> bool:
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True
