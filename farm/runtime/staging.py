"""A runtime as a folder, for a device that farm runs no jobs on: direct mode, and QNN on Arm Linux."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

from farm.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from farm.runtime.native.targets import Mode
    from farm.runtime.runtime import Runtime

# ExecuTorch 1.5, examples/qualcomm/direct_executor_runner: the compute DSP, in an unsigned process domain, and the
# audio DSP, which has the LPAI, in a signed one.
_DOMAINS = {"htp": 3, "lpai": 0}


def stage_into(runtime: Runtime, folder: Path) -> None:
    """Copy the files of a runtime into `folder`, which is made and must hold nothing. Raises UsageError, OSError."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} is not empty: name a folder that is not there yet")
    for name, path in runtime.files.items():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
        target.chmod(0o755)


def device_command(runtime: Runtime, backend: str, mode: Mode) -> str:
    """Return what a shell on the device runs, in the folder that the files were pushed to."""
    domain = f" --domain_id {_DOMAINS[backend]}" if mode == "direct" else ""
    paths = "LD_LIBRARY_PATH=. ADSP_LIBRARY_PATH=."
    return f"{paths} ./{runtime.runner}{domain} --model_path model.pte --input_list_path input_list.txt"
