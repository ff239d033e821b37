"""Parts of op packages in a program and its bundle; the files are headers of libraries, and no QNN is started."""

from __future__ import annotations

from typing import Any

import pytest

# QnnExecuTorch* of ExecuTorch 1.5, qc_schema: target of a package, platform.
CPU, HTP = 1, 2
X86_64, ANDROID = 1, 2


@pytest.fixture
def packages(lowered: dict[str, Any]) -> dict[str, Any]:
    return dict(lowered["op packages"])


@pytest.mark.whole
def test_a_program_names_a_library_for_each_machine_by_its_content(packages: dict[str, Any]) -> None:
    found = packages["on devices"]
    [hexagon, android, x86] = found["infos"].values()
    assert [(info["target"], info["platform"]) for info in (hexagon, android, x86)] == [
        (HTP, ANDROID), (CPU, ANDROID), (CPU, X86_64),
    ]  # fmt: skip
    for info, place in ((hexagon, "hexagon"), (android, "android"), (x86, "x86_64")):
        path = info["op_package_path"]
        assert path == f"op_packages/{place}/{found['opened'][path]}.so"
        named = [info[f"{key}_name"] for key in ("op_package", "custom_op", "qnn_op_type")]
        assert (named, info["interface_provider"]) == (["Package", "my_ops.mul3.default", "Mul3"], "Get")
    assert found["files"] == sorted(found["infos"]), "the bundle has all that the program names"
    assert found["left"] == []


@pytest.mark.whole
def test_a_program_for_another_dsp_is_for_virtual_devices_alone(packages: dict[str, Any]) -> None:
    [x86] = packages["another DSP"]["infos"].values()
    assert x86["platform"] == X86_64


@pytest.mark.whole
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("mixed up", "x86.so is made for x86-64, expected AArch64: QNN's op package generator"),
        ("newer DSP", "v79.so is made for V79 (e_flags 0x79), SM8650 needs V75 or older"),
        ("no library", "x86.so is no little-endian ELF file"),
    ],
)
def test_a_library_for_something_else_is_refused(packages: dict[str, Any], name: str, says: str) -> None:
    assert f"/suite.toml: case.mul3.features.op_packages: {says}" in packages[name]
