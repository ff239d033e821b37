from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farm.results.runner_report import REPORT_LIMIT, ReportError, RunnerReport, parse_report, read_report

from .conftest import PATIENT

# As farm_runner 1 wrote it for a convolution.
GOOD = {
    "schema": 1,
    "ok": True,
    "exit_code": 0,
    "error": None,
    "method": "forward",
    "load_ns": 3_500_000,
    "inputs": [{"shape": [1, 3, 16, 16], "dtype": "float32", "nbytes": 3072}],
    "outputs": [{"shape": [1, 8, 16, 16], "dtype": "float32", "nbytes": 8192}],
    "inferences": [
        {"line": 0, "warm_up_ns": [9], "iterations_ns": [3, 4], "differing": {"count": 1, "executions": [0]}},
        {"line": 1, "warm_up_ns": [], "iterations_ns": [5]},
    ],
    "versions": {"executorch": "1.5.1", "runner": "1"},
}
ERROR = {"stage": "load", "message": "cannot load 'model.pte': InvalidProgram", "code": 35, "line": None}


def parse(**changes: Any) -> RunnerReport:
    return parse_report(json.dumps({**GOOD, **changes}).encode())


def inference(*iterations_ns: object, line: object = 0, **more: object) -> list[dict[str, object]]:
    return [{"line": line, "warm_up_ns": [], "iterations_ns": list(iterations_ns), **more}]


def differing(count: object, *executions: object) -> list[dict[str, object]]:
    """Return the report of three executions."""
    return inference(1, 1, 1, differing={"count": count, "executions": list(executions)})


def test_a_report_is_read(tmp_path: Path) -> None:
    report = parse(later_field={"x": 1})
    assert report.outputs[0].shape == (1, 8, 16, 16)
    assert [i.iterations_ns for i in report.inferences] == [(3, 4), (5,)]
    assert report.versions["executorch"] == "1.5.1"
    first, second = report.inferences
    assert first.differing is not None
    assert (first.executions, first.differing.count, first.differing.executions) == (3, 1, (0,))
    assert (second.executions, second.differing) == (1, None)
    error = parse(ok=False, exit_code=4, error=ERROR, load_ns=0, inferences=[]).error
    assert error is not None
    assert (error.stage, error.code, error.line) == ("load", 35, None)
    path = tmp_path / "result.json"
    assert read_report(path) is None
    with path.open("wb") as file:
        file.truncate(REPORT_LIMIT * 64)
    with pytest.raises(ReportError, match="more than"):
        read_report(path)


FAILED = {"ok": False, "exit_code": 4}


@pytest.mark.parametrize(
    "changes",
    [
        {"schema": 2}, {"ok": "true"}, {"ok": False}, FAILED, {"error": ERROR}, {"exit_code": 4}, {"exit_code": 10**20},
        {**FAILED, "error": {**ERROR, "stage": "nowhere"}}, {**FAILED, "error": {**ERROR, "message": "x" * 70_000}},
        {"versions": {"executorch": 1}},
        *({"load_ns": time} for time in (-1, 0, 3.5, 10**18)),
        *(
            {"inferences": inferences}
            for inferences in (
                "none", inference(), *(inference(time) for time in (-5, 0, 1.5, 10**16, "1", None)),
                inference(1, line=1), inference(1, line=-1), inference(1, differing={"count": 0}),
                differing(3, 0, 1, 2), differing(1, 2), differing(1), differing(0, 0), differing(1, 0, 1),
                differing(2, 1, 0), differing(2, 0, 0), differing(1, -1), differing(-1), differing("1", 0),
            )
        ),
        *(
            {"outputs": [{"shape": shape, "dtype": dtype, "nbytes": 4}]}
            for shape, dtype in (
                ([-1], "float32"), ([3], "float32"), ([0], "float32"), ([1] * 40, "float32"), ([1], "x" * 300),
            )
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_believed_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ReportError):
        parse(**changes)


@pytest.mark.parametrize(
    "data",
    [b"", b"null", b"[]", b"{", b"\xff\xfe", b'{"schema":1}', b"[" * 100_000, b'{"ok":' * 50_000, b"1" * 5_000_000],
)
def test_what_is_no_report_is_refused(data: bytes) -> None:
    with pytest.raises(ReportError):
        parse_report(data)


TEXT = json.dumps(GOOD).encode()


@settings(PATIENT, max_examples=100)
@given(st.integers(0, len(TEXT) - 1), st.integers(0, 255), st.integers(0, len(TEXT)))
def test_a_damaged_or_cut_file_is_read_or_refused(place: int, value: int, size: int) -> None:
    data = bytearray(TEXT)
    data[place] = value
    for damaged in (bytes(data), TEXT[:size]):
        try:
            parse_report(damaged)
        except ReportError as error:
            assert str(error)  # noqa: PT017 - either outcome is right
