from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import flatbuffers
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from warm_torch import run_script

from farm.base.errors import ConfigError
from farm.builds.program.pte import QnnOptions, Value, read_pte

SCALAR_TYPES = {
    "FLOAT": "float32", "LONG": "int64", "UINT16": "uint16", "Int": "int64", "Double": "float64", "Bool": "bool",
}  # fmt: skip
BACKENDS = {"kHtpBackend": "htp", "kLpaiBackend": "lpai", "kGpuBackend": "gpu"}


def told(path: Path) -> list[dict[str, Any]]:
    """Return the result of our reader, in the form of the script above."""

    def options(qnn: QnnOptions | None) -> list[object] | None:
        if qnn is None:
            return None
        flags = (qnn.online_prepare, qnn.dump_intermediate_outputs, qnn.shared_buffer)
        return [qnn.soc, qnn.backend, *flags, qnn.use_weight_sharing]

    def value(found: Value) -> list[object]:
        return [found.dtype, list(found.shape), found.dynamic]

    return [
        {
            "name": method.name,
            "inputs": [value(found) for found in method.inputs],
            "outputs": [value(found) for found in method.outputs],
            "delegates": [[delegate.id, options(delegate.qnn)] for delegate in method.delegates],
            "operators": method.cpu_operators,
        }
        for method in read_pte(path).methods
    ]


def test_says_what_executorchs_own_readers_say(models: Path, farm_cache: Path, tmp_path: Path) -> None:
    script = Path(__file__).with_name("official_pte.py")
    official = json.loads(run_script(script, str(models), cache=farm_cache, folder=tmp_path).splitlines()[-1])
    assert len(official) > 10
    for methods in official.values():
        for method in methods:
            for found in (*method["inputs"], *method["outputs"]):
                found[0] = SCALAR_TYPES[found[0]]
            for _, options in method["delegates"]:
                if options:
                    options[1] = BACKENDS[options[1]]
    assert {path.name: told(path) for path in models.glob("*.pte")} == official


def test_a_program_for_the_htp_names_its_soc_and_backend(models: Path) -> None:
    program = read_pte(models / "conv_sm8850.pte")
    assert (program.qnn.soc, program.qnn.backend, program.qnn.online_prepare) == ("SM8850", "htp", False)
    forward = program.method("forward", "--method")
    assert [str(value) for value in (*forward.inputs, *forward.outputs)] == [
        "float32[1, 3, 16, 16]", "float32[1, 8, 16, 16]",
    ]  # fmt: skip
    assert (forward.inputs[0].nbytes, forward.partitions, forward.cpu_operators) == (3072, {"QnnBackend": 1}, {})


def test_a_program_without_a_method_forward_says_what_it_has(models: Path) -> None:
    program = read_pte(models / "methods.pte")
    assert (program.qnn, len(program.methods)) == (None, 2)
    several = r"methods\.pte: has no method 'forward': it has 'double', 'triple': name one of them with --method$"
    with pytest.raises(ConfigError, match=several):
        program.method("forward", "--method")
    one = r"conv\.pte: has no method 'foo', only 'forward': name that one with --method$"
    with pytest.raises(ConfigError, match=one):
        read_pte(models / "conv.pte").method("foo", "--method")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda _: b"\x7fELF" * 100, "is not an ExecuTorch program"),
        (lambda data: data[: len(data) // 2], "cut short.*copy it again"),
        (lambda data: data[:-100], "cut short.*copy it again"),
        (lambda data: data[:4] + b"ET13" + data[8:], "format ET13, expected ET12"),
        (lambda data: b"\xff\xff\xff\x7f" + data[4:], "malformed: points at byte"),
        (lambda data: data[:16] + (2**40).to_bytes(8, "little") + data[24:], "cut short"),
    ],
)
def test_what_is_no_whole_program_is_refused_by_its_name(
    models: Path, tmp_path: Path, change: Any, problem: str
) -> None:
    path = tmp_path / "some.pte"
    path.write_bytes(change((models / "conv.pte").read_bytes()))
    with pytest.raises(ConfigError, match=rf"some\.pte: .*({problem})"):
        read_pte(path)


def test_a_newer_version_of_the_format_is_refused(tmp_path: Path) -> None:
    builder = flatbuffers.Builder(64)
    builder.StartObject(8)
    builder.PrependUint32Slot(0, 3, 0)
    builder.Finish(builder.EndObject(), file_identifier=b"ET12")
    path = tmp_path / "newer.pte"
    path.write_bytes(bytes(builder.Output()))
    with pytest.raises(ConfigError, match=r"newer\.pte: has version 3 of the format, expected 0"):
        read_pte(path)


def test_a_file_that_is_not_there_or_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gone\.pte: No such file"):
        read_pte(tmp_path / "gone.pte")
    with pytest.raises(ConfigError, match="Is a directory"):
        read_pte(tmp_path)


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), name=st.sampled_from(["conv.pte", "dynamic.pte", "methods.pte"]))
def test_any_changed_program_is_read_or_refused(models: Path, tmp_path: Path, data: st.DataObject, name: str) -> None:
    whole = (models / name).read_bytes()
    # Offset of the weights in a file that has them behind its description.
    described = int.from_bytes(whole[16:24], "little") if whole[8:12] == b"eh00" else len(whole)
    changed = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, described - 1))
        changed[at] = data.draw(st.integers(0, 255))
    path = tmp_path / name
    path.write_bytes(changed)
    try:
        program = read_pte(path)
        _ = program.qnn
        _ = [str(value) for method in program.methods for value in (*method.inputs, *method.outputs)]
    except ConfigError:
        pass
    finally:
        path.unlink()
