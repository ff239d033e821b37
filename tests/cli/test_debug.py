"""Output of `farm debug`, and its messages for invalid names and targets. Nothing is compiled here."""

from __future__ import annotations

import csv
import io
import json
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
from farm_home import FarmHome

from farm.base.errors import UsageError
from farm.base.text import json_document
from farm.builds.compile.debug.protocol import UserMetric, parse_metric
from farm.builds.program.layers import INPUT, Gap, Layer, LayerStep, LayerTensor, Score
from farm.cli.running.debug import _data, _text, check_writable
from farm.replay.debug import DebugOutcome, describe
from farm.report.formats.layers_csv import LayerPlace, layers_csv, read_places
from farm.results.attempt import Attempt, Stage, Verdict
from farm.results.layers import diagnose


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["quantized_ops/conv2e[SM8650-htp-8a8w]"], "did you mean 'conv2d'?"),
        (["quantized_op/conv2d[SM8650-htp-8a8w]"], "did you mean 'quantized_ops'?"),
        (["quantized_ops/conv2d[SM8651-htp-8a8w]"], "did you mean 'SM8650'?"),
        (["quantized_ops/conv2d[SM8650-htp-8a8x]"], "unknown precision '8a8x'"),
        (["quantized_ops/relu[SM8650-htp-16a2w]"], "did you mean"),
        (["quantized_ops/conv2d[SM8650-xnnpack-fp32]"], "is for htp and lpai, not for xnnpack"),
        (["quantized_ops/conv2d[SM8650-htp-8a8w-use_dlbd=true]"], "did you mean 'use_dlbc'?"),
        (["quantized_ops/conv2d[SM8650-htp-8a8w-use_dlbc=true,false]"], "is one job: give every option one value"),
        (["quantized_ops/conv2d[SM8650-htp-8a8w]", "--soc", "SM8650"], "has a target already"),
        (["quantized_ops/conv2d[SM8650]"], "expected SoC-htp-precision"),
        (["quantized_ops/conv2d[SM8650-htp-8a8w"], "names no job"),
        (["quantized_ops"], "names no job"),
        (["quantized_ops/conv2d"], "name the SoC with --soc"),
        (["quantized_ops/conv2d", "--soc", "SM8650"], "several precisions"),
        (["quantized_ops/conv2d[SM8650-htp-8a8w]", "--sample", "7"], "there is no sample 7"),
        (["quantized_ops/conv2d[SM8650-htp-8a8w]", "--csv-file", "/proc/x/y.csv"], "cannot write /proc/x/y.csv"),
    ],
)
def test_what_cannot_be_is_one_line_and_exit_2(home: FarmHome, arguments: list[str], message: str) -> None:
    done = home.farm("debug", *arguments, "--virtual", code=2)
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert not home.state.exists()


def test_without_a_device_nothing_is_recorded_and_it_says_what_to_do(home: FarmHome, tmp_path: Path) -> None:
    from farm.base.processes import Supervisor
    from farm.devices.adb.server import start_adb_server

    with Supervisor() as supervisor:
        server = start_adb_server(supervisor, tmp_path / "adb")
        done = home.farm(
            "debug", "smoke/gelu[SM8650-htp-8a8w]", env={"ANDROID_ADB_SERVER_PORT": str(server.port)}, timeout_s=300
        )
    assert done.returncode == 4, done.stderr
    assert "no usable SM8650 is attached" in done.stderr
    assert "--virtual, without the device's column" in done.stderr
    assert "interrupted" not in done.stdout


def gap(db: float, mse: float = 0.00012345) -> Gap:
    return Gap(mse, db, 0.99987, 2.0)


def outcome(*, device: bool) -> DebugOutcome:
    """A convolution that the compiler breaks, under a name that is as long as such names are."""
    name = "aten__native_batch_norm_legit_no_training_default_12"
    known = list(LayerStep) if device else [LayerStep.QUANTIZATION, LayerStep.COMPILER]
    good = {step: gap(40.0) for step in known}
    equal = Gap(0, math.inf, 1)
    layers = [
        Layer("x", INPUT, (), {LayerStep.QUANTIZATION: gap(43.0)}),
        Layer("aten_view_copy_default", "aten.view_copy.default", ("x",), good | {LayerStep.COMPILER: equal}),
        Layer(name, "aten.norm", ("aten_view_copy_default",), {**good, LayerStep.COMPILER: gap(-3.25, 12345.0)}),
        Layer("fused", "aten.relu.default", (name,), {}),
    ]
    diagnosis = diagnose(layers)
    assert diagnosis.first is not None
    attempt = Attempt("s/c[SM8650-htp-8a8w]", Verdict.FAILED, Stage.NUMERICS, describe(diagnosis.first))
    return DebugOutcome(
        job_id=attempt.job_id,
        run_id="20261121-000000-abcdef",
        exit_code=1,
        attempt=attempt,
        layers=tuple(msgspec.structs.replace(layer, inspector=gap(39.0)) for layer in layers),
        diagnosis=diagnosis,
        devices={"simulator": "virtual-SM8650-0", **({"device": "R58M1"} if device else {})},
        seconds={"total": 1.0},
        report=Path("report.html"),
    )


@pytest.mark.parametrize("device", [False, True])
def test_the_table_fits_80_columns_and_has_all_figures_of_every_step(*, device: bool) -> None:
    lines = _text(outcome(device=device), 0)
    assert max(map(len, lines)) <= 80
    text = "\n".join(lines)
    assert ("device: not requested" in text) != device
    assert text.count("12345") == 0
    broken = lines[next(n for n, line in enumerate(lines) if line.startswith("> ")) + 1]
    assert broken.split()[-6 if device else -3 :][:3] == ["1.2e+04", "-3.2", "0.9999"]
    assert "equal" in text
    assert "  fused" not in text
    assert "likely cause: compiler (SQNR -3.2 dB, its inputs equal)" in text


def test_comparators_of_the_user_s_have_the_table_and_decide() -> None:
    """CSV and JSON have the figures of comparators that do not fit into the table."""

    def scored(valid: bool) -> Gap:
        scores = {f"a_metric_with_name_{number}": Score(12345.678, valid or number != 1) for number in range(3)}
        return msgspec.structs.replace(gap(3.0), scores=scores)

    debugged = outcome(device=True)
    layers = tuple(
        msgspec.structs.replace(row, gaps={step: scored(valid=row.operator != "aten.norm") for step in row.gaps})
        for row in debugged.layers
    )
    diagnosis = diagnose(layers)
    assert diagnosis.first is not None
    # A signal lost in noise is no divergence here, as the user's comparators accept it.
    assert (diagnosis.first.operator, diagnosis.first.step) == ("aten.norm", LayerStep.QUANTIZATION)
    assert diagnosis.first.why == "a_metric_with_name_1 12345.7 is not valid"
    judged = msgspec.structs.replace(debugged, layers=layers, diagnosis=diagnosis)
    lines = _text(judged, 0)
    assert max(map(len, lines)) <= 80
    assert lines[4].split() == ["layer", *["a_metric_", "a_metric_"] * 3]
    assert any("12345.7  12345.7!" in line for line in lines)
    rows = list(csv.DictReader(io.StringIO(layers_csv(layers, diagnosis))))
    assert rows[2]["device_metric_a_metric_with_name_1"] == "12345.678"
    assert rows[2]["device_valid_a_metric_with_name_1"] == "False"


def test_a_metric_that_is_called_as_a_figure_of_farms_has_a_column_of_its_own() -> None:
    figures = {"mse": "0.5", "sqnr_db": "3.0", "cosine": "0.9", "steps": "2.0", "problem": "x"}
    names = [*figures, "diverges", "mse_valid", "valid_mse"]
    scores = {name: Score(float(number), True) for number, name in enumerate(names)}
    answer = Gap(0.5, 3.0, 0.9, 2.0, "x", scores)
    layer = Layer("a", "aten.add.Tensor", (), {LayerStep.COMPILER: answer}, answer)
    heads, row = csv.reader(io.StringIO(layers_csv([layer], diagnose([layer]))))
    assert len(set(heads)) == len(heads)
    line = dict(zip(heads, row, strict=True))
    for group in ("compiler", "inspector"):
        assert {name: line[f"{group}_{name}"] for name in figures} == figures
        assert [line[f"{group}_metric_{name}"] for name in names] == [f"{number}.0" for number in range(len(names))]


def test_a_metric_that_only_the_inspector_s_reference_has_is_a_column() -> None:
    other = Gap(0.5, 3.0, 0.9, scores={"far": Score(7.0, None)})
    layer = Layer("a", "aten.add.Tensor", (), {LayerStep.COMPILER: Gap(0.5, 3.0, 0.9)}, other)
    [row] = csv.DictReader(io.StringIO(layers_csv([layer], diagnose([layer]))))
    assert (row["inspector_metric_far"], row["compiler_metric_far"]) == ("7.0", "")


def placed() -> DebugOutcome:
    """The same, with places in the model and operators."""
    debugged = outcome(device=True)
    places: dict[str, Any] = {
        "module": "body.norm", "source": "net/ops.py:7", "exported": ("aten.batch_norm.default",), "ran": ("norm@0",),
    }  # fmt: skip
    layers = tuple(
        msgspec.structs.replace(row, tensor=LayerTensor(handle), **(places if row.operator == "aten.norm" else {}))
        for row, handle in zip(debugged.layers, (None, 1, 2, 3), strict=True)
    )
    return msgspec.structs.replace(debugged, layers=layers)


def test_the_first_divergence_has_its_module_and_line() -> None:
    lines = _text(placed(), 0)
    assert lines[lines.index("likely cause: compiler (SQNR -3.2 dB, its inputs equal)") + 1] == (
        "in module body.norm, net/ops.py:7"
    )


def test_operators_ahead_of_time_and_at_run_time_are_a_table() -> None:
    lines = _text(placed(), 0, operators=True)
    table = [line.split() for line in lines[lines.index(next(line for line in lines if line.startswith("#"))) :][:4]]
    assert table == [
        ["#", "ahead", "of", "time", "at", "run", "time", "device", "dB", "module", "line"],
        ["1", "aten.view_copy.default", "-", "40.0", "-", "-"],
        ["2", "aten.batch_norm.default", "norm@0", "40.0", "body.norm", "net/ops.py:7"],
        ["3", "aten.relu.default", "-", "-", "-", "-"],
    ]
    assert not any(line.startswith("#") for line in _text(placed(), 0))


def test_csv_json_and_page_have_places_and_operators() -> None:
    debugged = placed()
    text = layers_csv(debugged.layers, debugged.diagnosis)
    places = read_places(text)
    expected = LayerPlace("body.norm", "net/ops.py:7", "aten.batch_norm.default", "norm@0")
    assert places[debugged.layers[2].name] == expected
    assert places["x"] == LayerPlace("", "", "", "")
    assert _data(debugged, 0)["layers"][2]["exported"] == ("aten.batch_norm.default",)  # type: ignore[index]
    assert read_places("layer,module\na,b\n") == read_places("") == {}


def test_csv_says_of_every_layer_what_its_tensor_is() -> None:
    tensor = LayerTensor(7, 1, 0, (1, 3), "uint16", 0.25, 12)
    layer = Layer("aten_topk_default:1", "aten.topk.default", ("x", "y"), {}, None, tensor)
    [row] = csv.DictReader(io.StringIO(layers_csv([layer, Layer("x", INPUT, (), {})][:1], diagnose([layer]))))
    expected = {
        "layer": "aten_topk_default:1", "inputs": "x y", "handle": "7", "output": "1", "partition": "0",
        "shape": "1x3", "dtype": "uint16", "scale": "0.25", "zero_point": "12", "device_mse": "",
    }  # fmt: skip
    assert {name: row[name] for name in expected} == expected


@pytest.mark.parametrize("text", ["Cosine", "my pkg:Cosine", "a.b:C=low", "a:b:c", "os.system('x'):y", "..a:B", "a:B="])
def test_a_metric_that_names_no_class_is_usage(text: str) -> None:
    with pytest.raises(UsageError, match="expected MODULE:CLASS"):
        parse_metric(text)


@pytest.mark.parametrize("threshold", ["inf", "-inf", "nan", "1e999"])
def test_a_threshold_that_is_no_number_is_usage(threshold: str) -> None:
    with pytest.raises(UsageError, match=rf"--comparator a.b:C={threshold}: the threshold must be a finite number"):
        parse_metric(f"a.b:C={threshold}")


def test_a_metric_is_named_as_an_import_string() -> None:
    assert parse_metric("my_pkg.metrics:Cosine=0.95") == UserMetric("my_pkg.metrics", "Cosine", 0.95)
    assert str(parse_metric(".metrics:Cosine")) == ".metrics:Cosine"


def test_whether_a_file_can_be_written_is_known_before_and_leaves_none(tmp_path: Path) -> None:
    path = tmp_path / "new" / "layers.csv"
    check_writable(path)
    assert list(path.parent.iterdir()) == []
    path.write_text("earlier")
    check_writable(path)
    assert path.read_text() == "earlier"
    with pytest.raises(UsageError, match=r"cannot write .*layers.csv/x: "):
        check_writable(path / "x")
    with pytest.raises(UsageError, match="Is a directory"):
        check_writable(tmp_path)


def test_csv_and_json_have_every_layer_and_figure() -> None:
    debugged = outcome(device=True)
    rows = list(csv.DictReader(io.StringIO(layers_csv(debugged.layers, debugged.diagnosis))))
    assert [row["layer"] for row in rows][-1] == "fused"
    assert rows[1]["compiler_sqnr_db"] == "inf"
    assert rows[2]["compiler_mse"] == "12345.0"
    assert rows[2]["compiler_diverges"] == "True"
    assert rows[2]["inspector_sqnr_db"] == "39.0"
    assert rows[3]["compiler_mse"] == ""
    answer = json.loads(json_document({"schema": 1, **_data(outcome(device=True), 3)}))
    assert (answer["schema"], answer["sample"], answer["first"]["step"]) == (1, 3, "compiler")
    assert answer["layers"][1]["compiler"]["sqnr_db"] == "inf"
    assert answer["layers"][3]["device"] is None
