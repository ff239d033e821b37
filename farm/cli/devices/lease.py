"""`farm lease`."""

from __future__ import annotations

from pathlib import Path

import click

from farm.cli.options import config_option, duration
from farm.cli.output import echo


@click.command("lease")
@click.argument("wanted", metavar="SOC|DEVICE")
@click.option(
    "--for",
    "seconds",
    metavar="TIME",
    callback=duration,
    default="1h",
    show_default=True,
    help="How long: 90s, 10m, 1h, 2d.",
)
@click.option(
    "--wait",
    "wait_s",
    metavar="TIME",
    callback=duration,
    default="10m",
    show_default=True,
    help="How long to wait for one at most.",
)
@click.option("--no-wait", is_flag=True, help="Do not wait, say who has it.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
@config_option
def command(
    *, wanted: str, seconds: float, wait_s: float, no_wait: bool, as_json: bool, config_file: Path | None
) -> None:
    """Reserve a device for yourself: only your commands may use it until then.

    A SOC gives one more device each time; of a DEVICE that you have, the time
    is changed, and counts from now. farm release gives it back earlier.
    """
    from farm.cli.devices.holding import acquire, clock_time, find_devices, reserved_by_me
    from farm.cli.output import print_json
    from farm.config.settings import load_config
    from farm.errors import NoDeviceError
    from farm.pool.inventory import resolve_device
    from farm.store.store import open_store
    from farm.system.processes import Supervisor
    from farm.system.user import user_name

    config = load_config(config_file)
    with Supervisor() as supervisor, open_store(config.store_url) as store:
        devices = find_devices(config, store, supervisor, wanted)
        mine = {lease.device for lease in reserved_by_me(store)}
        if len(devices) == 1 and wanted.casefold() != devices[0].soc.casefold() and devices[0].id in mine:
            device = devices[0]
            until_ms = store.leases.reserve(device.id, user_name(), seconds).reserved_until_ms
        else:
            devices = [device for device in devices if device.id not in mine]
            if not devices:
                raise NoDeviceError(f"every {wanted} is yours already: 'farm release' without a name lists them")
            lease = acquire(
                store,
                devices,
                purpose="farm lease",
                wait_s=0.0 if no_wait else wait_s,
                ttl_s=config.leases.ttl_s,
                seconds=seconds,
            )
            store.leases.release([lease])
            device = next(one for one in devices if one.id == lease.device)
            until_ms = next(one.reserved_until_ms for one in reserved_by_me(store) if one.device == device.id)
        name = resolve_device(store, device.id).name or device.id
    if as_json:
        print_json({"device": device, "id": device.id, "user": user_name(), "until_ms": until_ms})
        return
    echo(f"{name} ({device.soc}, {device.kind}) is yours until {clock_time(until_ms)}")
    hints = {
        f"farm shell {name}": "a shell on it",
        f"farm run --soc {device.soc} ...": "uses it, as all your commands may",
        f"farm release {name}": "gives it back",
    }
    width = max(map(len, hints))
    for command_line, meaning in hints.items():
        echo(f"  {command_line.ljust(width)}  {meaning}")
