"""`farm jobs bundle --as-suite`: programs of one toolchain as a suite, for the runtimes of others."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import numpy as np
import pytest
from farm_home import FarmHome

from farm.suites.manifests import load_suite
from farm.suites.prompts import expected_of, prompts_of

PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10, 11, 12, 13]]
ON_CPU = ("--soc", "SM8650", "--virtual", "1")
NIGHT = """
[nightly]
name = "old_programs"
[[run]]
socs = ["SM8650"]
suites = ["./kept_decoder/"]
backends = ["xnnpack"]
virtual = 1
"""


def generate(home: FarmHome, decoders: Path) -> list[list[int]]:
    (home.cwd / "ids.json").write_text(json.dumps(PROMPTS))
    program = str(decoders / "hybrid.pte")
    done = home.json("exec", program, *ON_CPU, "--prompt", "ids.json", "--new", "6", timeout_s=300)
    return [one["tokens"] for one in done["generated"]]


def test_what_a_program_generated_becomes_a_suite_that_requires_it(home: FarmHome, decoders: Path) -> None:
    tokens = generate(home, decoders)
    [entry] = home.json("jobs", "bundle", "exec/hybrid", "--as-suite", "kept_decoder")["cases"]
    assert (entry["name"], entry["judged_by"]) == ("hybrid", "its past tokens")
    [case] = load_suite(home.cwd / "kept_decoder" / "suite.toml").cases
    assert [list(map(list, rows)) for rows in (prompts_of(case), expected_of(case))] == [PROMPTS, tokens]
    assert (home.cwd / "kept_decoder" / case.pte).read_bytes() == (decoders / "hybrid.pte").read_bytes()

    for words, output in (
        (("--as-suite", "kept_decoder"), "kept_decoder is there already"),
        (("--as-suite", "Kept-2"), "'Kept-2' is to be a suite's name"),
        (("--as-suite", "kept_2", "--compiled"), "leave --to and --compiled out"),
        ((), "name a folder: --to for the program, or --as-suite for a suite of it"),
    ):
        assert output in home.farm("jobs", "bundle", "exec/hybrid", *words, code=2).stderr


@pytest.mark.whole
def test_a_night_runs_programs_that_were_kept_and_fails_for_another_token(home: FarmHome, decoders: Path) -> None:
    generate(home, decoders)
    home.farm("jobs", "bundle", "exec/hybrid", "--as-suite", "kept_decoder", code=0)
    (home.cwd / "nightly.toml").write_text(NIGHT)
    night = home.farm("nightly", "nightly.toml", timeout_s=300, code=0)
    assert "1 passed" in night.stdout

    file = home.cwd / "kept_decoder" / "hybrid" / "tokens.json"
    rows = json.loads(file.read_text())
    rows[1][2] = (rows[1][2] + 1) % 24
    file.write_text(json.dumps(rows))
    other = home.farm("run", *ON_CPU, "--backend", "xnnpack", "--suite", "./kept_decoder", timeout_s=300, code=1)
    assert f"prompt 1: token 3 is {(rows[1][2] - 1) % 24}, expected {rows[1][2]}" in other.stdout


@pytest.mark.whole
def test_outputs_that_were_kept_are_required_and_others_are_held_to_what_they_had(home: FarmHome) -> None:
    home.farm("run", *ON_CPU, "--suite", "smoke", "-k", "add or conv2d", timeout_s=300, code=0)
    home.farm("jobs", "rerun", "smoke/add", timeout_s=300, code=0)
    kept = home.farm("jobs", "bundle", "smoke/*", "--as-suite", "kept_smoke", code=0)
    for case, judge in (("add", "its past outputs"), ("conv2d", "the FP32 module, within the distance of that run")):
        assert f"{case}: smoke/{case}[SM8650-htp-8a8w], judged by {judge}" in kept.stdout
    table = tomllib.loads((home.cwd / "kept_smoke" / "suite.toml").read_text())["case"]
    assert table["add"]["tolerance"] == {"8a8w": {"fp32": {"sqnr_db": 100.0, "mismatch": 0.0}}}
    assert 20 < table["conv2d"]["tolerance"]["8a8w"]["fp32"]["sqnr_db"] < 60

    now = home.farm("run", *ON_CPU, "--suite", "./kept_smoke", "--json", timeout_s=300, code=0)
    made = table["add"]["compiled_with"]
    note = f"compiled with executorch {made['executorch']}, qnn {made['qnn']}, torch {made['torch']}"
    assert now.stdout.count(note) >= 2

    # A single element of the kept output is moved by a quantization step.
    file = home.cwd / "kept_smoke" / "add" / "expected_0_0.npy"
    array = np.load(file)
    array.ravel()[7] += np.ptp(array) / 255
    np.save(file, array)
    wrong = home.farm("run", *ON_CPU, "--suite", "./kept_smoke", "-k", "add", timeout_s=300, code=1)
    assert "dB < 100 dB" in wrong.stdout
