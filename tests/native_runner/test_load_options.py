"""Options that a backend gets when it loads: received values, effect on XNNPACK, and refusals."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from programs import run_program

_CACHE = ("--weight_cache_enabled", "--packed_cache_path=weights.packed")
_ALL = (*_CACHE, "--workspace_sharing_mode=1")
# Freed memory is overwritten, which destroys options that were not copied.
_PERTURB = {"MALLOC_PERTURB_": "165"}


@pytest.fixture
def linear(bare: Any, models: Path) -> Any:
    """A workspace with xnnpack.pte as model.pte, and its input."""
    shutil.copy(models / "xnnpack.pte", bare.folder / "model.pte")
    shutil.copy(models / "xnnpack_input.raw", bare.folder / "x.raw")
    bare.list_inputs("x.raw")
    (bare.folder / "shapes.txt").write_text("2, 8\n")
    return bare


@pytest.fixture
def reports(preload: Callable[[str], dict[str, str]]) -> dict[str, str]:
    return {**preload("load_options_stub"), **_PERTURB}


def _arrived(stderr: str) -> list[list[str]]:
    """Return the options that the stub got, for each delegate that it loaded."""
    found: list[list[str]] = []
    for line in re.findall(r"^stub: (.*)$", stderr, re.MULTILINE):
        found.append([]) if line.endswith(" options") else found[-1].append(line)
    return found


def _options(folder: Path) -> list[str]:
    return [
        "int workspace_sharing_mode=1",
        "bool weight_cache_enabled=true",
        f"text packed_cache_path={folder}/weights.packed",
    ]


def test_a_backend_gets_names_types_and_values_after_the_callers_map_is_gone(linear: Any, reports: Any) -> None:
    ran = linear.passes("--input_shape_path=shapes.txt", *_ALL, env=reports)
    assert _arrived(ran.stderr) == [_options(linear.folder)]


def test_without_a_flag_a_backend_gets_nothing(linear: Any, reports: Any) -> None:
    ran = linear.passes("--input_shape_path=shapes.txt", "--log_level=1", env=reports)
    assert _arrived(ran.stderr) == [[]]
    ran = linear.run("--input_shape_path=shapes.txt", "--noweight_cache_enabled", env=reports)
    assert _arrived(ran.stderr) == [["bool weight_cache_enabled=false"]]


def test_a_load_that_fails_keeps_the_options_of_the_session(linear: Any, reports: Any) -> None:
    (linear.folder / "junk.pte").write_bytes(b"junk" * 1000)
    with linear.serve(*_ALL, env=reports) as session:
        for model, code in (("model.pte", 0), ("junk.pte", 4), ("model.pte", 0)):
            answer = session.ask(f"--model_path={model}", "--input_shape_path=shapes.txt", "--weight_cache_enabled=yes")
            assert answer["exit_code"] == code, answer
        refused = session.ask("--weight_cache_enabled=false")
        assert "needs a process of its own: this session has --weight_cache_enabled=true" in refused["error"]["message"]
        assert _arrived(session.stderr) == [_options(linear.folder)] * 2


def test_a_load_that_fails_after_it_read_the_options_keeps_them_for_the_next(linear: Any, reports: Any) -> None:
    with linear.serve(*_ALL, env=reports) as session:
        for refuse, code in ((False, 0), (True, 4), (False, 0)):
            if refuse:
                (linear.folder / "refuse_init").touch()
            answer = session.ask("--input_shape_path=shapes.txt")
            assert answer["exit_code"] == code, answer
        assert not (linear.folder / "refuse_init").exists()
        assert _arrived(session.stderr) == [_options(linear.folder)] * 3


@pytest.fixture
def probe(linear: Any, reports: Any, load_options_probe: Path) -> Callable[[str], list[str]]:
    """Load model.pte by Module itself; return the lines of the probe and of the stub in front of XNNPACK."""

    def run(scenario: str) -> list[str]:
        done = run_program(
            [load_options_probe, scenario, "model.pte"], cwd=linear.folder, env={**os.environ, **reports}, timeout_s=120
        )
        return re.findall(r"^(?:probe|stub): (.*)$", done.stderr, re.MULTILINE)

    return run


def test_options_of_a_method_take_the_place_of_those_of_the_program(probe: Callable[[str], list[str]]) -> None:
    of_program = ["2 options", "int workspace_sharing_mode=1", "bool weight_cache_enabled=false", "loaded"]
    of_method = ["1 options", "int workspace_sharing_mode=2", "loaded"]
    # Options for another backend alone are none for this one.
    of_another = ["0 options", "loaded"]
    assert probe("override") == [*of_program, *of_method, *of_another, *of_program]


def test_a_refused_method_keeps_the_options_of_the_program(linear: Any, probe: Callable[[str], list[str]]) -> None:
    (linear.folder / "refuse_init").touch()
    of_program = ["2 options", "int workspace_sharing_mode=1", "bool weight_cache_enabled=false"]
    assert probe("refused") == [*of_program, "refused", *of_program, "loaded"]


def test_names_and_texts_at_their_limits_arrive_whole_and_longer_ones_are_refused(
    probe: Callable[[str], list[str]],
) -> None:
    added, name, text = (
        "added",
        f"the option name '{'k' * 64}' has 64 characters",
        "the option k has a text of 256 bytes",
    )
    output = probe("limits")
    assert output[:4] == [
        added, f"{name}, ExecuTorch takes 63", added, f"{text}, ExecuTorch takes 255: use a shorter path",
    ]  # fmt: skip
    assert output[4:] == ["1 options", f"text {'k' * 63}={'v' * 255}", "loaded"] * 2


@pytest.mark.parametrize("excess", [0, 1])
def test_a_path_of_255_bytes_is_the_longest(linear: Any, reports: Any, excess: int) -> None:
    rest = 255 + excess - len(f"{linear.folder}/")
    ran = linear.run(
        "--input_shape_path=shapes.txt", "--weight_cache_enabled", f"--packed_cache_path={'x' * rest}", env=reports
    )
    if excess:
        assert ran.code == 3, ran.stderr
        assert "has a text of 256 bytes, ExecuTorch takes 255: use a shorter path" in ran.error["message"]
    else:
        assert ran.code == 0, ran.stderr
        assert _arrived(ran.stderr)[0][-1] == f"text packed_cache_path={linear.folder}/{'x' * rest}"


def test_xnnpack_keeps_packed_weights_in_the_file_of_each_job(linear: Any) -> None:
    assert linear.run("--input_shape_path=shapes.txt").code == 0
    plain = linear.output(0, 0)
    assert not list(linear.folder.glob("*.packed"))
    for name in "ab":
        shutil.copytree(linear.folder, linear.folder / name, ignore=shutil.ignore_patterns("a", "b"))
    with linear.serve(*_CACHE) as session:
        for name in "aba":
            answer = session.ask(f"--working_folder={name}", "--input_shape_path=shapes.txt")
            assert answer["ok"] is True, answer
            # The packed weights of two layers, a page each at the least.
            assert (linear.folder / name / "weights.packed").stat().st_size > 2 * 4096
            assert (
                np.fromfile(linear.folder / name / "outputs" / "output_0_0.raw", np.float32).tolist() == plain.tolist()
            )
        assert not (linear.folder / "weights.packed").exists()
        # The first load of each folder packs, the second load of a folder finds the packed weights.
        opened, loaded = (session.stderr.count(text) for text in ("Opened packed weight file", "Loaded packed weight"))
        assert (opened, loaded) == (2, 1)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--packed_cache_path=w"], "--packed_cache_path has no effect without --weight_cache_enabled"),
        (["--packed_cache_path=w", "--noweight_cache_enabled"], "has no effect without"),
    ],
)
def test_a_load_option_that_cannot_be(linear: Any, flags: list[str], message: str) -> None:
    ran = linear.run("--input_shape_path=shapes.txt", *flags)
    assert ran.code == 3, ran.stderr
    assert message in ran.error["message"]


@pytest.mark.parametrize(
    ("knows", "message"),
    [
        ("nothing", "refuses the option weight_cache_enabled=true: it has no such option"),
        ("numbers", "refuses the option weight_cache_enabled=true: it takes a value of type int, not bool"),
    ],
)
def test_a_name_or_type_that_the_backend_does_not_know(linear: Any, reports: Any, knows: str, message: str) -> None:
    """XNNPACK would load with its default, without a message."""
    ran = linear.run("--input_shape_path=shapes.txt", "--weight_cache_enabled", env={**reports, "STUB_KNOWS": knows})
    assert ran.code == 3, ran.stderr
    assert ran.error["message"] == f"backend XnnpackBackend {message}"
