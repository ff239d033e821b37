"""Lists of devices: their columns by width, and the facts of a device that does not answer."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from farm_home import FarmHome
from msgspec.structs import replace
from waiting import until

from farm.base.errors import UnknownNameError
from farm.base.processes import Supervisor
from farm.cli.devices.compact import compact_lines, waiting_lines
from farm.cli.devices.device import show_command
from farm.cli.devices.devices import _listing
from farm.devices.adb.server import start_adb_server
from farm.devices.device import AdbAddress, Device, Unusable
from farm.devices.discovery import Scan
from farm.devices.health import HealthEvent
from farm.devices.status import DeviceStatus
from farm.devices.virtual.boot import boot
from farm.devices.virtual.faults import Fault, inject
from farm.dispatch.pool import fleet
from farm.dispatch.pool.fleet import Choice
from farm.dispatch.pool.inventory import DeviceRow, addresses_of, find_rows, rows, wanted_of
from farm.policy.situation import Lease, Priority, Waiting
from farm.store.leases.registry import Registered, Seen
from farm.store.store import open_store

SERIAL = "virtual-SM8650-0"


def known(id_: str, **facts: object) -> Registered:
    plain = dict.fromkeys(
        ("soc", "kind", "os", "product", "service_note", "service_user", "health_reason", "state"), ""
    )
    serial, _, host = id_.partition("@")
    more = {
        "labels": (),
        "in_service": True,
        "health": "healthy",
        "status": None,
        "last_seen_ms": 1,
        "name": "",
        "forgotten_ms": 0,
    }
    return Registered(**{**plain, "id": id_, "serial": serial, "host": host or "lab", **more, **facts})  # type: ignore[arg-type]


def lease(device: str, user: str) -> Lease:
    return Lease(device, 1, "token", user, "h", 1, "farm run", Priority.PERSON, 1, 2)


def test_a_device_that_cannot_be_asked_is_one_row_with_all_that_is_known_of_it() -> None:
    facts = {"name": "left", "soc": "SM8650", "kind": "hardware", "labels": ("rack-1",), "health": "suspect"}
    phone, virtual, elsewhere = known("R5CT", **facts), known(f"{SERIAL}@lab"), known(f"{SERIAL}@home", soc="SM8750")
    unusable = (
        Unusable("R5CT", "offline", "replug it", "lab"),
        Unusable(SERIAL, "unauthorized", "accept it", "lab"),
        Unusable("????", "no permissions", "add a udev rule", "lab"),
    )
    everything = {one.id: one for one in (phone, virtual, elsewhere)}
    found = rows(Scan((), unusable), {}, everything, {"R5CT": lease("R5CT", "\x1b[31mada")})
    assert [(row.id, row.state, row.host) for row in found] == [
        ("????", "no permissions", "lab"),
        ("R5CT", "offline", "lab"),
        (f"{SERIAL}@lab", "unauthorized", "lab"),
        (f"{SERIAL}@home", "absent", "home"),
    ]
    (left,) = find_rows(found, ["left"])
    assert (left.soc, left.kind, left.labels, left.health, left.reason) == (
        "SM8650", "hardware", ("rack-1",), "suspect", "replug it",
    )  # fmt: skip
    assert left.holder.endswith("ada")
    assert left.holder.isprintable()


def test_a_phone_on_a_cable_and_on_wifi_shows_its_other_address() -> None:
    wifi = AdbAddress(5037, attached_at="192.168.1.20:5555", name="192.168.1.20:5555")
    cable = AdbAddress(5037, name="2233fd19", also=(wifi,))
    phone = Device("2233fd19", "SM8650", "hardware", "build", cable, "phone")
    (row,) = rows(Scan((phone,), ()), {phone.id: "it does not answer"}, {}, {})
    assert row.also_at == ("192.168.1.20:5555",)
    assert "also at 192.168.1.20:5555" in str(_listing([row], [], 100))
    alone = replace(phone, address=wifi)
    (row,) = rows(Scan((alone,), ()), {phone.id: "it does not answer"}, {}, {})
    assert row.also_at == ()
    assert "also at" not in str(_listing([row], [], 100))


def test_both_addresses_of_a_phone_are_shown_and_name_it(tmp_path: Path) -> None:
    wifi = AdbAddress(5037, attached_at="192.168.1.20:5555", name="192.168.1.20:5555")
    cable = AdbAddress(5037, name="2233fd19", also=(wifi,))
    phone = Device("2233fd19", "SM8650", "hardware", "build", cable, "phone")
    (row,) = rows(Scan((phone,), ()), {phone.id: "it does not answer"}, {}, {})
    assert find_rows([row], ["192.168.1.20:5555"]) == [row]
    status = DeviceStatus(True, None, None, None, "", None, None, addresses_of(phone))
    (tmp_path / "farm.toml").write_text(f'store = "sqlite:///{tmp_path / "farm.db"}"\n')
    with open_store(f"sqlite:///{tmp_path / 'farm.db'}") as store:
        store.devices.see([Seen(phone, "device", status)])
    for name in ("2233fd19", "192.168.1.20:5555"):
        shown = CliRunner().invoke(show_command, [name, "--config", str(tmp_path / "farm.toml")])
        assert "at 2233fd19, also at 192.168.1.20:5555" in shown.output, shown.exception


def test_a_name_that_is_none_is_told_what_there_is() -> None:
    found = [DeviceRow(id="R5CT", serial="R5CT", name="left", soc="SM8650", state="ready")]
    with pytest.raises(UnknownNameError, match="did you mean 'SM8650'"):
        find_rows(found, ["SM865"])
    with pytest.raises(UnknownNameError, match="unknown device or SoC 'x': known are SM8650, left"):
        find_rows(found, ["x"])
    assert find_rows(found, ["sm8650"]) == found
    assert find_rows(found, ["SM8750"]) == []


LONGEST = DeviceRow(
    id="x", serial="serial-of-forty-characters-and-not-less0", name="", soc="QCS9100", kind="hardware",
    state="no permissions", health="quarantined", health_reason="why " * 40, holder="somebody-with-a-long-name",
    until_ms=1_700_000_000_000, host="a-host-in-the-lab", product="Some Product", labels=("l" * 64,), last_seen_ms=1,
)  # fmt: skip


@pytest.mark.parametrize("name", ["", "n" * 64, "n" * 128])
@pytest.mark.parametrize("width", [80, 60])
def test_every_line_fits_and_every_word_stands_alone(name: str, width: int) -> None:
    short = DeviceRow(id="y", serial="y", soc="SM8650", kind="hardware", state="unauthorized", health="healthy")
    for found in ([short], [short, LONGEST], [DeviceRow(**{**_fields(LONGEST), "name": name}), short]):
        text = str(_listing(found, (), width))
        assert max(map(len, text.splitlines())) <= width, text
        assert all(line == line.rstrip() for line in text.splitlines())
        words = text.split()
        for row in found:
            assert {row.soc, row.kind, *row.state.split(), row.health} <= set(words), text
            assert not row.holder or row.holder in words


def test_a_small_screen_shows_one_line_each_and_says_what_it_leaves_out() -> None:
    found = [DeviceRow(id=f"d{n}", serial=f"d{n}", soc="SM8650", state="ready", host="h") for n in range(20)]
    assert len(str(_listing(found, (), 80, 60)).splitlines()) == 40
    assert [line.split()[0] for line in str(_listing(found, (), 80, 24)).splitlines()] == [f"d{n}" for n in range(20)]
    lines = str(_listing(found, (), 80, 10)).splitlines()
    assert len(lines) == 10
    assert "and 11 more" in lines[-1]


def test_forty_phones_are_a_line_each_and_what_needs_attention_is_first() -> None:
    facts = {"soc": "SM8650", "kind": "hardware", "state": "ready", "battery_percent": 81, "temperature_c": 31.5}
    found = [DeviceRow(id=f"d{n:02}", serial=f"d{n:02}", **facts) for n in range(37)]  # type: ignore[arg-type]
    found[3] = DeviceRow(**_fields(found[3]) | {"holder": "ada", "purpose": "farm run --soc SM8650 --suite smoke"})
    found[5] = DeviceRow(
        **_fields(found[5]) | {"health": "suspect", "health_reason": "its health check fails: " + "x" * 90}
    )
    found[7] = DeviceRow(**_fields(found[7]) | {"state": "out", "reason": "its screen is broken", "in_service": False})
    found += [LONGEST, DeviceRow(id="g", serial="g", soc="SM8750", state="absent", last_seen_ms=1)]
    found += [DeviceRow(id="m", serial="m", soc="SM8750", state="absent", reason="nothing listens there")]
    lines = compact_lines(found, 80)
    assert max(map(len, lines)) <= 80
    titles = {line: place for place, line in enumerate(lines) if not line.startswith("  ")}
    assert list(titles) == ["NEEDS ATTENTION: 3", "IN USE: 1", "FREE: 34", "OUT OF SERVICE: 1", "ABSENT: 1"]
    assert len(lines) == 40 + len(titles)
    assert [line.split()[0] for line in lines[1:4]] == ["serial-of-forty-charact…", "d05", "m"]
    assert "suspect: its health check fails: xxx" in lines[2]
    assert lines[titles["IN USE: 1"] + 1].split()[2:] == ["ada", "farm", "run", "--soc", "SM8650", "--suite", "smoke"]
    assert lines[-1].split()[:2] == ["g", "SM8750"]


def test_who_waits_is_told_with_what_for_and_since_when() -> None:
    found = [DeviceRow(id=f"{n}@lab", serial=n, name=n, soc="SM8650") for n in ("left", "desk", "rack")]
    since_ms = int(time.mktime((2026, 11, 23, 14, 2, 0, 0, 0, -1)) * 1000)
    waiting = [
        Waiting(("left@lab",), 1, "ann", "lab", 1, "farm lease", Priority.PERSON, since_ms, "left is busy"),
        Waiting(
            tuple(row.id for row in found),
            1,
            "\x1b[31mbob",
            "lab",
            2,
            "farm run " * 20,
            Priority.NIGHTLY,
            since_ms,
            "quota of \x1b[31mbob: 1 device",
        ),
    ]
    title, ann, bob = waiting_lines(waiting, [wanted_of(one, {row.id: row for row in found}) for one in waiting], 80)
    assert title == "WAITING: 2"
    assert ann.split() == ["ann", "left", "since", "14:02", "left", "is", "busy", "farm", "lease"]
    assert "  1 of 3 SM8650  since 14:02  quota of bob: 1 device  farm run" in bob
    assert bob.isprintable()
    assert len(bob) <= 80
    assert waiting_lines([], [], 80) == []


def _fields(row: DeviceRow) -> dict[str, object]:
    return {name: getattr(row, name) for name in row.__struct_fields__}


@pytest.fixture(scope="module")
def adb(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[dict[str, str], Path]]:
    root = tmp_path_factory.mktemp("devices")
    with Supervisor() as supervisor:
        server = start_adb_server(supervisor, root / "adb")
        boot(supervisor, server, ["SM8650"], root)
        yield {"ANDROID_ADB_SERVER_PORT": str(server.port)}, root / SERIAL


def test_names_notes_and_watching_as_a_user_sees_them(home: FarmHome, adb: tuple[dict[str, str], Path]) -> None:
    env, root = adb
    assert home.farm("devices", env=env).stdout.startswith(f"{SERIAL}  SM8650  virtual  ready")
    for words, output in (
        (("name", SERIAL, "\x1b]0;x\x07"), "cannot be a name"),
        (("name", SERIAL, "SM8650"), "is an SoC"),
        (("label", SERIAL, "a b"), "cannot be a label"),
    ):
        refused = home.farm("devices", *words, env=env)
        assert (refused.returncode, refused.stderr.count("\n")) == (2, 1), refused.stderr
        assert output in refused.stderr
        assert refused.stderr.rstrip("\n").isprintable()
    assert home.farm("devices", "name", SERIAL, "left", env=env).returncode == 0
    assert home.farm("devices", "disable", SERIAL, "--note", "\x1b[31mcracked", env=env).returncode == 0
    inject(root, Fault("unauthorized"))
    until(lambda: "unauthorized" in home.farm("devices", "left", env=env).stdout)
    done = home.farm("devices", "left", env=env)
    assert len(done.stdout.splitlines()) == 3
    assert "accept 'Allow USB debugging'" in done.stdout
    shown = home.farm("devices", "show", "left", env=env).stdout
    assert "cracked" in shown
    assert "\x1b" not in done.stdout + shown

    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    watch = subprocess.Popen(
        [sys.executable, "-m", "farm.cli.main", "devices", "--watch"],
        env={**home.env, **env, "TERM": "xterm"}, cwd=home.cwd, stdin=slave, stdout=slave, stderr=slave,
        start_new_session=True,
    )  # fmt: skip
    os.close(slave)
    try:
        screen = b""
        while not re.search(rb"left.*unauthorized", screen):
            assert select.select([master], [], [], 60)[0], screen
            screen += os.read(master, 4096)
        watch.send_signal(signal.SIGINT)
        with contextlib.suppress(OSError):
            while select.select([master], [], [], 60)[0] and os.read(master, 4096):
                pass
        assert watch.wait(timeout=60) == 0
    finally:
        watch.kill()
        watch.wait()
        os.close(master)
    assert socket.gethostname() in done.stdout

    with open_store(home.state / "farm.db") as store:
        [device] = store.devices.all()
        store.devices.record_health(HealthEvent(device.id, "gave_up", "quarantined", "it was gone"))
    output = home.farm("devices", "unquarantine", "left", env=env).stdout
    assert output == "left is suspect: released from quarantine: a health check has to pass first\n"
    assert "farm devices disable" in home.farm("devices", "quarantine", "left", env=env, code=2).stderr
    assert home.farm("devices", "remove", "left", "--yes", env=env).returncode == 0
    assert home.farm("devices", "enable", SERIAL, env=env).returncode == 2
    assert "left" not in home.farm("devices", env=env).stdout
    assert "removed on " in home.farm("devices", "show", SERIAL, env=env).stdout


def test_absent_devices_are_listed_last_in_the_order_of_their_serials() -> None:
    here = Device(serial="z9", soc="SM8650", kind="hardware", build="", address=AdbAddress(5037), product="")
    listed = rows(Scan([here], [], []), {"z9": ""}, {one: known(one) for one in ("b2", "a1")}, {})
    assert [row.serial for row in listed] == ["z9", "a1", "b2"]


def test_a_wanted_device_may_be_known_to_the_store_alone_or_be_unusable() -> None:
    scan = Scan([], [Unusable("locked", "unauthorized", "confirm on its screen")], [])
    for name in ("stored", "locked"):
        fleet._require_known(scan, {"stored": known("stored")}, Choice((name,)))
    with pytest.raises(UnknownNameError, match="unheard"):
        fleet._require_known(scan, {"stored": known("stored")}, Choice(("unheard",)))
