"""`farm doctor` as a user calls it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from farm_home import FarmHome
from programs import run_program

NOTHING = {
    **dict.fromkeys(("QNN_SDK_ROOT", "ANDROID_NDK_ROOT", "HEXAGON_SDK_ROOT", "HEXAGON_TOOLS_ROOT"), ""),
    # No server listens on this port.
    "ANDROID_ADB_SERVER_PORT": "9",
}


def test_it_fits_on_a_screen_and_says_what_to_do(home: FarmHome, tmp_path: Path) -> None:
    done = home.farm("doctor", env={**NOTHING, "FARM_CACHE_DIR": str(tmp_path / "empty-cache")})
    assert (done.returncode, done.stderr) == (0, "")
    table, missing, direct, tools = done.stdout.split("\n\n")
    # Paths stand alone, to be copied.
    assert all(len(line) <= 80 for line in done.stdout.splitlines() if not line.strip().startswith("/"))
    rows = table.splitlines()
    assert rows[0].split() == ["backend", "compile", "stage", "run"]
    assert [row.split()[0] for row in rows[1::2]] == ["htp", "lpai", "gpu", "xnnpack"]
    assert rows[2].strip() == "all 21 SoCs"
    assert rows[4].strip() == "SAR2230P, SM8850"
    assert rows[1].split()[1] == "yes"
    for number in range(1, 6):
        assert f"\n[{number}] " in missing
    for variable in ("ANDROID_NDK_ROOT", "FARM_EXECUTORCH_BUILD", "QNN_SDK_ROOT", "FARM_EXECUTORCH_LINUX_BUILD"):
        assert f"    set {variable} to " in missing
    assert "not complete for any of them" in " ".join(direct.split())
    assert "--option direct_mode=true" in " ".join(direct.split())
    assert tools.startswith("tools\n  executorch ")
    assert "no server on port 9" in tools
    remembered = {path.name for path in (tmp_path / "empty-cache").glob("*")}
    assert remembered <= {"hashes"}, "what the files are that it looked at, and nothing else"
    assert list(home.cwd.iterdir()) == []


@pytest.mark.parametrize(
    ("soc", "backend", "code"),
    [("SM8650", "htp", 0), ("SM8650", "gpu", 6), ("SM8850", "lpai", 6), ("QCM6490", "xnnpack", 0)],
)
def test_asked_for_one_the_exit_code_says_whether_it_runs(home: FarmHome, soc: str, backend: str, code: int) -> None:
    done = home.farm("doctor", "--soc", soc.lower(), "--backend", backend, "--json", env=NOTHING)
    assert (done.returncode, done.stderr) == (code, "")
    answer = json.loads(done.stdout)
    assert answer["schema"] == 1
    (ability,) = answer["abilities"]
    assert (ability["soc"], ability["backend"]) == (soc, backend)
    assert ability["run"]["where"] == (["simulator"] if code == 0 else [])
    assert all(gap["repair"] for gap in ability["run"]["gaps"])
    assert all(one["runs_jobs"] is False for one in answer["direct"])
    assert {"QNN SDK", "Hexagon SDK", "adb", "torch"} <= {tool["name"] for tool in answer["tools"]}
    # For a whole SoC the command only reports.
    assert home.farm("doctor", "--soc", soc, env=NOTHING).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--soc", "SM8651"), "unknown SoC 'SM8651': did you mean 'SM8650'?"),
        (("--backend", "hpt"), "unknown backend 'hpt': did you mean 'htp'?"),
        (("--soc", "SM8650", "--backend", "lpai"), "SM8650 has no lpai backend: legal are"),
    ],
)
def test_bad_input_is_one_line(home: FarmHome, arguments: tuple[str, ...], says: str) -> None:
    done = home.farm("doctor", *arguments, env=NOTHING)
    assert (done.returncode, done.stdout) == (2, "")
    assert says in done.stderr
    assert done.stderr.count("\n") == 1


def test_it_tells_which_devices_are_attached(home: FarmHome, tmp_path: Path) -> None:
    from farm.base.processes import Supervisor
    from farm.devices.adb.server import start_adb_server
    from farm.devices.virtual.boot import boot

    with Supervisor() as supervisor:
        server = start_adb_server(supervisor, tmp_path / "adb")
        (device,) = boot(supervisor, server, ["SM8650"], tmp_path / "devices")
        done = home.farm("doctor", "--json", env={**NOTHING, "ANDROID_ADB_SERVER_PORT": str(server.port)})
    assert done.returncode == 0
    answer = json.loads(done.stdout)
    assert answer["adb"] == f"attached: {device.serial} (SM8650)"
    # A virtual device is none that GPU programs run on.
    gpu = [one for one in answer["abilities"] if (one["soc"], one["backend"]) == ("SM8650", "gpu")]
    assert gpu[0]["run"]["where"] == []


def test_it_imports_nothing_heavy(home: FarmHome) -> None:
    code = (
        "import sys\nfrom farm.cli.main import main\nsys.argv = ['farm', 'doctor']\n"
        "try:\n    main()\nexcept SystemExit as ended:\n    assert not ended.code, ended.code\n"
        "heavy = {'torch', 'executorch', 'numpy', 'sqlalchemy', 'adbutils', 'pytest'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    run_program([sys.executable, "-c", code], env={**home.env, **NOTHING}, timeout_s=60)
