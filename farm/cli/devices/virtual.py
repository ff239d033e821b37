"""`farm virtual`."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any

import click

from farm.base.errors import InfraError, StoreError, UnknownNameError, UsageError
from farm.base.text import one_line
from farm.cli.options import FOLDER, SuggestingGroup, configured, json_option, yes_option
from farm.cli.output import echo, opened, require_consent, show
from farm.devices.virtual.faults import CONDITIONS, Fault, FaultKind, fired, inject, is_running
from farm.devices.virtual.faults import clear as clear_faults
from farm.devices.virtual.tree import BUILDS
from farm.report.terminal.layout import columns

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from farm.base.processes import Supervisor
    from farm.devices.adb.server import AdbServer
    from farm.devices.device import Device

_MOST_DEVICES = 64
_LOOK_SECONDS = 0.5

_folder_option = click.option(
    "--folder", type=FOLDER, help="Folder of the devices' files; otherwise `virtual` in farm's state folder."
)


@click.group("virtual", cls=SuggestingGroup)
def command() -> None:
    """Start virtual devices for other commands, and inject faults into them.

    \b
    farm virtual up --soc SM8650 -n 4
    farm virtual fault virtual-SM8650-0 drop_push --after-bytes 100000
    farm virtual clear virtual-SM8650-0 --yes
    """


@command.command("up", short_help="Start virtual devices, and stay until Ctrl-C.")
@_folder_option
@click.option("--soc", "socs", multiple=True, required=True, metavar="SOC", help="SoC of the devices; repeatable.")
@click.option("-n", "--count", type=click.IntRange(1, _MOST_DEVICES), default=1, help="Devices of every SoC.")
@click.option("--build-type", "build", type=click.Choice(BUILDS), default=BUILDS[0], show_default=True,
              help="Build type: whether adbd can become root, or is root already.")  # fmt: skip
@click.option("--own-server", is_flag=True, help="Start an adb server for these devices, instead of using yours.")
@json_option("Print the started devices as JSON.")
def up(folder: Path | None, socs: tuple[str, ...], count: int, build: str, *, own_server: bool) -> None:
    """Start virtual devices, attach them to your adb server, and stay until Ctrl-C."""
    from farm.base.interrupts import InterruptHandler
    from farm.base.processes import Supervisor
    from farm.base.socs import find_soc
    from farm.devices.adb.server import ordinary_server, start_adb_server
    from farm.devices.virtual.boot import boot

    names = [find_soc(name).name for name in dict.fromkeys(socs)]
    place = _place(folder)
    wanted = [name for name in names for _ in range(count)]
    for serial in (f"virtual-{name}-{number}" for name in names for number in range(count)):
        if is_running(place / serial):
            raise UsageError(f"{serial} runs already, in {place}: end it, or give another --folder")
    with InterruptHandler(), Supervisor() as supervisor:
        server = start_adb_server(supervisor, place / "adb") if own_server else ordinary_server(start=True)
        _refuse_attached(server, names)
        attached: list[str] = []
        try:
            devices = boot(supervisor, server, wanted, place, build=build)
            serials = {device.serial for device in devices}
            attached = [one.adb_name for one in server.attached() if one.serial in serials]
            _show(devices, place, server, own_server=own_server)
            _stay(supervisor, devices)
        except KeyboardInterrupt:
            echo("ending the virtual devices", err=True)
        finally:
            supervisor.close()
            if not own_server:
                # An ended server has lost its list of devices.
                with contextlib.suppress(InfraError):
                    for address in attached:
                        server.query(f"host:disconnect:{address}")


def _show(devices: Sequence[Device], place: Path, server: AdbServer, *, own_server: bool) -> None:
    rows = [{"serial": one.serial, "soc": one.soc, "folder": str(place / one.serial)} for one in devices]
    lines = ("  ".join(row.values()) for row in rows)
    show({"devices": rows, "adb_server_port": server.port}, lines)
    first = devices[0].serial
    hints = [f"reach them with: export ANDROID_ADB_SERVER_PORT={server.port}"] if own_server else []
    hints += [f"a shell: adb -s product:{first} shell"]
    hints += [f"a fault: farm virtual fault {first} reboot (farm virtual faults lists them)", "Ctrl-C ends them"]
    echo("\n".join(hints), err=True)


def _stay(supervisor: Supervisor, devices: Sequence[Device]) -> None:
    """Wait for ever: KeyboardInterrupt ends the command, and InfraError when a device ends."""
    while True:
        for device in devices:
            child = supervisor.find(device.serial)
            if child.process.poll() is not None:
                raise InfraError(f"{device.serial} is gone: {child.why_silent(0.0)}")
        time.sleep(_LOOK_SECONDS)


def _refuse_attached(server: AdbServer, socs: Sequence[str]) -> None:
    """Raise UsageError when a device of that name is attached to the server: adb could not distinguish them."""
    for one in server.attached():
        if one.serial.startswith(tuple(f"virtual-{soc}-" for soc in socs)):
            raise UsageError(
                f"{one.serial} is attached to the adb server on port {server.port} already: end it, or detach it with "
                f"'adb disconnect {one.adb_name}', or start yours with --own-server"
            )


@command.command("fault", short_help="Inject a fault into a virtual device.")
@_folder_option
@click.argument("device")
@click.argument("kind")
@click.option("--after-bytes", type=int, default=0,
              help="Strike at this byte of a file, or of the output of a command.")  # fmt: skip
@click.option("--duration", "seconds", type=float, default=0.0, metavar="S",
              help="Duration in seconds, 0 until cleared.")  # fmt: skip
@click.option("--code", type=int, default=0, help="Exit code, signal, percent or degrees.")
@click.option("--text", default="", help="Text of the fault.")
@click.option("--match", default="", metavar="REGEX", help="Strike only commands or paths that match.")
@click.option("--times", type=int, default=1, help="Number of times; 0 until cleared.")
@click.option("--bytes-per-s", type=int, default=0, help="Speed of a slow link.")
@json_option()
def fault(folder: Path | None, device: str, kind: str, **details: Any) -> None:
    """Inject a fault into a virtual device: `farm virtual faults` lists the kinds."""
    if kind == "clear":
        raise UsageError(f"clear is no fault: 'farm virtual clear {one_line(device)} --yes' removes the present faults")
    wanted = _kind(kind)
    try:
        asked = Fault(wanted, **details)
    except ValueError as error:
        raise UsageError(str(error)) from None
    inject(_device_folder(folder, device), asked)
    until = f"for {asked.seconds:g} s" if asked.seconds else "until cleared"
    line = f"{device}: {wanted}{f', {until}' if wanted in CONDITIONS else ''}"
    show({"device": device, "fault": asked}, [line])


@command.command("faults", short_help="List kinds of faults, or the faults of a device.")
@_folder_option
@click.argument("device", required=False)
@json_option("Print JSON instead of a table.")
def faults(folder: Path | None, device: str | None) -> None:
    """List the kinds of faults, or the faults that DEVICE has met so far."""
    if device is None:
        kinds = {str(kind): kind.description for kind in FaultKind}
        show({"faults": kinds}, columns(list(kinds.items())))
        return
    struck = fired(_device_folder(folder, device))
    rows = [
        (time.strftime("%H:%M:%S", time.localtime(one["time"])), f"{one['kind']:<14}", f"{one['operation']:<6}",
         one_line(one["subject"], 48))
        for one in struck
    ]  # fmt: skip
    show({"device": device, "struck": struck}, columns(rows) if rows else [])


@command.command("clear")
@_folder_option
@click.argument("device")
@yes_option
@json_option()
def clear(folder: Path | None, device: str, *, yes: bool) -> None:
    """Remove all faults of a virtual device."""
    place = _device_folder(folder, device)
    require_consent(f"every fault of {device}", yes=yes)
    clear_faults(place)
    show({"device": device}, [f"{device} has no fault"])


def _kind(name: str) -> FaultKind:
    try:
        return FaultKind(name)
    except ValueError:
        raise UnknownNameError("fault", name, map(str, FaultKind), "(farm virtual faults lists them)") from None


def _place(folder: Path | None) -> Path:
    return (folder or configured().state_dir / "virtual").resolve()


def _device_folder(folder: Path | None, device: str) -> Path:
    """Return the folder of a running virtual device. Raises UnknownNameError."""
    place = _place(folder)
    up = {path.name: path.name for path in place.glob("virtual-*") if is_running(path)}
    known = up if device in up else {**_serials(), **up}
    if known.get(device) not in up:
        hint = "" if up else f"(none is up in {place}: 'farm virtual up --soc SM8650' starts one)"
        raise UnknownNameError("virtual device", device, [name for name, serial in known.items() if serial in up], hint)
    return place / known[device]


def _serials() -> dict[str, str]:
    """Return the serials of named devices, by name."""
    config = configured()
    named = {one.name: one.serial for one in config.devices if one.name}
    with contextlib.suppress(StoreError), opened(readonly=True, existing=True) as (_, store):
        return {**{known.name: known.serial for known in store.devices.all() if known.name}, **named}
    return named
