"""Facts about devices: state, root, text."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from attached import Rack, rack

from farm.base.config.settings import HealthConfig
from farm.base.errors import DeviceError, DeviceTimeoutError
from farm.base.text import clean_text, named_values
from farm.devices.adb.transport import STORAGE, AdbTransport
from farm.devices.connect import open_transport
from farm.devices.device import Device
from farm.devices.facts import DeviceStatus, check, parse_status, wait_until_cool
from farm.devices.virtual.boot import boot
from farm.devices.virtual.faults import Fault, FaultKind, clear, inject

# Status of a device, its conditions for measurements, and notes on measurements that did not wait for them.


PHONE = """\
time=1700000000.500000000
uid=2000
uptime=12345.67
boot=6f1e2f0a-1111-4222-8333-444455556666
free=/dev/block/dm-40 112456780 50000000 62456780 45% /data
zone=61200
zone=-40000
zone=0
battery=Current Battery Service state:
battery=  present: true
battery=  level: 87
battery=  scale: 100
battery=  temperature: 312
battery=  technology: Li-ion
"""
BOARD = "time=1700000000.%N\nuid=0\nuptime=9\nboot=\nfree=overlay 8 4 4 50% /\nzone=48500\nzone=51200\nzone=\n"


def test_a_phone_that_tells_everything() -> None:
    assert parse_status(named_values(PHONE.splitlines()), 1_700_000_000_000) == DeviceStatus(
        root=False,
        battery_percent=87,
        temperature_c=31.2,
        free_bytes=62456780 * 1024,
        boot_id="6f1e2f0a-1111-4222-8333-444455556666",
        uptime_s=12345.67,
        clock_offset_ms=500,
    )


def test_a_board_without_a_battery_tells_its_hottest_sensor() -> None:
    status = parse_status(named_values(BOARD.splitlines()), 1_700_000_000_500)
    assert status == DeviceStatus(True, None, 51.2, 4096, "", 9.0, 0)
    invented = [*BOARD.splitlines(), "battery=  present: false", "battery=  level: 0", "battery=  temperature: 250"]
    assert parse_status(named_values(invented), 1_700_000_000_500) == status


def test_what_cannot_be_is_not_believed() -> None:
    for line in (
        *("battery=level: 4000", "battery=level: nan", "battery=level: -1"),
        *("battery=temperature: 99999", "battery=temperature: 1e9", "zone=274000", "zone=-273000"),
        *("free=x x x 99999999999999999999 x x", "free=-", "uptime=inf", "uptime=-4"),
        *("time=9999999999999", "time=\N{ARABIC-INDIC DIGIT ONE}", "boot=; reboot", f"boot={'a' * 65}", "uid=0 0"),
    ):
        assert parse_status(named_values([line]), 0) == DeviceStatus(False, None, None, None, "", None, None), line


LIMITS = HealthConfig(max_temperature_c=45.0, min_battery_percent=20, gate_wait_s=12.0)
FINE = DeviceStatus(
    root=False, battery_percent=80, temperature_c=30.0, free_bytes=None, boot_id="", uptime_s=None, clock_offset_ms=None
)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({}, ""),
        ({"temperature_c": 45.0, "battery_percent": 20}, ""),
        ({"temperature_c": None, "battery_percent": None}, ""),
        ({"temperature_c": 45.1}, "at 45.1 C, limit 45.0 C"),
        ({"battery_percent": 19}, "at 19 % of battery, at least 20 %"),
        (
            {"temperature_c": 60.0, "battery_percent": 1},
            "at 60.0 C, limit 45.0 C and at 1 % of battery, at least 20 %",
        ),
    ],
)
def test_limits_decide(changes: dict[str, float | None], problem: str) -> None:
    assert check(msgspec.structs.replace(FINE, **changes), LIMITS) == problem


@pytest.fixture
def body(bench: Rack) -> Iterator[Path]:
    """The folder of a device whose body may be changed."""
    root = bench.folder()
    yield root
    clear(root)


def test_a_device_is_waited_for_until_it_is_cool_or_the_deadline_or_a_stop(bench: Rack, body: Path) -> None:
    def wait(sleep: Callable[[float], None], stop: Callable[[], bool] = lambda: False) -> str:
        return wait_until_cool(bench.transport(), "android", LIMITS, sleep, stop)

    assert wait(lambda _: pytest.fail("there is nothing to wait for")) == ""
    inject(body, Fault(FaultKind.OVERHEATED, code=47))
    pauses: list[float] = []
    assert wait(pauses.append) == "measured at 47.0 C, limit 45.0 C, after waiting 12 s"
    assert sum(pauses) == 12.0
    assert "after waiting 0 s" in wait(lambda _: pytest.fail("it was stopped"), stop=lambda: True)
    assert wait(lambda _: clear(body)) == "waited 5 s before measuring: it was at 47.0 C, limit 45.0 C"


# Root through a real adb server: adbd restarts, and the device disconnects and returns.


Start = Callable[[str], Device]


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rack]:
    with rack(tmp_path_factory.mktemp("root")) as one:
        yield one


@pytest.fixture(scope="module")
def start(empty: Rack) -> Start:
    """Function that boots another device of a build, at one adb server."""
    socs = iter(("SM8850", "SM8750", "SM8650", "SM8550", "SM8475", "SM8450", "SM8350"))
    return lambda build: boot(empty.supervisor, empty.server, [next(socs)], empty.root, build=build)[0]


def test_adbd_of_a_userdebug_build_becomes_root_and_the_device_comes_back(empty: Rack, start: Start) -> None:
    device = start("userdebug")
    transport = open_transport(device)
    ended: list[Exception] = []
    started = threading.Event()

    def run_meanwhile() -> None:
        process = transport.start(["sh", "-c", "echo started; sleep 600"])
        process.receive(30)
        started.set()
        try:
            process.receive(60)
        except DeviceError as error:
            ended.append(error)

    meanwhile = threading.Thread(target=run_meanwhile)
    meanwhile.start()
    assert started.wait(30)
    assert transport.user_id() == 2000
    assert open_transport(device).ensure_root() is True
    assert transport.user_id() == 0
    assert transport.run(["getprop", "service.adb.root"], timeout_s=10).stdout == b"1\n"
    meanwhile.join(60)
    # The earlier program has ended: adbd really restarted.
    assert "the connection ended before the program did" in str(ended)
    assert open_transport(device).ensure_root() is False
    # A later `adb root` of others gives the same answer.
    with empty.server.open(device.serial, "root:", timeout_s=10) as stream:
        assert stream.recv(100) == b"adbd is already running as root\n"


def test_a_device_that_is_root_from_the_start_is_left_alone(start: Start) -> None:
    transport = open_transport(start("rooted-already"))
    assert transport.ensure_root() is False
    assert transport.user_id() == 0


def test_a_production_build_is_refused_with_what_adbd_says(start: Start) -> None:
    transport = open_transport(start("user"))
    with pytest.raises(DeviceError, match=r"adbd cannot run as root in production builds.*userdebug or eng"):
        transport.ensure_root()


@pytest.mark.parametrize("build", ["rooted-by-su", "rooted-by-magisk"])
def test_su_makes_commands_root_where_adbd_cannot(start: Start, build: str) -> None:
    device = start(build)
    transport = open_transport(device)
    assert (transport.user_id(), transport.root_refusal()) == (2000, "")
    assert transport.ensure_root() is True
    assert transport.user_id() == 0
    # Words, folder, environment, standard input and exit code arrive as without it.
    script = 'printf "%s|" "$@" "$PWD" "$NAME"; id -un; cat; exit 7'
    words = ["it's", "a b", "$(reboot)"]
    done = transport.run(
        ["sh", "-c", script, "sh", *words], stdin=b"in", timeout_s=10, cwd=STORAGE.parent, env={"NAME": "'$x"}
    )
    folder = done.stdout.split(b"|")[3]
    assert (done.code, done.stdout) == (7, b"it's|a b|$(reboot)|" + folder + b"|'$x|root\nin")
    assert folder.endswith(b"/data/local/tmp")
    # Each new connection queries the user id itself.
    assert open_transport(device).user_id() == 2000
    assert transport.ensure_root() is False


def test_a_device_that_does_not_come_back_is_said_so(
    empty: Rack, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = start("userdebug")

    def dies(transport: AdbTransport) -> str:
        empty.supervisor.find(transport.serial).terminate()
        return "restarting adbd as root"

    monkeypatch.setattr(AdbTransport, "_ask_for_root", dies)
    monkeypatch.setattr("farm.devices.adb.transport._ROOT_SECONDS", 0.5)
    with pytest.raises(DeviceTimeoutError, match="asked to start anew as root, and 0.5 s later it is not there"):
        open_transport(device).ensure_root()


def test_a_device_that_says_nothing_sensible_about_its_user_is_an_error(empty: Rack, start: Start) -> None:
    device = start("userdebug")
    (empty.root / device.serial / "system/bin/id").write_text("#!/bin/sh\nprintf '0\\033[31m; rm'\n")
    with pytest.raises(DeviceError, match="does not report the user") as caught:
        open_transport(device).ensure_root()
    assert "\033" not in str(caught.value)


def test_lines_stay_only_when_asked_for_and_length_is_bounded() -> None:
    assert clean_text(b" a\nb\r\nc \x00\xff") == "a␤b␤c ␀\N{REPLACEMENT CHARACTER}"
    assert clean_text(b"a\r\nb\tc", lines=True) == "a\nb\tc"
    assert clean_text("\N{GRINNING FACE}".encode() * 1000, 7) == "\N{GRINNING FACE}" * 7
