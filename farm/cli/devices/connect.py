"""`farm devices connect`: a leased device under the user's own adb, until the lease ends."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

import click

from farm.base.errors import InfraError, UsageError
from farm.cli.devices.adb import adb_address, is_elsewhere
from farm.cli.devices.hold import (
    CommandWithWords,
    Held,
    device_held,
    held_device_options,
    purpose_of,
    terminal_restored,
    words_of,
)
from farm.cli.output import echo
from farm.report.terminal.layout import columns

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from farm.devices.adb.server import AdbServer

_LOOK_SECONDS = 1.0
_READY_SECONDS = 30.0
# State of the device after a lost lease: True if it belongs to the user's adb server, False if it was attached there.
_AFTER = {True: "it stays on your adb server, and is not yours to use", False: "it was detached from your adb"}


@click.command("connect", cls=CommandWithWords)
@held_device_options
def command(context: click.Context, *, device: str | None, wait_s: float | None, config_file: Path | None) -> int:
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

    words = words_of(context)
    with (
        terminal_restored(),
        device_held(
            device,
            purpose=purpose_of("devices connect", words),
            wait_s=wait_s,
            config_file=config_file,
            require=adb_address,
        ) as held,
    ):
        server = ordinary_server(start=True)
        try:
            with _under(server, held) as name:
                if words:
                    env = environment_with({**server.environment(), "ANDROID_SERIAL": name})
                    return held.hold.run(held.supervisor, words, env, words[0])
                _show(held, name)
                held.hold.wait(_AFTER[_hangs_on(server, held)])
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
            f"{held.name} is attached to another adb server; yours is on {server.place} and cannot attach what is "
            f"offered here: unset the variable that names it, or use 'farm devices adb {held.name} -- COMMAND'"
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
