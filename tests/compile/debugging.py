"""Debugs programs on the simulator in one process that has torch, and prints the facts for test_debug.py as JSON.

Beside farm's own figures it prints ExecuTorch's Inspector's with its Qualcomm comparators, called as in upstream's
tests: against its own reference, and against the same graph with quantize and dequantize put back as nodes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import torch
from executorch.backends.qualcomm.debugger.qcom_numerical_comparator_sample import (
    QcomCosineSimilarityComparator,
    QcomMSEComparator,
    QcomSQNRComparator,
)
from executorch.devtools import Inspector, parse_etrecord

from farm.base.config.settings import load_config
from farm.builds.bundles.bundle import load_bundle
from farm.builds.compile.debug.compare import compare_layers, missing_layers
from farm.builds.compile.debug.compiler import compile_debug
from farm.builds.compile.debug.debugger import Debugger
from farm.builds.compile.debug.metrics import MetricClass, bind_all
from farm.builds.compile.debug.protocol import CompareRequest, CompileRequest, Written, parse_metric
from farm.builds.program.layers import Layer
from farm.builds.runtime.runtime import simulator_runtime
from farm.builds.toolchains.prepare import prepare
from farm.results.layers import diagnose
from farm.suites.suite import Case, InputSpec, Job, Target

MODELS = """
import torch

class Several(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.one = torch.nn.Conv2d(3, 4, 3, padding=1)
        self.two = torch.nn.Conv2d(4, 4, 3, padding=1)
        self.last = torch.nn.Linear(64, 5)
    def forward(self, x):
        x = torch.relu(self.one(x))
        return self.last((self.two(x) + x).flatten(1))

class Outlier(torch.nn.Module):
    # One column is a thousand times as great as the others: its range leaves them no step, and clamp shows it.
    def __init__(self):
        super().__init__()
        self.one = torch.nn.Conv2d(3, 4, 3, padding=1)
        self.register_buffer("gain", torch.tensor([1.0, 3000.0, 1.0, 1.0]))
    def forward(self, x):
        far = torch.relu(self.one(x)) * self.gain
        return torch.clamp(far, -1, 1), far

class Raises(torch.nn.Module):
    def forward(self, x):
        raise ValueError("no such\\nshape")

class Exits(torch.nn.Module):
    def forward(self, x):
        raise SystemExit("that was it")

class Swapped(torch.nn.Module):
    # Its inputs are used in another order than they are given in, and each by an operator of its own.
    def __init__(self):
        super().__init__()
        self.one = torch.nn.Linear(8, 8)
        self.two = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh())
    def forward(self, a, b, c):
        last = torch.sigmoid(c) * 4
        later = self.two(b) + last
        return later - torch.relu(self.one(a))

class Between(torch.nn.Module):
    # QNN has no erf: it parts the program in two. Both outputs of topk are used.
    def __init__(self):
        super().__init__()
        self.one = torch.nn.Linear(8, 8)
        self.two = torch.nn.Linear(3, 3)
        self.register_buffer("offsets", torch.rand(8))
    def forward(self, x):
        largest, places = torch.topk(self.one(x), 3)
        return self.two(torch.erf(largest + self.offsets[places]))
"""
METRICS = """
from executorch.backends.qualcomm.debugger.qcom_numerical_comparator_base import QcomNumericalComparatorBase
from executorch.devtools.inspector.numerical_comparator import NumericalComparatorBase

class Farthest(QcomNumericalComparatorBase):
    def __init__(self, edge_ep, threshold=1e9):
        super().__init__(edge_ep)
        self.threshold = threshold
    def metric_name(self):
        return "farthest <away>"
    def is_valid_score(self, score):
        return score <= self.threshold
    def element_compare(self, a, b):
        return float((a - b).abs().max())

class Shown(NumericalComparatorBase):
    def element_compare(self, a, b):
        return float(a.numel())

class Fails(Farthest):
    def element_compare(self, a, b):
        raise ValueError("cannot\\ncompare")
"""
UPSTREAM_METRIC = "executorch.backends.qualcomm.debugger.qcom_numerical_comparator_sample:QcomSQNRComparator"
SHAPE = (1, 3, 4, 4)
EDGE = "edge_after_transform/forward"


class Bench:
    """Compiles and runs in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        config = load_config()
        self.versions = prepare(config).versions
        runtime = simulator_runtime(config.cache_dir)
        self.runner = folder / "runtime" / runtime.runner
        for name, path in runtime.files.items():
            link = folder / "runtime" / name
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(path)
        (folder / "models.py").write_text(MODELS)
        (folder / "metrics.py").write_text(METRICS)

    def case(self, name: str, shape: tuple[int, ...] = SHAPE) -> Case:
        inputs = (InputSpec(shape=shape),) * (3 if name == "Swapped" else 1)
        return Case("s", name.lower(), f".models:{name}", inputs, folder=str(self.folder))

    def request(self, name: str, shape: tuple[int, ...] = SHAPE, *metrics: str) -> CompileRequest:
        folder = self.folder / name.lower()
        folder.mkdir(exist_ok=True)
        case = self.case(name, shape)
        parsed = tuple(parse_metric(metric) for metric in metrics)
        return CompileRequest(Job(case, Target("SM8650", "htp", "8a8w")), self.versions, 0, str(folder), parsed)

    def compile(self, name: str, shape: tuple[int, ...] = SHAPE, *metrics: str) -> tuple[Any, Path]:
        asked = self.request(name, shape, *metrics)
        folder = Path(asked.folder)
        return compile_debug(asked.job, asked.versions, asked.sample, folder, asked.metrics), folder

    def run(self, folder: Path, name: str, *, scale: float = 1.0, order: tuple[int, ...] | None = None) -> Path:
        """Run the bundle in `folder`; its inputs, times `scale` and in another `order`, are of one sample."""
        ran = folder / name
        ran.mkdir()
        bundle = load_bundle(folder / "bundle")
        names = []
        for number, source in enumerate(bundle.input_files(0)):
            given = torch.frombuffer(bytearray(source.read_bytes()), dtype=torch.float32) * scale
            names.append(f"input_{number}.raw")
            (ran / names[-1]).write_bytes(given.numpy().tobytes())
        order = names if order is None else [names[place] for place in order]
        (ran / "input_list.txt").write_text(f"{' '.join(order)}\n")
        flags = ["--output_folder_path=.", "--etdump_path=etdump.etdp", "--dump_intermediate_outputs=true"]
        subprocess.run(
            [self.runner, f"--model_path={bundle.model}", *flags, "--debug_output_path=debug_output.bin"],
            cwd=ran, env={"LD_LIBRARY_PATH": str(self.runner.parent)}, check=True, capture_output=True,
        )  # fmt: skip
        return ran


def written(ran: Path) -> Written:
    return Written(str(ran / "etdump.etdp"), str(ran / "debug_output.bin"))


def official(program: Any, ran: Path) -> dict[str, dict[str, list[float]]]:
    """Return MSE, SQNR and cosine of every node, as the Inspector has them, by reference."""
    record = parse_etrecord(str(program.etrecord))
    inspector = Inspector(
        etdump_path=str(ran / "etdump.etdp"), debug_buffer_path=str(ran / "debug_output.bin"), etrecord=record,
        reference_graph_name=EDGE,
    )  # fmt: skip
    record.graph_map["quantized/forward"] = WithQuantizeNodes(program.edge)
    found: dict[str, dict[str, list[float]]] = {}
    for reference in (EDGE, "quantized/forward"):
        figures: dict[str, list[float]] = {}
        for comparator in (QcomMSEComparator, QcomSQNRComparator, QcomCosineSimilarityComparator):
            table = inspector.calculate_numeric_gap(distance=comparator(program.edge), reference_graph=reference)
            for runtime, gap in zip(table["runtime_ops"], table["gap"], strict=True):
                figures.setdefault(runtime[0].removesuffix("@0"), []).append(gap[0])
        found[reference] = figures
    return found


class WithQuantizeNodes:
    """Graph with the nodes that FoldQDQ removed; its handles are of the dequantized values."""

    def __init__(self, edge: Any) -> None:
        self._module = edge.module()
        graph, operators = self._module.graph, torch.ops.quantized_decomposed
        for node in list(graph.nodes):
            attributes = node.meta.get("quant_attrs", {})
            if node.op not in ("call_function", "placeholder") or "scale" not in attributes:
                continue
            names = ("scale", "zero_point", "quant_min", "quant_max", "dtype")
            arguments = tuple(attributes[name] for name in names)
            with graph.inserting_after(node):
                quantized = graph.call_function(operators.quantize_per_tensor.default, (node, *arguments))
            with graph.inserting_after(quantized):
                value = graph.call_function(operators.dequantize_per_tensor.default, (quantized, *arguments))
            node.replace_all_uses_with(value, delete_user_cb=lambda user, kept=quantized: user is not kept)
            if "debug_handle" in node.meta:
                value.meta["debug_handle"] = node.meta.pop("debug_handle")
        self._module.recompile()

    def module(self) -> torch.fx.GraphModule:
        return self._module


def plain(rows: tuple[Layer, ...]) -> dict[str, Any]:
    """Return MSE, SQNR, cosine and steps of every layer, by step, and by `inspector`."""
    found: dict[str, Any] = {}
    for row in rows:
        gaps = {**row.gaps, **({"inspector": row.inspector} if row.inspector else {})}
        found[row.name] = {
            step: [float(x) if x is not None else None for x in (gap.mse, gap.sqnr_db, gap.cosine, gap.steps)]
            for step, gap in gaps.items()
        }
    return found


def first(rows: tuple[Layer, ...]) -> dict[str, Any] | None:
    found = diagnose(rows).first
    return {name: str(getattr(found, name)) for name in ("operator", "step", "why")} if found else None


def main() -> None:
    folder = Path.cwd()
    bench = Bench(folder)
    program, place = bench.compile("Several", SHAPE, UPSTREAM_METRIC, ".metrics:Farthest=0.3", ".metrics:Shown")
    simulator, again = bench.run(place, "simulator"), bench.run(place, "again")
    other = bench.run(place, "other", scale=-0.5)
    ours = compare_layers(program, written(simulator), written(again))
    answer: dict[str, Any] = {
        "several": {
            "ours": plain(ours), "official": official(program, simulator), "first": first(ours),
            "notes": program.notes, "missing": missing_layers(ours), "rows": msgspec.to_builtins(ours),
            "other device": first(compare_layers(program, written(simulator), written(other))),
            "graph": {node.name: node.inputs for node in program.nodes},
        }
    }  # fmt: skip
    program, place = bench.compile("Outlier")
    rows = compare_layers(program, written(bench.run(place, "simulator")), None)
    answer["outlier"] = {"first": first(rows), "ours": plain(rows), "notes": program.notes}
    program, place = bench.compile("Swapped", (2, 8))
    ran, wrong = bench.run(place, "simulator"), bench.run(place, "wrong", order=(1, 0, 2))
    rows = compare_layers(program, written(ran), None)
    answer["swapped"] = {
        "ours": plain(rows), "official": official(program, ran), "rows": msgspec.to_builtins(rows),
        "graph": {node.name: node.inputs for node in program.nodes},
        "wrong order": first(compare_layers(program, written(wrong), None)),
    }  # fmt: skip
    program, place = bench.compile("Between", (2, 8))
    ran = bench.run(place, "simulator")
    rows = compare_layers(program, written(ran), None)
    answer["between"] = {"rows": msgspec.to_builtins(rows), "missing": missing_layers(rows), "notes": program.notes}
    for name in ("Raises", "Exits"):
        answer[name.lower()] = msgspec.to_builtins(Debugger().serve(bench.request(name, (2, 4))))
    others = folder / "others"
    others.mkdir(mode=0o777)
    others.chmod(0o777)
    (others / "anybodys.py").write_text("raise SystemExit('executed')")
    sys.path.insert(0, str(others))
    refused = ("anybodys:Cosine", "no_such_package.metrics:Cosine", ".metrics:Several", ".metrics:Nobody", "json:loads")
    answer["refused"] = {
        metric: msgspec.to_builtins(Debugger().serve(bench.request("Raises", (2, 4), metric))) for metric in refused
    }
    [fails] = bind_all([MetricClass(parse_metric(".metrics:Fails"), bench.case("Between"))], program.edge)
    debugger = Debugger(program._replace(metrics=[fails]))
    answer["refused"][".metrics:Fails"] = msgspec.to_builtins(debugger.serve(CompareRequest(written(ran))))
    print(json.dumps(answer))  # noqa: T201


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
