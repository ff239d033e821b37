"""Choice of the log line with the reason of a failed compile. The logs are QNN's, of real compilations and issues."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from farm.builds.bundles.origins import Origin
from farm.builds.compile.qnn_errors import explained
from farm.builds.compile.watched import noting_node, take_node

EMPTY = "AssertionError: Failed to generate Qnn context binary."
ORIGINS = {
    "aten_convolution_default": Origin("decoder.up", "models/unet.py:42"),
    "aten_relu_default": Origin("", "net.py:7"),
    "aten_instance_norm_default": Origin("norm", "net.py:9"),
}
BUILD = """\
[INFO] [Qnn ExecuTorch]: Caching: Caching is in SAVE MODE.
[ERROR] [Qnn ExecuTorch]:  <E> unexpected GraphHtpSettings option 66

[INFO 2026-11-27 04:59:22,400 qnn_preprocess.py:230] Processing Method(0): (1/1)
[INFO 2026-11-27 04:59:22,407 qnn_preprocess.py:122] Visiting: aten_relu_default, aten.relu.default
"""
ENDS = """\
[ERROR] [Qnn ExecuTorch]:  <E> Failed to construct common node for graph 260

[ERROR] [Qnn ExecuTorch]:  <E> Failed to add node with err 6007

[ERROR] [Qnn ExecuTorch]: Failed to add node to Qnn Graph with error: 6007
[ERROR] [Qnn ExecuTorch]: Fail to compile QNN graph
"""
TYPES = """\
[ERROR] [Qnn ExecuTorch]:  <E> Unsupported input/output datatypes requested for the HTP Op 'TransposeConv2d' in the \
node 'aten_convolution_default'. There is a mismatch for the combination of inputs and outputs.
[ERROR] [Qnn ExecuTorch]:  <E> Requested I/O datatype set:
[ERROR] [Qnn ExecuTorch]:  <E> Supported I/O datatype sets for the configuration: FP16
[ERROR] [Qnn ExecuTorch]:  <E> Please refer to the 'HTP Backend Op Definition Supplement' section of QNN SDK
[ERROR] [Qnn ExecuTorch]:  <E> QnnBackend_validateOpConfig failed 3110
[ERROR] [Qnn ExecuTorch]:  <E> Failed to validate op aten_convolution_default with error 0xc26
[WARNING] [Qnn ExecuTorch]: Qnn Backend op validation failed with error: 3110
"""
SCALE = "[ERROR] [Qnn ExecuTorch]: graph_prepare.cc:3207::ERROR:Output def has a bad scale (nan, inf, or too small).\n"
IMPROPER = "[ERROR] [Qnn ExecuTorch]: graph_prepare.cc:3282::ERROR:node 35, output 0  has improper OutputDef\n"
WEIGHT = "[ERROR] [Qnn ExecuTorch]:  <E> Op Dequantize does not support per-channel quant tensor\n"
UNREADABLE = (
    "[WARNING] [Qnn ExecuTorch]: Failed to interpret QNN context binary. Error code 30010. Try verifying binary with "
    "online-prepare format.\n"
)
TCM = """\
[ ERROR ] initial_sequencer_dp.cc:149:ERROR:A single op, "q::ForceFormat_Crouton" (Op ID: 1165b600001430), requires \
0x2400000 bytes of TCM, which is greater than the TCM size of 0x800000!
[ERROR] [Qnn ExecuTorch]: QnnDsp <E> "aten_instance_norm_default" generated: Requires 0x2400000 bytes of TCM
[ERROR] [Qnn ExecuTorch]: QnnDsp <E> RouterX86 graph prepare failed 13
[ERROR] [Qnn ExecuTorch]: QnnDsp <E> Failed to finalize graph (id: 1) with err 1002
"""
KERNEL = """\
[ERROR] [Qnn ExecuTorch]: graph_prepare.cc:204:ERROR:could not create op: q::flat_from_vtcm
[ERROR] [Qnn ExecuTorch]: graph_prepare.cc:1519::ERROR:Op 0x12cb0000000b0 preparation failed with err:-1
[ERROR] [Qnn ExecuTorch]:  <E> "aten_relu_default" generated: could not create op
"""
RANK = """\
[ERROR] [Qnn ExecuTorch]:  <E> [4294967295] has incorrect Rank 7.
[ERROR] [Qnn ExecuTorch]:  <E> [4294967295] has incorrect Rank 7.
[ERROR] [Qnn ExecuTorch]:  <E> QnnBackend_validateOpConfig failed 3110
[ERROR] [Qnn ExecuTorch]:  <E> Failed to validate op aten_relu_default with error 0xc26
"""
LEFT_OVER = """\
[ERROR] [Qnn ExecuTorch]: graph_prepare.cc:4214::ERROR:Oops: Could not prepare op with id 0x4014000000d1
[ERROR] [Qnn ExecuTorch]:  <E> "quantized_decomposed_dequantize_per_tensor_default_1" generated: could not create op
[ERROR] [Qnn ExecuTorch]:  <E> RouterX86 graph prepare failed 18
"""


ODD = "the scale of aten_relu_default is inf"
UNSUPPORTED = (
    "Unsupported input/output datatypes requested for the HTP Op 'TransposeConv2d' in the node "
    "'aten_convolution_default' (module decoder.up, models/unet.py:42)"
)
NO_ROOM = (
    'A single op, "q::ForceFormat_Crouton" (Op ID: 1165b600001430), requires 0x2400000 bytes of TCM, which is greater '
    "than the TCM size of 0x800000!, in aten_instance_norm_default (module norm, net.py:9)"
)
NOT_MADE = '"quantized_decomposed_dequantize_per_tensor_default_1" generated: could not create op'


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        (BUILD + SCALE + IMPROPER + ENDS, f"QNN: Output def has a bad scale (nan, inf, or too small); {ODD}"),
        # A weight that was left alone is no reason: the operator that it was for is.
        (TYPES + BUILD + WEIGHT + ENDS, f"QNN: {UNSUPPORTED}; Op Dequantize does not support per-channel quant tensor"),
        (TYPES + BUILD + ENDS, f"QNN: {UNSUPPORTED}"),
        (RANK + BUILD + LEFT_OVER + ENDS, f"QNN: has incorrect Rank 7, in aten_relu_default (net.py:7); {NOT_MADE}"),
        # An operator on the CPU is no reason where something else failed.
        (TYPES + BUILD + SCALE + ENDS, f"QNN: Output def has a bad scale (nan, inf, or too small); {ODD}"),
        (BUILD + UNREADABLE + ENDS, "QNN: Failed to interpret QNN context binary. Error code 30010"),
        (BUILD + TCM, f"QNN: {NO_ROOM}"),
        (BUILD + KERNEL + ENDS, "QNN: could not create op: q::flat_from_vtcm, in aten_relu_default (net.py:7)"),
        ("nothing of QNN\n", f"{EMPTY}; {ODD}"),
    ],
)
def test_the_reason_is_the_line_of_qnn_that_others_follow_from(log: str, reason: str) -> None:
    assert explained(EMPTY, log, ORIGINS, [ODD]) == reason


@pytest.mark.parametrize("reason", ["ValueError: Qnn is not at fault", "the compiler called exit(7)",
                                    "MissingToolError: libQnnGpu.so of the QNN SDK does not start"])  # fmt: skip
def test_a_reason_that_says_more_stays(reason: str) -> None:
    assert explained(reason, TYPES + BUILD + SCALE + ENDS, ORIGINS, ["the scale of a is inf"]) == reason


def test_a_hostile_log_costs_no_time() -> None:
    started = time.process_time()
    for piece in ("[ERROR] ", "[ ERROR ]", "in the node '", '"a" generated', "QnnDsp <E> ", "Failed to validate op a "):
        explained(EMPTY, piece * (1_000_000 // len(piece)), {})
        explained(EMPTY, f"{piece}\n" * 20_000, {})
    assert time.process_time() - started < 10.0


def test_a_compiler_that_ends_by_itself_leaves_no_file_and_a_killed_one_its_node(tmp_path: Path) -> None:
    log = tmp_path / "build.log"
    log.write_text("printed\n")
    with noting_node(log) as note:
        note("aten_convolution_default (module a, very/long.py:1)")
        note("aten_relu_default (net.py:7)")
        # The caller sees this state during the compile, or after the compiler was killed.
        assert take_node(log) == "aten_relu_default (net.py:7)"
        assert log.read_text() == "printed\n\nfarm: the compiler was at aten_relu_default (net.py:7)\n"
        assert take_node(log) == ""
    assert list(tmp_path.iterdir()) == [log]
    with noting_node(log):
        pass
    assert take_node(log) == ""


def test_a_full_disk_does_not_fail_a_job_over_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with noting_node(tmp_path / "build.log") as note:
        monkeypatch.setattr("os.pwrite", full)
        note("aten_relu_default")


def test_a_refused_write_has_the_line_of_qnn_as_well() -> None:
    # The module writes to its only input, and the partition is left without inputs.
    log = (
        BUILD
        + """\
[ERROR] [Qnn ExecuTorch]:  <E> No graph inputs present for graph [0]
[ERROR] [Qnn ExecuTorch]:  <E> Context binary size calculation failed
[ERROR] [Qnn ExecuTorch]:  <E> Failed to get serialized binary
[ERROR] [Qnn ExecuTorch]:  <E> Failed to get context binary size with err 0x7532
[ERROR] [Qnn ExecuTorch]: Can't determine the size of graph binary to be saved to cache. Error 30002
"""
    )
    refused = "ConfigError: mine/suite.toml: case.a.module: forward writes to its input x: return the new value instead"
    empty = EMPTY.partition(": ")[2]
    found = explained(f"{refused} ({empty})", log, ORIGINS)
    assert found == f"{refused} (QNN: No graph inputs present for graph [0])"
    assert explained(f"{refused} (an own reason)", log, ORIGINS) == f"{refused} (an own reason)"
    assert explained(f"{refused} ({empty})", BUILD, ORIGINS) == f"{refused} ({empty})"
