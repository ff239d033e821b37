"""`farm devices adb`: the user's own adb on one leased device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from farm.base.errors import UsageError
from farm.cli.devices.hold import (
    CommandWithWords,
    device_held,
    held_device_options,
    purpose_of,
    terminal_restored,
    words_of,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from farm.base.config.settings import Config
    from farm.devices.device import AdbAddress, Device

# Options that select no device and work without one.
_HARMLESS_OPTIONS = {"--version", "--help", "-h", "--exit-on-write-error"}
_OF_THE_SERVER = {"kill-server", "start-server", "server", "nodaemon", "fork-server"}
_OF_OTHERS = {"connect", "disconnect", "pair"}
_PORTS = {"forward", "reverse", "ppp"}


class _Adb(CommandWithWords):
    meaning = "ADB-COMMAND..."


@click.command("adb", cls=_Adb)
@held_device_options
def command(context: click.Context, *, device: str | None, wait_s: float | None, config_file: Path | None) -> int:
    """Run your own adb on a device, leased for the duration of the command.

    \b
    farm devices adb pixel -- logcat -d
    farm devices adb pixel -- push model.pte /data/local/tmp
    farm devices adb -- install app.apk        your reserved device

    Output and exit code are adb's. It is the adb on PATH, and it reaches the
    device also behind another machine or another adb server. For several
    commands, forwarded ports or Android Studio: farm devices connect.
    """
    words = words_of(context)
    if why := refusal(words):
        raise UsageError(why)
    with (
        terminal_restored(),
        device_held(
            device,
            purpose=purpose_of("devices adb", words),
            wait_s=wait_s,
            config_file=config_file,
            require=adb_address,
        ) as held,
    ):
        if verb_of(words) in _PORTS and is_elsewhere(held.config, held.device):
            raise UsageError(
                f"{verb_of(words)} would open a port on {held.device.host}, where the adb server of "
                f"{held.name} runs: 'farm devices connect {held.name}' brings the device under your own adb"
            )
        argv, env = adb_of(held.device)
        return held.hold.run(held.supervisor, [*argv, *words], env, "adb")


def refusal(words: Sequence[str]) -> str:
    """Return why adb may not be called with `words` on a leased device, with the next step; "" if allowed. Pure."""
    verb = verb_of(words)
    if not verb:
        return "no command for adb: give one behind --: farm devices adb DEVICE -- shell getprop"
    if verb.startswith("-"):
        return f"leave {verb} out: farm selects the device and its adb server; begin with adb's command behind --"
    if verb in _OF_THE_SERVER:
        return f"{verb} is for the adb server, which other devices share: call adb itself for that"
    if verb in _OF_OTHERS or (verb == "reconnect" and "offline" in words):
        return f"{verb} is for other devices than the leased one: call adb itself for that"
    if verb == "forward" and "--remove-all" in words:
        return "forward --remove-all is for every device of the adb server: name one with forward --remove"
    return ""


def verb_of(words: Sequence[str]) -> str:
    """Return adb's command among its words, or the first option that selects a device; "" without either. Pure."""
    return next(
        (one for one in words if one not in _HARMLESS_OPTIONS and not one.startswith("wait-for-")), _last(words)
    )


def _last(words: Sequence[str]) -> str:
    # `adb wait-for-device` and `adb --version` are complete commands.
    return words[-1].lstrip("-") if words else ""


def adb_address(device: Device) -> AdbAddress:
    """Return the adb server of a device. Raises UsageError with the next step for a device without one."""
    from farm.devices.device import AdbAddress

    if isinstance(device.address, AdbAddress):
        return device.address
    name = device.name or device.id
    raise UsageError(
        f"{name} has no adb server, farm reaches it directly: 'farm shell {name}' opens a shell on it, and "
        f"'farm shell {name} -- COMMAND' runs a command"
    )


def is_elsewhere(config: Config, device: Device) -> bool:
    """Return True when the adb server of a device runs on another machine, directly or through a tunnel."""
    from farm.devices.device import LOOPBACK

    tunnelled = any(host.ssh is not None and host.name == device.host for host in config.hosts)
    return tunnelled or adb_address(device).host != LOOPBACK


def adb_of(device: Device) -> tuple[list[str], dict[str, str]]:
    """Return the adb for a device's server, and the environment in which it finds this device only.

    Raises InfraError if no adb has the server's version.
    """
    from farm.devices.adb.host import AdbHost
    from farm.devices.adb.names import environment_with
    from farm.devices.adb.server import suitable_adb
    from farm.devices.connect import open_transport

    address = adb_address(device)
    adb = suitable_adb(AdbHost(address.port, address.host))
    return [str(adb)], environment_with(open_transport(device).tool_environment())
