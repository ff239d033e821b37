"""`farm exec net.py:Net`: a module without suite or TOML, and the fit of a program before a device is used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from elf_maker import make_elf
from farm_home import FarmHome

from farm.base.socs import find_soc
from farm.builds.program.pte import Delegate, Method, Value, read_pte
from farm.builds.runtime.native.elf import HEXAGON
from farm.builds.runtime.parts import RuntimePart
from farm.replay.exec_plan import (
    Contexts,
    FitLine,
    cpu_line,
    error_line,
    file_lines,
    find_module,
    precision_of,
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


def test_impossible_requests_are_one_line(home: FarmHome) -> None:
    (home.cwd / "net.py").write_text(NET)
    for words, problem in {
        "net.py:Net": "is compiled for an SoC: name it, as with --soc SM8650",
        "gone.py:Net --soc SM8650": "gone.py does not exist",
        "net.py:Net --soc SM8650 --prompt ids.json": "--prompt is for a .pte file",
        "net.py:Net --soc SM8650 --soc SM8450 --device x": "--device is for one --soc",
    }.items():
        done = home.farm("exec", *words.split(), code=2)
        assert (problem in done.stderr, done.stderr.count("\n")) == (True, 1), done.stderr


def test_a_module_is_named_by_file_and_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("net.py").touch()
    module = find_module("net.py:Net")
    assert module is not None
    assert (module.file, module.name, module.label) == (tmp_path / "net.py", "Net", "net_Net")
    assert [find_module(name) for name in ("model.pte", "net.py")] == [None, None]
    assert [precision_of(name, "") for name in ("htp", "xnnpack", "gpu")] == ["8a8w", "fp32", "fp16"]


METHOD = Method("forward", (), (), (Delegate("QnnBackend"),), {"aten::add.out": 1, "aten::sort.values": 3})
REFERENCE = np.linspace(-1, 1, 100, dtype=np.float32)
NEAR, FAR = (compare(REFERENCE * np.float32(ratio), REFERENCE) for ratio in (1.001, 1.3))
FITS, LARGE = Value((1, 3, 224, 224), "float32"), Value((1, 64, 512, 512), "float32")


@pytest.mark.parametrize(
    ("line", "level", "text"),
    [
        (qnn_line("2.51.0", "v2.51.0.260929181845"), Level.OK, "compiled by QNN 2.51.0, the runtime has 2.51.0"),
        (qnn_line("2.51.0", "2.47.0"), Level.ERROR, "compiled by QNN 2.51.0, newer than the runtime's 2.47.0"),
        (qnn_line("", "2.47.0"), Level.OK, ""),
        (qnn_line("2.51.0", ""), Level.WARNING, ""),
        (cpu_line(METHOD, on_cpu=False), Level.WARNING, "aten::sort.values 3, aten::add.out 1, beside 1 delegated"),
        (cpu_line(METHOD, on_cpu=True), Level.OK, ""),
        (cpu_line(msgspec.structs.replace(METHOD, cpu_operators={}), on_cpu=False), Level.OK, "no operator"),
        # An error is a warning above a tenth of the amplitude.
        (error_line([NEAR], is_compared=True), Level.OK, ""),
        (error_line([NEAR, FAR], is_compared=True), Level.WARNING, "output 1 SQNR 10.5 dB"),
        (error_line(None, is_compared=False), Level.WARNING, "unknown"),
        (error_line(None, is_compared=True), Level.OK, ""),
        (error_line([], is_compared=False), Level.OK, ""),
        # A context beyond 4 GB does not fit, and a large tensor is a warning.
        (size_line(1000, Contexts((), "")), Level.OK, "1.0 kB"),
        (size_line(5 << 30, Contexts((1 << 20, (4 << 30) + 1), "2.51.0")), Level.ERROR, ""),
        (vtcm_line(find_soc("SM8650"), [FITS]), Level.OK, "8 MB, more than each input and output"),
        (vtcm_line(find_soc("SM8650"), [FITS, LARGE]), Level.WARNING, ""),
    ],
)
def test_the_fit_of_a_program_has_levels(line: FitLine, level: Level, text: str) -> None:
    assert line.level is level
    assert text in line.text


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
    name, soc = "libQnnHtpV75Skel.so", find_soc("SM8650")
    for arch, levels in ((0x75, [Level.OK, Level.OK]), (0x73, [Level.WARNING])):
        (tmp_path / name).write_bytes(make_elf(HEXAGON, arch))
        part = RuntimePart(name, tmp_path / name, HEXAGON, "get it", hexagon=soc.htp_arch, soc=soc.name)
        lines = list(file_lines([part]))
        assert [line.level for line in lines[: len(levels)]] == levels
    assert "is a skel for V73 (e_flags 0x73), SM8650 needs V75" in lines[0].line


def test_contexts_of_a_real_program_have_their_size_and_their_qnn(models: Path) -> None:
    path = models / "conv.pte"
    contexts = read_contexts(path)
    assert len(contexts.sizes) == len(read_pte(path).methods[0].delegates) == 1
    assert 0 < contexts.sizes[0] < path.stat().st_size
    assert contexts.qnn.startswith("2.")
    assert read_contexts(models / "select.pte") == Contexts((), "")
