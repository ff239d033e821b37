"""Writes test_suites/lpai_ops: the cases of quantized_ops that ExecuTorch's rules for LPAI quantize, by precision.

    python tools/generate_lpai_ops.py           write suite.toml and rules.json
    python tools/generate_lpai_ops.py --check   fail when the files are not up to date

Each case is exported and taken through the passes that come before annotation, in its way to LPAI. If every
operator then has a rule, the quantizer annotates the case in each of its precisions, and validates the result
against the QNN SDK's data on LPAI's operators, as it does before calibration. A precision is left out if either step
refuses it, or if its activations cannot go between the CPU, which quantizes and dequantizes them, and the delegate.
rules.json has the operators and the precisions; suite.toml has the cases that have any, of the installed ExecuTorch.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT)]

from farm.base.config.settings import load_config  # noqa: E402 - also where farm is not installed
from farm.builds.runtime.qnn_sdk import host_sdk  # noqa: E402
from farm.suites.manifests import find_suites, load_suite  # noqa: E402
from farm.suites.suite import Target  # noqa: E402

if TYPE_CHECKING:
    import torch

    from farm.suites.suite import Case

FOLDER = ROOT / "test_suites" / "lpai_ops"
OF = "quantized_ops"
SOC = "SM8850"
_MANIFEST = """[suite]
name = "lpai_ops"
description = "What of quantized_ops ExecuTorch's rules for LPAI quantize; never tried on an LPAI"
backends = ["lpai"]

# Written by tools/generate_lpai_ops.py.
"""


def rules_of(cases: list[Case]) -> dict[str, dict[str, list[str]]]:
    """Return the operators of each case as LPAI's quantizer sees them, and the precisions that it quantizes it in."""
    import torch

    from farm.builds.compile.flows.factory import make_inputs, make_module
    from farm.builds.compile.flows.qualcomm import quantizer_of

    found = {}
    for case in cases:
        quantizers = {name: quantizer_of(Target(SOC, "lpai", name)) for name in case.precisions_on("lpai")}
        first = next(iter(quantizers.values()))
        with torch.no_grad():
            exported = torch.export.export(make_module(case), make_inputs(case, 0), strict=True)
            graph = first.transform_for_annotation(exported.module())
        operators = {node.target for node in graph.graph.nodes if node.op == "call_function"}
        ruled = first.supported_ops.issuperset(operators)
        found[case.name] = {
            "operators": sorted(map(str, operators)),
            "precisions": [
                name for name, one in quantizers.items() if ruled and _can_cross(one) and _quantizes(one, graph)
            ],
        }
    return found


def _quantizes(quantizer: Any, graph: torch.fx.GraphModule) -> bool:
    """Return whether `quantizer` annotates and validates `graph`; annotations of another quantizer are removed."""
    from torchao.quantization.pt2e.quantizer.quantizer import Q_ANNOTATION_KEY

    for node in graph.graph.nodes:
        node.meta.pop(Q_ANNOTATION_KEY, None)
    try:
        quantizer.annotate(graph)
        quantizer.validate(graph)
    except Exception as error:  # noqa: BLE001 - rules raise what they like
        sys.stderr.write(f"{quantizer.default_quant_config.quant_dtype.name}: {error}\n")
        return False
    return True


def _can_cross(quantizer: Any) -> bool:
    """Return whether a quantized activation has as many bytes on the CPU as in QNN's tensors."""
    import torch
    from executorch.backends.qualcomm.builders.utils import deduce_dtype

    activation = quantizer.default_quant_config.quant_config.output_activation
    if activation is None:
        return True
    ranges = {"quant_min": activation.quant_min, "quant_max": activation.quant_max, "dtype": activation.dtype}
    in_qnn = deduce_dtype(torch.empty(0, dtype=activation.dtype), ranges)
    return bool(in_qnn.itemsize == activation.dtype.itemsize)


def manifest_of(cases: list[Case], rules: dict[str, dict[str, list[str]]]) -> str:
    """Return suite.toml: first the cases with all of their precisions, then the others, grouped by precisions."""
    own = {case.name: case.precisions for case in cases}
    groups: dict[tuple[str, ...], list[str]] = {(): []}
    for name, one in rules.items():
        precisions = tuple(one["precisions"])
        if precisions:
            groups.setdefault(() if precisions == own[name] else precisions, []).append(f'"{name}",')
    text = _MANIFEST
    for precisions, names in groups.items():
        shown = textwrap.fill(" ".join(names), width=116, initial_indent="    ", subsequent_indent="    ")
        some = f"precisions = {json.dumps(precisions)}\n" if precisions else ""
        text += f'[[include]]\nsuite = "{OF}"\n{some}cases = [\n{shown}\n]\n'
    return text


def main() -> int | str:
    """Write or check the suite; return the exit code or the message of the process."""
    parser = argparse.ArgumentParser(description="Writes test_suites/lpai_ops.")
    parser.add_argument("--check", action="store_true", help="fail when the files are not what would be written")
    check = parser.parse_args().check
    # Without an SDK, ExecuTorch looks for one on the network.
    os.environ["QNN_SDK_ROOT"] = str(host_sdk(load_config().cache_dir).root)
    logging.disable(logging.WARNING)
    cases = list(load_suite(find_suites()[OF]).cases)
    rules = rules_of(cases)
    rows = ",\n".join(f"  {json.dumps(name)}: {json.dumps(one)}" for name, one in sorted(rules.items()))
    files = {"suite.toml": manifest_of(cases, rules), "rules.json": f"{{\n{rows}\n}}\n"}
    stale = [name for name, text in files.items() if not _is(FOLDER / name, text)]
    if check:
        return f"{', '.join(stale)} of {FOLDER} is out of date: run this without --check" if stale else 0
    for name, text in files.items():
        (FOLDER / name).write_text(text)
    return 0


def _is(path: Path, text: str) -> bool:
    return path.exists() and path.read_text() == text


if __name__ == "__main__":
    sys.exit(main())
