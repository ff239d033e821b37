"""Shortcuts of a compilation: equal results with fewer calls, and none for versions that they were not tried with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import equal_programs
import pytest
import warm_torch
from test_bench import DOCUMENTED

# A small sample, as shortcuts change seldom: bench/equal_programs.py compares whole suites after such a change.
SEED = int(os.environ.get("FARM_SAMPLE_SEED", "739948"))


@pytest.fixture(scope="session")
def shortened(printed_json: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    """Output of shortening.py."""
    return printed_json(Path(__file__).with_name("shortening.py"))


def test_an_export_is_shared_by_modules_that_are_equal_and_by_no_others(shortened: dict[str, Any]) -> None:
    assert shortened["exports"] == {
        "made again": 1,
        "other weights": 2,
        "another number": 2,
        "a number without effect": 2,
        "the other sign of zero": 2,
        "an edited class": 2,
        "a hook": 2,
        "for the CPU": 2,
        "written weights": 2,
        "another case": 2,
        "unknown outputs": 2,
        "another in between": 3,
    }


@pytest.mark.parametrize("graph", ["quantized", "not quantized", "unread input"])
def test_a_flat_graph_is_exported_again_without_dynamo_to_the_same_program(
    shortened: dict[str, Any], graph: str
) -> None:
    assert shortened["flat"][graph] == {"same": True, "traced": 0}


@pytest.mark.parametrize("graph", ["written buffer", "random", "dynamic"])
def test_any_other_graph_is_left_to_dynamo(shortened: dict[str, Any], graph: str) -> None:
    assert shortened["flat"][graph] == {"same": True, "traced": 1}


def test_a_program_without_operators_of_the_table_is_its_own_decomposition(shortened: dict[str, Any]) -> None:
    assert shortened["settled"] == {
        "nothing to decompose": True,
        "an operator of the table": False,
        "all operators": False,
        "an edited graph": False,
        "a written buffer or input": False,
        "outside": False,
    }


def test_no_pattern_is_exported_that_matches_nothing(shortened: dict[str, Any]) -> None:
    short, plain = shortened["patterns"]
    assert short["exported"] == 0
    assert short["graph"] == plain["graph"]


def test_the_vendor_of_the_processor_is_the_same_without_a_process(shortened: dict[str, Any]) -> None:
    assert shortened["vendor"] == {"without a process": True, "not from the kernel": True, "without py-cpuinfo": True}


def test_the_types_of_edge_operators_are_the_same_from_another_parser(shortened: dict[str, Any]) -> None:
    assert shortened["edge types"] == {"same": True, "many": True}


def test_untried_versions_are_not_changed(shortened: dict[str, Any]) -> None:
    assert shortened["replaced"] == {"": 4, "executorch": 0, "torch": 0, "torchao": 0}
    assert [version for version, is_tried in shortened["versions"].items() if is_tried] == [
        "torch 2.13.0",
        "torch 2.13.0+cpu",
        "torch 2.13.0+cu126",
        "executorch 1.5.1",
        "torchao 0.18.0",
    ]


@pytest.mark.parametrize(
    ("suites", "count"),
    [
        (["quantized_ops", "fp_ops"], 6),
        pytest.param(["models_small"], 1, marks=pytest.mark.whole),
        pytest.param(["llm_tiny"], 1, marks=pytest.mark.soak),
    ],
)
def test_programs_and_references_are_equal_with_and_without_shortcuts(
    suites: list[str], count: int, farm_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def run_warm(words: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        warm_torch.run_script(Path(words[1]), *words[2:], cache=farm_cache, folder=tmp_path)
        return subprocess.CompletedProcess(words, 0)

    monkeypatch.setattr(equal_programs, "subprocess", SimpleNamespace(run=run_warm))
    drawn = ("--sample", str(count), "--seed", str(SEED), "--kept", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["equal_programs.py", *suites, *drawn])
    equal_programs.main()
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(found) == DOCUMENTED["equal_programs.py"]
    assert found["jobs"] == count
    # The hash of a program with blocks of weights differs from one compilation to the next, without shortcuts as well.
    assert [job for job in found["different"] if "_block" not in job] == [], f"FARM_SAMPLE_SEED={SEED}"
