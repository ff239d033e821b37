"""A runtime folder as a device has it, models compiled for it, and a workspace to run the runner in."""

from __future__ import annotations

import contextlib
import functools
import json
import shlex
import shutil
import subprocess
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest
from built_stub import built_stub, executorch_flags
from native_runner.sanitizers import HERE, put_sanitized_runner, runner_environment
from waiting import Started, until

from farm.base.paths import data_folder
from farm.builds.runtime.packages import package_folder
from farm.builds.runtime.runtime import simulator_runtime


@dataclass(frozen=True)
class Ran:
    """Result of an execution of the runner."""

    code: int
    stdout: str
    stderr: str
    result: dict[str, Any] | None

    @property
    def error(self) -> dict[str, Any]:
        assert self.result["ok"] is False
        assert self.result["exit_code"] == self.code
        error: dict[str, Any] = self.result["error"]
        return error

    def fails(self, code: int, stage: str, message: str) -> None:
        """Require this exit code, and a message with these words, in the result and on standard error."""
        assert self.code == code, self.stderr
        assert self.error["stage"] == stage
        assert message in self.error["message"]
        assert f"farm_runner: {stage}: " in self.stderr


@dataclass(frozen=True)
class Workspace:
    """A folder on the device, with the output folder in it."""

    folder: Path
    runtime: Path
    env: dict[str, str] = field(default_factory=dict)

    def run(self, *flags: str, env: dict[str, str] | None = None, result: str = "result.json") -> Ran:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "errors": "replace"}
        with self.start(*flags, env=env, **pipes) as process:
            stdout, stderr = process.communicate(timeout=120)
        return self.ended(process.returncode, stdout, stderr, result=result)

    def start(self, *flags: str, env: dict[str, str] | None = None, **options: Any) -> Started[Any]:
        """Start the runner in this folder; `options` are passed to Popen."""
        environment = runner_environment(self.runtime, {**self.env, **(env or {})})
        argv = [str(self.runtime / "farm_runner"), *flags]
        return Started(argv, cwd=self.folder, env=environment, **{"stdin": subprocess.DEVNULL, **options})

    def passes(self, *flags: str, env: dict[str, str] | None = None) -> Ran:
        """Run without an error."""
        ran = self.run(*flags, env=env)
        assert ran.code == 0, ran.stderr
        return ran

    def ended(self, code: int, stdout: str = "", stderr: str = "", *, result: str = "result.json") -> Ran:
        """Return a run that is over, with the result that it left."""
        path = self.folder / result
        return Ran(code, stdout, stderr, json.loads(path.read_text()) if path.is_file() else None)

    def serve(self, *flags: str, env: dict[str, str] | None = None) -> Session:
        return Session(self, flags, env)

    def list_inputs(self, *lines: str) -> None:
        (self.folder / "input_list.txt").write_text("".join(f"{line}\n" for line in lines))

    def write(self, name: str, values: Any, dtype: Any = np.float32) -> str:
        np.asarray(values, dtype).tofile(self.folder / name)
        return name

    def output(self, line: int, index: int, dtype: Any = np.float32) -> Any:
        return np.fromfile(self.folder / "outputs" / f"output_{line}_{index}.raw", dtype)

    def names(self) -> list[str]:
        return sorted(path.name for path in (self.folder / "outputs").iterdir())


class Session:
    """A runner that takes jobs, ended at the latest when the test is over."""

    def __init__(self, workspace: Workspace, flags: tuple[str, ...], env: dict[str, str] | None) -> None:
        self.workspace = workspace
        self.ready: dict[str, Any] = {}
        self._stderr = (workspace.folder / "stderr.txt").open("w+")
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._stderr}
        self.process = workspace.start("--serve", *flags, env=env, **pipes)
        # Nothing here waits without an end.
        self._limit = threading.Timer(120, self.process.kill)
        self._limit.start()

    def __enter__(self) -> Self:
        self.ready = self.answer()
        return self

    def __exit__(self, *_: object) -> None:
        self._limit.cancel()
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout, self._stderr):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()

    def answer(self) -> dict[str, Any]:
        line = self.process.stdout.readline()
        assert line.endswith(b"\n"), f"the session ended: {self.stderr[-2000:]}"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def send(self, line: bytes) -> None:
        self.process.stdin.write(line + b"\n")
        self.process.stdin.flush()

    def ask(self, *flags: str) -> dict[str, Any]:
        # An empty line is no job.
        self.send(shlex.join(flags or ("--iteration=1",)).encode())
        return self.answer()

    def end(self) -> int:
        """Close its input and return its exit code."""
        self.process.stdin.close()
        return self.process.wait()

    @property
    def stderr(self) -> str:
        return (self.workspace.folder / "stderr.txt").read_text(errors="replace")

    def wait_for(self, text: str) -> None:
        def is_there() -> bool:
            has_ended = self.process.poll() is not None
            stderr = self.stderr
            assert text in stderr or not has_ended, stderr[-2000:]
            return text in stderr

        until(is_there, text)


@pytest.fixture(scope="session")
def runtime_folder(farm_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of copies, not links, so that only files of the runtime can be found."""
    runtime = simulator_runtime(farm_cache)
    folder = tmp_path_factory.mktemp("runtime")
    for name, path in runtime.files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copy(path, folder / name)
    put_sanitized_runner(farm_cache, folder)
    return folder


@pytest.fixture(scope="session")
def preload(farm_cache: Path) -> Callable[[str], dict[str, str]]:
    """From the name of a C++ file here to the environment that puts it in front of the runner's libraries.

    Compiled once a cache: no sanitizer has a part in it.
    """

    def build(name: str) -> dict[str, str]:
        flags = (*executorch_flags(), "-shared", "-fPIC", HERE / f"{name}.cpp")
        return {"LD_PRELOAD": str(built_stub(farm_cache, f"{name}.so", *flags, headers=[HERE / "backend_stub.h"]))}

    return functools.cache(build)


@pytest.fixture(scope="session")
def load_options_probe(farm_cache: Path) -> Path:
    """A program that loads with options, built of the runner's own source of them, once a cache."""
    sources, libraries = data_folder("native_runner") / "src", package_folder("executorch", "lib", "build") / "lib"
    parts = (HERE / "load_options_probe.cpp", sources / "backend_options.cpp", sources / "failure.cpp")
    names = ("executorch", "executorch_backend_xnnpack", "executorch_kernels_optimized", "executorch_threadpool")
    linked = (f"-L{libraries}", "-Wl,--no-as-needed", *(f"-l{name}" for name in names), f"-Wl,-rpath,{libraries}")
    headers = [sources / "backend_options.h", sources / "flags.h", sources / "failure.h"]
    return built_stub(farm_cache, "probe", "-O1", *executorch_flags(), f"-I{sources}", *parts, *linked, headers=headers)


@pytest.fixture
def bare(runtime_folder: Path, tmp_path: Path) -> Workspace:
    """A workspace with an output folder only."""
    folder = tmp_path / "workspace"
    (folder / "outputs").mkdir(parents=True)
    return Workspace(folder, runtime_folder)


@pytest.fixture
def stub(bare: Workspace, models: Path, preload: Callable[[str], dict[str, str]]) -> Workspace:
    """A workspace with the backend stub, foreign.pte for it as model.pte, and an input file per order to it."""
    shutil.copy(models / "foreign.pte", bare.folder / "model.pte")
    for order, name in enumerate(
        ("work", "hang", "crash", "abort", "fail", "print", "third", "fifth", "abort_in_thread", "abort_late")
    ):
        bare.list_inputs(bare.write(f"{name}.raw", [order, 1]))
        (bare.folder / "input_list.txt").rename(bare.folder / f"{name}.txt")
    return replace(bare, env=preload("backend_stub"))


@pytest.fixture
def conv(bare: Workspace, models: Path) -> Workspace:
    """A workspace with conv.pte as model.pte and two inferences."""
    shutil.copy(models / "conv.pte", bare.folder / "model.pte")
    for i in range(2):
        shutil.copy(models / f"conv_input_{i}.raw", bare.folder / f"x{i}.raw")
    bare.list_inputs("x0.raw", "x1.raw")
    return bare
