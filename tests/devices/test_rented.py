"""Rented devices: hosts with an end time behind a real sshd that only forwards, and behind a poor adb server."""

from __future__ import annotations

import getpass
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from attached import Attached, attach
from farm_home import FarmHome
from poor_adb_proxy import PoorAdbProxy, poor_adb_proxy
from ssh_server import SshServer, running
from waiting import until

from farm.base.config.settings import load_config
from farm.base.errors import DeviceError, UsageError
from farm.base.processes import Supervisor
from farm.base.socs import find_soc
from farm.builds.runtime.runtime import virtual_runtime
from farm.devices.adb.transport import AdbTransport
from farm.devices.device import AdbAddress
from farm.devices.discovery import scan, scan_all
from farm.devices.health import Event, Health, HealthMark, next_health
from farm.devices.rented import remove_rented
from farm.dispatch.device_run.device_run import DeviceRun
from farm.policy.estimate import UNKNOWN_SECONDS, fits

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
    done = farm.farm(
        "devices", "host", "add", "qdc", *login(gateway), "--adb", f"127.0.0.1:{rack.port}", "--until", "2h", code=0
    )
    assert "with 1 devices" in done.stdout
    assert SERIAL in done.stdout
    assert serials(farm) == [SERIAL]
    again = farm.farm("devices", "host", "add", "qdc", "--adb", f"127.0.0.1:{rack.port}", "--until", "1h", code=2)
    assert "remove it first" in again.stderr
    [listed] = farm.json("devices", "host", "list")["hosts"]
    assert listed["name"] == "qdc"
    assert 7100 < listed["until_ms"] / 1000 - time.time() < 7200
    farm.farm("devices", "host", "remove", "qdc", "--yes", code=0)
    assert serials(farm) == []
    assert "unknown rented host 'qdc'" in farm.farm("devices", "host", "remove", "qdc", code=2).stderr


def test_a_host_that_cannot_be_reached_is_refused_with_its_reason(farm: FarmHome, gateway: SshServer) -> None:
    words = ("devices", "host", "add", "qdc", "--until", "2h")
    no_adb = farm.farm(*words, *login(gateway), "--adb", "127.0.0.1:1", code=4)
    assert "runs no commands" in no_adb.stderr
    other_key = [*login(gateway)[:2], "--key-file", f"{gateway.folder}/other_key", *login(gateway)[4:]]
    assert "does not let" in farm.farm(*words, *other_key, code=4).stderr
    assert "--adb" in farm.farm(*words, "--adb", "nonsense", code=2).stderr
    assert "neither adb" in farm.farm(*words, code=2).stderr
    for name in ("../x", "a/b"):
        refused = farm.farm("devices", "host", "add", name, "--adb", "127.0.0.1:1", "--until", "1h", code=2)
        assert "expected letters, digits" in refused.stderr
    with pytest.raises(UsageError, match="is no name of a host"):
        remove_rented(load_config(), "../x")
    (farm.cwd / "farm.toml").write_text('[[host]]\nname = "qdc"\nadb = "127.0.0.1:1"\n')
    assert farm.json("devices", "host", "list")["hosts"] == []


def test_a_host_is_gone_at_its_end_time(farm: FarmHome, rack: Attached) -> None:
    farm.farm("devices", "host", "add", "qdc", "--adb", f"127.0.0.1:{rack.port}", "--until", "4s", code=0)
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
    with poor_adb_proxy(rack.port) as proxy:
        yield proxy


@pytest.mark.whole
def test_a_run_on_a_poor_server_behind_a_forwarding_account(
    farm: FarmHome, poor: PoorAdbProxy, gateway: SshServer
) -> None:
    farm.farm(
        "devices", "host", "add", "qdc", *login(gateway), "--adb", f"127.0.0.1:{poor.port}", "--until", "2h", code=0
    )
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
    with poor_adb_proxy(rack.port, 0.0) as proxy:
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
    with poor_adb_proxy(rack.port, 0.0) as proxy:
        farm.farm("devices", "host", "add", "qdc", "--adb", f"127.0.0.1:{proxy.port}", "--until", "1h", code=0)
        with farm.running("run", "--soc", "SM8650", "--suite", "smoke", "--name", "cut") as run:
            assert run.stdout is not None
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
    farm.farm("devices", "host", "add", "qdc", "--adb", f"127.0.0.1:{rack.port}", "--until", "80s", code=0)
    done = farm.farm(*run, "--name", "short", code=4, timeout_s=300)
    assert "its rented session ends at" in done.stderr
    assert "do not fit into the rest" in done.stderr
    assert [job["attempts"] for job in jobs_of(farm, "short")] == [[]]
    farm.farm("devices", "host", "remove", "qdc", "--yes", code=0)
    farm.farm("devices", "host", "add", "qdc", "--adb", f"127.0.0.1:{rack.port}", "--until", "2h", code=0)
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
