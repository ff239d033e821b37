"""Python interpreters of toolchains: their facts, generations of ExecuTorch, pip, and farm's own code in them."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

import farm
from farm.base.errors import InfraError, MissingToolError, UsageError
from farm.base.files import published
from farm.base.hashes import name_of
from farm.base.processes import Supervisor, ask_program
from farm.builds.runtime.packages import package_version
from farm.builds.toolchains import probe

# Interpreters: their packages and search path, and the start of their processes.


LEAST_PYTHON = (3, 11)
"""Oldest Python of a toolchain, whose processes run farm's own code."""

SITES = ("site-packages", "dist-packages")
"""Names of folders that packages are installed in."""

PYTHON = ".".join(map(str, sys.version_info[:2]))
"""Version of farm's Python in names of folders."""

SHARED = "farm.pth"
"""File in an environment that farm made, which adds the folders of farm's own packages."""

_PROBE_SECONDS = 60.0


class PackageFacts(msgspec.Struct, frozen=True):
    """Version and folders of a package that an interpreter imports."""

    version: str
    folders: tuple[Path, ...]
    """Folders in the order of the search: a namespace package, such as ExecuTorch, may have several."""


class InterpreterFacts(msgspec.Struct, frozen=True):
    """Facts of an interpreter, and the places of a toolchain's packages."""

    version: tuple[int, int, int]
    abi: str
    """ABI tag in the names of binary modules: `cpython-311-x86_64-linux-gnu`."""
    prefix: Path
    """Folder of the environment."""
    path: tuple[str, ...]
    """Folders that the interpreter searches for modules."""
    packages: dict[str, PackageFacts]
    """Facts of executorch, torch and torchao, as far as the interpreter finds them."""

    def folder(self, package: str) -> Path | None:
        """Return the folder of a package, the first of several; None without the package."""
        found = self.packages.get(package)
        return found.folders[0] if found and found.folders else None

    @property
    def versions(self) -> dict[str, str]:
        """Versions of the found packages."""
        return {name: self.version_of(name) for name in self.packages}

    def version_of(self, package: str) -> str:
        """Return the version of a package; `missing` without the package, `unknown` without a recorded version."""
        found = self.packages.get(package)
        return "missing" if found is None else found.version or "unknown"


def packages_of(python: Path) -> Path:
    """Return the folder of packages of an environment that farm made, by its interpreter."""
    return python.parents[1] / "lib" / f"python{PYTHON}" / SITES[0]


def own_facts() -> InterpreterFacts:
    """Return the facts of a process of this interpreter in the environment of `process_environment`."""
    return msgspec.convert(probe.look(_inherited_path()), InterpreterFacts, dec_hook=_path)


def _inherited_path() -> list[str]:
    """Return the entries of sys.path without this process's own ones: the folder of its script, or the user's."""
    given = {os.path.abspath(entry) for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry}  # noqa: PTH100
    named = set(given)
    standard = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}
    for entry in sys.path:
        if Path(entry).name in SITES:
            named |= {entry, *added_by(entry)}
        elif entry in standard or os.path.dirname(entry) in standard or entry.endswith(".zip"):  # noqa: PTH120
            named.add(entry)
    # This process has put a repeated entry in front: site-packages come behind the standard library.
    return [
        entry
        for place, entry in enumerate(sys.path)
        if entry in named and (entry in given or entry not in sys.path[place + 1 :])
    ]


def added_by(site: str) -> set[str]:
    """Return the folders that the `.pth` files of a folder of packages add to sys.path."""
    lines = set()
    for file in Path(site).glob("*.pth"):
        with contextlib.suppress(OSError):
            lines |= set(file.read_text(encoding="utf-8", errors="replace").splitlines())
    return {os.path.abspath(os.path.join(site, line.strip())) for line in lines if line.strip()}  # noqa: PTH100, PTH118


def inspect(python: Path, env: Mapping[str, str] | None = None) -> InterpreterFacts:
    """Return the facts of `python` in the environment of `process_environment(env)`.

    Raises MissingToolError for an interpreter that cannot be started, or that is too old for farm's code.
    """
    source = Path(probe.__file__).read_text(encoding="utf-8")
    try:
        answer = ask_program([python, "-c", source], _PROBE_SECONDS, process_environment(env or {}))
        # Output of a `sitecustomize` comes before the document.
        document = (answer.output.strip().splitlines() or [""])[-1]
        facts = msgspec.json.decode(document, type=InterpreterFacts, dec_hook=_path)
    except subprocess.TimeoutExpired:
        raise MissingToolError(f"{python} does not answer within {_PROBE_SECONDS:g} s") from None
    except OSError as error:
        raise MissingToolError(f"{python} cannot be started: {error.strerror or error}") from None
    except (msgspec.DecodeError, msgspec.ValidationError):
        raise MissingToolError(f"{python} is no Python that farm can use: {answer.reason}") from None
    if facts.version[:2] < LEAST_PYTHON:
        needed, found = (".".join(map(str, version[:2])) for version in (LEAST_PYTHON, facts.version))
        raise MissingToolError(f"{python} is Python {found}: a toolchain needs Python {needed} or newer")
    return facts


def process_environment(env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a process of a toolchain whose own variables are `env`."""
    # The user's current folder is left out of the search path: an `executorch` in it would be imported.
    return {**os.environ, "PYTHONSAFEPATH": "1", **env}


def _path(kind: type, text: Any) -> Any:
    return kind(text)


# Differences between releases of ExecuTorch in starting their processes, and the releases that farm compiles with.
#
# Differences in calls are in farm/builds/compile/flows, beside the calls.


OLDEST = "1.3.1"
"""Before it, ExecuTorch's Qualcomm backend has no LPAI, whose names farm's flow imports."""
NEWEST = "1.5.1"
"""Newest release that farm was run with. Newer releases are tried, as they may work."""

_NUMBERS = re.compile(r"v?(\d+)\.(\d+)(?:\.(\d+))?")


class ReleaseRow(NamedTuple):
    """Range of releases that are used in the same way."""

    since: tuple[int, int]
    torch: str
    """Requirement of torch for the wheels of these releases: the metadata of wheels from 1.5 lack it."""
    needs_flatc: bool
    """True for releases that search flatc on PATH, not in their own wheel."""


_GENERATIONS = (
    ReleaseRow((1, 3), "torch>=2.12,<2.14", needs_flatc=True),
    ReleaseRow((1, 4), "torch>=2.13,<2.14", needs_flatc=False),
)


def generation_of(version: str) -> ReleaseRow:
    """Return the row of ExecuTorch `version`; for an unknown version, the row of the newest release.

    Raises UsageError for a version older than OLDEST.
    """
    numbers = _numbers(version)
    if numbers is None:
        return _GENERATIONS[-1]
    if not is_supported(version):
        raise UsageError(
            f"ExecuTorch {version} is too old: farm compiles with {OLDEST} and newer, as LPAI came into its Qualcomm "
            "backend then"
        )
    return next(one for one in reversed(_GENERATIONS) if one.since <= numbers[:2])


def newer_than_known(version: str) -> bool:
    """Return whether farm was never run with such a version, which deserves a note but is not refused."""
    numbers, newest = _numbers(version), _numbers(NEWEST)
    return numbers is not None and newest is not None and numbers[:2] > newest[:2]


def variables_of(facts: InterpreterFacts) -> dict[str, str]:
    """Return the variables, besides paths, for the processes of an interpreter's ExecuTorch. Raises UsageError."""
    generation, package = generation_of(facts.version_of("executorch")), facts.folder("executorch")
    if not generation.needs_flatc or package is None or "FLATC_EXECUTABLE" in os.environ:
        return {}
    flatc = package / "data" / "bin" / "flatc"
    return {"FLATC_EXECUTABLE": str(flatc)} if os.access(flatc, os.X_OK) else {}


def is_supported(version: str) -> bool:
    """Return whether farm can compile with an ExecuTorch of that version."""
    return (_numbers(version) or (0, 0, 0)) >= (_numbers(OLDEST) or ())


def _numbers(version: str) -> tuple[int, int, int] | None:
    found = _NUMBERS.match(version)
    return (int(found[1]), int(found[2]), int(found[3] or 0)) if found else None


# Calls of pip for another interpreter.


_INSTALL_SECONDS = 1800.0
_BASE = str(getattr(sys, "_base_executable", sys.executable))
_OPTIONS = ("--quiet", "--no-input", "--disable-pip-version-check", "--no-warn-script-location")


def pip_install(python: Path, requirements: Sequence[str], folder: Path | None = None) -> str:
    """Install `requirements` for the interpreter `python`, in `folder` or its environment.

    Return the reason of a failure in one line, empty after success. farm's own pip is used or, without one, the pip of
    `python`.
    """
    target = ["--target", str(folder)] if folder is not None else []
    problem = f"there is no pip: {sys.executable} -m ensurepip"
    # The base Python has pip more often than an environment.
    pips = [[one, "-P", "-m", "pip", "--python", str(python)] for one in dict.fromkeys((sys.executable, _BASE))]
    for command in (*pips, [str(python), "-P", "-m", "pip"]):
        try:
            code, lines = _run([*command, "install", *_OPTIONS, *target, *requirements])
        except (InfraError, subprocess.TimeoutExpired) as error:
            problem = str(error)
            continue
        if code == 0:
            return ""
        # Without pip, or with a pip that is too old to install for another interpreter, the next one is tried.
        if any("No module named pip" in line or "no such option: --python" in line for line in lines):
            continue
        errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
        return "; ".join(errors or lines[:1] or [f"exit code {code}"])
    return problem


def _run(argv: list[str]) -> tuple[int, list[str]]:
    """Return exit code and standard error of pip, which ends with this process, even if that is killed."""
    with Supervisor() as supervisor:
        child = supervisor.spawn(argv, name="pip", stderr_pipe=True)
        _, errors = child.process.communicate(timeout=_INSTALL_SECONDS)
        return child.process.returncode, errors.decode(errors="replace").strip().splitlines()


# Links on PYTHONPATH to farm's own code, for a toolchain's interpreter without farm.
#
# The folder of links has `farm`, msgspec (the only package that a builder imports before torch) and coverage, which
# traces a builder. Other packages of farm's environment are left out, as they would hide the toolchain's packages.


_FOLDER = "toolchains"
# Packages and their binary modules, which are built for a single ABI.
_NEEDED = {"msgspec": "_core"}
_USEFUL = {"coverage": "tracer"}
"""Tracer of executed functions, so that an edit invalidates only bundles that used it; without a tracer, all."""


def handover(cache_dir: Path, python: Path, facts: InterpreterFacts) -> Path:
    """Return the folder that makes farm's code importable for `python`. Raises MissingToolError, UntrustedError."""
    packages = {"farm": Path(farm.__file__).resolve().parent, **_own_packages(facts)}
    if not _NEEDED.keys() <= packages.keys():
        installed = _installed(cache_dir, python, facts)
        packages |= {name: installed / name for name in _NEEDED | _USEFUL if (installed / name).is_dir()}

    def link(folder: Path) -> None:
        for name, target in packages.items():
            (folder / name).symlink_to(target)

    where = cache_dir / _FOLDER / "handover" / name_of(*(f"{name}={target}" for name, target in packages.items()))
    # The target of a link may be removed and made again, so each link is checked.
    return published(where, link, is_whole=lambda folder: all((folder / name).is_dir() for name in packages))


def checkout_link(cache_dir: Path, package: Path) -> Path:
    """Return the folder for PYTHONPATH that makes `executorch` the code in `package` alone. Raises UntrustedError.

    ExecuTorch is a namespace package: PYTHONPATH=$EXECUTORCH_ROOT/.. alone would import modules that a checkout lacks,
    such as native libraries, from an installed wheel, and so mix both in a program.
    """

    def fill(folder: Path) -> None:
        (folder / "executorch").mkdir()
        text = f"# Only the source tree of the toolchain, no modules of a wheel.\n__path__ = [{str(package)!r}]\n"
        (folder / "executorch" / "__init__.py").write_text(text, encoding="utf-8")

    return published(cache_dir / _FOLDER / "checkouts" / name_of(str(package)), fill)


def _own_packages(facts: InterpreterFacts) -> dict[str, Path]:
    """Return the packages of farm's environment that an interpreter with this ABI can load."""
    found = {}
    for name, core in (_NEEDED | _USEFUL).items():
        spec = importlib.util.find_spec(name)
        folder = Path(spec.origin).resolve().parent if spec and spec.origin else None
        if folder is not None and facts.abi and any(folder.glob(f"{core}.{facts.abi}.*")):
            found[name] = folder
    return found


def _installed(cache_dir: Path, python: Path, facts: InterpreterFacts) -> Path:
    """Return a folder with the packages for another ABI; the first call installs them."""
    wanted = {name: f"{name}=={version}" for name in _NEEDED | _USEFUL if (version := package_version(name))}

    def install(folder: Path) -> None:
        for name, requirement in wanted.items():
            problem = pip_install(python, [requirement], folder)
            if name in _NEEDED and not any((folder / name).glob(f"{_NEEDED[name]}.*")):
                raise MissingToolError(
                    f"farm's code needs {requirement} for {python} ({facts.abi}), and pip cannot install it: "
                    f"{problem or 'it has no binary for it'}; is the package index reachable?"
                )

    key = name_of(facts.abi, *wanted.values())
    return published(cache_dir / _FOLDER / "handover" / f"packages-{key}", install)
