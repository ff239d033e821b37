"""An output that is an input of the next inference: computed references, and refusals."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from farm.base.errors import ConfigError, IllegalTargetError
from farm.base.socs import find_soc
from farm.builds.bundles.bundle import load_bundle
from farm.builds.bundles.key import bundle_key
from farm.suites.manifests import load_suite
from farm.suites.state import State, state_problem
from farm.suites.suite import Case, Job, Target, plan

MODULES = Path(__file__).with_name("made_states.py")
SUITE = """
[suite]
name = "kept"
description = "state"
precisions = ["8a8w"]
[suite.tolerance.8a8w]
fp32 = { sqnr_db = 30.0 }
[case.sums]
module = ".sums:Sums"
samples = SAMPLES
state = STATE
inputs = [{ shape = [2] }, { shape = [2], distribution = "constant", low = 0.0 }]
"""


@pytest.fixture(scope="module")
def samples(printed_json: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    """Output of made_states.py."""
    return printed_json(MODULES)


def test_each_sample_takes_what_the_one_before_left(samples: dict[str, Any]) -> None:
    assert samples["kept"]["outputs"] == [[1, 1], [2, 2], [3, 3]]
    assert samples["kept"]["inputs"] == [[0, 0], [1, 1], [2, 2]]
    assert samples["plain"]["outputs"] == [[1, 1]] * 3


@pytest.mark.parametrize(
    ("state", "wrong"),
    [
        ("no output", "names output 2, and there are 2, from 0"),
        ("another shape", "output 0 is float32[2], and the input takes float32[3]"),
    ],
)
def test_an_output_that_the_input_does_not_take_is_refused(samples: dict[str, Any], state: str, wrong: str) -> None:
    assert wrong in samples[state]


def test_what_cannot_be_a_state_is_known_without_the_module() -> None:
    assert state_problem((), 1, 1) == ""
    assert "give the case samples = 2 or more" in state_problem((State(0, 0),), 1, 1)
    assert "names input 2, and there are 2" in state_problem((State(0, 2),), 2, 3)
    assert "gives input 1 two outputs" in state_problem((State(0, 1), State(1, 1)), 2, 3)


def read_case(folder: Path, *, samples: int, state: str) -> Case:
    suite = folder / "kept"
    shutil.rmtree(suite, ignore_errors=True)
    suite.mkdir()
    (suite / "sums.py").write_text("")
    (suite / "suite.toml").write_text(SUITE.replace("SAMPLES", str(samples)).replace("STATE", state))
    [case] = load_suite(suite / "suite.toml").cases
    return case


def test_a_manifest_names_it_and_another_state_is_another_bundle(tmp_path: Path) -> None:
    case = read_case(tmp_path, samples=3, state="[{ output = 1, input = 1 }]")
    assert case.state == (State(output=1, input=1),)
    other = read_case(tmp_path, samples=3, state="[]")
    target = Target("SM8650", "htp", "8a8w")
    keys = {bundle_key(Job(one, target), {"qnn": "1"}) for one in (case, other)}
    assert len(keys) == 2
    with pytest.raises(ConfigError, match=r"case\.sums\.state: goes from one sample to the next, and there is one"):
        read_case(tmp_path, samples=1, state="[{ output = 1, input = 1 }]")


def test_direct_mode_has_no_state(tmp_path: Path) -> None:
    read_case(tmp_path, samples=3, state="[{ output = 1, input = 1 }]")
    suite = load_suite(tmp_path / "kept" / "suite.toml")
    with pytest.raises(IllegalTargetError, match="passes none between samples"):
        plan([suite], [find_soc("SM8650")], "htp", option_sets=[(("direct_mode", "true"),)])


def test_a_state_beside_a_written_input_has_the_place_of_its_program(filled_by: Callable[[Path], Path]) -> None:
    # The program gives the written input first: output 1 of the module is its output 2.
    bundle = load_bundle(filled_by(MODULES) / "bundle")
    assert [(one.output, one.input) for one in bundle.manifest.state] == [(2, 1)]
    outputs = [(spec.name, spec.written) for spec in bundle.manifest.outputs]
    assert outputs == [("x", True), ("", False), ("", False)]
    assert bundle.reference("fp32", 0, 2).tolist() == np.fromfile(bundle.input_files(1)[1], np.float32).tolist()
