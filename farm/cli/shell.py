"""`farm shell`."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import click

from farm.cli.holding import duration
from farm.cli.options import config_option

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from farm.devices.device import Device
    from farm.leases import Lease
    from farm.store.store import Store

_RENEW_SECONDS = 1.0
_COMMAND = "farm.cli.shell"


class _Shell(click.Command):
    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        # What follows `--` is for the device, also where no device is named before it.
        if "--" in args:
            ctx.meta[_COMMAND] = args[args.index("--") + 1 :]
            args = args[: args.index("--")]
        return super().parse_args(ctx, args)

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "[-- COMMAND...]"]


@click.command("shell", cls=_Shell)
@click.argument("device", required=False, metavar="[DEVICE|SOC]")
@click.option(
    "--wait", "wait_s", metavar="TIME", callback=duration, help="Wait so long for the device, when another has it."
)
@config_option
@click.pass_context
def command(context: click.Context, *, device: str | None, wait_s: float | None, config_file: Path | None) -> int:
    """Open a shell on a device, or run COMMAND there; nobody else uses it meanwhile.

    Without a name, it is the device that is reserved for you. The exit code is
    that of the shell.
    """
    from farm.cli.holding import acquire, find_devices, reserved_by_me
    from farm.config import load_config
    from farm.errors import LeaseLostError, UsageError
    from farm.processes import Supervisor
    from farm.store.store import open_store

    words: list[str] = context.meta.get(_COMMAND, [])
    config = load_config(config_file)
    with Supervisor() as supervisor, open_store(config.store_url) as store:
        if not device:
            mine = [lease.device for lease in reserved_by_me(store)]
            if len(mine) != 1:
                which = f"name one of {', '.join(mine)}" if mine else "name a device or an SoC"
                raise UsageError(f"{len(mine) or 'no'} devices are reserved for you: {which}")
            device = mine[0]
        devices = find_devices(config, store, supervisor, device)
        ttl_s = config.leases.ttl_s
        lease = acquire(store, devices, purpose=_purpose(words), wait_s=wait_s or 0.0, ttl_s=ttl_s)
        try:
            argv, env = shell_of(next(one for one in devices if one.id == lease.device), words)
            # Ctrl-C is for what runs on the device.
            with _ignored(signal.SIGINT):
                process = subprocess.Popen(argv, env=env)
                with _kept(store, lease, ttl_s, process) as lost:
                    code = process.wait()
        finally:
            store.leases.release([lease])
    if lost.is_set():
        raise LeaseLostError(f"{lease.device} was given to somebody else: the shell was ended")
    return code if code >= 0 else 128 - code


def shell_of(device: Device, words: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Return the program, and its environment, that opens a shell on a device or runs `words` in one."""
    from farm.devices.adb_names import adb_target
    from farm.devices.adb_server import AdbServer, ordinary_server
    from farm.devices.device import AdbAddress, SshAddress

    script, address = shlex.join(words), device.address
    if isinstance(address, AdbAddress):
        server = AdbServer(address.port, ordinary_server().adb, host=address.host)
        terminal = ["-t"] if words and sys.stdin.isatty() else []
        argv = [str(server.adb), "-s", adb_target(device.serial), "shell", *terminal]
        return [*argv, *([script] if words else [])], {**os.environ, **server.environment()}
    if isinstance(address, SshAddress):
        options = ["-p", str(address.port), "-l", address.user, "-o", "StrictHostKeyChecking=yes"]
        if address.key_file:
            options += ["-i", address.key_file, "-o", "IdentitiesOnly=yes"]
        if address.known_hosts:
            # ssh reads a list of files, and takes quotes for names with blanks.
            options += ["-o", f'UserKnownHostsFile="{address.known_hosts}"']
        terminal = ["-t"] if sys.stdin.isatty() else ["-T"]
        return ["ssh", *options, *terminal, "--", address.host, *([script] if words else [])], dict(os.environ)
    shell = os.environ.get("SHELL", "/bin/sh")
    return [shell, *(["-c", script] if words else [])], dict(os.environ)


def _purpose(words: Sequence[str]) -> str:
    return shlex.join(["farm", "shell", *(["--", *words] if words else [])])


@contextlib.contextmanager
def _ignored(number: signal.Signals) -> Iterator[None]:
    # A handler of ours and not SIG_IGN, which the child would inherit.
    before = signal.signal(number, lambda *_: None)
    try:
        yield
    finally:
        signal.signal(number, before)


@contextlib.contextmanager
def _kept(store: Store, lease: Lease, ttl_s: float, process: subprocess.Popen[bytes]) -> Iterator[threading.Event]:
    """Keep a lease alive; the event that is yielded says that it was lost, and then `process` is ended."""
    from farm.errors import StoreError

    over, lost = threading.Event(), threading.Event()

    def renew() -> None:
        while not over.wait(_RENEW_SECONDS):
            # A store that cannot be reached now may be in time.
            with contextlib.suppress(StoreError):
                if store.leases.renew([lease], ttl_s=ttl_s).lost:
                    lost.set()
                    process.terminate()
                    return

    thread = threading.Thread(target=renew, name="lease", daemon=True)
    thread.start()
    try:
        yield lost
    finally:
        over.set()
        thread.join()
