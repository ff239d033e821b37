"""Reports of ExecuTorch's own readers about programs: `python official_pte.py FOLDER`, a process with torch."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from executorch.backends.qualcomm.serialization.qc_schema_serialize import flatbuffer_to_option
from executorch.exir._serialize._program import deserialize_pte_binary
from executorch.exir.schema import KernelCall, Tensor


def value(plan: Any, index: int) -> list[Any]:
    held = plan.values[index].val
    if not isinstance(held, Tensor):
        return [type(held).__name__, [], False]
    return [held.scalar_type.name, held.sizes, held.shape_dynamism.name != "STATIC"]


def options(delegate: Any) -> list[Any] | None:
    specs = [spec.value for spec in delegate.compile_specs if spec.key == "qnn_compile_spec"]
    if not specs:
        return None
    found = flatbuffer_to_option(specs[0])
    return [
        found.soc_info.soc_model.name, found.backend_options.backend_type.name, found.online_prepare,
        found.dump_intermediate_outputs, found.shared_buffer,
        found.backend_options.htp_options.use_weight_sharing,
    ]  # fmt: skip


def method(plan: Any) -> dict[str, Any]:
    calls = [i.instr_args for chain in plan.chains for i in chain.instructions]
    operators = [plan.operators[c.op_index] for c in calls if isinstance(c, KernelCall)]
    return {
        "name": plan.name,
        "inputs": [value(plan, index) for index in plan.inputs],
        "outputs": [value(plan, index) for index in plan.outputs],
        "delegates": [[delegate.id, options(delegate)] for delegate in plan.delegates],
        "operators": Counter(f"{o.name}.{o.overload}" if o.overload else o.name for o in operators),
    }


programs = {path.name: deserialize_pte_binary(path.read_bytes()).program for path in Path(sys.argv[1]).glob("*.pte")}
found = {name: [method(plan) for plan in program.execution_plan] for name, program in programs.items()}
sys.stdout.write(f"{json.dumps(found)}\n")
