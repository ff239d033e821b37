"""`farm release`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from farm.cli.options import config_option
from farm.cli.output import echo

if TYPE_CHECKING:
    from farm.store.leases.rules import Lease
    from farm.store.store import Store


@click.command("release")
@click.argument("device", required=False)
@click.option("--all", "everything", is_flag=True, help="Every device that is reserved for you.")
@click.option(
    "--force",
    is_flag=True,
    help="Also what is another's, or in use: a shell is ended, a run lets go of it after its running job.",
)
@config_option
def command(*, device: str | None, everything: bool, force: bool, config_file: Path | None) -> None:
    """Give a device back: DEVICE, or the only one that you have."""
    from farm.cli.devices.holding import reserved_by_me
    from farm.config.settings import load_config
    from farm.errors import UsageError
    from farm.store.store import open_store

    if device and everything:
        raise UsageError("give a device or --all, not both")
    config = load_config(config_file)
    with open_store(config.store_url) as store:
        if device:
            _release(store, _find(store, device), force=force)
            return
        mine = reserved_by_me(store)
        if not mine:
            raise UsageError("no device is reserved for you: 'farm devices' shows who has which")
        if len(mine) > 1 and not everything:
            names = ", ".join(lease.device for lease in mine)
            raise UsageError(f"{len(mine)} devices are yours: name one of {names}, or give --all")
        for lease in mine:
            _release(store, lease, force=force)


def _find(store: Store, device: str) -> Lease:
    """Return what is held of a device. Raises UnknownNameError, UsageError when it is free."""
    from farm.errors import UsageError
    from farm.pool.inventory import resolve_device

    leases = {lease.device: lease for lease in store.leases.all()}
    id_ = device if device in leases else resolve_device(store, device).id
    if id_ not in leases:
        raise UsageError(f"{id_} is free already")
    return leases[id_]


def _release(store: Store, lease: Lease, *, force: bool) -> None:
    from farm.cli.devices.holding import describe
    from farm.devices.text import clean_text
    from farm.errors import UsageError
    from farm.system.user import user_name

    mine = lease.reserved_for == user_name()
    if not mine and not force:
        end = "end that" if lease.user == user_name() else "ask for it"
        raise UsageError(f"{describe(lease)}: {end}, or give --force")
    if lease.reserved_for:
        store.leases.cancel(lease.device, lease.reserved_for)
    if lease.token and force:
        store.leases.release([lease])
    after = ""
    if lease.token and not force:
        after = f"; {lease.user} uses it still, for {lease.purpose!r}"
    elif lease.token and lease.purpose.startswith("farm shell"):
        after = f"; the shell of {lease.user} is being ended"
    elif lease.token:
        after = f"; {lease.purpose!r} of {lease.user} stops using it after its running job"
    echo(clean_text(f"{lease.device} is given back{after}", 400))
