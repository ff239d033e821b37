"""Lists and states of devices, answers of actions on them, and virtual devices that stay."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from farm_home import FarmHome, processes_of, wait_for_no_process
from made_runs import PHONE, record_run
from msgspec.structs import replace
from waiting import until

from farm.base.errors import UnknownNameError
from farm.base.machine import user_name
from farm.base.processes import Supervisor
from farm.cli.devices.devices import _listing, compact_lines, show_command, waiting_lines
from farm.devices.adb.server import AdbServer, start_adb_server
from farm.devices.device import AdbAddress, Device, HealthEvent, Unusable
from farm.devices.discovery import Scan
from farm.devices.facts import DeviceStatus
from farm.devices.virtual.faults import Fault, clear, inject
from farm.dispatch.pool import fleet
from farm.dispatch.pool.fleet import Choice
from farm.dispatch.pool.inventory import DeviceRow, addresses_of, find_rows, rows, wanted_of
from farm.policy.situation import Lease, Priority, Waiting
from farm.store.leases.registry import Registered, Seen
from farm.store.store import open_store

# Lists of devices: their columns by width, and the facts of a device that does not answer.


SERIAL = "virtual-SM8650-0"


def known(id_: str, **facts: object) -> Registered:
    plain = dict.fromkeys(
        ("soc", "kind", "os", "product", "service_note", "service_user", "health_reason", "state", "name"), ""
    )
    serial, _, host = id_.partition("@")
    more = {"labels": (), "in_service": True, "health": "healthy", "status": None, "last_seen_ms": 1, "forgotten_ms": 0}
    return Registered(**{**plain, **more, "id": id_, "serial": serial, "host": host or "lab", **facts})  # type: ignore[arg-type]


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
    everything = {one.id: one for one in (elsewhere, phone, virtual)}
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


def test_both_addresses_of_a_phone_are_shown_and_name_it(tmp_path: Path) -> None:
    wifi = AdbAddress(5037, attached_at="192.168.1.20:5555", name="192.168.1.20:5555")
    cable = AdbAddress(5037, name="2233fd19", also=(wifi,))
    phone = Device("2233fd19", "SM8650", "hardware", "build", cable, "phone")
    (row,) = rows(Scan((phone,), ()), {phone.id: "it does not answer"}, {}, {})
    assert find_rows([row], ["192.168.1.20:5555"]) == [row]
    assert "also at 192.168.1.20:5555" in str(_listing([row], [], 100))
    status = DeviceStatus(True, None, None, None, "", None, None, addresses_of(phone))
    (tmp_path / "farm.toml").write_text(f'store = "sqlite:///{tmp_path / "farm.db"}"\n')
    with open_store(f"sqlite:///{tmp_path / 'farm.db'}") as store:
        store.devices.see([Seen(phone, "device", status)])
    for name in ("2233fd19", "192.168.1.20:5555"):
        shown = CliRunner().invoke(show_command, [name, "--config", str(tmp_path / "farm.toml")])
        assert "at 2233fd19, also at 192.168.1.20:5555" in shown.output, shown.exception


def test_an_unknown_name_is_told_the_known_ones() -> None:
    found = [DeviceRow(id="R5CT", serial="R5CT", name="left", soc="SM8650", state="ready")]
    for name, message in (("SM865", "did you mean 'SM8650'"), ("x", "SoC 'x': known are SM8650, left")):
        with pytest.raises(UnknownNameError, match=message):
            find_rows(found, [name])
    assert [find_rows(found, [name]) for name in ("sm8650", "SM8750")] == [found, []]


LONGEST = DeviceRow(
    id="x", serial="serial-of-forty-characters-and-not-less0", name="", soc="QCS9100", kind="hardware",
    state="no permissions", health="quarantined", health_reason="why " * 40, holder="somebody-with-a-long-name",
    until_ms=1_700_000_000_000, host="a-host-in-the-lab", product="Some Product", labels=("l" * 64,), last_seen_ms=1,
)  # fmt: skip


@pytest.mark.parametrize("width", [80, 60])
def test_every_line_fits_and_every_word_stands_alone(width: int) -> None:
    short = DeviceRow(id="y", serial="y", soc="SM8650", kind="hardware", state="unauthorized", health="healthy")
    for found in ([short], [short, LONGEST], [replace(LONGEST, name="n" * 128), short]):
        text = str(_listing(found, (), width))
        assert max(map(len, text.splitlines())) <= width, text
        for row in found:
            words = {row.soc, row.kind, *row.state.split(), row.health, *row.holder.split()}
            assert words <= set(text.split()), text


def test_forty_phones_are_a_line_each_and_those_that_need_attention_are_first() -> None:
    facts = {"soc": "SM8650", "kind": "hardware", "state": "ready", "battery_percent": 81, "temperature_c": 31.5}
    found = [DeviceRow(id=f"d{n:02}", serial=f"d{n:02}", **facts) for n in range(37)]  # type: ignore[arg-type]
    found[3] = replace(found[3], holder="ada", purpose="farm run --soc SM8650 --suite smoke")
    found[5] = replace(found[5], health="suspect", health_reason="its health check fails: " + "x" * 90)
    found[7] = replace(found[7], state="out", reason="its screen is broken", in_service=False)
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


def test_waiting_users_are_listed_with_purpose_and_since_when() -> None:
    found = {f"{n}@lab": DeviceRow(id=f"{n}@lab", serial=n, name=n, soc="SM8650") for n in ("left", "desk", "rack")}
    since_ms = int(time.mktime((2026, 11, 23, 14, 2, 0, 0, 0, -1)) * 1000)
    ann = Waiting(("left@lab",), 1, "ann", "lab", 1, "farm lease", Priority.PERSON, since_ms, "left is busy")
    quota = "quota of \x1b[31mbob: 1 device"
    bob = Waiting(tuple(found), 1, "\x1b[31mbob", "lab", 2, "farm run " * 20, Priority.NIGHTLY, since_ms, quota)
    title, first, second = waiting_lines([ann, bob], [wanted_of(one, found) for one in (ann, bob)], 80)
    assert title == "WAITING: 2"
    assert first.split() == ["ann", "left", "since", "14:02", "left", "is", "busy", "farm", "lease"]
    assert "  1 of 3 SM8650  since 14:02  quota of bob: 1 device  farm run" in second
    assert (second.isprintable(), len(second) <= 80) == (True, True)
    assert waiting_lines([], [], 80) == []


def test_names_and_notes_as_a_user_sees_them(home: FarmHome, bench: dict[str, str], bench_root: Path) -> None:
    root = bench_root / SERIAL

    def devices(*words: str, code: int = 0) -> str:
        if code:
            return home.refused("devices", *words, env=bench, code=code)
        return home.farm("devices", *words, env=bench, code=0).stdout

    assert devices().startswith(f"{SERIAL}  SM8650  virtual  ready")
    devices("name", SERIAL, "left")
    devices("label", SERIAL, "rack-1")
    for words in (("label", SERIAL), ("name", SERIAL, "")):
        assert "would be removed: --yes does it" in devices(*words, code=2)
    assert home.json("devices", "label", SERIAL, "--yes", env=bench)["device"]["labels"] == []
    devices("disable", SERIAL, "--note", "\x1b[31mcracked")
    inject(root, Fault("unauthorized"))
    until(lambda: "unauthorized" in devices("left"))
    listed, shown = devices("left"), devices("show", "left")
    assert "accept 'Allow USB debugging'" in listed
    assert ("cracked" in shown, "\x1b" in listed + shown) == (True, False)

    with open_store(home.state / "farm.db") as store:
        [device] = [one for one in store.devices.all() if one.serial == SERIAL]
        store.devices.record_health(HealthEvent(device.id, "gave_up", "quarantined", "it was gone"))
    released = devices("unquarantine", "left")
    assert released == "left is suspect: released from quarantine: a health check has to pass first\n"
    assert "farm devices disable" in home.farm("devices", "quarantine", "left", env=bench, code=2).stderr
    devices("remove", "left", "--yes")
    devices("enable", SERIAL, code=2)
    assert "left" not in devices()
    assert "removed on " in devices("show", SERIAL)
    clear(root)


def test_a_wanted_device_may_be_known_to_the_store_alone_or_be_unusable() -> None:
    scan = Scan([], [Unusable("locked", "unauthorized", "confirm on its screen")], [])
    for name in ("stored", "locked"):
        fleet._require_known(scan, {"stored": known("stored")}, Choice((name,)))
    with pytest.raises(UnknownNameError, match="unheard"):
        fleet._require_known(scan, {"stored": known("stored")}, Choice(("unheard",)))


# Actions answer programs with --json: the changed object, and the removed one.


@pytest.fixture
def lab(home: FarmHome) -> FarmHome:
    """Home with a device that is quarantined and reserved for the user."""
    home.state.mkdir()
    with open_store(home.state / "farm.db") as store:
        store.devices.see([Seen(PHONE, "device", None)])
        store.devices.record_health(HealthEvent(PHONE.id, "gave_up", "quarantined", "it was gone"))
        store.leases.reserve(PHONE.id, user_name(), 3600)
    return home


def test_a_changed_device_is_the_answer(lab: FarmHome) -> None:
    changes: list[tuple[tuple[str, ...], dict[str, object]]] = [
        (("label", "phone-1", "camera", "5g"), {"labels": ["camera", "5g"]}),
        (("disable", "phone-1", "--note", "its screen"), {"in_service": False, "service_note": "its screen"}),
        (("enable", "phone-1"), {"in_service": True}),
        (("unquarantine", "phone-1"), {"health": "suspect"}),
        (("name", "phone-1", "desk"), {"name": "desk"}),
    ]
    for words, changed in changes:
        answer = lab.json("devices", *words)
        assert {name: answer["device"][name] for name in changed} == changed
    assert lab.json("devices", "show", "desk")["device"] == answer["device"]


def test_a_released_device_and_a_removed_one_are_the_answers(lab: FarmHome) -> None:
    assert lab.json("devices", "release")["released"] == [{"device": PHONE.id, "done": "phone-1 is given back"}]
    assert "--yes does it" in lab.farm("devices", "remove", "phone-1", code=2).stderr
    assert lab.json("devices", "list")["devices"]
    assert lab.json("devices", "remove", "phone-1", "--yes")["device"]["id"] == PHONE.id
    assert lab.json("devices", "list")["devices"] == []


def test_accounts_and_quotas_are_removed_with_yes_alone(lab: FarmHome) -> None:
    for make, remove, left in (
        (("lab", "accounts", "--add", "ada"), ("lab", "accounts", "--remove", "ada"), "accounts"),
        (("lab", "quota", "user:ada", "2"), ("lab", "quota", "user:ada", "--remove"), "quotas"),
    ):
        lab.farm(*make, code=0)
        assert "--yes does it" in lab.farm(*remove, code=2).stderr
        assert lab.json(*make[:2])[left]
        lab.json(*remove, "--yes")
        assert not lab.json(*make[:2])[left]


def test_an_export_names_its_runs_and_needs_a_file(lab: FarmHome) -> None:
    with open_store(lab.state / "farm.db") as store:
        run = record_run(store)
    assert "--json needs --output" in lab.farm("data", "export", "--all", "--json", code=2).stderr
    answer = lab.json("data", "export", "--all", "--output", "runs.jsonl")
    assert (answer["output"], answer["runs"]) == ("runs.jsonl", [run])


# Virtual devices that stay: output and effects of `farm virtual`, at a real adb server.


@pytest.fixture
def server(home: FarmHome) -> Iterator[AdbServer]:
    """The user's ordinary adb server."""
    with Supervisor() as supervisor:
        yield start_adb_server(supervisor, home.cwd / "adb")


@contextlib.contextmanager
def up(home: FarmHome, server: AdbServer, *words: str) -> Iterator[list[str]]:
    """The lines that it prints once the devices are there."""
    environment = {"ANDROID_ADB_SERVER_PORT": str(server.port)}
    with home.running("virtual", "up", "--soc", "SM8650", *words, env=environment) as process:
        lines: list[str] = []
        while not lines or not lines[-1].startswith("Ctrl-C"):
            line = process.stdout.readline()
            assert line, lines
            lines.append(line.rstrip("\n"))
        yield lines
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 0


def adb(server: AdbServer, *words: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **server.environment()}
    return subprocess.run([server.adb, *words], env=env, capture_output=True, text=True, timeout=60, check=False)


def test_devices_stay_fail_on_request_and_leave_nothing(home: FarmHome, server: AdbServer) -> None:
    env = {"ANDROID_ADB_SERVER_PORT": str(server.port)}

    with up(home, server, "-n", "2") as output:
        assert [line.split()[0] for line in output[:2]] == [SERIAL, "virtual-SM8650-1"]
        assert f"adb -s product:{SERIAL} shell" in "\n".join(output)
        shell = ("-s", f"product:{SERIAL}", "shell", "echo well")
        assert adb(server, *shell).stdout == "well\n"

        done = home.json("virtual", "fault", SERIAL, "exit_code", "--code", "7", "--match", "^echo")
        assert (done["device"], done["fault"]["kind"], done["fault"]["code"]) == (SERIAL, "exit_code", 7)
        assert [adb(server, *shell).returncode for _ in range(2)] == [7, 0]
        struck = home.json("virtual", "faults", SERIAL)["struck"]
        assert [(one["kind"], one["operation"]) for one in struck] == [("exit_code", "shell")]

        home.farm("devices", env=env, code=0)
        home.farm("devices", "name", SERIAL, "desk", code=0)
        assert home.farm("virtual", "fault", "desk", "wrong_soc").stdout == "desk: wrong_soc, until cleared\n"
        soc = ("-s", f"product:{SERIAL}", "shell", "getprop ro.soc.model")
        assert adb(server, *soc).stdout == "SM8550\n"
        assert home.json("virtual", "clear", SERIAL, "--yes")["device"] == SERIAL
        assert adb(server, *soc).stdout == "SM8650\n"

        for words, message in (
            (("up", "--soc", "SM8650"), "runs already"),
            (("up", "--soc", "SM8650", "--folder", str(home.cwd / "other")), "is attached to the adb server"),
            (("fault", "desk", "clear"), "'farm virtual clear desk --yes'"),
            (("fault", "dask", "wrong_soc"), "did you mean 'desk'"),
            (("fault", SERIAL, "stal"), "did you mean 'stall'"),
            (("fault", SERIAL, "stall", "--duration", "-1"), "seconds"),
            (("fault", SERIAL, "exit_code", "--match", "("), "regular expression"),
        ):
            assert message in home.refused("virtual", *words, env=env)
    assert adb(server, "devices").stdout.split("\n")[1] == ""
    assert wait_for_no_process(home) == {}
    assert "farm virtual up" in home.refused("virtual", "fault", SERIAL, "stall", env=env)


def test_a_device_that_is_killed_is_named_with_how_it_ended(home: FarmHome, server: AdbServer) -> None:
    environment = {"ANDROID_ADB_SERVER_PORT": str(server.port)}
    with home.running("virtual", "up", "--soc", "SM8650", env=environment) as process:
        while not (line := process.stdout.readline()).startswith("Ctrl-C"):
            assert line
        (daemon,) = [pid for pid, command in processes_of(home).items() if "-m farm.devices.virtual" in command]
        os.kill(daemon, signal.SIGKILL)
        output = process.stdout.read()
        assert process.wait(timeout=60) == 4
    assert output == f"farm: {SERIAL} is gone: it ended with signal 9\n"
    assert wait_for_no_process(home) == {}


def test_with_a_server_of_their_own(home: FarmHome, server: AdbServer) -> None:
    with up(home, server, "--own-server") as output:
        [port] = [line.rpartition("=")[2] for line in output if "ANDROID_ADB_SERVER_PORT" in line]
        assert adb(server, "devices").stdout.split("\n")[1] == ""
        command = [server.adb, "-P", port, "-s", f"product:{SERIAL}", "shell", "true"]
        assert subprocess.run(command, capture_output=True, timeout=60, check=False).returncode == 0
    assert wait_for_no_process(home) == {}
