"""Variables of adb: farm looks for a server where adb looks for it, or refuses a value in one line."""

from __future__ import annotations

import json
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from farm_home import FarmHome
from msgspec.structs import replace
from ordinary_server import kill_server, ordinary_adb_server

from farm.base.config.settings import load_config
from farm.base.errors import NoDeviceError, UsageError
from farm.base.processes import Supervisor
from farm.devices.adb.host import AdbHost
from farm.devices.adb.names import environment_with
from farm.devices.adb.server import AdbServer, find_adb, ordinary_server, server_place
from farm.devices.adb.transport import AdbTransport
from farm.devices.device import LOOPBACK
from farm.devices.discovery import Scan, scan_all
from farm.dispatch.cluster.client.devices import pinned
from farm.dispatch.pool.fleet import Choice, choose, narrowed
from farm.dispatch.request.request import RunRequest

if TYPE_CHECKING:
    from conftest import Bench

NAMES = ("ADB_SERVER_SOCKET", "ANDROID_ADB_SERVER_ADDRESS", "ANDROID_ADB_SERVER_PORT", "ANDROID_SERIAL")


def free_port() -> int:
    with socket.socket() as free:
        free.bind((LOOPBACK, 0))
        return int(free.getsockname()[1])


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Set variables of adb, and no other."""

    def named(**variables: str) -> None:
        for name in NAMES:
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return named


def socket_variable(value: str) -> dict[str, str]:
    return {"ADB_SERVER_SOCKET": value}


PLACES = [
    ({}, LOOPBACK, 5037, True),
    ({"ANDROID_ADB_SERVER_PORT": ""}, LOOPBACK, 5037, True),
    ({"ANDROID_ADB_SERVER_PORT": " 45985"}, LOOPBACK, 45985, True),
    ({"ANDROID_ADB_SERVER_PORT": "0x1234"}, LOOPBACK, 4660, True),
    ({"ANDROID_ADB_SERVER_ADDRESS": "localhost"}, LOOPBACK, 5037, True),
    # adb starts a server at `localhost` alone.
    ({"ANDROID_ADB_SERVER_ADDRESS": "127.0.0.1"}, LOOPBACK, 5037, False),
    ({"ANDROID_ADB_SERVER_ADDRESS": "10.0.0.7", "ANDROID_ADB_SERVER_PORT": "5038"}, "10.0.0.7", 5038, False),
    ({"ANDROID_ADB_SERVER_ADDRESS": "[fe80::1]"}, "fe80::1", 5037, False),
    (socket_variable("tcp:5999"), LOOPBACK, 5999, True),
    (socket_variable("tcp:localhost:5999"), LOOPBACK, 5999, True),
    (socket_variable("tcp:localhost"), LOOPBACK, 5037, True),
    (socket_variable("tcp:host.docker.internal:5037"), "host.docker.internal", 5037, False),
    (socket_variable("tcp:[::1]:5999"), "::1", 5999, False),
    # This variable wins over the two others.
    ({**socket_variable("tcp:5999"), "ANDROID_ADB_SERVER_ADDRESS": "10.0.0.7"}, LOOPBACK, 5999, True),
]

REFUSED = [
    (socket_variable(""), "ADB_SERVER_SOCKET is '', and farm reaches adb servers over TCP alone"),
    (socket_variable("5999"), "ADB_SERVER_SOCKET is '5999'"),
    (socket_variable("localfilesystem:/run/adb"), "over TCP alone: expected tcp:PORT or tcp:HOST:PORT"),
    (socket_variable("localabstract:adb"), "over TCP alone"),
    (socket_variable("tcp:host:70000"), "ADB_SERVER_SOCKET is '70000', expected a port number"),
    (socket_variable("tcp:::1:5037"), "an IPv6 address in brackets"),
    (socket_variable("tcp:-oProxy:5037"), "expected tcp:PORT or tcp:HOST:PORT"),
    ({"ANDROID_ADB_SERVER_ADDRESS": ""}, "ANDROID_ADB_SERVER_ADDRESS is '', expected a host"),
    ({"ANDROID_ADB_SERVER_ADDRESS": "::1"}, "an IPv6 address in brackets"),
    ({"ANDROID_ADB_SERVER_ADDRESS": "host:5037"}, "expected a host"),
    ({"ANDROID_ADB_SERVER_PORT": "many"}, "ANDROID_ADB_SERVER_PORT is 'many', expected a port number"),
    ({"ANDROID_ADB_SERVER_PORT": "0"}, "expected a port number from 1 to 65535"),
    ({"ANDROID_ADB_SERVER_PORT": "9" * 5000}, "expected a port number"),
]


@pytest.mark.parametrize(("variables", "host", "port", "startable"), PLACES)
def test_the_server_is_where_adb_looks_for_it(
    variables: dict[str, str], host: str, port: int, startable: bool, named: Callable[..., None]
) -> None:
    assert server_place(variables)[:3] == (host, port, startable)
    named(**variables)
    server = ordinary_server()
    assert (server.host, server.port) == (host, port)


@pytest.mark.parametrize(("variables", "problem"), REFUSED)
def test_what_farm_cannot_follow_is_refused_in_one_line(
    variables: dict[str, str], problem: str, named: Callable[..., None]
) -> None:
    named(**variables)
    with pytest.raises(UsageError) as refused:
        ordinary_server(start=True)
    assert problem in str(refused.value)
    assert str(refused.value).isprintable()
    assert refused.value.exit_code == 2


def test_a_named_server_is_used_and_none_is_started_beside_it(
    bench: Bench, tmp_path: Path, named: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    beside = free_port()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "farm.toml").write_text("")
    for variables in (
        {"ADB_SERVER_SOCKET": f"tcp:127.0.0.1:{bench.server.port}", "ANDROID_ADB_SERVER_PORT": str(beside)},
        {"ADB_SERVER_SOCKET": f"tcp:{bench.server.port}", "ANDROID_ADB_SERVER_PORT": str(beside)},
        {"ANDROID_ADB_SERVER_ADDRESS": LOOPBACK, "ANDROID_ADB_SERVER_PORT": str(bench.server.port)},
    ):
        named(**variables)
        with Supervisor() as supervisor:
            found = scan_all(load_config(tmp_path / "farm.toml"), supervisor)
        assert {one.serial for one in found.devices} == {one.serial for one in bench.devices}
    assert not AdbHost(beside).listens()


@pytest.mark.parametrize("variable", ["ADB_SERVER_SOCKET", "ANDROID_ADB_SERVER_ADDRESS"])
def test_a_server_on_another_host_that_does_not_answer_is_named_and_not_replaced(
    tmp_path: Path, named: Callable[..., None], variable: str
) -> None:
    port, beside = free_port(), free_port()
    values = {
        "ADB_SERVER_SOCKET": {"ADB_SERVER_SOCKET": f"tcp:127.0.0.2:{port}", "ANDROID_ADB_SERVER_PORT": str(beside)},
        "ANDROID_ADB_SERVER_ADDRESS": {"ANDROID_ADB_SERVER_ADDRESS": "127.0.0.2", "ANDROID_ADB_SERVER_PORT": str(port)},
    }
    named(**values[variable])
    (tmp_path / "farm.toml").write_text("")
    with Supervisor() as supervisor:
        found = scan_all(load_config(tmp_path / "farm.toml"), supervisor)
    assert [one.reason for one in found.unusable] == [
        f"no adb server listens on 127.0.0.2:{port}, which {variable} names: start one there, or unset it"
    ]
    assert not any(AdbHost(one).listens() for one in (port, beside))


def test_a_server_is_started_where_adb_would_start_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ordinary_adb_server(tmp_path) as server:
        kill_server(server.port)
        beside = free_port()
        # Undone before the server's own variables are.
        with monkeypatch.context() as patch:
            patch.setenv("ANDROID_ADB_SERVER_PORT", str(beside))
            patch.setenv("ADB_SERVER_SOCKET", f"tcp:localhost:{server.port}")
            patch.setenv("ANDROID_ADB_SERVER_ADDRESS", "127.0.0.2")
            started = ordinary_server(start=True)
            assert (started.port, started.answers()) == (server.port, True)
            assert not AdbHost(beside).listens()


def test_variables_for_the_server_reach_one_that_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {"ADB_LOCAL_TRANSPORT_MAX_PORT": "5555", "ADB_VENDOR_KEYS": str(tmp_path), "ADB_LIBUSB": "0"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with ordinary_adb_server(tmp_path) as server:
        line = f"-L\0tcp:{server.port}\0".encode()
        [environment] = [
            (process / "environ").read_bytes().split(b"\0")
            for process in Path("/proc").iterdir()
            if process.name.isdecimal() and line in read(process / "cmdline")
        ]
        assert {f"{name}={value}".encode() for name, value in variables.items()} <= set(environment)


def read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def test_programs_that_call_adb_reach_the_server_of_their_device(bench: Bench, named: Callable[..., None]) -> None:
    """The user's variables name other servers and another device: each would win over what farm sets."""
    named(ADB_SERVER_SOCKET="tcp:127.0.0.1:1", ANDROID_ADB_SERVER_ADDRESS="127.0.0.2", ANDROID_SERIAL="other")
    transport = AdbTransport(bench.devices[0].serial, bench.server.port)
    argv, environment = transport.shell_argv(["getprop", "ro.soc.model"], terminal=False)
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "SM8650")
    environment = environment_with(transport.tool_environment())
    argv = [str(find_adb()), "shell", "getprop", "ro.soc.model"]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "SM8650")


def test_the_environment_of_a_server_on_another_host_names_it() -> None:
    server = AdbServer(5037, find_adb(), host="fe80::1")
    assert server.environment() == {"ANDROID_ADB_SERVER_PORT": "5037", "ANDROID_ADB_SERVER_ADDRESS": "[fe80::1]"}
    assert server.place == "[fe80::1]:5037"


@pytest.fixture
def scanned(bench: Bench, tmp_path: Path, named: Callable[..., None]) -> Callable[[str], Scan]:
    """Return the devices at the user's adb server, where ANDROID_SERIAL names a device of it."""
    (tmp_path / "farm.toml").write_text("")

    def scanned(serial: str) -> Scan:
        named(ANDROID_ADB_SERVER_PORT=str(bench.server.port), ANDROID_SERIAL=serial)
        with Supervisor() as supervisor:
            return scan_all(load_config(tmp_path / "farm.toml"), supervisor)

    return scanned


def test_android_serial_names_the_device_that_adb_takes(bench: Bench, scanned: Callable[[str], Scan]) -> None:
    first, second = bench.devices[:2]
    address = first.address.attached_at
    for serial in (address, f"product:{first.serial}", first.serial, f"tcp:{address}"):
        narrow = narrowed(scanned(serial), ())
        assert [one.serial for one in narrow.devices] == [first.serial], serial
        assert {one.serial for one in bench.devices} - {first.serial} == {one.serial for one in narrow.unusable}
        devices, refused = choose(narrow, {}, [first.soc], Choice())
        assert [one.serial for one in devices] == [first.serial]
        assert f"{second.serial} (left out: ANDROID_SERIAL names {serial})" in refused
    # A name on the command line wins, as with `adb -s`; an empty value names none, as for adb.
    assert narrowed(scanned(address), [second.id]).devices == narrowed(scanned(""), ()).devices
    assert len(scanned("").devices) == len(bench.devices)


@pytest.mark.parametrize(
    ("serial", "why"),
    [
        ("zz", "device 'zz' not found"),
        ("127.0.0.1", "more than one device with serial 127.0.0.1"),
        ("\x1b[2Jzz", "not found"),
    ],
)
def test_android_serial_of_no_device_is_refused_in_one_line(
    scanned: Callable[[str], Scan], serial: str, why: str
) -> None:
    scan = scanned(serial)
    with pytest.raises(NoDeviceError) as refused:
        narrowed(scan, ())
    assert why in str(refused.value)
    assert "attach it, unset ANDROID_SERIAL, or name another with --device" in str(refused.value)
    assert str(refused.value).isprintable()
    assert scan.narrowed.devices == ()


def test_commands_use_the_device_of_android_serial(bench: Bench, home: FarmHome) -> None:
    """Each of them would take another device, or ask for a name."""
    first, second = bench.devices[:2]
    adb = {"ANDROID_ADB_SERVER_PORT": str(bench.server.port)}
    chosen = {**adb, "ANDROID_SERIAL": second.address.attached_at}
    done = home.farm("shell", "--", "getprop", "ro.product.name", env=chosen)
    assert (done.returncode, done.stdout.strip()) == (0, second.serial), done.stderr
    done = home.farm("lease", second.soc, "--json", env=chosen)
    assert json.loads(done.stdout)["device"]["serial"] == second.serial
    # The other device stays free.
    assert "yours already" in home.farm("lease", second.soc, "--no-wait", env=chosen, code=4).stderr
    assert home.farm("lease", first.serial, env=chosen).returncode == 0
    for words in (("shell", "--", "true"), ("devices", "check"), ("run", "--soc", "SM8650", "--suite", "smoke")):
        done = home.farm(*words, env={**adb, "ANDROID_SERIAL": "zz"}, code=4)
        assert "ANDROID_SERIAL names zz, and device 'zz' not found" in done.stderr
        assert len(done.stderr.splitlines()) == 1, done.stderr


def test_a_submitted_run_is_for_the_device_of_android_serial(named: Callable[..., None]) -> None:
    request = RunRequest(socs=("SM8650",), suites=("smoke",), choice=Choice(labels=("lab",)))
    named(ANDROID_SERIAL="desk")
    assert pinned(request).choice == Choice(("desk",), ("lab",))
    chosen = replace(request, choice=Choice(("shelf",)))
    assert pinned(chosen) == chosen
    named(ANDROID_SERIAL="")
    assert pinned(request) == request
