"""`farm setup sign` as a user calls it, with a stub of elfsigner."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from elf_maker import make_elf
from farm_home import FarmHome
from hexagon_sdk_stub import make_hexagon_sdk, processes, starts

NOTHING = {"QNN_SDK_ROOT": "", "HEXAGON_SDK_ROOT": "", "HEXAGON_TOOLS_ROOT": ""}


@pytest.fixture
def sdk(home: FarmHome) -> Path:
    """A stub of an SDK with the unsigned skel of LPAI v6."""
    root = home.cwd / "stub-sdk"
    skel = root / "lib/lpai-v6/unsigned/libQnnLpaiSkel.so"
    skel.parent.mkdir(parents=True)
    skel.write_bytes(make_elf(164, 0x81))
    return root


@pytest.fixture
def roots(home: FarmHome, sdk: Path) -> dict[str, str]:
    hexagon = make_hexagon_sdk(home.cwd / "stub-hexagon-sdk")
    return {**NOTHING, "QNN_SDK_ROOT": str(sdk), "HEXAGON_SDK_ROOT": str(hexagon)}


def test_it_signs_once_and_says_what_it_did(home: FarmHome, sdk: Path, roots: dict[str, str]) -> None:
    signed = sdk / "lib/lpai-v6/signed"
    done = home.farm("setup", "sign", "--lpai", "v6", env=roots, code=0)
    assert done.stdout == f"{signed}\n  {'libQnnLpaiSkel.so':<36}signed\n"
    assert f"farm: signing {sdk}/lib/lpai-v6/unsigned/libQnnLpaiSkel.so" in done.stderr
    assert "  elfsigner:         Agree? [y/n]:" in done.stderr
    again = home.farm("setup", "sign", "--lpai", "6", "--json", env=roots)
    answer = json.loads(again.stdout)
    assert (answer["schema"], again.stderr) == (1, "")
    assert answer["files"] == [{"file": str(signed / "libQnnLpaiSkel.so"), "state": "is signed already"}]
    assert starts(home.cwd / "stub-hexagon-sdk") == 1
    forced = home.farm("setup", "sign", "--lpai", "v6", "--force", env=roots)
    assert (forced.returncode, starts(home.cwd / "stub-hexagon-sdk")) == (0, 2)
    checked = home.farm("setup", "runtime", "check", "--soc", "SM8850", "--backend", "lpai", "--json", env=roots)
    states = {one["name"]: one["state"] for one in json.loads(checked.stdout)["files"]}
    assert states["libQnnLpaiSkel.so"] == "ok"


def test_the_roots_may_be_options(home: FarmHome, sdk: Path) -> None:
    make_hexagon_sdk(home.cwd / "stub-hexagon-sdk")
    roots = ("--sdk-root", "stub-sdk", "--hexagon-sdk", "stub-hexagon-sdk")
    home.farm("setup", "sign", "--lpai", "v6", *roots, "--python", sys.executable, env=NOTHING, code=0)
    assert (sdk / "lib/lpai-v6/signed/libQnnLpaiSkel.so.farm-sign.json").is_file()


def test_what_others_signed_is_neither_replaced_nor_trusted_unless_told(
    home: FarmHome, sdk: Path, roots: dict[str, str]
) -> None:
    skel = sdk / "lib/lpai-v6/signed/libQnnLpaiSkel.so"
    skel.parent.mkdir()
    content = make_elf(164, 0x81, segments=((0, 2 << 24), (1, 5)))
    skel.write_bytes(content)
    refused = home.farm("setup", "sign", "--lpai", "v6", env=roots, code=2)
    assert "signed, but not by this command: --adopt vouches for it as it is, --force signs anew" in refused.stderr
    assert skel.read_bytes() == content
    adopted = home.farm("setup", "sign", "--lpai", "v6", "--adopt", env={**roots, "HEXAGON_SDK_ROOT": ""})
    assert (adopted.returncode, adopted.stdout.split()[-1]) == (0, "adopted")
    assert starts(home.cwd / "stub-hexagon-sdk") == 0
    assert skel.read_bytes() == content


def test_all_that_upstreams_build_signed_is_adopted_by_one_command(
    home: FarmHome, sdk: Path, roots: dict[str, str]
) -> None:
    """`build.sh --build_direct_mode 0` leaves what direct mode runs on the LPAI, and no skel."""
    names = ["libQnnLpai.so", "libQnnSystem.so", "libqnn_executorch_backend.so", "libqnn_executorch_skel.so",
             "libc++.so.1", "libc++abi.so.1"]  # fmt: skip
    signed = sdk / "lib/lpai-v6/signed"
    signed.mkdir()
    for name in names[:5]:
        (signed / name).write_bytes(make_elf(164, 0x81, segments=((0, 2 << 24), (1, 5))))
    lacking = home.farm("setup", "sign", "--lpai", "v6", "--direct", "--htp", "v81", "--adopt", env=roots)
    assert (lacking.returncode, lacking.stdout) == (2, "")
    assert lacking.stderr == (
        f"farm: {signed} lacks libc++abi.so.1: put it there, or let farm setup sign make it without --adopt\n"
    )
    (signed / names[5]).write_bytes(make_elf(164, 0x81, segments=((0, 2 << 24), (1, 5))))
    done = home.farm(
        "setup", "sign", "--lpai", "v6", "--adopt", "--json", env={**roots, "HEXAGON_SDK_ROOT": ""}, code=0
    )
    assert json.loads(done.stdout)["files"] == [{"file": str(signed / name), "state": "adopted"} for name in names]
    assert {path.name for path in signed.glob("*.farm-sign.json")} == {f"{name}.farm-sign.json" for name in names}
    checked = home.farm(
        "setup", "runtime", "check", "--soc", "SM8850", "--backend", "lpai", "--direct", "--json", env=roots
    )
    states = {one["name"]: one["state"] for one in json.loads(checked.stdout)["files"]}
    assert {states[name] for name in names} == {"ok"}


def test_what_was_adopted_is_signed_over_by_force_only(home: FarmHome, sdk: Path, roots: dict[str, str]) -> None:
    skel = sdk / "lib/lpai-v6/signed/libQnnLpaiSkel.so"
    skel.parent.mkdir()
    content = make_elf(164, 0x81, segments=((0, 2 << 24), (1, 5)))
    skel.write_bytes(content)
    unsigned = sdk / "lib/lpai-v6/unsigned/libQnnLpaiSkel.so"
    kept = unsigned.read_bytes()
    unsigned.unlink()
    assert home.farm("setup", "sign", "--lpai", "v6", "--adopt", env=roots).returncode == 0
    unsigned.write_bytes(kept)
    again = home.farm("setup", "sign", "--lpai", "v6", env=roots)
    assert (again.returncode, again.stdout.split()[-3:]) == (0, ["is", "signed", "already"])
    assert home.farm("setup", "sign", "--lpai", "v6", "--adopt", env=roots).returncode == 0
    unsigned.write_bytes(kept + b"newer")
    refused = home.farm("setup", "sign", "--lpai", "v6", env=roots, code=2)
    assert "signed, but not by this command: --adopt vouches for it as it is, --force signs anew" in refused.stderr
    assert skel.read_bytes() == content
    assert home.farm("setup", "sign", "--lpai", "v6", "--force", env=roots).returncode == 0
    assert skel.read_bytes() != content


@pytest.mark.parametrize(
    ("arguments", "changes", "code", "says"),
    [
        (("--lpai", "v6"), {"HEXAGON_SDK_ROOT": ""}, 6, "set HEXAGON_SDK_ROOT to a Hexagon SDK from Qualcomm"),
        (("--lpai", "v6"), {"QNN_SDK_ROOT": ""}, 6, "set QNN_SDK_ROOT to a QNN SDK"),
        (("--lpai", "six"), {}, 2, "--lpai: 'six' is no version: expected something like v6"),
        (("--lpai", "v5"), {}, 2, "no SoC has LPAI v5: known are v6"),
        (("--lpai", "v6", "--direct"), {}, 2, "--direct needs --htp"),
        (("--lpai", "v6", "--htp", "v81"), {}, 2, "--htp is for --direct only"),
        (("--lpai", "v6", "--direct", "--htp", "v75"), {}, 2, "no SoC with LPAI v6 has a Hexagon V75"),
        (("--lpai", "v6", "--direct", "--htp", "v81"), {}, 6, "set FARM_EXECUTORCH_DIRECT_BUILD"),
        (("--lpai", "v6", "--adopt"), {}, 2, "/lib/lpai-v6/signed: put signed files there, as libQnnLpaiSkel.so"),
        (("--adopt",), {}, 2, "name the version of the LPAI: --lpai v6\n"),
        (("--lpai", "v6", "--adopt", "--force"), {}, 2, "--adopt signs nothing: leave --force out"),
        (("--lpai", "v6", "--adopt", "--python", sys.executable), {}, 2, "--adopt signs nothing: leave --python out"),
        (("--lpai", "v6", "--sdk-root", "/nonexistent"), {}, 2, "--sdk-root: there is no folder /nonexistent"),
        (("--lpai", "v6", "--hexagon-sdk", "/nonexistent"), {}, 2, "--hexagon-sdk: there is no folder /nonexistent"),
        (("--lpai", "v6"), {"QNN_SDK_ROOT": "/nonexistent"}, 6, "the QNN SDK folder /nonexistent does not exist"),
        (("--lpai", "v6"), {"QNN_SDK_ROOT": "/usr"}, 6, "(Qualcomm AI Engine Direct) with lib/lpai-v6/unsigned"),
    ],
)
def test_bad_input_is_one_line(
    home: FarmHome, roots: dict[str, str], arguments: tuple[str, ...], changes: dict[str, str], code: int, says: str
) -> None:
    done = home.farm("setup", "sign", *arguments, env={**roots, **changes})
    assert (done.returncode, done.stdout) == (code, "")
    assert says in done.stderr
    assert done.stderr.startswith("farm: ")
    assert done.stderr.count("\n") == 1
    assert starts(home.cwd / "stub-hexagon-sdk") == 0


def test_a_tool_that_fails_is_exit_code_4_below_what_it_said(home: FarmHome, roots: dict[str, str]) -> None:
    make_hexagon_sdk(home.cwd / "stub-hexagon-sdk", "fails")
    done = home.farm("setup", "sign", "--lpai", "v6", env=roots)
    assert (done.returncode, done.stdout) == (4, "")
    *above, last = done.stderr.splitlines()
    assert above[-1] == "  elfsigner: ERROR: Signing failed!"
    assert last == "farm: elfsigner did not sign libQnnLpaiSkel.so: it ended with exit code 1; its lines are above"


def test_an_interrupted_signing_leaves_nothing(home: FarmHome, sdk: Path, roots: dict[str, str]) -> None:
    make_hexagon_sdk(home.cwd / "stub-hexagon-sdk", "hangs")
    env = {**home.env, **roots, "FARM_CACHE_DIR": str(home.cwd / "cache")}
    farm = subprocess.Popen(
        [sys.executable, "-m", "farm.cli.main", "setup", "sign", "--lpai", "v6"],
        env=env, cwd=home.cwd, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert farm.stderr is not None
    while b"red" not in (line := farm.stderr.readline()):
        assert line
    os.kill(farm.pid, signal.SIGINT)
    farm.communicate(timeout=60)
    assert farm.returncode == 130
    assert processes(home.cwd / "stub-hexagon-sdk") == []
    assert [path for path in (home.cwd / "cache").rglob("*") if path.is_file()] == []
    assert not (sdk / "lib/lpai-v6/signed").exists()
