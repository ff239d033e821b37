"""`farm devices adb` and `farm devices connect`: one leased device under the user's own adb."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

import click

from farm.base.errors import InfraError, UsageError
from farm.cli.devices.hold import CommandWithWords, Held, on_held_device
from farm.cli.output import echo
from farm.report.terminal.layout import columns

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from farm.base.config.settings import Config
    from farm.devices.adb.server import AdbServer
    from farm.devices.device import AdbAddress, Device

# Options that select no device and work without one.
_HARMLESS_OPTIONS = {"--version", "--help", "-h", "--exit-on-write-error"}
_OF_THE_SERVER = {"kill-server", "start-server", "server", "nodaemon", "fork-server"}
_OF_OTHERS = {"connect", "disconnect", "pair"}
_PORTS = {"forward", "reverse", "ppp"}
_LOOK_SECONDS = 1.0
_READY_SECONDS = 30.0
# State of the device after a lost lease: True if it belongs to the user's adb server, False if it was attached there.
_AFTER = {True: "it stays on your adb server, and is not yours to use", False: "it was detached from your adb"}


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


class _Adb(CommandWithWords):
    meaning = "ADB-COMMAND..."


@click.command("adb", cls=_Adb)
@on_held_device("devices adb", refuse=refusal, require=adb_address)
def adb_command(held: Held) -> int:
    """Run your own adb on a device, leased for the duration of the command.

    \b
    farm devices adb pixel -- logcat -d
    farm devices adb pixel -- push model.pte /data/local/tmp
    farm devices adb -- install app.apk        your reserved device

    Output and exit code are adb's. It is the adb on PATH, and it reaches the
    device also behind another machine or another adb server. For several
    commands, forwarded ports or Android Studio: farm devices connect.
    """
    if (verb := verb_of(held.words)) in _PORTS and is_elsewhere(held.config, held.device):
        raise UsageError(
            f"{verb} would open a port on {held.device.host}, where the adb server of {held.name} runs: 'farm devices "
            f"connect {held.name}' brings the device under your own adb"
        )
    argv, env = adb_of(held.device)
    return held.run([*argv, *held.words], env, "adb")


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


@click.command("connect", cls=CommandWithWords)
@on_held_device("devices connect", require=adb_address)
def connect_command(held: Held) -> int:
    """Bring a device under your own adb, until Ctrl-C or as long as COMMAND runs.

    \b
    farm devices connect pixel              for adb, scrcpy, Android Studio
    farm devices connect pixel -- ./gradlew connectedCheck
    farm devices connect pixel -- sh -c 'python x.py --device $ANDROID_SERIAL'

    The device is leased meanwhile. It may be attached to another machine or
    another adb server: your own adb server shows it, alone, as 127.0.0.1:PORT.
    COMMAND finds it by ANDROID_SERIAL, and its exit code is handed on. When
    the lease is lost, the device is detached and the exit code is 4.
    """
    from farm.devices.adb.names import environment_with
    from farm.devices.adb.server import ordinary_server

    server = ordinary_server(start=True)
    try:
        with _under(server, held) as name:
            if held.words:
                env = environment_with({**server.environment(), "ANDROID_SERIAL": name})
                return held.run(held.words, env, held.words[0])
            _show(held, name)
            held.wait(_AFTER[_hangs_on(server, held)])
    except KeyboardInterrupt:
        echo(f"{held.name} is given back", err=True)
    return 0


def _show(held: Held, name: str) -> None:
    device = held.device
    echo(f"{held.name} ({device.soc}, {device.kind}) is under your adb as {name}, until Ctrl-C")
    hints = [
        (f"adb -s {name} shell", "or any command of adb"),
        (f"scrcpy -s {name}", "Android Studio lists the device by itself"),
        (f"export ANDROID_SERIAL={name}", "for scripts that call adb; ExecuTorch's take --device"),
    ]
    for line in columns(hints, indent="  "):
        echo(line)


@contextlib.contextmanager
def _under(server: AdbServer, held: Held) -> Iterator[str]:
    """Attach the device to the user's own adb server for the body, and yield its name there. Raises InfraError."""
    from farm.devices.adb.host import AdbHost
    from farm.devices.adb.names import adb_target
    from farm.devices.device import LOOPBACK
    from farm.devices.virtual.relay import Relay

    device, address = held.device, adb_address(held.device)
    if _hangs_on(server, held):
        yield address.attached_at or address.name or adb_target(device.serial)
        return
    if server.host != LOOPBACK:
        raise UsageError(
            f"{held.name} is attached to another adb server; yours is on {server.place} and cannot attach devices "
            f"of another server: unset the variable that names it, or use 'farm devices adb {held.name} -- COMMAND'"
        )
    there = AdbHost(address.port, address.host)
    reverse = not is_elsewhere(held.config, device)
    with Relay(there, address.name or device.serial, model=device.product or device.soc, reverse=reverse) as relay:
        if not relay.wait_ready(_READY_SECONDS):
            raise InfraError(f"{held.name} no longer answers: 'farm devices' shows the state of every device")
        name = server.connect(server.host, relay.port)
        over = threading.Event()
        keeper = threading.Thread(target=_keep, args=(server, name, held, over), name="keeper", daemon=True)
        keeper.start()
        try:
            yield name
        finally:
            over.set()
            keeper.join()
            with contextlib.suppress(InfraError):
                # If the server has ended, the device is detached already.
                server.query(f"host:disconnect:{name}")


def _hangs_on(server: AdbServer, held: Held) -> bool:
    """Return True when the device is attached to the user's own adb server."""
    address = adb_address(held.device)
    return (address.port, address.host) == (server.port, server.host)


def _keep(server: AdbServer, name: str, held: Held, over: threading.Event) -> None:
    """Attach the device again after a reboot, a broken tunnel or a restart of the user's adb server."""
    from farm.devices.hosts import revive_tunnels

    while not over.wait(_LOOK_SECONDS):
        with contextlib.suppress(InfraError):
            revive_tunnels(held.supervisor)
            if not _is_attached(server, name):
                server.query(f"host:connect:{name}")


def _is_attached(server: AdbServer, name: str) -> bool:
    """Return True when the server has the device. Raises InfraError without a server."""
    server.query("host:version")
    try:
        return server.query(f"host-serial:{name}:get-state") == "device"
    except InfraError:
        return False
