"""Scripts that compile for tests: one process imports torch, and each script runs in a fork of it, once a session.

Run as a program it is that process: `python torch_scripts.py CACHE FOLDER PATH...`.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import gc
import hashlib
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from farm.config.settings import load_config
from farm.runtime.packages import package_version
from farm.system.publish import published
from farm.toolchains.prepare import prepare

if TYPE_CHECKING:
    from collections.abc import Iterable

HERE = Path(__file__).resolve().parent
SCRIPTS = {
    "lowered": HERE / "compile" / "lowering.py",
    "drawn": HERE / "compile" / "drawing.py",
}
"""Fixtures, each with the script that it needs, in the order in which the scripts run."""

_PRELOADED = (
    "executorch.backends.qualcomm.quantizer.quantizer",
    "executorch.backends.qualcomm.utils.utils",
    "executorch.backends.xnnpack.partition.xnnpack_partitioner",
    "executorch.exir",
    "farm.compile.flows.qualcomm",
    "numpy",
    "torchao.quantization.pt2e.quantize_pt2e",
)
_PAUSE_S, _PRINTED = 0.05, "printed"


class TorchScripts:
    """Results of scripts: folders that the scripts filled and lines that the scripts printed.

    Compiled programs depend on ExecuTorch alone and stay in the cache. Other results depend on farm as well and stay in
    `session`, which all workers of a session share.
    """

    def __init__(self, cache: Path, session: Path) -> None:
        self._cache, self._session = cache, session
        self._process: subprocess.Popen[bytes] | None = None
        session.mkdir(exist_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def begin(self, scripts: Iterable[Path]) -> None:
        """Run the scripts that have no result yet in a process of their own, unless a worker has started that."""
        missing = [script for script in scripts if not self._place(script).is_dir()]
        if not missing:
            return
        with (self._session / "process.lock").open("a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return
            # The process inherits the lock, which opens with its end.
            log = self._session / "process.log"
            self._process = start(self._cache, self._session, missing, log, pass_fds=(lock.fileno(),))

    def folder(self, script: Path) -> Path:
        """Return the folder that a script filled. Raises AssertionError with the end of its output when it fails."""
        place = self._place(script)
        (self._session / f"{script.stem}.wanted").touch()
        while not place.is_dir() and self._is_running() and not self._errors(script).exists():
            time.sleep(_PAUSE_S)
        if not place.is_dir() and not self._errors(script).exists():
            # The process has ended with the worker that started it.
            start(self._cache, self._session, [script], self._session / f"{script.stem}.log").wait()
        said = next(
            (path for path in (self._errors(script), self._session / f"{script.stem}.log") if path.exists()), None
        )
        assert place.is_dir(), said and said.read_text(errors="replace")[-4000:]
        return place

    def printed(self, script: Path) -> dict[str, Any]:
        """Return the last line that a script printed, as JSON."""
        return dict(json.loads((self.folder(script) / _PRINTED).read_text().splitlines()[-1]))

    def make(self, script: Path) -> None:
        """Run a script in a fork of this process and publish its result."""

        def fill(folder: Path) -> None:
            output = self._session / f"{script.stem}.output"
            pid = os.fork()
            if pid == 0:
                os._exit(_run(script, folder, output))
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            if code != 0:
                raise RuntimeError(f"{script.name} ended with {code}:\n{output.read_text(errors='replace')}")

        try:
            published(self._place(script), fill)
        except RuntimeError as error:
            partial = self._session / f"{script.stem}.partial"
            partial.write_text(str(error))
            partial.rename(self._errors(script))

    def next_of(self, scripts: list[Path]) -> Path:
        """Return the script that a test waits for, or the first."""
        return next((one for one in scripts if (self._session / f"{one.stem}.wanted").exists()), scripts[0])

    def _place(self, script: Path) -> Path:
        return compiled_folder(self._cache, script) if _is_kept(script) else self._session / script.stem

    def _errors(self, script: Path) -> Path:
        return self._session / f"{script.stem}.errors"

    def _is_running(self) -> bool:
        with (self._session / "process.lock").open("a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False


def start(
    cache: Path, session: Path, scripts: Iterable[Path], log: Path, *, pass_fds: tuple[int, ...] = ()
) -> subprocess.Popen[bytes]:
    """Start the process that runs scripts, with the configuration of no user."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("FARM_", "QNN_", "PYTEST_"))}
    env |= {"FARM_CACHE_DIR": str(cache), "FARM_STATE_DIR": str(session / "state"), "HF_HUB_OFFLINE": "1"}
    # Threads of one script would take the processors from the tests.
    env["OMP_NUM_THREADS"] = "1"
    command = [sys.executable, __file__, str(cache), str(session), *map(str, scripts)]
    with log.open("wb") as output:
        return subprocess.Popen(
            command, env=env, cwd=session, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            start_new_session=True, pass_fds=pass_fds,
        )  # fmt: skip


def compiled_folder(cache: Path, script: Path) -> Path:
    """Return the folder of a cache for the programs that a script of native_runner/ compiles."""
    versions = "".join(package_version(name) for name in ("executorch", "torch", "onnxruntime-qnn"))
    key = hashlib.sha256(script.read_bytes() + versions.encode()).hexdigest()[:16]
    return cache / "runner-test-models" / key


def _is_kept(script: Path) -> bool:
    return script.parent == HERE / "native_runner"


def _run(script: Path, folder: Path, output: Path) -> int:
    """Run a script in this fork as a new interpreter does, and return its exit code."""
    printed = output if _is_kept(script) else folder / _PRINTED
    for descriptor, path in ((1, printed), (2, output)):
        file = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
        os.dup2(file, descriptor)
        os.close(file)
    os.chdir(folder)
    sys.argv, sys.path[0] = [str(script), str(folder)], str(script.parent)
    code = 1
    try:
        runpy.run_path(str(script), run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - the loop of the process it is a fork of must not go on here
        sys.excepthook(*sys.exc_info())
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def main(cache: str, folder: str, *paths: str) -> None:
    """Run scripts; a script that a test waits for comes first."""
    if "QNN_SDK_ROOT" not in os.environ:
        # The loader reads LD_LIBRARY_PATH when a program starts.
        env = prepare(load_config(), note=lambda _line: None).compiler.env
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **env})  # noqa: S606
    for name in _PRELOADED:
        importlib.import_module(name)
    # Torch and ExecuTorch keep 400,000 objects that no collection needs to look at.
    gc.set_threshold(100_000, 10, 10)
    gc.collect()
    gc.freeze()
    scripts, missing = TorchScripts(Path(cache), Path(folder)), list(map(Path, paths))
    while missing:
        script = scripts.next_of(missing)
        missing.remove(script)
        scripts.make(script)


if __name__ == "__main__":
    main(*sys.argv[1:])
