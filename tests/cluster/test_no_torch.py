"""A host of devices has neither torch nor ExecuTorch: what its agent and its device processes import does without."""

from __future__ import annotations

import subprocess
import sys

_MODULES = """
farm.cli.cluster.agent farm.dispatch.cluster.agent.host_agent farm.dispatch.device_runner farm.dispatch.device_process
farm.dispatch.cluster.files.prepare farm.dispatch.device_run.device_worker farm.results.judge
farm.results.generation
"""
_REFUSING = """
import importlib.abc, importlib.util, sys

class Refusing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "executorch", "transformers", "torchao"}:
            raise ImportError(f"a host of devices has no {name}")

sys.meta_path.insert(0, Refusing())
for module in sys.argv[1:]:
    importlib.import_module(module)
"""


def test_an_agent_and_device_processes_are_loaded_where_there_is_no_torch() -> None:
    argv = [sys.executable, "-c", f"import importlib\n{_REFUSING}", *_MODULES.split()]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
