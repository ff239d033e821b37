"""`farm devices check`: a line for each property of a device, and a transcript without names."""

from __future__ import annotations

import getpass
import json
import re
import socket
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from attached import Attached, attach
from elf_maker import make_elf
from farm_home import FarmHome
from waiting import until

from farm.base.config.devices import HealthConfig
from farm.base.config.settings import load_config
from farm.base.text import named_values
from farm.builds.runtime.parts import AARCH64, HEXAGON, read_elf
from farm.devices.device import AdbAddress, Device, SshAddress
from farm.devices.facts import DeviceStatus, PlatformFacts, parse_platform
from farm.devices.virtual.faults import Fault, clear, inject
from farm.devices.virtual.tree import LOGCAT
from farm.policy.situation import Lease, Priority
from farm.replay import properties
from farm.replay.check import Anonymizer, CheckedDevice, CheckOutcome, CheckReport
from farm.replay.properties import HealthCheckResult, Level, Property
from farm.results.attempt import Cause

SERIAL = "virtual-SM8650-0"
PHONE = Device("R5CT1", "SM8650", "hardware", "vendor/phone/1", AdbAddress(5037), "Phone", serialno="R5CT1")
STATUS = DeviceStatus(True, 80, 30.0, 50 << 30, "", 1.0, 0)
DSP = PlatformFacts(4096, "Enforcing", ("/dev/fastrpc-cdsp",), (), ("/vendor/lib64/libcdsprpc.so",))
MISMATCH = "<E> Stub lib id mismatch: expected (v2.5), detected (v2.4)"
REFUSED = "Error 0x8000054f: open failed"
PASSED = HealthCheckResult(latency_ns=tuple(1e6 + 1e3 * number for number in range(20)))


@pytest.fixture(scope="module")
def phone(farm_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attached]:
    folder = tmp_path_factory.mktemp("check")
    with attach(FarmHome.make(farm_cache, folder), folder, ["SM8650"]) as attached:
        # The store knows the device and its SoC.
        attached.json("devices", "list")
        yield attached


@pytest.fixture(autouse=True)
def _healthy(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "phone" in request.fixturenames:
        attached: Attached = request.getfixturevalue("phone")
        clear(attached.root(0))
        # A check reads the log from some seconds before its begin.
        (attached.root(0) / LOGCAT).unlink(missing_ok=True)
        until(lambda: attached.json("devices", "list", SERIAL)["devices"][0]["state"] == "ready")


def check(phone: Attached, code: int) -> dict[str, dict[str, str]]:
    """Return the lines of the device by property; the check ends with `code`."""
    answer = phone.home.json("devices", "check", SERIAL, env=phone.env, code=code)
    [device] = answer["devices"]
    return {line["name"]: line for line in device["properties"]}


def levels(lines: dict[str, dict[str, str]]) -> dict[str, str]:
    """Return the properties that are not ok; latencies of a machine with other tests are anything."""
    return {name: line["level"] for name, line in lines.items() if line["level"] != "ok" and name != "latencies"}


def test_a_healthy_device_has_a_line_for_each_property(phone: Attached) -> None:
    head, *lines = phone.farm("devices", "check", SERIAL, code=0).stdout.splitlines()
    assert head == f"{SERIAL}: SM8650 virtual, fit"
    named = [line for line in lines if re.match(r"  (ok|warning|error) ", line)]
    assert [line[11:24].strip() for line in named] == [str(name) for name in Property]
    assert max(map(len, lines)) <= 80


def refusing(text: str) -> Fault:
    """Return the fault of a runner that a session always starts in vain."""
    return Fault("exit_code", text=text, match="--serve", times=0)


@pytest.mark.whole
@pytest.mark.parametrize(
    ("fault", "name", "level", "message"),
    [
        (Fault("disk_full", after_bytes=1000), "free space", "error", "remove files"),
        (Fault("overheated"), "temperature", "warning", "at 60.0 C, limit 45.0 C"),
        (Fault("low_battery"), "temperature", "warning", "at 5 % of battery"),
        (refusing(REFUSED), "unsigned PD", "error", "refuses a process domain of this user (0x8000054f)"),
        (refusing(MISMATCH), "skel", "error", "stub and skel are of two QNN SDKs (expected v2.5, found v2.4)"),
        (Fault("wrong_numbers", times=0), "health check", "error", "the health check did not pass"),
        (Fault("slow_link", bytes_per_s=200_000), "push speed", "warning", "0.2 MB/s: the runtime alone takes"),
    ],
    ids=lambda value: value.kind if isinstance(value, Fault) else "",
)
def test_a_missing_property_has_its_line(phone: Attached, fault: Fault, name: str, level: str, message: str) -> None:
    inject(phone.root(0), fault)
    warned = fault.kind in ("overheated", "low_battery")
    lines = check(phone, 0 if warned else 4)
    assert lines[name]["level"] == level
    assert message in f"{lines[name]['text']}: {lines[name]['next_step']}"
    # The health check fails with a fault that it meets, and has no line of its own for it.
    followers = {"health check", "push speed", "free space"} if fault.kind in ("disk_full", "slow_link") else set()
    followers |= {"health check"} if name in ("unsigned PD", "skel") else set()
    assert levels(lines).keys() - {name} <= followers


def test_another_soc_than_before_and_one_without_a_profile_are_errors_of_identity_and_profile(phone: Attached) -> None:
    inject(phone.root(0), Fault("wrong_soc", text="ABC1"))
    lines = check(phone, 4)
    assert "reports the SoC ABC1, and reported SM8650 before" in lines["identity"]["text"]
    assert lines["SoC profile"]["level"] == "error"
    assert "[soc.ABC1]" in lines["SoC profile"]["next_step"]
    clear(phone.root(0))
    assert "reported ABC1 before" in check(phone, 4)["identity"]["text"]


def test_a_device_that_trusts_nobody_is_an_error_of_identity(phone: Attached) -> None:
    inject(phone.root(0), Fault("unauthorized"))
    # The adb server calls the device offline until the handshake has failed.
    until(lambda: "accept 'Allow USB debugging'" in check(phone, 4)["identity"]["next_step"])


def test_a_denial_in_the_log_of_the_device_is_an_error_of_selinux(phone: Attached) -> None:
    denial = 'avc: denied { read } for comm="farm_runner" name="fastrpc-cdsp" tclass=chr_file permissive=0'
    with (phone.root(0) / LOGCAT).open("a") as file:
        file.write(f"{time.strftime('%m-%d %H:%M:%S')}.999   700   700 I auditd  : {denial}\n")
    lines = check(phone, 4)
    assert lines["SELinux"]["level"] == "error"
    assert 'denies: avc: denied { read } for comm="farm_runner"' in lines["SELinux"]["text"]


@pytest.mark.whole
def test_a_production_build_is_a_warning_about_root(farm_cache: Path, tmp_path: Path) -> None:
    with attach(FarmHome.make(farm_cache, tmp_path), tmp_path, ["SM8650"], build="user") as user:
        lines = check(user, 0)
    assert lines["root"]["level"] == "warning"
    assert "production build" in lines["root"]["text"]


def test_the_transcript_has_no_serial_account_or_path(phone: Attached, tmp_path: Path) -> None:
    phone.farm("devices", "name", SERIAL, "adas-phone", code=0)
    # The text of the fault has names of each kind: device, account, path, address.
    text = f"Error 0x8000054f: {SERIAL} of ada.lovelace@example.org at {phone.home.state}/x and 192.168.7.9:5555, root"
    inject(phone.root(0), refusing(text))
    saved = tmp_path / "check.zip"
    done = phone.home.farm(
        "devices", "check", "adas-phone", "--save", str(saved), env={**phone.env, "USER": "lovelace-a"}, code=4
    )
    phone.farm("devices", "name", SERIAL, "", "--yes", code=0)
    assert f"wrote {saved}" in done.stderr
    with zipfile.ZipFile(saved) as archive:
        names = archive.namelist()
        contents = {name: archive.read(name).decode() for name in names}
    assert {"check.txt", "check.json"} <= set(names)
    everything = "\n".join((*names, *contents.values()))
    hidden = [SERIAL, "adas-phone", "lovelace-a", "ada.lovelace", socket.gethostname(), "192.168.7.9", "127.0.0.1:"]
    hidden += [str(phone.home.state), str(phone.home.cache), str(tmp_path), str(phone.folder)]
    hidden += [getpass.getuser()] if getpass.getuser() != "root" else ["/root"]
    assert [word for word in hidden if word in everything] == []
    answer = json.loads(contents["check.json"])
    [device] = answer["devices"]
    assert answer["versions"]["executorch"]
    assert device["facts"]["platform"]["page_bytes"] == 4096
    assert device["facts"]["runtime"]["files"]["farm_runner"]["page_bytes"] >= 4096
    assert {line["name"] for line in device["checked"]["properties"]} == {str(name) for name in Property}
    assert "error    unsigned PD" in contents["check.txt"]


NAMED = """\
on the way, at alicejump@gatekeeper: no answer
no SSH server can be reached at GATEKEEPER, port 22
fe80::1ff:fe23:4567:890a%wlan0 and [2001:db8::7]:5555
00:11:22:33:44:55 02-11-22-33-44-56
is used by grace since 10:05 for 'farm exec wearables/net.py' (process 7 on labhost7)
is reserved for Henry until 12:00
device ser123 SER123_x
no tunnel to rack-nine: tom@middlebox refused
/Volumes/alice/x C:\\Users\\alice\\x
imei 356938035643809
"""
NAMES = "alice|gatekeeper|fe80|2001|:22:33|-22-33|grace|labhost7|wearables|henry|ser123|rack-nine|tom@|middlebox|3569"


def test_no_name_of_people_machines_or_phones_is_left(tmp_path: Path) -> None:
    file = tmp_path / "farm.toml"
    file.write_text('[[host]]\nname = "rack-nine"\nssh = "tom@middlebox"\n')
    file.chmod(0o600)
    address = SshAddress("board7", "tester", jumps=(SshAddress("gatekeeper", "alicejump"),))
    device = Device(serial="SER123", soc="SM8650", kind="hardware", build="b", address=address, product="p", name="n1")
    report = CheckReport(CheckedDevice("SER123", "n1", "SM8650", "hardware", CheckOutcome.NOT_CHECKED), device)
    command = "farm exec wearables/net.py"
    lease = Lease("SER123", 1, "t", "grace", "labhost7", 7, command, Priority.PERSON, 0, 0, reserved_for="henry")
    for line in NAMED.splitlines():
        shown = Anonymizer(load_config(file), [report], [lease]).text(line)
        assert not re.search(NAMES, shown, re.IGNORECASE), shown


def test_times_and_names_of_code_stay_in_a_transcript() -> None:
    text = "at 09:37:44: QNN 2.49.40.260810104044: c10::Error in std::vector, at::add: 0x8000054f"
    assert Anonymizer(load_config(), []).text(text) == text


def test_facts_of_a_system_are_read_from_hostile_answers() -> None:
    lines = ["page=16384", "selinux=1", "node=/dev/fastrpc-cdsp", "closed=/dev/adsprpc-smd", "x", "=y"]
    facts = parse_platform(named_values(lines))
    assert facts == PlatformFacts(16384, "Enforcing", ("/dev/fastrpc-cdsp",), ("/dev/adsprpc-smd",), ())
    assert [parse_platform({"page": [size]}).page_bytes for size in ("4097", "9" * 40)] == [0, 0]


@pytest.mark.parametrize(
    ("facts", "level", "message"),
    [
        (DSP, Level.WARNING, "did not get so far"),
        (msgspec.structs.replace(DSP, nodes=(), closed_nodes=("/dev/fastrpc-cdsp",)), Level.ERROR, "may not be opened"),
        (msgspec.structs.replace(DSP, nodes=()), Level.ERROR, "no FastRPC node"),
        (msgspec.structs.replace(DSP, fastrpc=()), Level.ERROR, "libcdsprpc.so"),
    ],
)
def test_a_phone_whose_dsp_cannot_be_reached_has_the_reason(facts: PlatformFacts, level: Level, message: str) -> None:
    line = properties.domain(PHONE, facts, HealthCheckResult("the runner is missing: build it", skipped=True))
    assert (line.level, message in line.text) == (level, True)
    assert properties.domain(PHONE, facts, PASSED).level is Level.OK


def test_levels_and_next_steps_of_single_properties() -> None:
    def status(**changes: Any) -> DeviceStatus:
        return msgspec.structs.replace(STATUS, **changes)

    missing = "SM8650 htp needs a file that is missing: libQnnHtpV75Skel.so: set QNN_SDK_ROOT to a QNN SDK"
    incomplete = HealthCheckResult("the runtime is incomplete", skipped=True)
    uneven = HealthCheckResult(latency_ns=(1e6, 3e6) * 10)
    refused = HealthCheckResult("the health check did not pass: no skel: take another", Cause.RUNTIME)
    for line, level, next_step in (
        (properties.room(status(free_bytes=None), 200 << 20), Level.WARNING, None),
        (properties.room(status(free_bytes=1 << 20), 200 << 20), Level.ERROR, None),
        (properties.room(status(free_bytes=300 << 20), 200 << 20), Level.WARNING, None),
        (properties.temperature(status(temperature_c=None), HealthConfig()), Level.WARNING, None),
        (properties.identity(PHONE, "SM8650"), Level.OK, None),
        (properties.identity(msgspec.structs.replace(PHONE, serialno=""), ""), Level.WARNING, None),
        (properties.skel(PHONE, {}, incomplete, missing), Level.ERROR, "set QNN_SDK_ROOT to a QNN SDK"),
        (properties.skel(PHONE, {}, refused, ""), Level.ERROR, "take another"),
        (properties.latencies(PASSED), Level.OK, ""),
        (properties.latencies(uneven), Level.WARNING, None),
    ):
        assert (line.level, next_step in (None, line.next_step)) == (level, True), line
    assert properties.health(refused).text == "failed: see skel"


def test_the_skel_and_the_alignment_come_from_elf_headers(tmp_path: Path) -> None:
    (tmp_path / "skel").write_bytes(make_elf(HEXAGON, flags=0x75))
    (tmp_path / "old").write_bytes(make_elf(AARCH64, align=4096))
    (tmp_path / "new").write_bytes(make_elf(AARCH64, align=16384))
    headers = {name: read_elf(tmp_path / name) for name in ("skel", "old", "new")}
    loaded = properties.skel(PHONE, headers, PASSED, "")
    assert (loaded.level, loaded.text) == (Level.OK, "skel for V75 was loaded")
    assert properties.page_size(DSP, headers).level is Level.OK
    wrong = properties.page_size(msgspec.structs.replace(DSP, page_bytes=16384), headers)
    assert wrong.level is Level.ERROR
    assert "old (4 KB)" in wrong.text
    assert "new" not in wrong.text
