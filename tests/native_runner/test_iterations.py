"""The runner's report of executions whose outputs differ from the written outputs of the last one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

_NONE: dict[str, Any] = {"count": 0, "executions": []}


def _differing(answer: dict[str, Any]) -> list[dict[str, Any]]:
    assert answer["ok"], answer["error"]
    return [inference["differing"] for inference in answer["inferences"]]


def test_a_program_that_repeats_itself_has_none(conv: Any) -> None:
    ran = conv.run("--iteration=4", "--warm_up=2", "--etdump_path=e.etdp", "--profile_level=2")
    assert _differing(ran.result) == [_NONE, _NONE]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        # The stub is wrong in the 5th, 10th, 15th and 20th execution of its process.
        (("--iteration=9",), {"count": 1, "executions": [4]}),
        (("--iteration=18", "--warm_up=4"), {"count": 4, "executions": [4, 9, 14, 19]}),
        (("--iteration=2", "--warm_up=6"), {"count": 1, "executions": [4]}),
        (("--iteration=5",), {"count": 4, "executions": [0, 1, 2, 3]}),
    ],
)
def test_every_execution_counts_and_not_only_the_last(
    stub: Any, flags: tuple[str, ...], expected: dict[str, Any]
) -> None:
    with stub.serve() as session:
        assert _differing(session.ask("--input_list_path=fifth.txt", *flags)) == [expected]
        assert _differing(session.ask("--input_list_path=work.txt", *flags)) == [_NONE]


def test_other_numbers_in_one_output_are_enough_and_the_list_is_bounded(bare: Any, models: Path) -> None:
    bare.write("x.raw", [1, 2])
    bare.list_inputs("x.raw", "x.raw")
    ran = bare.run(f"--model_path={models / 'noise.pte'}", "--iteration=50", "--warm_up=1")
    assert _differing(ran.result) == [{"count": 50, "executions": list(range(32))}] * 2


def test_a_program_with_a_state_of_its_own_differs_from_time_to_time(bare: Any, models: Path) -> None:
    bare.write("x.raw", [1, 2])
    bare.write("zero.raw", [0, 0])
    bare.list_inputs("x.raw", "zero.raw")
    ran = bare.run(f"--model_path={models / 'counter.pte'}", "--iteration=3")
    assert _differing(ran.result) == [{"count": 2, "executions": [0, 1]}, _NONE]


def test_a_dynamic_output_counts_as_it_is_written(bare: Any, models: Path) -> None:
    bare.write("x.raw", range(6))
    bare.write("y.raw", 3)
    bare.list_inputs("x.raw y.raw")
    (bare.folder / "inputs.txt").write_text("2, 3\n\n")
    (bare.folder / "outputs.txt").write_text("2, 3\n2,\n")
    ran = bare.run(
        *(f"--model_path={models / 'dynamic.pte'}", "--input_shape_path=inputs.txt"),
        *("--output_shape_path=outputs.txt", "--iteration=3"),
    )
    assert _differing(ran.result) == [_NONE]
