"""An output that is an input of the next inference, in manifests, keys and plans."""

from __future__ import annotations

from pathlib import Path

import pytest

from farm.base.errors import ConfigError, IllegalTargetError
from farm.base.socs import find_soc
from farm.builds.bundles.key import bundle_key
from farm.suites.manifests import load_suite
from farm.suites.suite import Job, State, Suite, Target, plan, state_problem

SUITE = """
[suite]
name = "kept"
description = "state"
precisions = ["8a8w"]
[suite.tolerance.8a8w]
fp32 = {{ sqnr_db = 30.0 }}
[case.sums]
module = "torch.nn:ReLU"
samples = {samples}
state = {state}
inputs = [{{ shape = [2] }}, {{ shape = [2], distribution = "constant", low = 0.0 }}]
"""
KEPT = "[{ output = 1, input = 1 }]"


def read_suite(folder: Path, *, samples: int = 3, state: str = KEPT) -> Suite:
    (folder / "kept").mkdir(exist_ok=True)
    (folder / "kept" / "suite.toml").write_text(SUITE.format(samples=samples, state=state))
    return load_suite(folder / "kept" / "suite.toml")


def test_what_cannot_be_a_state_is_known_without_the_module() -> None:
    assert state_problem((), 1, 1) == ""
    assert "give the case samples = 2 or more" in state_problem((State(0, 0),), 1, 1)
    assert "names input 2, and there are 2" in state_problem((State(0, 2),), 2, 3)
    assert "gives input 1 two outputs" in state_problem((State(0, 1), State(1, 1)), 2, 3)


def test_a_manifest_names_it_and_another_state_is_another_bundle(tmp_path: Path) -> None:
    (case,), (other,) = (read_suite(tmp_path, state=state).cases for state in (KEPT, "[]"))
    assert case.state == (State(output=1, input=1),)
    assert len({bundle_key(Job(one, Target("SM8650", "htp", "8a8w")), {"qnn": "1"}) for one in (case, other)}) == 2
    with pytest.raises(ConfigError, match=r"case\.sums\.state: goes from one sample to the next, and there is one"):
        read_suite(tmp_path, samples=1)


def test_direct_mode_has_no_state(tmp_path: Path) -> None:
    with pytest.raises(IllegalTargetError, match="passes none between samples"):
        plan([read_suite(tmp_path)], [find_soc("SM8650")], "htp", option_sets=[(("direct_mode", "true"),)])
