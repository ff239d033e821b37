"""`farm` where nothing is compiled and nothing computes: `python tests/chaos/chaos_farm.py run`.

The runtime of virtual devices is the stub runner in $CHAOS_RUNNER, and builders have a stub for a compiler
(stub_compiler/). Command line, store, leases, session, workers, builder pool, adb server and virtual devices are the
real thing. For stub_home.py.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from stub_farm import as_runtime

from farm.builds.runtime import runtime
from farm.builds.runtime.runtime import Runtime
from farm.builds.toolchains import selection
from farm.builds.toolchains.toolchain import Compiler, Toolchain

HERE = Path(__file__).resolve().parent
VERSIONS = {"executorch": "stub", "torch": "stub", "torchao": "stub", "qnn": "stub", "host_cpu": "x86"}


def _prepare(*_arguments: object, **_named: object) -> Toolchain:
    path = os.pathsep.join([str(HERE / "stub_compiler"), os.environ.get("PYTHONPATH", "")])
    return Toolchain(VERSIONS, Compiler(sys.executable, {"PYTHONPATH": path}), "stub")


def _runtime(*_arguments: object, **_named: object) -> Runtime:
    return as_runtime(Path(os.environ["CHAOS_RUNNER"]))


def main() -> None:
    """Run `farm` and end with its exit code."""
    vars(selection).update(prepare=_prepare)
    vars(runtime).update(simulator_runtime=_runtime, require_backend=lambda *_arguments: None)
    from farm.cli.main import main as farm

    farm()


if __name__ == "__main__":
    main()
