"""`farm devices host`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import click

from farm.base.errors import ConfigError, UnknownNameError, UsageError
from farm.base.text import one_line
from farm.cli.devices.hold import CommandWithWords, ctrl_c_left_to_child, exit_code_of, words_of
from farm.cli.options import FILE, ListingGroup, configured, duration, is_json, json_option, yes_option
from farm.cli.output import notice, require_consent, show
from farm.report.terminal.layout import columns

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from farm.devices.device import Device, Unusable
    from farm.devices.hosts import RentedHost


@click.group("host", cls=ListingGroup)
def command() -> None:
    """Hosts with an end time: devices that are rented for a session.

    \b
    farm devices host add qdc --ssh user@gateway --adb TARGET:5037 --until 2h
    farm devices host list
    farm devices host remove qdc
    Other hosts belong in farm.toml. Agents of a shared farm use none of these.
    """


@command.command("add", cls=CommandWithWords, short_help="Use the devices of a host until a time.")
@click.argument("name")
@click.option("--ssh", default="", metavar="LOGIN",
              help="user@host[:port], or a Host of ~/.ssh/config; the account may only forward.")  # fmt: skip
@click.option("--adb", default="", metavar="HOST:PORT",
              help="Its adb server, with --ssh as that machine reaches it; else 127.0.0.1:5037 there.")  # fmt: skip
@click.option("--until", "seconds", metavar="TIME", callback=duration, required=True,
              help="End of the session, from now: 90m, 2h.")  # fmt: skip
@click.option("--key-file", type=FILE, help="Private key of this session.")
@click.option("--known-hosts", type=FILE, help="File with the host key of this session.")
@click.option("--ssh-config", default="", metavar="FILE|none", help="File in place of ~/.ssh/config.")
@json_option()
@click.pass_context
def add(
    context: click.Context,
    *,
    name: str,
    ssh: str,
    adb: str,
    seconds: float,
    key_file: Path | None,
    known_hosts: Path | None,
    ssh_config: str,
) -> int:
    """Use the devices of a host until the time of --until.

    The host is asked for its devices first. With COMMAND, such as farm run, the
    host belongs to that command: it is removed when COMMAND exits, or when this
    process is killed, and the exit code is the exit code of COMMAND.
    """
    from farm.base.config.devices import HostTable
    from farm.devices.hosts import RentedHost, add_rented, remove_rented, this_process

    config = configured()
    words = words_of(context)
    table = HostTable(
        name,
        adb or None,
        ssh or None,
        str(key_file.absolute()) if key_file else "",
        str(known_hosts.absolute()) if known_hosts else "",
        ssh_config,
    )
    rented = RentedHost(table, time.time() + seconds, this_process() if words else None)
    if words and is_json():
        raise UsageError("standard output belongs to COMMAND: leave --json or COMMAND out")
    devices, unusable = _look(rented)
    add_rented(config, rented)
    lines = _added_lines(rented, devices, unusable)
    if not words:
        lines.append(f"'farm devices host remove {name} --yes' removes it earlier")
    show({"host": _facts(rented), "devices": devices, "unusable": unusable}, lines)
    if not words:
        return 0
    try:
        return _run(words)
    finally:
        remove_rented(config, name)
        notice(f"{name} is removed")


@command.command("list")
@json_option()
def list_hosts() -> None:
    """List the hosts with an end time."""
    from farm.devices.hosts import rented_hosts

    found = rented_hosts(configured())
    rows = [(one.host.name, f"until {_clock(one.until_s)}", _way(one)) for one in found]
    show({"hosts": [_facts(one) for one in found]}, columns(rows) if rows else ["no host with an end time"])


@command.command("remove")
@click.argument("name")
@yes_option
@json_option()
def remove(name: str, *, yes: bool) -> None:
    """Remove a host before its end time. A running job on its devices is broken off."""
    from farm.devices.hosts import remove_rented, rented_hosts

    config = configured()
    known = [one.host.name for one in rented_hosts(config)]
    if name in known:
        require_consent(f"rented host {name}", yes=yes)
    if not remove_rented(config, name):
        raise UnknownNameError("rented host", name, known)
    show({"removed": name}, [f"{name} is removed"])


def _look(rented: RentedHost) -> tuple[Sequence[Device], Sequence[Unusable]]:
    """Return the devices of a host. Raises UsageError for an invalid address, InfraError for an unreachable host."""
    from farm.base.processes import Supervisor
    from farm.devices.discovery import scan
    from farm.devices.hosts import reach_server

    try:
        host = rented.config()
    except ConfigError as error:
        raise UsageError(f"--{error.key.rpartition('.')[2] or 'ssh'}: {error.problem}") from None
    with Supervisor() as supervisor:
        server = reach_server(host, supervisor)
        found = scan(server.port, server.host)
    return found.devices, found.unusable


def _facts(rented: RentedHost) -> dict[str, object]:
    host = rented.host
    return {"name": host.name, "until_ms": int(rented.until_s * 1000), "ssh": host.ssh, "adb": host.adb}


def _added_lines(rented: RentedHost, devices: Sequence[Device], unusable: Sequence[Unusable]) -> list[str]:
    rows = [(one_line(one.serial), one.soc, one.product) for one in devices]
    rows += [(one_line(one.serial), one.state, one_line(one.reason)) for one in unusable]
    head = f"{rented.host.name} is used until {_clock(rented.until_s)}, with {len(devices)} devices"
    return [head, *(columns(rows, indent="  ") if rows else ())]


def _run(words: Sequence[str]) -> int:
    """Run a command in the foreground, which ends with this process, and return its exit code."""
    from farm.base.processes import Supervisor

    # Ctrl-C is for the command: farm run finishes its jobs first.
    with ctrl_c_left_to_child(), Supervisor() as supervisor:
        return exit_code_of(supervisor.spawn(words, name=one_line(words[0]), foreground=True))


def _way(rented: RentedHost) -> str:
    host = rented.host
    return " ".join(filter(None, (f"ssh {host.ssh}" if host.ssh else "", f"adb {host.adb}" if host.adb else "")))


def _clock(until_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(until_s))
