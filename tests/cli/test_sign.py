"""`farm setup sign` as a user calls it, with a stub of elfsigner."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
from elf_maker import make_elf
from farm_home import FarmHome
from hexagon_sdk_stub import make_hexagon_sdk, processes, starts

NOTHING = {"QNN_SDK_ROOT": "", "HEXAGON_SDK_ROOT": "", "HEXAGON_TOOLS_ROOT": ""}
SIGN = ("setup", "sign", "--lpai", "v6")


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
    signed, hexagon = sdk / "lib/lpai-v6/signed", home.cwd / "stub-hexagon-sdk"
    done = home.farm(*SIGN, env=roots, code=0)
    assert done.stdout == f"{signed}\n  {'libQnnLpaiSkel.so':<36}signed\n"
    assert f"farm: signing {sdk}/lib/lpai-v6/unsigned/libQnnLpaiSkel.so" in done.stderr
    assert "  elfsigner:         Agree? [y/n]:" in done.stderr
    again = home.json("setup", "sign", "--lpai", "6", env=roots)
    assert again["files"] == [{"file": str(signed / "libQnnLpaiSkel.so"), "state": "is signed already"}]
    assert starts(hexagon) == 1
    checked = home.json("setup", "runtime", "check", "--soc", "SM8850", "--backend", "lpai", env=roots, code=None)
    assert {one["name"]: one["state"] for one in checked["files"]}["libQnnLpaiSkel.so"] == "ok"


def test_the_roots_may_be_options(home: FarmHome, sdk: Path) -> None:
    make_hexagon_sdk(home.cwd / "stub-hexagon-sdk")
    roots = ("--sdk-root", "stub-sdk", "--hexagon-sdk", "stub-hexagon-sdk")
    home.farm(*SIGN, *roots, "--python", sys.executable, env=NOTHING, code=0)
    assert (sdk / "lib/lpai-v6/signed/libQnnLpaiSkel.so.farm-sign.json").is_file()


def test_a_file_that_others_signed_is_neither_replaced_nor_trusted_unless_told(
    home: FarmHome, sdk: Path, roots: dict[str, str]
) -> None:
    skel = sdk / "lib/lpai-v6/signed/libQnnLpaiSkel.so"
    skel.parent.mkdir()
    skel.write_bytes(by_others := make_elf(164, 0x81, segments=((0, 2 << 24), (1, 5))))
    refused = home.farm(*SIGN, env=roots, code=2)
    assert "signed, but not by this command: --adopt vouches for it as it is, --force signs anew" in refused.stderr
    adopted = home.farm(*SIGN, "--adopt", env={**roots, "HEXAGON_SDK_ROOT": ""}, code=0)
    assert (adopted.stdout.split()[-1], skel.read_bytes()) == ("adopted", by_others)
    home.farm(*SIGN, "--force", env=roots, code=0)
    assert skel.read_bytes() != by_others


def test_bad_input_is_one_line(home: FarmHome, roots: dict[str, str]) -> None:
    bad: list[tuple[str, dict[str, str], int, str]] = [
        ("--lpai v6", {"HEXAGON_SDK_ROOT": ""}, 6, "set HEXAGON_SDK_ROOT to a Hexagon SDK from Qualcomm"),
        ("--lpai six", {}, 2, "--lpai: 'six' is no version: expected something like v6"),
        ("--lpai v5", {}, 2, "no SoC has LPAI v5: known are v6"),
        ("--lpai v6 --direct", {}, 2, "--direct needs --htp"),
        ("--lpai v6 --htp v81", {}, 2, "--htp is for --direct only"),
        ("--lpai v6 --adopt", {}, 2, "/lib/lpai-v6/signed: put signed files there, as libQnnLpaiSkel.so"),
        ("--adopt", {}, 2, "name the version of the LPAI: --lpai v6"),
        ("--lpai v6 --adopt --force", {}, 2, "--adopt signs nothing: leave --force out"),
        ("--lpai v6 --sdk-root /nonexistent", {}, 2, "--sdk-root: there is no folder /nonexistent"),
        ("--lpai v6", {"QNN_SDK_ROOT": "/nonexistent"}, 6, "the QNN SDK folder /nonexistent does not exist"),
    ]
    for words, changes, code, message in bad:
        done = home.farm("setup", "sign", *words.split(), env={**roots, **changes}, code=code)
        assert (done.stdout, done.stderr.count("\n"), message in done.stderr) == ("", 1, True), (words, done.stderr)
    assert starts(home.cwd / "stub-hexagon-sdk") == 0


def test_an_interrupted_signing_leaves_nothing(home: FarmHome, sdk: Path, roots: dict[str, str]) -> None:
    make_hexagon_sdk(home.cwd / "stub-hexagon-sdk", "hangs")
    farm = home.start_alone(*SIGN, env={**roots, "FARM_CACHE_DIR": str(home.cwd / "cache")})
    assert farm.stderr is not None
    while b"red" not in (line := farm.stderr.readline()):
        assert line
    os.kill(farm.pid, signal.SIGINT)
    farm.communicate(timeout=60)
    assert farm.returncode == 130
    assert processes(home.cwd / "stub-hexagon-sdk") == []
    assert [path for path in (home.cwd / "cache").rglob("*") if path.is_file()] == []
    assert not (sdk / "lib/lpai-v6/signed").exists()
