"""Targets whose heap ExecuTorch does not measure are refused before a run begins."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from made import device

from farm.base.config.settings import load_config
from farm.base.errors import IllegalTargetError, UsageError
from farm.devices.discovery import Scan
from farm.dispatch.cluster.client.devices import choose as devices_of_agents
from farm.dispatch.nightly.plan import command_of
from farm.dispatch.pool.fleet import Choice, choose
from farm.dispatch.request.choose import check_machine, jobs_of, select
from farm.dispatch.request.request import RunRequest
from farm.store.cluster.records import Agent, AgentDevice, AgentFacts
from farm.store.protocol import PROTOCOL
from farm.suites.features import Features

HEAP = RunRequest(socs=("SM8650",), suites=("smoke",), heap=True)
PHONE = device("phone", "QCS9100")
BOARD = msgspec.structs.replace(PHONE, serial="board", os="linux")


def test_a_linux_board_is_left_out_and_refused_where_it_is_alone() -> None:
    wanted = Choice(heap=True)
    devices, refused = choose(Scan([PHONE, BOARD], [], []), {}, ["QCS9100"], wanted)
    assert [device.serial for device in devices] == ["phone"]
    assert refused == ["board (QCS9100: ExecuTorch measures the DSP's heap on Android and QNX, not on Linux)"]
    with pytest.raises(IllegalTargetError, match="--heap: board: ExecuTorch measures .* not on Linux: attach a device"):
        choose(Scan([BOARD], [], []), {}, ["QCS9100"], wanted)
    assert choose(Scan([BOARD], [], []), {}, ["QCS9100"], Choice())[0] == [BOARD]


def test_a_shared_farm_leaves_out_linux_boards_as_well() -> None:
    facts = [AgentDevice(one.id, one.serial, one.soc, one.kind, one.os or "android") for one in (PHONE, BOARD)]
    both, alone = (
        Agent("lab", "farm", 0, 0, True, AgentFacts(host="lab", pid=1, version="1", protocol=PROTOCOL, devices=devices))
        for devices in (tuple(facts), tuple(facts[1:]))
    )
    devices, refused = devices_of_agents([both], {}, ["QCS9100"], Choice(heap=True))
    assert [device.serial for device in devices] == ["phone"]
    assert refused == ["board (QCS9100 of lab: ExecuTorch measures the DSP's heap on Android and QNX, not on Linux)"]
    with pytest.raises(IllegalTargetError, match="--heap: board: ExecuTorch measures .* not on Linux: attach a device"):
        devices_of_agents([alone], {}, ["QCS9100"], Choice(heap=True))


def test_programs_that_make_their_contexts_on_the_device_are_refused(tmp_path: Path) -> None:
    config = load_config(folder=tmp_path)
    one, other, *_ = jobs_of(config, HEAP)
    online = msgspec.structs.replace(
        one, case=msgspec.structs.replace(one.case, features=Features(online_prepare=True))
    )
    assert select(HEAP, [other], judged=False) == (other,)
    with pytest.raises(UsageError, match=r"makes its own on the device \(online_prepare\): leave it out with -k 'not "):
        select(HEAP, [online, other], judged=False)


def test_the_simulator_is_refused_and_a_stub_in_its_place_is_not(tmp_path: Path) -> None:
    virtual = msgspec.structs.replace(HEAP, virtual=1)
    config = load_config(folder=tmp_path)
    with pytest.raises(IllegalTargetError, match="the simulator has none: attach a device"):
        check_machine(config, virtual)
    stub = tmp_path / "sdk"
    stub.mkdir()
    (stub / "sdk.yaml").write_text("product: stub\n")
    check_machine(msgspec.structs.replace(config, sdk_root=stub), virtual)


def test_a_night_measures_the_heap_as_often_as_its_cell_states() -> None:
    assert "--heap --iterations 5" in command_of(msgspec.structs.replace(HEAP, iterations=5))
    assert "--iterations" not in command_of(msgspec.structs.replace(HEAP, reducible=True))
