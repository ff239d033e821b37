"""Variables of adb: farm looks for a server where adb looks for it, or refuses a value in one line."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace
from ordinary_server import kill_server, ordinary_adb_server
from stub_home import make_stub_home, write_stub_suite
from waiting import free_port

from farm.base.config.settings import load_config
from farm.base.errors import NoDeviceError, UsageError
from farm.base.processes import Supervisor
from farm.devices.adb.host import AdbHost
from farm.devices.adb.names import environment_with
from farm.devices.adb.server import AdbServer, find_adb, ordinary_server, server_place
from farm.devices.adb.transport import AdbTransport
from farm.devices.device import LOOPBACK, AdbAddress
from farm.devices.discovery import Scan, scan_all
from farm.dispatch.cluster.client.devices import pinned
from farm.dispatch.pool.fleet import Choice, choose, narrowed
from farm.dispatch.request.request import RunRequest

if TYPE_CHECKING:
    from conftest import Bench

NAMES = ("ADB_SERVER_SOCKET", "ANDROID_ADB_SERVER_ADDRESS", "ANDROID_ADB_SERVER_PORT", "ANDROID_SERIAL")


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Set variables of adb, and no other."""

    def named(**variables: str) -> None:
        for name in NAMES:
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return named


def variables(socket: str | None = None, host: str | None = None, port: str | None = None) -> dict[str, str]:
    values = dict(zip(NAMES, (socket, host, port), strict=False))
    return {name: value for name, value in values.items() if value is not None}


def test_the_server_is_where_adb_looks_for_it(named: Callable[..., None]) -> None:
    for words, place in (
        (variables(), (LOOPBACK, 5037, True)),
        (variables(port=""), (LOOPBACK, 5037, True)),
        (variables(port=" 45985"), (LOOPBACK, 45985, True)),
        (variables(port="0x1234"), (LOOPBACK, 4660, True)),
        (variables(host="localhost"), (LOOPBACK, 5037, True)),
        # adb starts a server at `localhost` alone.
        (variables(host="127.0.0.1"), (LOOPBACK, 5037, False)),
        (variables(host="10.0.0.7", port="5038"), ("10.0.0.7", 5038, False)),
        (variables(host="[fe80::1]"), ("fe80::1", 5037, False)),
        (variables("tcp:localhost:5999"), (LOOPBACK, 5999, True)),
        (variables("tcp:localhost"), (LOOPBACK, 5037, True)),
        (variables("tcp:host.docker.internal:5037"), ("host.docker.internal", 5037, False)),
        (variables("tcp:[::1]:5999"), ("::1", 5999, False)),
        # This variable wins over the two others.
        (variables("tcp:5999", host="10.0.0.7"), (LOOPBACK, 5999, True)),
    ):
        assert server_place(words)[:3] == place
        named(**words)
        assert (ordinary_server().host, ordinary_server().port) == place[:2]
    server = AdbServer(5037, find_adb(), host="fe80::1")
    assert server.environment() == {"ANDROID_ADB_SERVER_PORT": "5037", "ANDROID_ADB_SERVER_ADDRESS": "[fe80::1]"}


def test_what_farm_cannot_follow_is_refused_in_one_line(named: Callable[..., None]) -> None:
    for words, problem in (
        (variables(""), "ADB_SERVER_SOCKET is '', and farm reaches adb servers over TCP alone"),
        (variables("localfilesystem:/run/adb"), "over TCP alone: expected tcp:PORT or tcp:HOST:PORT"),
        (variables("tcp:host:70000"), "ADB_SERVER_SOCKET is '70000', expected a port number"),
        (variables("tcp:::1:5037"), "an IPv6 address in brackets"),
        (variables("tcp:-oProxy:5037"), "expected tcp:PORT or tcp:HOST:PORT"),
        (variables(host=""), "ANDROID_ADB_SERVER_ADDRESS is '', expected a host"),
        (variables(host="::1"), "an IPv6 address in brackets"),
        (variables(host="host:5037"), "expected a host"),
        (variables(port="many"), "ANDROID_ADB_SERVER_PORT is 'many', expected a port number"),
        (variables(port="0"), "expected a port number from 1 to 65535"),
        (variables(port="9" * 5000), "expected a port number"),
    ):
        named(**words)
        with pytest.raises(UsageError) as refused:
            ordinary_server(start=True)
        assert problem in str(refused.value)
        assert str(refused.value).isprintable()
        assert refused.value.exit_code == 2


@pytest.fixture
def scanned(tmp_path: Path, named: Callable[..., None]) -> Callable[..., Scan]:
    """Return the devices at the user's adb server, which variables name, and perhaps a device of it."""
    (tmp_path / "farm.toml").write_text("")

    def scanned(**words: str) -> Scan:
        named(**words)
        with Supervisor() as supervisor:
            return scan_all(load_config(tmp_path / "farm.toml"), supervisor)

    return scanned


def test_a_named_server_is_used_and_none_is_started_beside_it(bench: Bench, scanned: Callable[..., Scan]) -> None:
    beside, port = str(free_port()), bench.server.port
    for words in (
        variables(f"tcp:127.0.0.1:{port}", port=beside),
        variables(f"tcp:{port}", port=beside),
        variables(host=LOOPBACK, port=str(port)),
    ):
        assert {one.serial for one in scanned(**words).devices} == {one.serial for one in bench.devices}
    assert not AdbHost(int(beside)).listens()


def test_a_server_on_another_host_that_does_not_answer_is_named_and_not_replaced(scanned: Callable[..., Scan]) -> None:
    port, beside = free_port(), free_port()
    for words in (variables(f"tcp:127.0.0.2:{port}", port=str(beside)), variables(host="127.0.0.2", port=str(port))):
        assert [one.reason for one in scanned(**words).unusable] == [
            f"no adb server listens on 127.0.0.2:{port}, which {next(iter(words))} names: start one there, or unset it"
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
    transport = AdbTransport(bench.devices[0].serial, AdbAddress(bench.server.port))
    argv, environment = transport.shell_argv(["getprop", "ro.soc.model"], terminal=False)
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "SM8650")
    environment = environment_with(transport.tool_environment())
    argv = [str(find_adb()), "shell", "getprop", "ro.soc.model"]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "SM8650")


def test_android_serial_names_the_device_that_adb_takes(bench: Bench, scanned: Callable[..., Scan]) -> None:
    def found(serial: str) -> Scan:
        return scanned(ANDROID_ADB_SERVER_PORT=str(bench.server.port), ANDROID_SERIAL=serial)

    first, second = bench.devices[:2]
    address = first.address.attached_at
    for serial in (address, f"product:{first.serial}", first.serial, f"tcp:{address}"):
        narrow = narrowed(found(serial), ())
        assert [one.serial for one in narrow.devices] == [first.serial], serial
        assert {one.serial for one in bench.devices} - {first.serial} == {one.serial for one in narrow.unusable}
        devices, refused = choose(narrow, {}, [first.soc], Choice())
        assert [one.serial for one in devices] == [first.serial]
        assert f"{second.serial} (left out: ANDROID_SERIAL names {serial})" in refused
    # A name on the command line wins, as with `adb -s`; an empty value names none, as for adb.
    assert narrowed(found(address), [second.id]).devices == narrowed(found(""), ()).devices
    assert len(found("").devices) == len(bench.devices)
    for serial, why in (
        ("zz", "device 'zz' not found"),
        ("127.0.0.1", "more than one device with serial 127.0.0.1"),
        ("\x1b[2Jzz", "not found"),
    ):
        scan = found(serial)
        with pytest.raises(NoDeviceError, match=why) as refused:
            narrowed(scan, ())
        assert "attach it, unset ANDROID_SERIAL, or name another with --device" in str(refused.value)
        assert str(refused.value).isprintable()
        assert scan.narrowed.devices == ()


def test_commands_use_the_device_of_android_serial(bench: Bench, tmp_path: Path) -> None:
    """Each of them would take another device, or ask for a name."""
    home = make_stub_home(tmp_path / "stub")
    write_stub_suite(home, "mine", {"only": 20})
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
    for words in (("shell", "--", "true"), ("devices", "check"), ("run", "--soc", "SM8650", "--suite", "./mine")):
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
