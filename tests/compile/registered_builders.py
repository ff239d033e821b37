"""The op builders that ExecuTorch's Qualcomm backend registers, target and module of each: a process with torch."""

from __future__ import annotations

import json

import executorch.backends.qualcomm.builders  # noqa: F401 - registers them
from executorch.backends.qualcomm.builders import node_visitor_manager

visitors = node_visitor_manager._node_visitor_dict.items()
print(json.dumps({target: visitor.__module__.rpartition(".")[2] for target, visitor in visitors}))  # noqa: T201
