"""Builders and scripts that compile, as forks of one process per session that has imported torch and ExecuTorch.

A builder that starts by itself spends 6 s of processor time on its imports.
"""

from __future__ import annotations

import fcntl
import functools
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import msgspec
from forks import ForkedProcess, opened, run_fork, start_forking

from farm.base import processes
from farm.builds.compile.processes import ONE_THREAD, SAME_EACH_TIME
from farm.builds.runtime.qnn_sdk import TARGET, host_sdk

COLD = "FARM_TEST_COLD_TORCH"
"""Variable that lets every builder and script start by itself."""

# The words of each command. A builder has more where folders of its toolchain are traced, from the first import on.
_MODULES = {
    "farm.builds.compile.builder": 6,
    "farm.builds.compile.processes": 7,
    "farm.builds.compile.debug.debugger": 5,
}
_READ_AT_START = ("GLIBC_", "LD_", "MKL_", "OMP_", "PYTHON", "QNN_")
_FLOWS = "farm.builds.compile.flows"
_NAMES = ("torch", f"{_FLOWS}.qualcomm", f"{_FLOWS}.xnnpack", f"{_FLOWS}.compiler", "warm_torch:warm_up")


class WarmTorch(NamedTuple):
    """Shared facts of all processes of a session."""

    folder: Path
    """Folder of the socket, the lock and the log."""
    cache: Path
    """The cache whose QNN the process loads."""
    owner: int

    def subprocess(self, *, traced: bool = False) -> SimpleNamespace:
        """Return a stand-in for the module `subprocess` of farm.base.processes that forks compiler processes.

        With `traced`, builders that trace are forks as well: the process has imported nothing of their folders.
        """

        def start(words: Sequence[str], **options: Any) -> Any:
            env = options["env"]
            is_known = list(words[:2]) == [sys.executable, "-m"] and _MODULES.get(words[2]) == len(words)
            if traced and list(words[1:3]) == ["-m", "farm.builds.compile.builder"]:
                is_known, env = True, {name: value for name, value in env.items() if name != "PYTHONPATH"}
            if is_known and self.is_ready(env):
                known = ("env", "cwd", "stdin", "stdout", "stderr", "pass_fds")
                return ForkedProcess(self.place, words, **{name: options[name] for name in known})
            return subprocess.Popen(words, **options)

        return SimpleNamespace(**{**vars(subprocess), "Popen": start})

    @property
    def place(self) -> Path:
        return self.folder / "socket"

    def is_ready(self, env: Mapping[str, str]) -> bool:
        """Return whether the process has the environment `env`; start it if there is none."""
        wanted = self._environment(env)
        self.folder.mkdir(exist_ok=True)
        known = self.folder / "environment.json"
        with (self.folder / "lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not known.exists():
                # A builder of a stub of QNN may be the first of a session.
                if wanted.get("QNN_SDK_ROOT") != str(_host_root(self.cache)):
                    return False
                self._start(wanted)
                known.write_text(json.dumps(wanted))
        return bool(json.loads(known.read_text()) == wanted)

    def _environment(self, env: Mapping[str, str]) -> dict[str, str]:
        """Return the environment of a new process, with the paths of the session's cache: names are hashes there.

        Stubs of SDKs around the session's libraries, as LPAI's stub, have the paths of the session's SDK.
        """
        kept = {name: value for name, value in env.items() if name.startswith(_READ_AT_START)} | ONE_THREAD
        root = Path(kept.get("QNN_SDK_ROOT", os.devnull))
        theirs, ours = str(root.parent.parent), str(self.cache)
        if _system_library(root) == _system_library(host := _host_root(self.cache)):
            theirs, ours = str(root), str(host)
        return {name: value.replace(theirs, ours) for name, value in kept.items()}

    def _start(self, env: dict[str, str]) -> None:
        ordinary = {name: value for name, value in os.environ.items() if not name.startswith(("FARM_", "PYTEST_"))}
        folder = Path(env["QNN_SDK_ROOT"], "lib", TARGET)
        with opened(folder) as libraries:
            paths = env["LD_LIBRARY_PATH"].replace(str(folder), f"/proc/self/fd/{libraries}")
            env = {**ordinary, **env, "LD_LIBRARY_PATH": paths, "TMPDIR": str(self.folder)}
            process = start_forking(self.place, _NAMES, owner=self.owner, env=env, libraries=libraries)
        # The forking process outlives its parent.
        process.returncode = 0


@functools.cache
def _host_root(cache: Path) -> Path:
    return host_sdk(cache).root


def _system_library(sdk_root: Path) -> Path:
    """Return the file that is QNN's system library, wherever links in the SDK lead."""
    return Path(sdk_root, "lib", TARGET, "libQnnSystem.so").resolve()


session: WarmTorch | None = None
"""Session of this process's tests."""


def session_facts() -> list[Any] | None:
    """Return the facts of the session for `fork_builders` in another process."""
    return None if session is None else [str(session.folder), str(session.cache), session.owner]


def fork_builders(folder: str, cache: str, owner: int) -> None:
    """Let compiler processes that this process starts be forks."""
    vars(processes)["subprocess"] = WarmTorch(Path(folder), Path(cache), owner).subprocess()


def run_script(script: Path, *arguments: str, cache: Path, folder: Path) -> str:
    """Run a script that imports torch in a folder, and return its output. Raises AssertionError when it fails."""
    from farm.base.config.settings import load_config
    from farm.builds.toolchains.interpreters import process_environment
    from farm.builds.toolchains.selection import prepare

    tools = prepare(msgspec.structs.replace(load_config(), cache_dir=cache))
    env = {**process_environment(tools.compiler.env), **SAME_EACH_TIME, **ONE_THREAD, "FARM_CACHE_DIR": str(cache)}
    words = [sys.executable, str(script), *arguments]
    if session is not None and session.cache == cache:
        assert session.is_ready(env), f"{words}: another environment than that of builders"
        done = run_fork(session.place, words, env=env, cwd=folder)
    else:
        # The script imports modules beside it, which the environment of a compiler leaves out.
        env |= {"PYTHONSAFEPATH": ""}
        done = subprocess.run(words, env=env, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def warm_up() -> None:
    """Do the first steps of a builder."""
    import torch

    from farm.builds.compile import builder

    torch.set_num_threads(1)
    builder.warm_up()
    assert builder.is_single_threaded()
