"""`farm exec module.py:Net`: a module of the user with example inputs -> a compiled bundle with references."""

from __future__ import annotations

import hashlib
import re
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from farm.base.atomic import write_atomically
from farm.base.backends.registry import DEFAULT_BACKEND, find_backend
from farm.base.errors import InfraError, ProgramError, UsageError
from farm.base.publish import make_folders
from farm.base.socs import check_target, find_soc
from farm.base.text import one_line
from farm.builds.bundles.bundle import Bundle, load_bundle
from farm.builds.bundles.cache import BundleCache
from farm.builds.bundles.reuse import find_bundle_for
from farm.builds.toolchains.interpreters import process_environment
from farm.replay.stored_result import try_build
from farm.results.attempt import Cause, Stage
from farm.suites.suite import Case, InputSpec, Job, Target

if TYPE_CHECKING:
    from collections.abc import Sequence

    from farm.base.config.settings import Config
    from farm.base.processes import Supervisor
    from farm.builds.toolchains.toolchain import Toolchain

_NAMED = re.compile(r"(?P<file>.+\.py):(?P<name>[A-Za-z_]\w*)")
_INPUT_SECONDS = 300.0
_DEFAULT_PRECISION = {DEFAULT_BACKEND: "8a8w"}


class NamedModule(msgspec.Struct, frozen=True):
    """Class of a torch module in a Python file."""

    file: Path
    name: str

    @property
    def label(self) -> str:
        """Name for files and jobs: `net_Net`."""
        return f"{self.file.stem}_{self.name}"


def find_module(text: str) -> NamedModule | None:
    """Return the module that `text` names, `net.py:Net`; None for another text. Raises UsageError without the file."""
    found = _NAMED.fullmatch(text)
    if found is None:
        return None
    file = Path(found["file"])
    if not file.is_file():
        raise UsageError(f"{file} does not exist: name a Python file, as net.py:Net")
    return NamedModule(file.absolute(), found["name"])


def precision_of(backend: str, asked: str) -> str:
    """Return the precision of a module: `asked`, or the default of `backend`."""
    return asked or _DEFAULT_PRECISION.get(backend) or find_backend(backend).precisions[0]


def write_example_inputs(config: Config, tools: Toolchain, module: NamedModule) -> tuple[Path, ...]:
    """Return files with the example inputs of a module, named by content, in the cache. Raises UsageError."""
    with tempfile.TemporaryDirectory(prefix="farm-inputs-") as folder:
        words = [str(module.file.parent), module.file.stem, module.name, folder]
        try:
            done = subprocess.run(
                [tools.compiler.python, "-m", "farm.builds.compile.example_inputs", *words],
                env=process_environment(tools.compiler.env),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=_INPUT_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise UsageError(f"{module.file} made no example inputs within {_INPUT_SECONDS:g} s") from None
        if done.returncode:
            lines = done.stderr.decode(errors="replace").strip().splitlines() or ["it ended without a message"]
            raise UsageError(f"no example inputs: {one_line(lines[-1])}")
        made = sorted(Path(folder).iterdir(), key=lambda path: int(path.stem))
        place = config.cache_dir / "example_inputs"
        try:
            make_folders(place)
            return tuple(_kept(path.read_bytes(), place) for path in made)
        except OSError as error:
            raise InfraError(f"cannot write {place}: {error.strerror}") from None


def _kept(content: bytes, place: Path) -> Path:
    path = place / f"{hashlib.sha256(content).hexdigest()}.npy"
    if not path.is_file():
        write_atomically(path, content)
    return path


def module_job(module: NamedModule, inputs: Sequence[Path], soc: str, backend: str, precision: str) -> Job:
    """Return the job that compiles a module with `.npy` files as inputs. Raises IllegalTargetError."""
    found = find_soc(soc)
    check_target(found, backend, precision)
    case = Case(
        suite="exec",
        name=re.sub(r"[^a-z0-9_]+", "_", module.label.lower())[:64],
        module=f".{module.file.stem}:{module.name}",
        inputs=tuple(InputSpec(files=(str(path.absolute()),)) for path in inputs),
        precisions=(precision,),
        folder=str(module.file.parent),
    )
    return Job(case, Target(found.name, backend, precision))


def compile_module(config: Config, tools: Toolchain, supervisor: Supervisor, job: Job) -> Bundle:
    """Return the bundle of a module's job, compiled if the cache lacks it. Raises ProgramError, InfraError."""
    cache = BundleCache(config.cache_dir)
    key, is_cached = find_bundle_for(job, tools, cache)
    if not is_cached:
        reply, log = try_build(config, job, key, tools, supervisor)
        if reply.infra:
            raise InfraError(f"{job.id} could not be built: {reply.reason}: see {log}")
        if not reply.ok:
            problem = f"{job.case.module} does not compile for {job.target}: {reply.reason}: see {log}"
            raise ProgramError(problem, stage=Stage.BUILD, cause=Cause.COMPILE)
    return load_bundle(cache.folder(key))
