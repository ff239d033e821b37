"""Discovery of devices, also of rented ones."""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from socketserver import BaseRequestHandler
from typing import Any

import msgspec
import pytest
from attached import Attached, Rack, attach
from farm_home import FarmHome
from networks import serving
from processors import of_an_arm
from ssh_server import SshServer, running
from waiting import until

from farm.base.config.settings import load_config
from farm.base.errors import DeviceError, UsageError
from farm.base.processes import Supervisor
from farm.base.socs import find_soc
from farm.builds.runtime.runtime import virtual_runtime
from farm.devices.adb.host import parse_listing
from farm.devices.adb.transport import AdbTransport
from farm.devices.connect import open_transport
from farm.devices.device import AdbAddress, Device, Event, Health, HealthMark, next_health
from farm.devices.discovery import _joined, scan, scan_all
from farm.devices.facts import identify
from farm.devices.hosts import remove_rented
from farm.dispatch.device_run.device_run import DeviceRun
from farm.policy.waits import UNKNOWN_SECONDS, fits

# Discovery of attached devices: names of adb, joined addresses, hostile properties.


@pytest.fixture
def properties(bench: Rack) -> Iterator[Path]:
    path = bench.root / "virtual-SM8750-0/system/build.prop"
    before = path.read_text()
    yield path
    path.write_text(before)


def test_what_a_device_says_is_bounded_and_cleaned(bench: Rack, properties: Path) -> None:
    properties.write_bytes(
        b"ro.soc.model=sm8750-ab\n"
        b"ro.build.fingerprint=\x1b[31mred\x07\xff\xe2\x80\xae" + b"x" * 5000 + b"\nro.product.model=<script>\n"
    )
    with of_an_arm(bench.root / "virtual-SM8750-0/system/bin"):
        device = identify("virtual-SM8750-0", AdbAddress(bench.server.port))
    assert (device.soc, device.soc_reported) == ("SM8750", "sm8750-ab")
    assert device.kind == "hardware"
    assert len(device.build) == 200
    assert device.build.isprintable()
    assert device.product == "<script>"


@pytest.mark.parametrize("message", [b"", b"ro.soc.model=../../etc/passwd\n"])
def test_a_device_that_names_no_soc_cannot_be_used(bench: Rack, properties: Path, message: bytes) -> None:
    properties.write_bytes(message)
    found = scan(bench.server.port)
    assert [device.serial for device in found.devices] == ["virtual-SM8650-0"]
    assert [(one.serial, one.state) for one in found.unusable] == [("virtual-SM8750-0", "device")]
    assert "does not report its SoC" in found.unusable[0].reason


def test_an_endless_answer_is_an_error(bench: Rack, properties: Path) -> None:
    properties.write_bytes(b"ro.soc.model=" + b"x" * 100_000 + b"\n")
    with pytest.raises(DeviceError, match="more than"):
        identify("virtual-SM8750-0", AdbAddress(bench.server.port))


TLS = "adb-2233fd19-9mU6UL (2)._adb-tls-connect._tcp"


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("R5CT10ABCDE            device usb:1-1 product:kalama model:X transport_id:1", ("R5CT10ABCDE", "device")),
        ("0a388e93               unauthorized usb:1-2 transport_id:2", ("0a388e93", "unauthorized")),
        ("R5CT                   warming usb:1-1 transport_id:7", ("R5CT", "warming")),
        ("????????????           no permissions (user in plugdev group); see [http://a]",
         ("????????????", "no permissions")),
        ("127.0.0.1:40001 device product:virtual-SM8650-0 transport_id:4", ("virtual-SM8650-0", "device")),
        ("127.0.0.1:40002 device product:virtual-$(reboot) transport_id:5", ("127.0.0.1:40002", "device")),
        # The text before the state is the name.
        (f"{TLS} device product:kalama model:X device:y transport_id:1", (TLS, "device")),
        (f"{TLS} offline transport_id:1", (TLS, "offline")),
        ("offline box (2)    device usb:1-1 product:a model:b transport_id:4", ("offline box (2)", "device")),
        ("two  blanks  detached transport_id:5", ("two  blanks", "detached")),
    ],
)  # fmt: skip
def test_a_line_of_adbs_listing_names_a_device_and_its_state(line: str, found: tuple[str, str]) -> None:
    [one] = parse_listing(f"{line}\n")
    assert (one[0], one.state, one.adb_name) == (*found, found[0] if "virtual-S" not in line else "127.0.0.1:40001")


def phone(name: str, boot_id: str, attached_at: str = "") -> Device:
    address = AdbAddress(5037, attached_at=attached_at, name=name)
    return Device("2233fd19", "SM8650", "hardware", "b", address, "p", serialno="2233fd19", boot_id=boot_id)


@pytest.mark.parametrize("other", [phone(TLS, "a"), phone("10.0.0.7:5555", "a", "10.0.0.7:5555")])
def test_the_cable_comes_first_and_the_other_address_is_kept(other: Device) -> None:
    cable = phone("2233fd19", "a")
    for first, second in ((cable, other), (other, cable)):
        one = _joined(first, second)
        assert one is not None
        assert isinstance(one.address, AdbAddress)
        assert (one.id, one.address.name) == ("2233fd19", "2233fd19")
        assert one.address.also == (other.address,)
        assert {"2233fd19", other.address.name} <= one.known_as  # type: ignore[attr-defined]


@pytest.mark.parametrize("boot_id", ["b", ""])
def test_two_boards_with_one_serial_are_not_one_device(boot_id: str) -> None:
    assert _joined(phone("2233fd19", boot_id and "a"), phone("10.0.0.7:5555", boot_id, "10.0.0.7:5555")) is None


def test_a_device_under_two_addresses_is_one_and_is_reached_by_the_other(bench: Rack) -> None:
    near = bench.server.network_address("virtual-SM8650-0")
    second = near.replace("127.0.0.1", "localhost")
    bench.server.query(f"host:connect:{second}")
    bench.server.wait_for(second)
    try:
        with pytest.MonkeyPatch.context() as patch, Supervisor() as supervisor:
            patch.setenv("ANDROID_ADB_SERVER_PORT", str(bench.server.port))
            (bench.root / "none.toml").write_text("")
            scan = scan_all(load_config(bench.root / "none.toml"), supervisor)
        assert scan.unusable == ()
        found = scan.devices
        assert [one.serial for one in found] == ["virtual-SM8650-0", "virtual-SM8750-0"]
        device = found[0]
        assert {near, second} <= device.known_as
        bench.server.query(f"host:disconnect:{device.address.name}")  # type: ignore[attr-defined]
        with contextlib.closing(open_transport(device)) as transport:
            assert transport.run(["echo", "hi"], timeout_s=20).stdout == b"hi\n"
    finally:
        bench.server.query(f"host:disconnect:{second}")
        bench.server.query(f"host:connect:{near}")
        bench.server.wait_for(near)


@pytest.mark.parametrize("message", ["2233fd19", "0123456789ABCDEF"])
def test_a_phone_is_known_by_its_serial_and_not_by_adbs_name(bench: Rack, properties: Path, message: str) -> None:
    properties.write_text(f"ro.soc.model=SM8750\nro.serialno={message}\n")
    with of_an_arm(bench.root / "virtual-SM8750-0/system/bin"):
        near = bench.server.network_address("virtual-SM8750-0")
        device = identify(near, AdbAddress(bench.server.port, attached_at=near, name=near))
    assert device.serial == ("2233fd19" if message == "2233fd19" else near)


# Proxy in front of a real adb server with the services of a poor one, as a vendor's bridge to rented devices.


REFUSED = (b"host:host-features", b"host:features", b"host:track-devices", b"reboot:")


class PoorAdbProxy:
    """Listens on loopback at `port`; refuses REFUSED anywhere in a request, and delays the first stream."""

    def __init__(self, server_port: int, first_stream_s: float = 8.0) -> None:
        self.server_port, self.delay_s = server_port, first_stream_s
        self.requests: list[bytes] = []
        self.connections: list[socket.socket] = []
        self._serving = contextlib.ExitStack()
        self.port = self._serving.enter_context(serving(type("Carrier", (_Carrier,), {"proxy": self})))

    def close(self) -> None:
        """End the proxy and every connection, as at the end of a rented session."""
        self._serving.close()
        for one in self.connections:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


class _Carrier(BaseRequestHandler):
    proxy: PoorAdbProxy

    def handle(self) -> None:
        client = self.request
        with socket.create_connection(("127.0.0.1", self.proxy.server_port)) as server:
            self.proxy.connections += [client, server]
            while True:
                size = client.recv(4, socket.MSG_WAITALL)
                if not size:
                    return
                request = client.recv(int(size, 16), socket.MSG_WAITALL)
                self.proxy.requests.append(request)
                if any(one in request for one in REFUSED):
                    reason = b"unknown host service"
                    client.sendall(b"FAIL%04x%s" % (len(reason), reason))
                    return
                is_transport = request.startswith(b"host:transport")
                if not is_transport and not request.startswith(b"host"):
                    # A service of a device: its stream is passed on as it is.
                    delay_s, self.proxy.delay_s = self.proxy.delay_s, 0.0
                    time.sleep(delay_s)
                server.sendall(size + request)
                if is_transport:
                    client.sendall(server.recv(4, socket.MSG_WAITALL))
                    continue
                back = threading.Thread(target=_copy, args=(server, client), daemon=True)
                back.start()
                _copy(client, server)
                back.join()
                return


def _copy(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)


# Rented devices: hosts with an end time behind a real sshd that only forwards, and behind a poor adb server.


FORWARD_ONLY = ("PermitTTY no", "AllowTcpForwarding local", "X11Forwarding no", "AllowAgentForwarding no")
SERIAL = "virtual-SM8650-0"


@pytest.fixture(scope="module")
def rack(farm_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attached]:
    """A device behind an adb server that no command asks by itself."""
    folder = tmp_path_factory.mktemp("rack")
    with attach(FarmHome(farm_cache, folder / "state", folder), folder, ["SM8650"]) as attached:
        yield attached


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshServer]:
    """An account that may forward and nothing else."""
    folder = tmp_path_factory.mktemp("gateway") / "sshd"
    with running(SshServer, folder, sftp="", force="/bin/false", options=FORWARD_ONLY) as server:
        yield server


@pytest.fixture
def farm(home: FarmHome) -> Iterator[FarmHome]:
    yield home
    for host in home.json("devices", "host", "list")["hosts"]:
        home.farm("devices", "host", "remove", host["name"], "--yes", code=0)


def add(farm: FarmHome, *words: str, until: str = "2h", code: int = 0) -> subprocess.CompletedProcess[str]:
    """Add the rented host `qdc`."""
    return farm.farm("devices", "host", "add", "qdc", "--until", until, *words, code=code)


def login(gateway: SshServer) -> list[str]:
    words = ["--ssh", f"{getpass.getuser()}@127.0.0.1:{gateway.port}"]
    return [*words, "--key-file", f"{gateway.folder}/user_key", "--known-hosts", str(gateway.known_hosts)]


def serials(farm: FarmHome) -> list[str]:
    return [one["serial"] for one in farm.json("devices", "list")["devices"] if one["state"] == "ready"]


def jobs_of(farm: FarmHome, name: str) -> list[dict[str, Any]]:
    """Return the jobs of a run, also of a run that has not begun or ended."""
    done = farm.farm("report", name, "--json")
    return list(json.loads(done.stdout)["jobs"]) if done.stdout else []


def test_an_account_that_only_forwards_leads_to_a_device_until_the_host_is_removed(
    farm: FarmHome, rack: Attached, gateway: SshServer
) -> None:
    done = add(farm, *login(gateway), "--adb", f"127.0.0.1:{rack.port}")
    assert "with 1 devices" in done.stdout
    assert SERIAL in done.stdout
    assert serials(farm) == [SERIAL]
    assert "remove it first" in add(farm, "--adb", f"127.0.0.1:{rack.port}", code=2).stderr
    [listed] = farm.json("devices", "host", "list")["hosts"]
    assert listed["name"] == "qdc"
    assert 7100 < listed["until_ms"] / 1000 - time.time() < 7200
    farm.farm("devices", "host", "remove", "qdc", "--yes", code=0)
    assert serials(farm) == []
    assert "unknown rented host 'qdc'" in farm.farm("devices", "host", "remove", "qdc", code=2).stderr


def test_a_host_that_cannot_be_reached_is_refused_with_its_reason(farm: FarmHome, gateway: SshServer) -> None:
    assert "runs no commands" in add(farm, *login(gateway), "--adb", "127.0.0.1:1", code=4).stderr
    other_key = [*login(gateway)[:2], "--key-file", f"{gateway.folder}/other_key", *login(gateway)[4:]]
    assert "does not let" in add(farm, *other_key, code=4).stderr
    assert "--adb" in add(farm, "--adb", "nonsense", code=2).stderr
    assert "neither adb" in add(farm, code=2).stderr
    for name in ("../x", "a/b"):
        refused = farm.farm("devices", "host", "add", name, "--adb", "127.0.0.1:1", "--until", "1h", code=2)
        assert "expected letters, digits" in refused.stderr
    with pytest.raises(UsageError, match="is no name of a host"):
        remove_rented(load_config(), "../x")
    (farm.cwd / "farm.toml").write_text('[[host]]\nname = "qdc"\nadb = "127.0.0.1:1"\n')
    assert farm.json("devices", "host", "list")["hosts"] == []


def test_a_host_is_gone_at_its_end_time(farm: FarmHome, rack: Attached) -> None:
    add(farm, "--adb", f"127.0.0.1:{rack.port}", until="4s")
    over = time.time() + 4
    until(lambda: time.time() > over)
    assert farm.json("devices", "host", "list")["hosts"] == []
    assert serials(farm) == []
    assert list((farm.state / "rented-hosts").iterdir()) == []


def test_a_host_of_a_command_goes_with_that_command(farm: FarmHome, rack: Attached) -> None:
    add = ("devices", "host", "add", "qdc", "--adb", f"127.0.0.1:{rack.port}", "--until", "1h", "--")
    record = farm.state / "rented-hosts/qdc.json"
    done = farm.farm(*add, "sh", "-c", f"ls {record}; exit 7", code=7)
    assert str(record) in done.stdout
    assert farm.json("devices", "host", "list")["hosts"] == []
    with farm.running(*add, "sleep", "600") as process:
        until(record.exists)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        until(lambda: farm.json("devices", "host", "list")["hosts"] == [])


@pytest.fixture
def poor(rack: Attached) -> Iterator[PoorAdbProxy]:
    with contextlib.closing(PoorAdbProxy(rack.port)) as proxy:
        yield proxy


@pytest.mark.whole
def test_a_run_on_a_poor_server_behind_a_forwarding_account(
    farm: FarmHome, poor: PoorAdbProxy, gateway: SshServer
) -> None:
    add(farm, *login(gateway), "--adb", f"127.0.0.1:{poor.port}")
    run = ("run", "--soc", "SM8650", "--suite", "smoke", "-k", "add", "--json")
    view = json.loads(farm.farm(*run, code=0, timeout_s=300).stdout)
    assert {one["verdict"] for job in view["jobs"] for one in job["attempts"]} == {"passed"}
    assert not [one for one in poor.requests if b"track-devices" in one or b"host-features" in one]


def test_a_refused_reboot_is_an_error_of_the_device(poor: PoorAdbProxy) -> None:
    transport = AdbTransport(SERIAL, AdbAddress(poor.port))
    with pytest.raises(DeviceError, match="adb refuses: unknown host service"):
        transport.reboot()
    transport.close()


def test_a_rented_device_that_is_gone_counts_as_the_end_of_its_session(rack: Attached, farm_cache: Path) -> None:
    config = msgspec.structs.replace(load_config(), cache_dir=farm_cache)
    with contextlib.closing(PoorAdbProxy(rack.port, 0.0)) as proxy:
        (found,) = scan(proxy.port).devices
        hour = msgspec.structs.replace(found, until_s=time.time() + 3600)
        over = msgspec.structs.replace(found, until_s=time.time() - 1)
        runtime = virtual_runtime(config, find_soc("SM8650"))
        runs = {one: DeviceRun(one, runtime, "rented", takeover=False) for one in (found, hour, over)}
        assert [run.silence_cause() for run in runs.values()] == ["", "", "lease"]
        proxy.close()
        assert [run.silence_cause() for run in runs.values()] == ["adb_server", "lease", "lease"]
        for run in runs.values():
            run.close()
    state, _ = next_health(Health.SUSPECT, (), HealthMark(Event.GAVE_UP, "lease", "it did not answer"))
    assert state is Health.SUSPECT


@pytest.mark.whole
def test_the_end_of_a_session_is_infra_and_no_quarantine(farm: FarmHome, rack: Attached) -> None:
    with contextlib.closing(PoorAdbProxy(rack.port, 0.0)) as proxy:
        add(farm, "--adb", f"127.0.0.1:{proxy.port}")
        with farm.running("run", "--soc", "SM8650", "--suite", "smoke", "--name", "cut") as run:
            while "[1/8]" not in (line := run.stdout.readline()):
                assert line, "no job"
            proxy.close()
            run.communicate(timeout=300)
    assert run.returncode == 4
    ends = {one["verdict"] for job in jobs_of(farm, "cut") for one in job["attempts"]}
    assert ends <= {"infra", "passed"}
    [device] = [one for one in farm.json("devices", "list")["devices"] if one["serial"] == SERIAL]
    assert device["health"] != "quarantined"


@pytest.mark.whole
def test_a_job_begins_only_if_it_ends_before_the_session(farm: FarmHome, rack: Attached) -> None:
    run = ("run", "--soc", "SM8650", "--suite", "smoke", "-k", "add")
    # A job without history is expected to take a minute.
    add(farm, "--adb", f"127.0.0.1:{rack.port}", until="80s")
    done = farm.farm(*run, "--name", "short", code=4, timeout_s=300)
    assert "its rented session ends at" in done.stderr
    assert "do not fit into the rest" in done.stderr
    assert [job["attempts"] for job in jobs_of(farm, "short")] == [[]]
    farm.farm("devices", "host", "remove", "qdc", "--yes", code=0)
    add(farm, "--adb", f"127.0.0.1:{rack.port}")
    farm.farm("run", "--resume", "short", code=0, timeout_s=300)


def test_times_that_fit_into_the_rest_of_a_session() -> None:
    assert fits(60.0, 200.0, 100.0)
    assert not fits(80.0, 200.0, 100.0)
    # A job without history, on a device without an end and on a device with an end.
    assert fits(0.0, 0.0, 1e9)
    assert not fits(0.0, 100.0 + UNKNOWN_SECONDS, 100.0)


def test_records_of_others_and_of_another_version_are_set_aside(
    tmp_path: Path, rack: Attached, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ANDROID_ADB_SERVER_PORT", str(rack.port))
    config = msgspec.structs.replace(load_config(), state_dir=tmp_path)
    (tmp_path / "rented-hosts").mkdir()
    (tmp_path / "rented-hosts/bad.json").write_text("{")
    (tmp_path / "rented-hosts/odd.json").write_text(
        json.dumps({"host": {"name": "odd", "adb": "-oProxyCommand=x"}, "until_s": time.time() + 99})
    )
    with Supervisor() as supervisor:
        assert [one.serial for one in scan_all(config, supervisor).devices] == [SERIAL]
