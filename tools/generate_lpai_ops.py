"""Writes test_suites/lpai_ops: the cases of quantized_ops all of whose operators ExecuTorch's rules for LPAI quantize.

    python tools/generate_lpai_ops.py           write suite.toml and rules.json
    python tools/generate_lpai_ops.py --check   fail when they are not what would be written

Each case is exported and taken through the passes that come before annotation, in its way to LPAI. rules.json has the
operators that are there then; suite.toml has the cases with a rule for each, of the installed ExecuTorch.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT)]

from farm.config.settings import load_config  # noqa: E402 - also where farm is not installed
from farm.runtime.simulator import host_sdk  # noqa: E402
from farm.suites.manifests import find_suites, load_suite  # noqa: E402

if TYPE_CHECKING:
    from farm.suites.suite import Case

FOLDER = ROOT / "test_suites" / "lpai_ops"
OF = "quantized_ops"
PRECISION = "8a8w"
_MANIFEST = f"""[suite]
name = "lpai_ops"
description = "What of quantized_ops ExecuTorch's rules for LPAI quantize; never tried on an LPAI"
backends = ["lpai"]

# Written by tools/generate_lpai_ops.py.
[[include]]
suite = "{OF}"
precisions = ["{PRECISION}"]
cases = [
{{cases}}
]
"""


def operators_of(cases: list[Case]) -> tuple[dict[str, list[str]], set[str]]:
    """Return the operators of each case as LPAI's quantizer sees them, and those that it has a rule for."""
    import torch
    from executorch.backends.qualcomm.quantizer.quantizer import QnnQuantizer
    from executorch.backends.qualcomm.serialization.qc_schema import QcomChipset, QnnExecuTorchBackendType

    from farm.compile.flows.factory import make_inputs, make_module

    quantizer = QnnQuantizer(backend=QnnExecuTorchBackendType.kLpaiBackend, soc_model=QcomChipset.SM8850)
    found = {}
    for case in cases:
        with torch.no_grad():
            exported = torch.export.export(make_module(case), make_inputs(case, 0), strict=True)
            graph = quantizer.transform_for_annotation(exported.module()).graph
        found[case.name] = sorted({str(node.target) for node in graph.nodes if node.op == "call_function"})
    return found, {str(operator) for operator in quantizer.supported_ops}


def main() -> int | str:
    """Write or check the suite; what is returned is what the process ends with."""
    parser = argparse.ArgumentParser(description="Writes test_suites/lpai_ops.")
    parser.add_argument("--check", action="store_true", help="fail when the files are not what would be written")
    check = parser.parse_args().check
    # Without an SDK, ExecuTorch looks for one on the network.
    os.environ["QNN_SDK_ROOT"] = str(host_sdk(load_config().cache_dir).root)
    logging.disable(logging.WARNING)
    cases = [case for case in load_suite(find_suites()[OF]).cases if PRECISION in case.precisions]
    operators, ruled = operators_of(cases)
    taken = [f'"{name}",' for name, used in operators.items() if ruled.issuperset(used)]
    shown = textwrap.fill(" ".join(taken), width=116, initial_indent="    ", subsequent_indent="    ")
    rows = ",\n".join(f"  {json.dumps(name)}: {json.dumps(used)}" for name, used in sorted(operators.items()))
    files = {"suite.toml": _MANIFEST.format(cases=shown), "rules.json": f"{{\n{rows}\n}}\n"}
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
