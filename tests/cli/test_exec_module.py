"""`farm exec net.py:Net`: a module without suite or TOML, and the fit of a program before a device is used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from elf_maker import make_elf
from farm_home import FarmHome

from farm.base.errors import UsageError
from farm.base.socs import find_soc
from farm.builds.program.pte import Delegate, Method, Value, read_pte
from farm.builds.runtime.native.elf import HEXAGON
from farm.builds.runtime.parts import RuntimePart
from farm.replay.module_program import find_module, precision_of
from farm.replay.program_fit import (
    Contexts,
    cpu_line,
    error_line,
    file_lines,
    qnn_line,
    read_contexts,
    size_line,
    vtcm_line,
)
from farm.replay.properties import Level
from farm.results.numerics import compare

NET = """
import torch


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.conv = torch.nn.Conv2d(3, 8, 3)

    def forward(self, image):
        return torch.relu(self.conv(image))

    @staticmethod
    def example_inputs():
        return (torch.linspace(-1, 1, 3 * 8 * 8).reshape(1, 3, 8, 8),)


class Bare(torch.nn.Module):
    def forward(self, image):
        return image + 1
"""


@pytest.mark.whole
def test_a_module_is_compiled_for_each_soc_shows_its_fit_and_is_compared_with_fp32(home: FarmHome) -> None:
    (home.cwd / "net.py").write_text(NET)
    answer = home.json(
        "exec", "net.py:Net", "--soc", "SM8650", "--soc", "SM8450", "--virtual", "1", "--iterations", "1"
    )
    programs: list[dict[str, Any]] = answer["programs"]
    assert [one["job"] for one in programs] == [f"exec/net_net_8a8w[{soc}-htp-ready]" for soc in ("SM8650", "SM8450")]
    for one in programs:
        fit = {line["name"]: line for line in one["fit"]}
        assert list(fit) == ["SoC", "QNN", "skel", "on the CPU", "error", "size", "VTCM"]
        assert {line["level"] for line in one["fit"]} == {"ok"}
        assert "against FP32, by the quantized module on the CPU" in fit["error"]["text"]
        [comparison] = one["attempt"]["comparisons"]
        assert (comparison["reference"], comparison["sqnr_db"] > 25) == ("expected", True)
        assert one["inputs"] == [{"dtype": "float32", "shape": [1, 3, 8, 8], "source": "example input 0"}]


@pytest.mark.whole
def test_a_module_without_example_inputs_is_refused_before_anything_is_compiled(home: FarmHome) -> None:
    (home.cwd / "net.py").write_text(NET)
    for name, problem in (("Bare", "neither Bare nor net.py has example_inputs"), ("Nope", "has no Nope")):
        done = home.farm("exec", f"net.py:{name}", "--soc", "SM8650", "--virtual", "1")
        assert done.returncode == 2, done.stderr
        assert problem in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("net.py:Net",), "is compiled for an SoC: name it, as with --soc SM8650"),
        (("gone.py:Net", "--soc", "SM8650"), "gone.py does not exist"),
        (("net.py:Net", "--soc", "SM8650", "--prompt", "ids.json"), "--prompt is for a .pte file"),
        (("net.py:Net", "--soc", "SM8650", "--soc", "SM8450", "--device", "x"), "--device is for one --soc"),
    ],
)
def test_impossible_requests_are_one_line(home: FarmHome, words: tuple[str, ...], problem: str) -> None:
    (home.cwd / "net.py").write_text(NET)
    done = home.farm("exec", *words)
    assert (done.returncode, problem in done.stderr) == (2, True), done.stderr


def test_a_module_is_named_by_file_and_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("net.py").touch()
    module = find_module("net.py:Net")
    assert module is not None
    assert (module.file, module.name, module.label) == (tmp_path / "net.py", "Net", "net_Net")
    assert find_module("model.pte") is None
    assert find_module("net.py") is None
    with pytest.raises(UsageError, match="other.py does not exist"):
        find_module("other.py:Net")
    assert [precision_of(name, "") for name in ("htp", "xnnpack", "gpu")] == ["8a8w", "fp32", "fp16"]
    assert precision_of("htp", "16a8w") == "16a8w"


def test_a_program_of_a_newer_qnn_does_not_fit() -> None:
    assert qnn_line("2.51.0", "v2.51.0.260929181845").line == "compiled by QNN 2.51.0, the runtime has 2.51.0"
    newer = qnn_line("2.51.0", "2.47.0")
    assert (newer.level, newer.text) == (Level.ERROR, "compiled by QNN 2.51.0, newer than the runtime's 2.47.0")
    assert qnn_line("", "2.47.0").level is Level.OK
    assert qnn_line("2.51.0", "").level is Level.WARNING


def test_files_of_an_attached_device_are_checked_before_a_device_is_looked_for(home: FarmHome, models: Path) -> None:
    done = home.farm("exec", str(models / "conv.pte"))
    assert done.returncode == 4, done.stderr
    lines = done.stdout.splitlines()
    assert lines[1].startswith("  ok       SoC")
    [skel] = [line for line in lines if line.startswith("  warning  skel")]
    assert "libQnnHtpV75Skel.so is missing" in skel
    [qnn] = [line for line in lines if line.startswith("  warning  files") and "libQnnHtp.so" in line]
    assert "libQnnSystem.so is missing, libQnnHtp.so is missing" in qnn, "files with one repair share a line"


def test_a_skel_of_another_hexagon_is_named(tmp_path: Path) -> None:
    good, foreign, name = tmp_path / "good", tmp_path / "foreign", "libQnnHtpV75Skel.so"
    for folder, arch in ((good, 0x75), (foreign, 0x73)):
        folder.mkdir()
        (folder / name).write_bytes(make_elf(HEXAGON, arch))
    soc = find_soc("SM8650")
    lines = [
        list(file_lines([RuntimePart(name, folder / name, HEXAGON, "get it", hexagon=soc.htp_arch, soc=soc.name)]))
        for folder in (good, foreign)
    ]
    assert [line.level for line in lines[0]] == [Level.OK, Level.OK]
    assert lines[1][0].level is Level.WARNING
    assert "is a skel for V73 (e_flags 0x73), SM8650 needs V75" in lines[1][0].line


def test_operators_on_the_cpu_are_named_most_frequent_first() -> None:
    method = Method("forward", (), (), (Delegate("QnnBackend"),), {"aten::add.out": 1, "aten::sort.values": 3})
    line = cpu_line(method, on_cpu=False)
    assert line.level is Level.WARNING
    assert line.text == "aten::sort.values 3, aten::add.out 1, beside 1 delegated parts"
    assert cpu_line(method, on_cpu=True).level is Level.OK
    assert cpu_line(msgspec.structs.replace(method, cpu_operators={}), on_cpu=False).text == "no operator"


def test_the_error_is_a_warning_above_a_tenth_of_the_amplitude() -> None:
    import numpy as np

    reference = np.linspace(-1, 1, 100, dtype=np.float32)
    near, far = compare(reference * np.float32(1.001), reference), compare(reference * np.float32(1.3), reference)
    assert error_line([near], is_compared=True).level is Level.OK
    wrong = error_line([near, far], is_compared=True)
    assert (wrong.level, "output 1 SQNR 10.5 dB" in wrong.text) == (Level.WARNING, True)
    unknown = error_line(None, is_compared=False)
    assert (unknown.level, unknown.text) == (Level.WARNING, "unknown")
    assert error_line(None, is_compared=True).level is Level.OK
    assert error_line([], is_compared=False).level is Level.OK


def test_a_context_beyond_4_gb_does_not_fit_and_a_large_tensor_is_a_warning() -> None:
    assert size_line(1000, Contexts((), "")).text == "1.0 kB"
    assert size_line(5 << 30, Contexts((1 << 20, (4 << 30) + 1), "2.51.0")).level is Level.ERROR
    soc = find_soc("SM8650")
    fits, large = Value((1, 3, 224, 224), "float32"), Value((1, 64, 512, 512), "float32")
    assert vtcm_line(soc, [fits]).text == "8 MB, more than each input and output"
    assert vtcm_line(soc, [fits, large]).level is Level.WARNING


def test_contexts_of_a_real_program_have_their_size_and_their_qnn(models: Path) -> None:
    path = models / "conv.pte"
    contexts = read_contexts(path)
    assert len(contexts.sizes) == len(read_pte(path).methods[0].delegates) == 1
    assert 0 < contexts.sizes[0] < path.stat().st_size
    assert contexts.qnn.startswith("2.")
    assert read_contexts(models / "select.pte") == Contexts((), "")
