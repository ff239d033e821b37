"""Runs on devices that fail for good: one is revived by its power command, of the other its owner gets a notice."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import pytest
from attached import Attached, attach
from receivers import web_server

from farm.virtual.faults import Fault, FaultKind, inject

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from farm_home import FarmHome

pytestmark = pytest.mark.whole

RUN = ("run", "--soc", "SM8650", "--suite", "smoke", "-k", "add", "--json")


@pytest.fixture
def pair(home: FarmHome, tmp_path: Path) -> Iterator[Attached]:
    with attach(home, tmp_path, ["SM8650", "SM8650"]) as attached:
        yield attached


def test_power_revives_a_device_and_a_quarantine_is_announced_once(pair: Attached, tmp_path: Path) -> None:
    # Every runner dies, whatever is done but for the power: the canary's as well.
    for number in (0, 1):
        inject(pair.root(number), Fault(FaultKind.KILL_RUNNER, times=0))
    hub = tmp_path / "hub.py"
    hub.write_text(
        f"#!{sys.executable}\nimport sys\nfrom pathlib import Path\nfrom farm.virtual.faults import clear\n"
        f"clear(Path({str(pair.root(0))!r}))\nprint('cycled', *sys.argv[1:])\n"
    )
    hub.chmod(0o700)
    with web_server() as hook:
        (pair.home.cwd / "farm.toml").write_text(
            f'[[device]]\nserial = "{pair.devices[0].serial}"\nname = "left"\npower = ["{hub}", "{{serial}}"]\n'
            f'[[notify.webhook]]\nurl_env = "LAB_HOOK"\n'
        )
        env = {**pair.env, "LAB_HOOK": hook.url("/T0/SECRET")}

        revived = pair.home.farm(*RUN, "--device", "left", env=env, timeout_s=300)
        assert revived.returncode == 0, revived.stderr
        [event] = [one for one in pair.json("device", "show", "left")["events"] if "power" in one["reason"]]
        assert event["reason"] == (
            f"power cycle: it answers again; the command printed: cycled {pair.devices[0].serial}"
        )
        assert hook.requests == []

        other = pair.devices[1].serial
        for _ in range(2):
            given_up = pair.home.farm(*RUN, "--device", other, env=env, timeout_s=300)
            assert given_up.returncode == 4, given_up.stdout
            assert "SECRET" not in given_up.stderr
        told = [json.loads(body) for body in hook.bodies]
        assert [one["device"]["serial"] for one in told] == [other], "once for the quarantine, and not for each run"
        assert told[0]["run"] in pair.json("device", "show", other)["events"][-1]["detail"]["run"]
    shown = pair.farm("device", "show", other).stdout
    assert "sent: webhook 1 (http://127.0.0.1" in shown
    everything = [file.read_bytes() for file in pair.home.state.rglob("*") if file.is_file()]
    assert not any(b"T0/SECRET" in content for content in everything)
