"""`farm doctor` as a user calls it."""

from __future__ import annotations

from pathlib import Path

import pytest
from farm_home import FarmHome

from farm.base.processes import Supervisor
from farm.devices.adb.server import start_adb_server
from farm.devices.virtual.boot import boot

NOTHING = {
    **dict.fromkeys(("QNN_SDK_ROOT", "ANDROID_NDK_ROOT", "HEXAGON_SDK_ROOT", "HEXAGON_TOOLS_ROOT"), ""),
    # No server listens on this port.
    "ANDROID_ADB_SERVER_PORT": "9",
}


def test_it_fits_on_a_screen_and_says_what_to_do(home: FarmHome, tmp_path: Path) -> None:
    done = home.farm("doctor", env={**NOTHING, "FARM_CACHE_DIR": str(tmp_path / "empty-cache")}, code=0)
    table, missing, direct, tools = done.stdout.split("\n\n")
    # Paths stand alone, to be copied.
    assert all(len(line) <= 80 for line in done.stdout.splitlines() if not line.strip().startswith("/"))
    rows = table.splitlines()
    assert [row.split()[0] for row in rows[::2][:1] + rows[1::2]] == ["backend", "htp", "lpai", "gpu", "xnnpack"]
    assert [rows[2].strip(), rows[4].strip()] == ["all 21 SoCs", "SAR2230P, SM8850"]
    for variable in ("ANDROID_NDK_ROOT", "FARM_EXECUTORCH_BUILD", "QNN_SDK_ROOT", "FARM_EXECUTORCH_LINUX_BUILD"):
        assert f"    set {variable} to " in missing
    assert "--option direct_mode=true" in " ".join(direct.split())
    assert "no server on port 9" in tools
    remembered = {path.name for path in (tmp_path / "empty-cache").glob("*")}
    assert remembered <= {"hashes"}, "hashes of the files that it looked at, and nothing else"


@pytest.mark.parametrize(
    ("soc", "backend", "code"), [("SM8650", "htp", 0), ("SM8650", "gpu", 6), ("SM8850", "lpai", 6)]
)
def test_asked_for_one_the_exit_code_says_whether_it_runs(home: FarmHome, soc: str, backend: str, code: int) -> None:
    answer = home.json("doctor", "--soc", soc.lower(), "--backend", backend, env=NOTHING, code=code)
    (ability,) = answer["abilities"]
    assert (ability["soc"], ability["backend"]) == (soc, backend)
    assert ability["run"]["where"] == (["simulator"] if code == 0 else [])
    assert all(gap["repair"] for gap in ability["run"]["gaps"])
    assert {"QNN SDK", "Hexagon SDK", "adb", "torch"} <= {tool["name"] for tool in answer["tools"]}


def test_it_tells_which_devices_are_attached(home: FarmHome, tmp_path: Path) -> None:
    with Supervisor() as supervisor:
        server = start_adb_server(supervisor, tmp_path / "adb")
        (device,) = boot(supervisor, server, ["SM8650"], tmp_path / "devices")
        answer = home.json("doctor", env={**NOTHING, "ANDROID_ADB_SERVER_PORT": str(server.port)})
    assert answer["adb"] == f"attached: {device.serial} (SM8650)"
    # A virtual device is none that GPU programs run on.
    [gpu] = [one for one in answer["abilities"] if (one["soc"], one["backend"]) == ("SM8650", "gpu")]
    assert gpu["run"]["where"] == []
