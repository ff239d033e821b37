"""Runs on devices that fail for good: one is revived by its power command, of the other its owner gets a notice."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from attached import Attached, attach
from receivers import web_server
from stub_home import make_stub_home, write_stub_suite

from farm.devices.virtual.faults import Fault, FaultKind, inject

pytestmark = pytest.mark.whole

RUN = ("run", "--soc", "SM8650", "--suite", "./mine", "--json")


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Attached]:
    home = make_stub_home(tmp_path / "stub")
    write_stub_suite(home, "mine", {"only": 20})
    with attach(home, tmp_path, ["SM8650", "SM8650"]) as attached:
        yield attached


def test_power_revives_a_device_and_a_quarantine_is_announced_once(pair: Attached, tmp_path: Path) -> None:
    # Every runner dies, also at a health check, until the power is switched off and on.
    for number in (0, 1):
        inject(pair.root(number), Fault(FaultKind.KILL_RUNNER, times=0))
    left, other = (device.serial for device in pair.devices)
    hub = tmp_path / "hub.py"
    hub.write_text(
        f"#!{sys.executable}\nimport sys\nfrom pathlib import Path\nfrom farm.devices.virtual.faults import clear\n"
        f"clear(Path({str(pair.root(0))!r}))\nprint('cycled', *sys.argv[1:])\n"
    )
    hub.chmod(0o700)
    (pair.home.cwd / "farm.toml").write_text(
        f'[[device]]\nserial = "{left}"\nname = "left"\npower = ["{hub}", "{{serial}}"]\n'
        f'[[notify.webhook]]\nurl_env = "LAB_HOOK"\n'
    )
    with web_server() as hook:
        env = {**pair.env, "LAB_HOOK": hook.url("/T0/SECRET")}
        with pair.home.running(*RUN, "--device", "left", env=env) as revived:
            # At the same time: most of either is the pauses between the steps.
            pair.home.farm(*RUN, "--device", other, env=env, timeout_s=300, code=4)
            output = revived.communicate(timeout=300)[0]
        assert revived.returncode == 0, output
        [event] = [one for one in pair.json("devices", "show", "left")["events"] if "power" in one["reason"]]
        assert event["reason"] == f"power cycle: it answers again; the command printed: cycled {left}"
        pair.home.farm(*RUN, "--device", other, env=env, timeout_s=300, code=4)
        answers = [json.loads(body)["device"]["serial"] for body in hook.bodies]
        assert answers == [other], "once for the quarantine, and not for each run"
    assert "sent: webhook 1 (http://127.0.0.1" in pair.farm("devices", "show", other).stdout
    everything = [file.read_bytes() for file in pair.home.state.rglob("*") if file.is_file()]
    assert not any(b"T0/SECRET" in content for content in everything)
