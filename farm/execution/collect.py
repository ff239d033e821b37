"""What an execution left on the device -> files here: names that farm chose, sizes that it knows."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from farm.devices.text import clean_text
from farm.execution.raw import DEBUG_FILE, ETDUMP_FILE, HEAP_FILE, HEAP_LIMIT, RESULT_FILE
from farm.execution.trouble import StagingError
from farm.execution.workspace import OUTPUTS

if TYPE_CHECKING:
    from farm.devices.transport import Transport
    from farm.execution.raw import RunnerOptions
    from farm.execution.result import Execution

# An ETDump of a whole model with per-operator events is a few MB.
_ETDUMP_BYTES = 256 << 20
# Intermediate outputs of a whole model: the runner takes memory for them as they come.
DEBUG_BYTES = 1 << 30
_SHELL_SECONDS = 30.0
_NO_FILE = 3


def collect(transport: Transport, execution: Execution, options: RunnerOptions) -> None:
    """Leave the answer of an execution that answered, and what else is wanted, in its folder. Raises DeviceError."""
    ending, workspace = execution.ending, execution.workspace
    if ending is None or ending.answer is None:
        return
    (execution.folder / RESULT_FILE).write_bytes(ending.line)
    if not ending.answer.ok:
        return
    # No more outputs than the runner says there are.
    manifest, answer = workspace.bundle.manifest, ending.answer
    sizes = {
        PurePosixPath(OUTPUTS, f"output_{sample}_{index}.raw"): spec.nbytes + 1
        for sample in range(min(manifest.samples, len(answer.inferences)) if options.outputs else 0)
        for index, spec in enumerate(manifest.outputs[: len(answer.outputs)])
    }
    if options.profiles:
        sizes[PurePosixPath(ETDUMP_FILE)] = _ETDUMP_BYTES
    if options.debug:
        sizes[PurePosixPath(DEBUG_FILE)] = DEBUG_BYTES
    if not sizes:
        return
    transport.pull(
        {workspace.folder / name: execution.folder / name.name for name in sizes},
        max_bytes={workspace.folder / name: size for name, size in sizes.items()},
    )


def collect_heap(transport: Transport, execution: Execution) -> None:
    """Bring what there is of the heap's file, also of a job that crashed; none is an answer as well."""
    script = 'if [ -e "$1" ]; then exec head -c "$2" -- "$1"; fi; exit "$3"'
    done = transport.run(
        ["sh", "-c", script, "sh", HEAP_FILE, str(HEAP_LIMIT + 1), str(_NO_FILE)],
        cwd=execution.workspace.folder,
        timeout_s=_SHELL_SECONDS,
    )
    if done.code == 0:
        (execution.folder / HEAP_FILE).write_bytes(done.stdout)
    elif done.code != _NO_FILE:
        problem = f"{HEAP_FILE} cannot be read"
        raise StagingError(transport.serial, problem, code=done.code, stderr=clean_text(done.stderr))
