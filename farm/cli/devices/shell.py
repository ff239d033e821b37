"""`farm shell`."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from farm.cli.options import config_option, duration
from farm.cli.output import notice, opened

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from farm.devices.device import Device
    from farm.store.leases.rules import Lease
    from farm.store.store import Store
    from farm.system.processes import Child, Supervisor

_RENEW_SECONDS = 1.0
# What a shell gets to end by itself after SIGHUP.
_HANGUP_SECONDS = 1.0
_COMMAND = "farm.cli.devices.shell"


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

    Without a name, it is the device that is reserved for you. COMMAND is a
    program and its arguments; for pipes and the like, sh -c '...'. The exit
    code is that of the shell, or of COMMAND.
    """
    from farm.cli.devices.lease import acquire, ended_in_order, find_devices, reserved_by_me
    from farm.errors import UsageError
    from farm.system.processes import Supervisor

    words: list[str] = context.meta.get(_COMMAND, [])
    with ended_in_order(), Supervisor() as supervisor, opened(config_file) as (config, store):
        if not device:
            mine = [lease.device for lease in reserved_by_me(store)]
            if len(mine) != 1:
                which = f"name one of {', '.join(mine)}" if mine else "name a device or an SoC"
                raise UsageError(f"{len(mine) or 'no'} devices are reserved for you: {which}")
            device = mine[0]
        devices = find_devices(config, store, supervisor, device)
        ttl_s = config.leases.ttl_s
        try:
            lease = acquire(store, devices, purpose=_purpose(words), wait_s=wait_s or 0.0, ttl_s=ttl_s)
            found = next(one for one in devices if one.id == lease.device)
            argv, env = shell_of(found, words)
            with _Hold(store, lease, ttl_s, found.name or found.id) as hold, _terminal_restored():
                _take_over(found)
                return hold.run(supervisor, argv, env)
        finally:
            # Not only what was returned: a signal may come in between.
            store.leases.release(_held_here(store))


class _Hold:
    """Keeps a lease alive, and ends what runs by it when that is lost."""

    def __init__(self, store: Store, lease: Lease, ttl_s: float, name: str) -> None:
        """`name` is what the device is called."""
        self._store, self._lease, self._ttl_s, self._name = store, lease, ttl_s, name
        self._over = threading.Event()
        self._lost = ""
        self._child: Child | None = None
        self._thread = threading.Thread(target=self._renew, name="lease", daemon=True)

    def run(self, supervisor: Supervisor, argv: Sequence[str], env: dict[str, str]) -> int:
        """Run a program in the foreground and return its exit code, 128 + n for signal n.

        Raises LeaseLostError, once it has ended, where somebody else may use the device.
        """
        from farm.errors import LeaseLostError

        # Ctrl-C is for what runs on the device. A handler of ours and not SIG_IGN, which the child would inherit.
        before = signal.signal(signal.SIGINT, lambda *_: None)
        try:
            self._child = supervisor.spawn(argv, name="the shell", env=env, foreground=True)
            if self._lost:
                self._end()
            code = self._child.process.wait()
        finally:
            self._end()
            signal.signal(signal.SIGINT, before)
        if self._lost:
            raise LeaseLostError(f"{self._name} {self._lost}: the shell was ended")
        return code if code >= 0 else 128 - code

    def _renew(self) -> None:
        from farm.errors import StoreError

        renewed = time.monotonic()
        while not self._over.wait(_RENEW_SECONDS):
            asked = time.monotonic()
            # A store that cannot be reached now may be in time.
            with contextlib.suppress(StoreError):
                if self._store.leases.renew([self._lease], ttl_s=self._ttl_s).lost:
                    self._lost = self._whose()
                else:
                    renewed = asked
            if time.monotonic() > renewed + self._ttl_s:
                self._lost = f"may be somebody else's, as the store did not answer for {self._ttl_s:g} s"
            if self._lost:
                self._end()
                return

    def _whose(self) -> str:
        """Return what became of a lease that was lost. Raises StoreError."""
        now = next((one for one in self._store.leases.all() if one.device == self._lease.device), None)
        if now is not None and now.token:
            return f"was given to {now.user}"
        if now is not None:
            return f"is reserved for {now.reserved_for}"
        return "was given back, and nobody has it"

    def _end(self) -> None:
        """End it with all that it started. An interactive shell is deaf to SIGTERM, and tells its jobs of SIGHUP."""
        if self._child is None:
            return
        if self._child.process.poll() is None:
            self._child.process.send_signal(signal.SIGHUP)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.process.wait(_HANGUP_SECONDS)
        self._child.terminate()

    def __enter__(self) -> _Hold:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def shell_of(device: Device, words: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Return the program, and its environment, that opens a shell on a device or runs the program `words` there.

    It gets a terminal there where there is one here: for a command, where its output goes to it as well.
    """
    from farm.devices.connect import open_transport

    terminal = sys.stdin.isatty() and (not words or sys.stdout.isatty())
    return open_transport(device).shell_argv(words, terminal=terminal)


def _take_over(device: Device) -> None:
    """End what former owners left on a device, and say so where that cannot be: a shell may be what helps."""
    from farm.devices.connect import open_transport
    from farm.errors import DeviceError
    from farm.execution.takeover import take_over

    transport = open_transport(device)
    try:
        take_over(transport, "")
    except DeviceError as error:
        notice(str(error))
    finally:
        transport.close()


def _held_here(store: Store) -> list[Lease]:
    here = (os.getpid(), socket.gethostname())
    return [lease for lease in store.leases.all() if lease.token and (lease.pid, lease.host) == here]


def _purpose(words: Sequence[str]) -> str:
    from farm.devices.text import clean_text

    # Not the arguments: everybody who shares the store reads it.
    return clean_text(shlex.join(["farm", "shell", *(["--", words[0]] if words else [])]))


@contextlib.contextmanager
def _terminal_restored() -> Iterator[None]:
    """Leave the terminal as it was: a shell that is killed cannot."""
    import termios

    if not sys.stdin.isatty():
        yield
        return
    terminal, group, modes = sys.stdin.fileno(), 0, []
    with contextlib.suppress(termios.error, OSError):
        group, modes = os.tcgetpgrp(terminal), termios.tcgetattr(terminal)
    try:
        yield
    finally:
        if modes:
            # Whoever is in the background may not do this, unless deaf to the signal.
            deaf = signal.signal(signal.SIGTTOU, signal.SIG_IGN)
            with contextlib.suppress(termios.error, OSError):
                os.tcsetpgrp(terminal, group)
                termios.tcsetattr(terminal, termios.TCSANOW, modes)
            signal.signal(signal.SIGTTOU, deaf)
