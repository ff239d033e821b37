"""`farm lab accounts` and `farm lab audit`: accounts of `farm serve`, and their actions."""

from __future__ import annotations

import time
from pathlib import Path

import click

from farm.base.errors import UsageError
from farm.base.text import one_line
from farm.cli.options import json_option, limit_option, yes_option
from farm.cli.output import opened, require_consent, show

_ROLES = ("viewer", "developer", "operator")


@click.command("accounts")
@click.option("--add", metavar="NAME", help="Make an account and print its token, which is shown only once.")
@click.option("--role", type=click.Choice(_ROLES), default="viewer", show_default=True, help="Role of the new account.")
@click.option("--remove", metavar="NAME", help="Remove an account: its token and its sessions end.")
@yes_option
@json_option()
def accounts_command(
    *, add: str | None, role: str, remove: str | None, yes: bool, as_json: bool, config_file: Path | None
) -> None:
    """List, make and remove the accounts of farm serve.

    \b
    viewer       reads
    developer    leases, runs and cancels for itself, remarks on alerts
    operator     also for others; takes devices out of service, checks them

    With an account every request to farm serve needs one. A new token for a
    name: remove the account and add it again.
    """
    from farm.report.terminal.layout import columns
    from farm.store.accounts import Role

    if add is not None and remove is not None:
        raise UsageError("give --add or --remove, not both")
    with opened(config_file) as (_, store):
        if add is not None:
            token = store.accounts.add(add, Role(role))
            show({"name": add, "role": role, "token": token}, [token], as_json=as_json)
            return
        if remove is not None:
            require_consent(f"account {remove}", yes=yes)
            store.accounts.remove(remove)
            show({"removed": remove}, [f"account {one_line(remove)} is removed"], as_json=as_json)
            return
        found = store.accounts.all()
    rows = [(one_line(one.name), str(one.role), _time(one.created_ms)) for one in found]
    lines = columns([("name", "role", "since"), *rows]) if rows else ["no account: farm serve is read-only"]
    show({"accounts": found}, lines, as_json=as_json)


@click.command("audit")
@click.option("--user", default="", metavar="NAME", help="Only actions of this user.")
@limit_option("Newest actions.")
@json_option()
def audit_command(*, user: str, limit: int, as_json: bool, config_file: Path | None) -> None:
    """Show the actions of accounts on farm serve, also the refused ones, newest first."""
    from farm.report.terminal.layout import columns

    with opened(config_file, readonly=True) as (_, store):
        found = store.accounts.audit(limit, user)
    rows = [
        (_time(one.time_ms), one_line(one.user), one.action, one_line(one.outcome, 60), one_line(one.asked, 120))
        for one in found
    ]
    lines = columns([("when", "user", "action", "outcome", "asked"), *rows]) if rows else ["no action yet"]
    show({"actions": found}, lines, as_json=as_json)


def _time(time_ms: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(time_ms / 1000))
