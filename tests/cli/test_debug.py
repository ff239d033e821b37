"""Output of `farm debug`, and its messages for invalid names and targets. Nothing is compiled here."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from farm_home import FarmHome
from in_process import refused

from farm.base.text import json_document
from farm.builds.program.layers import INPUT, Gap, Layer, LayerStep, LayerTensor
from farm.cli.running.debug import _data, _text
from farm.replay.debug import DebugOutcome, describe
from farm.report.formats.layers_csv import LayerPlace, layers_csv, read_places
from farm.results.attempt import Attempt, Stage, Verdict
from farm.results.layers import diagnose


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("quantized_ops/conv2e[SM8650-htp-8a8w]", "did you mean 'conv2d'?"),
        ("quantized_op/conv2d[SM8650-htp-8a8w]", "did you mean 'quantized_ops'?"),
        ("quantized_ops/conv2d[SM8651-htp-8a8w]", "did you mean 'SM8650'?"),
        ("quantized_ops/conv2d[SM8650-htp-8a8x]", "unknown precision '8a8x'"),
        ("quantized_ops/conv2d[SM8650-xnnpack-fp32]", "is for htp and lpai, not for xnnpack"),
        ("quantized_ops/conv2d[SM8650-htp-8a8w-use_dlbd=true]", "did you mean 'use_dlbc'?"),
        ("quantized_ops/conv2d[SM8650-htp-8a8w-use_dlbc=true,false]", "is one job: give every option one value"),
        ("quantized_ops/conv2d[SM8650-htp-8a8w] --soc SM8650", "has a target already"),
        ("quantized_ops/conv2d[SM8650]", "expected SoC-htp-precision"),
        ("quantized_ops/conv2d[SM8650-htp-8a8w", "names no job"),
        ("quantized_ops", "names no job"),
        ("quantized_ops/conv2d", "name the SoC with --soc"),
        ("quantized_ops/conv2d --soc SM8650", "several precisions"),
        ("quantized_ops/conv2d[SM8650-htp-8a8w] --sample 7", "there is no sample 7"),
        ("quantized_ops/conv2d[SM8650-htp-8a8w] --csv-file /dev/null/y.csv", "/dev/null is no folder"),
    ],
)
def test_an_impossible_job_is_refused_and_nothing_is_recorded(tmp_path: Path, words: str, message: str) -> None:
    assert message in refused("debug", *words.split(), "--virtual=1")
    assert not (tmp_path / "state").exists()


def test_without_a_device_nothing_is_recorded_and_it_says_what_to_do(home: FarmHome) -> None:
    done = home.farm("debug", "smoke/gelu[SM8650-htp-8a8w]", timeout_s=300, code=4)
    assert "no usable SM8650 is attached" in done.stderr
    assert "--virtual, without the device's column" in done.stderr


def gap(db: float, mse: float = 0.00012345) -> Gap:
    return Gap(mse, db, 0.99987, 2.0)


def outcome(*, device: bool) -> DebugOutcome:
    """A convolution that the compiler breaks, under a name that is as long as such names are."""
    name = "aten__native_batch_norm_legit_no_training_default_12"
    known = list(LayerStep) if device else [LayerStep.QUANTIZATION, LayerStep.COMPILER]
    good = {step: gap(40.0) for step in known}
    equal, wrong = Gap(0, math.inf, 1), gap(-3.25, 12345.0)
    place: dict[str, Any] = {
        "module": "body.norm", "source": "net/ops.py:7", "exported": ("aten.batch_norm.default",), "ran": ("norm@0",),
    }  # fmt: skip
    layers = [
        Layer("x", INPUT, (), {LayerStep.QUANTIZATION: gap(43.0)}),
        Layer("aten_view_copy_default", "aten.view_copy.default", ("x",), good | {LayerStep.COMPILER: equal}),
        Layer(name, "aten.norm", ("aten_view_copy_default",), {**good, LayerStep.COMPILER: wrong}, **place),
        Layer("fused", "aten.relu.default", (name,), {}),
    ]
    placed = tuple(
        msgspec.structs.replace(layer, inspector=gap(39.0), tensor=LayerTensor(handle))
        for layer, handle in zip(layers, (None, 1, 2, 3), strict=True)
    )
    diagnosis = diagnose(placed)
    attempt = Attempt("s/c[SM8650-htp-8a8w]", Verdict.FAILED, Stage.NUMERICS, describe(diagnosis.first))
    devices = {"simulator": "virtual-SM8650-0", **({"device": "R58M1"} if device else {})}
    return DebugOutcome(
        attempt.job_id, "20261121-000000-abcdef", 1, attempt, placed, diagnosis, devices, {"total": 1.0},
        Path("report.html"),
    )  # fmt: skip


@pytest.mark.parametrize("device", [False, True])
def test_the_table_fits_80_columns_and_has_all_figures_of_every_step(*, device: bool) -> None:
    lines = _text(outcome(device=device), 0)
    assert max(map(len, lines)) <= 80
    text = "\n".join(lines)
    assert ("device: not requested" in text) != device
    broken = lines[next(n for n, line in enumerate(lines) if line.startswith("> ")) + 1]
    assert broken.split()[-6 if device else -3 :][:3] == ["1.2e+04", "-3.2", "0.9999"]
    assert ("equal" in text, "12345" in text, "  fused" in text) == (True, False, False)
    cause = lines.index("likely cause: compiler (SQNR -3.2 dB, its inputs equal)")
    assert lines[cause + 1] == "in module body.norm, net/ops.py:7"


def test_operators_ahead_of_time_and_at_run_time_are_a_table() -> None:
    lines = _text(outcome(device=True), 0, operators=True)
    [start] = [number for number, line in enumerate(lines) if line.startswith("#")]
    assert [line.split() for line in lines[start + 1 : start + 4]] == [
        ["1", "aten.view_copy.default", "-", "40.0", "-", "-"],
        ["2", "aten.batch_norm.default", "norm@0", "40.0", "body.norm", "net/ops.py:7"],
        ["3", "aten.relu.default", "-", "-", "-", "-"],
    ]


def rows_of(layers: Sequence[Layer]) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(layers_csv(layers, diagnose(layers)))))


def test_csv_and_json_have_every_layer_figure_and_place() -> None:
    debugged = outcome(device=True)
    rows = rows_of(debugged.layers)
    assert [row["layer"] for row in rows][-1] == "fused"
    figures = [(row["compiler_sqnr_db"], row["compiler_mse"], row["compiler_diverges"]) for row in rows]
    assert figures[1][0] == "inf"
    assert figures[2] == ("-3.25", "12345.0", "True")
    assert (figures[3][1], rows[2]["inspector_sqnr_db"]) == ("", "39.0")
    places = read_places(layers_csv(debugged.layers, debugged.diagnosis))
    expected = LayerPlace("body.norm", "net/ops.py:7", "aten.batch_norm.default", "norm@0")
    assert (places[debugged.layers[2].name], places["x"]) == (expected, LayerPlace("", "", "", ""))
    assert read_places("layer,module\na,b\n") == read_places("") == {}
    answer = json.loads(json_document(_data(debugged, 3)))
    assert (answer["sample"], answer["first"]["step"]) == (3, "compiler")
    assert (answer["layers"][1]["compiler"]["sqnr_db"], answer["layers"][3]["device"]) == ("inf", None)


def test_csv_tells_of_every_layer_its_tensor() -> None:
    tensor = LayerTensor(7, 1, 0, (1, 3), "uint16", 0.25, 12)
    [row] = rows_of([Layer("aten_topk_default:1", "aten.topk.default", ("x", "y"), {}, None, tensor)])
    expected = {
        "layer": "aten_topk_default:1", "inputs": "x y", "handle": "7", "output": "1", "partition": "0",
        "shape": "1x3", "dtype": "uint16", "scale": "0.25", "zero_point": "12", "device_mse": "",
    }  # fmt: skip
    assert row.items() >= expected.items()
