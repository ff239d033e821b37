"""Lease of a device for one command: `farm shell` and `farm devices connect`."""

from __future__ import annotations

import contextlib
import functools
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Self

import click

from farm.base.errors import DeviceError, FarmError, InfraError, LeaseLostError, StoreError, UsageError
from farm.cli.options import config_option, duration
from farm.cli.output import echo, notice, opened
from farm.report.terminal.layout import columns

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from farm.base.config.settings import Config
    from farm.base.processes import Child, Supervisor
    from farm.devices.adb.server import AdbServer
    from farm.devices.device import AdbAddress, Device
    from farm.policy.situation import Lease
    from farm.store.store import Store


# Seconds for a shell to end by itself after SIGHUP.
_HANGUP_SECONDS = 1.0
_COMMAND = "farm.cli.devices.hold"


class CommandWithWords(click.Command):
    """Command with words for another program behind `--`, which `words_of` returns."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Store the words behind `--`, and parse the others."""
        # All words behind `--` belong to the device's program, also when no device is named before.
        if "--" in args:
            ctx.meta[_COMMAND] = args[args.index("--") + 1 :]
            args = args[: args.index("--")]
        return super().parse_args(ctx, args)

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        """Return the usage line with the words at its end."""
        return [*super().collect_usage_pieces(ctx), "[-- COMMAND...]"]


def on_held_device(
    name: str, *, require: Callable[[Device], object] = lambda _: None
) -> Callable[[Callable[[Held], int]], Callable[..., int]]:
    """Make `function(held)` the command `farm NAME` on a leased device, with DEVICE, `--wait` and `--config`.

    `require` as for `device_held`.
    """

    def decorate(function: Callable[[Held], int]) -> Callable[..., int]:
        @click.argument("device", required=False, metavar="[DEVICE|SOC]")
        @click.option("--wait", "wait_s", metavar="TIME", callback=duration,
                      help="Longest wait for a device that another command uses.")  # fmt: skip
        @config_option
        @click.pass_context
        @functools.wraps(function)
        def command(context: click.Context, *, device: str, wait_s: float | None) -> int:
            words = words_of(context)
            with terminal_restored(), device_held(device, name, words, wait_s, require) as held:
                return function(held)

        return command

    return decorate


def words_of(context: click.Context) -> list[str]:
    """Return the words behind `--`."""
    words: list[str] = context.meta.get(_COMMAND, [])
    return words


@contextlib.contextmanager
def device_held(
    wanted: str | None, command: str, words: Sequence[str], wait_s: float | None, require: Callable[[Device], object]
) -> Iterator[Held]:
    """Lease a device for the body: by name or SoC, else by ANDROID_SERIAL, else the only reserved device.

    `require` raises for an unsuitable device; if several match, only suitable ones are considered. Processes and files
    of former owners are removed from the device. Raises UsageError and NoDeviceError; the body may raise
    LeaseLostError.
    """
    from farm.base.processes import Supervisor
    from farm.cli.devices.lease import acquire, ended_in_order, find_devices
    from farm.devices.adb.protocol import named_device

    with ended_in_order(), Supervisor() as supervisor, opened() as (config, store):
        # ANDROID_SERIAL, if set, names the device.
        wanted = wanted or ("" if named_device(os.environ) else _my_only(store))
        devices = _serving(find_devices(config, store, supervisor, wanted), require)
        try:
            purpose = purpose_of(command, words)
            lease = acquire(store, devices, purpose=purpose, wait_s=wait_s or 0.0, ttl_s=config.leases.ttl_s)
            found = next(one for one in devices if one.id == lease.device)
            with Held(store, lease, config, supervisor, found, words) as held:
                _take_over(found)
                yield held
        finally:
            # A signal may arrive between the grant and the assignment, so release all leases of this process.
            here = (os.getpid(), socket.gethostname())
            held_here = [one for one in store.leases.all() if one.token and (one.pid, one.host) == here]
            store.leases.release(held_here)


def _my_only(store: Store) -> str:
    """Return the id of the only device that is reserved for this user. Raises UsageError."""
    from farm.dispatch.pool.inventory import reserved_for

    mine = [lease.device for lease in reserved_for(store, store.user)]
    if len(mine) != 1:
        which = f"name one of {', '.join(mine)}" if mine else "name a device or an SoC"
        raise UsageError(f"{len(mine) or 'no'} devices are reserved for you: {which}")
    return mine[0]


def _serving(devices: Sequence[Device], require: Callable[[Device], object]) -> list[Device]:
    """Return the devices that `require` accepts. Raises its error for the first device if it accepts none."""
    serving, refusals = [], []
    for device in devices:
        try:
            require(device)
            serving.append(device)
        except FarmError as error:
            refusals.append(error)
    if not serving:
        raise refusals[0]
    return serving


class Held:
    """Leased device of this process; its lease is renewed in the background, and its program ends with the lease."""

    def __init__(
        self,
        store: Store,
        lease: Lease,
        config: Config,
        supervisor: Supervisor,
        device: Device,
        words: Sequence[str],
    ) -> None:
        """Prepare the renewal; `words` stand behind `--`."""
        self.device, self.words, self.config, self.supervisor = device, words, config, supervisor
        self.name = device.name or device.id
        """Name of the device for messages; every command accepts it."""
        self._store, self._lease, self._times = store, lease, config.leases
        self._over = threading.Event()
        self._gone = threading.Event()
        self._lost = ""
        self._child: Child | None = None
        self._thread = threading.Thread(target=self._renew, name="lease", daemon=True)

    def run(self, argv: Sequence[str], env: dict[str, str], what: str = "the shell") -> int:
        """Run a program in the foreground and return its exit code, 128 + n for signal n.

        `what` is the name of the program for messages. Raises LeaseLostError, after the program has ended, when the
        lease is lost.
        """
        with ctrl_c_left_to_child():
            try:
                self._child = self.supervisor.spawn(argv, name=what, env=env, foreground=True)
                if self._lost:
                    self._end()
                code = exit_code_of(self._child)
            finally:
                self._end()
        self._raise_if_lost(f"{what} was ended")
        return code

    def wait(self, what: str) -> None:
        """Wait until the lease is lost, and raise LeaseLostError with `what`, the state of the device afterwards."""
        self._gone.wait()
        self._raise_if_lost(what)

    def _raise_if_lost(self, what: str) -> None:
        if self._lost:
            raise LeaseLostError(f"{self.name} {self._lost}: {what}")

    def _renew(self) -> None:
        from farm.dispatch.pool.device_pool import LOOK_SECONDS

        renewed, ttl_s, heartbeat_s = time.monotonic(), self._times.ttl_s, self._times.heartbeat_s
        while not self._over.wait(LOOK_SECONDS):
            asked = time.monotonic()
            # The store may be reachable again before the lease expires.
            with contextlib.suppress(StoreError):
                if self._store.leases.renew([self._lease], ttl_s=ttl_s, heartbeat_s=heartbeat_s).lost:
                    self._lost = self._whose()
                else:
                    renewed = asked
            if time.monotonic() > renewed + ttl_s:
                self._lost = f"may have another owner, as the store did not answer for {ttl_s:g} s"
            if self._lost:
                self._gone.set()
                self._end()
                return

    def _whose(self) -> str:
        """Return the reason for the loss of the lease. Raises StoreError."""
        from farm.dispatch.pool.inventory import clock_time

        now = next((one for one in self._store.leases.all() if one.device == self._lease.device), None)
        if now is not None and now.token:
            return f"was given to {now.user}"
        if now is not None:
            return f"is reserved for {now.reserved_for} until {clock_time(now.reserved_until_ms)}"
        return "was released and is free"

    def _end(self) -> None:
        """End the program and its children. SIGHUP first: interactive shells ignore SIGTERM and forward SIGHUP."""
        if self._child is None:
            return
        if self._child.process.poll() is None:
            self._child.process.send_signal(signal.SIGHUP)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.process.wait(_HANGUP_SECONDS)
        self._child.terminate()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


@contextlib.contextmanager
def ctrl_c_left_to_child() -> Iterator[None]:
    """Leave Ctrl-C to the program in the foreground while the body runs it."""
    # A handler of ours and not SIG_IGN, which the child would inherit.
    before = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def exit_code_of(child: Child) -> int:
    """Wait for the end of a child, and return its exit code, 128 + n for signal n."""
    code = child.process.wait()
    return code if code >= 0 else 128 - code


def _take_over(device: Device) -> None:
    """End processes of former owners on a device; a failure is only reported, since a shell may help to repair it."""
    from farm.devices.connect import open_transport
    from farm.devices.execution.liveness import take_over

    with contextlib.closing(open_transport(device)) as transport:
        try:
            take_over(transport, "")
        except DeviceError as error:
            notice(str(error))


def purpose_of(command: str, words: Sequence[str]) -> str:
    """Return the purpose of a lease for `farm COMMAND -- WORDS`, which all users of the store can read."""
    from farm.base.text import clean_text

    # Arguments may be secrets, so only the first word is recorded.
    return clean_text(shlex.join(["farm", *command.split(), *(["--", words[0]] if words else [])]))


@contextlib.contextmanager
def terminal_restored() -> Iterator[None]:
    """Restore the state of the terminal after the body, since a killed program cannot."""
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
            # A background process may change the terminal only while it ignores SIGTTOU.
            before = signal.signal(signal.SIGTTOU, signal.SIG_IGN)
            with contextlib.suppress(termios.error, OSError):
                os.tcsetpgrp(terminal, group)
                termios.tcsetattr(terminal, termios.TCSANOW, modes)
            signal.signal(signal.SIGTTOU, before)


@click.command("shell", cls=CommandWithWords)
@on_held_device("shell")
def shell_command(held: Held) -> int:
    """Open a shell on a device, or run COMMAND there, leased meanwhile.

    Without a name, it is the device that is reserved for you. COMMAND is a
    program and its arguments; for pipes and the like, sh -c '...'. The exit
    code is the exit code of the shell or of COMMAND.
    """
    argv, env = shell_of(held.device, held.words)
    return held.run(argv, env)


def shell_of(device: Device, words: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Return the program, and its environment, that opens a shell on a device or runs the program `words` there.

    The shell gets a terminal if standard input is one; a command, if standard output is one as well.
    """
    from farm.devices.connect import open_transport

    terminal = sys.stdin.isatty() and (not words or sys.stdout.isatty())
    return open_transport(device).shell_argv(words, terminal=terminal)


# `farm devices connect`: a leased device under the user's own adb.


_LOOK_SECONDS = 1.0
_READY_SECONDS = 30.0
# State of the device after a lost lease: True if it belongs to the user's adb server, False if it was attached there.
_AFTER = {True: "it stays on your adb server, and is not yours to use", False: "it was detached from your adb"}


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


@click.command("connect", cls=CommandWithWords)
@on_held_device("devices connect", require=adb_address)
def connect_command(held: Held) -> int:
    """Bring a device under your own adb, until Ctrl-C or as long as COMMAND runs.

    \b
    farm devices connect pixel              for adb, scrcpy, Android Studio
    farm devices connect pixel -- adb logcat -d
    farm devices connect pixel -- ./gradlew connectedCheck
    farm devices connect pixel -- sh -c 'python x.py --device $ANDROID_SERIAL'

    The device is leased meanwhile. It may be attached to another machine or
    another adb server: your own adb server shows it, alone, as 127.0.0.1:PORT.
    COMMAND finds it by ANDROID_SERIAL, and its exit code is handed on. When
    the lease is lost, the device is detached and the exit code is 4.
    """
    from farm.devices.adb.protocol import environment_with
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
    echo("\n".join(columns(hints, indent="  ")))


@contextlib.contextmanager
def _under(server: AdbServer, held: Held) -> Iterator[str]:
    """Attach the device to the user's own adb server for the body, and yield its name there. Raises InfraError."""
    from farm.devices.adb.host import AdbHost
    from farm.devices.adb.protocol import adb_target
    from farm.devices.device import LOOPBACK
    from farm.devices.virtual.relay import Relay

    device, address = held.device, adb_address(held.device)
    if _hangs_on(server, held):
        yield address.attached_at or address.name or adb_target(device.serial)
        return
    if server.host != LOOPBACK:
        raise UsageError(
            f"{held.name} is attached to another adb server; yours is on {server.place} and cannot attach devices "
            "of another server: unset the variable that names it"
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
