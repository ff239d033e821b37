"""`tools/upstream_plans.py`: its plans name tests of the installed ExecuTorch, and its table compares counts."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
from executorch_checkout import installed

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))


import upstream_plans as plans


def test_every_plan_names_a_test_that_the_installed_executorch_has() -> None:
    for test in (test for plan in plans.PLANS for test in plan.tests):
        module, cls, name = test.split("::")
        source = installed().joinpath(*module.split(".")[1:]).with_suffix(".py").read_text()
        assert re.search(rf"^class {cls}\b(?:(?!^class ).)*^    def {name}\(", source, re.DOTALL | re.MULTILINE), test
    assert {number for plan in plans.PLANS for number in plan.change.split("/")} >= {"18151", "16316", "19716"}
    assert {change.split("/")[0] for change, _, _ in plans.NOT_TRIED} == {"18151", "19673", "16316", "19716"}


def rows(*, verdict: str = "passed", **count: Any) -> list[Any]:
    plan = plans.PLANS[0]
    [test] = plan.tests
    name = test.partition("::")[2]
    attempt = {"verdict": verdict, "known_issue": "", "reason": "1 != 2" if verdict == "failed" else ""}
    run = {"jobs": [{"id": f"pytest/test_qnn_delegate.py::{name}[SM8850-lpai]", "attempts": [attempt]}]}
    counted = {"test": name, "line": 7, "what": "partitions", "upstream": 8, "ours": 8, "checked": True, **count}
    found: list[Any] = plans.rows_of((plan,), run, [counted] if counted["what"] else [])
    return found


@pytest.mark.parametrize(
    ("given", "holds", "shown"),
    [
        ({}, True, "| partitions | 8 | 8 | passed | ✓ |"),
        ({"ours": 7}, False, "| partitions | 8 | 7 | passed | ✗ |"),
        ({"ours": None}, False, "| partitions | 8 | - | passed | ✗ |"),
        ({"ours": 7, "checked": False}, True, "| partitions | 8 | 7 | passed | not checked upstream |"),
        ({"verdict": "failed"}, False, "| partitions | 8 | 8 | failed: 1 != 2 | ✗ |"),
        ({"verdict": "skipped"}, False, "| partitions | 8 | 8 | skipped | ✗ |"),
        ({"what": ""}, False, "| - | - | - | passed | ✗ |"),
    ],
)
def test_a_row_holds_where_a_test_passed_with_upstreams_count(given: dict[str, Any], holds: bool, shown: str) -> None:
    [row] = rows(**given)
    assert row.holds is holds
    text = plans.markdown([row])
    assert shown in text
    assert "| #18151 | stub of LPAI | TestQNNQuantizedOperator::test_qnn_backend_mean (executorch/" in text
    assert "| #19673 | `extension/module/test/module_test.cpp`, C++ | no wheel has it |" in text
    [row] = plans.rows_of((plans.PLANS[0],), {"jobs": []}, [])
    assert (row.outcome, row.holds) == ("not run", False)
