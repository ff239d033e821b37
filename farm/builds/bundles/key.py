"""Address of a bundle: a hash of all its ingredients, among them the code of its case, which is not imported."""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.metadata
import importlib.util
import re
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import NamedTuple

import msgspec

from farm.base.backends.registry import BACKENDS, find_backend
from farm.base.errors import MissingToolError
from farm.base.hashes import is_read, let_the_clock_pass, sha256_of
from farm.base.paths import files_below
from farm.base.socs import find_soc
from farm.suites.options import compile_numbers
from farm.suites.suite import Case, Job

# Location and hash of the code of a case, found without importing it.


_SITES = ("site-packages", "dist-packages")
_NAME = rb"[A-Za-z_]\w*"
# An import at the begin of a line, or behind `;` or `:` in it; `import a, b` goes on behind a backslash at its end.
_IMPORT = re.compile(
    rb"(?:^|[;:])[ \t]*(?:from[ \t]+(?P<one>" + _NAME + rb")|import[ \t]+(?P<several>(?:[^\r\n#;\\]|\\\r?\n)+))",
    re.MULTILINE,
)
_IMPORTED = re.compile(rb"(?:^|,)[\s\\]*(" + _NAME + rb")")
# Packages whose content is in every key.
_VERSIONED = ("torch", "executorch", "torchao")
# Files that farm reads in a folder with the layout of Hugging Face's hub.
_OF_HUGGING_FACE = (
    "config.json", "*.safetensors", "*.safetensors.index.json", "tokenizer.json", "tokenizer.model"
)  # fmt: skip


def source_place(case: Case) -> tuple[str, ...]:
    """Return the places that `source_digest` reads: cases with the same places have the same digest."""
    return (case.folder, case.module.partition(":")[0], *case.files)


def suite_files(case: Case) -> list[Path]:
    """Return the files below the folder of a suite that `source_digest` reads; none for an installed module's code."""
    found = named_files(case)
    name = case.module.partition(":")[0]
    return [*found, *(path for _, path in _code_files(case, name))] if name.startswith(".") else found


def named_files(case: Case) -> list[Path]:
    """Return the files that `case` and its task name, and the model files in its named folders."""
    folders = case.generate.folders if case.generate is not None else ()
    found: list[Path] = []
    for name in case.files:
        path = Path(case.folder, name)
        found += sorted({one for kind in _OF_HUGGING_FACE for one in path.glob(kind)}) if name in folders else [path]
    if case.generate is not None and case.generate.task:
        # Imported late, as this import loads a YAML parser.
        from farm.suites.tasks import read_task

        found += read_task(Path(case.folder, case.generate.task)).files[1:]
    return found


def _code_files(case: Case, name: str) -> Iterator[tuple[Path, Path]]:
    """Yield the Python files in the suite's folder; for `..name` the files beside it that take part, by short names."""
    folder = Path(case.folder)
    if not name.startswith(".."):
        yield from ((path.relative_to(folder), path) for path in _python_files(folder))
        return
    root = folder.parent
    left = [name[2:].partition(".")[0]]
    seen: set[str] = set()
    while left:
        sibling = left.pop(0)
        if sibling in seen:
            continue
        place, module = root / sibling, root / f"{sibling}.py"
        found = [(path.relative_to(root if seen else place), path) for path in _python_files(place)]
        found += [(module.relative_to(root), module)] if module.is_file() else []
        seen.add(sibling)
        for short, path in found:
            yield short, path
            left += sorted(_siblings(path, root))


def _python_files(folder: Path) -> list[Path]:
    return sorted(path for path in files_below(folder) if path.suffix == ".py")


def _siblings(path: Path, root: Path) -> set[str]:
    """Return the names directly below `root` that a file imports by dots: `from ..other import Net`."""
    level = len(path.relative_to(root).parts)
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return set()
    nodes = (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level == level)
    return {
        name
        for node in nodes
        for name in ([node.module.partition(".")[0]] if node.module else [alias.name for alias in node.names])
    }


def source_digest(case: Case) -> str:
    """Return a hash of the code that makes the module of `case`, and of the files that it names.

    A module in the suite's folder counts with every Python file there, as they may import each other. A module beside
    that folder counts with every file of its own folder, and of the folders beside it that these import. Packages that
    they import count: an installed wheel by its version, a package in a source folder by its content and its own
    imports. A module of an installed package counts by its file, and a package that is no wheel by its content as
    well; torch, torchao and executorch are in every key by their own content.
    """
    digest = hashlib.sha256()
    for path in named_files(case):
        digest.update(sha256_of(path).encode())
    name = case.module.partition(":")[0]
    if name.startswith("."):
        for short, path in _code_files(case, name):
            digest.update(str(short).encode() + b"\0")
            code = path.read_bytes()
            digest.update(hashlib.sha256(code).digest())
            for package in sorted(_imported(code)):
                digest.update(f"{package} {_state(package)}".encode())
    elif name.partition(".")[0] not in _VERSIONED:
        path_or_none = _installed_file(name)
        if path_or_none is not None:
            digest.update(path_or_none.read_bytes())
        package = name.partition(".")[0]
        if not _is_wheel(package, _places(package)):
            digest.update(_state(package).encode())
    return digest.hexdigest()


def _imported(code: bytes) -> set[str]:
    """Return the packages that a file imports, perhaps more; parsing takes twenty times as long."""
    found = set[bytes]()
    for match in _IMPORT.finditer(code):
        found.update([match["one"]] if match["one"] else _IMPORTED.findall(match["several"]))
    return {name.decode() for name in found} - {*_VERSIONED, *sys.stdlib_module_names}


def _state(package: str) -> str:
    """Return the state of a package: the versions of its wheels, or its content and the state of its imports."""
    state, imported = package_state(package)
    left, seen = sorted(imported), {package}
    while left:
        name = left.pop()
        if name not in seen:
            seen.add(name)
            own, imported = package_state(name)
            state += f"\0{name} {own}"
            left += sorted(imported)
    return state


@functools.cache
def package_state(package: str) -> tuple[str, frozenset[str]]:
    """Return the state of a package alone, and its imports; a wheel's version stands for its imports."""
    places = _places(package)
    if not places:
        return "", frozenset()
    if _is_wheel(package, places):
        return _versions(package), frozenset()
    digest, imported = hashlib.sha256(), set[str]()
    for path, name in sorted(_files(places)):
        content = path.read_bytes()
        digest.update(f"{name}\0".encode() + hashlib.sha256(content).digest())
        if path.suffix == ".py":
            imported |= _imported(content)
    return digest.hexdigest(), frozenset(imported - {package})


def _is_wheel(package: str, places: Iterable[Path]) -> bool:
    """Return whether a package was installed as a wheel, rather than linked to a source folder."""
    found = list(places)
    # A missing package has no wheel, and a search through all wheels takes a third of a second.
    return bool(found) and all(place.parent.name in _SITES for place in found) and bool(_versions(package))


def _versions(package: str) -> str:
    """Return the versions of the wheels that have a package; empty if no wheel has it."""
    # Most wheels have the name of their package; a search through all of them is slow.
    try:
        return importlib.metadata.version(package)
    except (importlib.metadata.PackageNotFoundError, ValueError):
        wheels = sorted(set(_wheels().get(package, ())))
    return " ".join(f"{name} {importlib.metadata.version(name)}" for name in wheels)


@functools.cache
def _wheels() -> Mapping[str, list[str]]:
    return importlib.metadata.packages_distributions()


def _spec(package: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return None


def _places(package: str) -> list[Path]:
    """Return the folders of a package, or the file of a module."""
    if (spec := _spec(package)) is None:
        return []
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    return folders or ([Path(spec.origin)] if spec.origin and spec.has_location else [])


def _files(places: Iterable[Path]) -> Iterator[tuple[Path, str]]:
    for place in places:
        if not place.is_dir():
            yield place, place.name
        for path in files_below(place):
            name = path.relative_to(place).as_posix()
            if is_read(name) and not any(part.startswith(".") for part in name.split("/")):
                yield path, name


def _installed_file(name: str) -> Path | None:
    top, *rest = name.split(".")
    spec = _spec(top)
    for part in rest:
        # find_spec of the whole name would import its parents.
        spec = spec and PathFinder.find_spec(f"{spec.name}.{part}", spec.submodule_search_locations or [])
    return Path(spec.origin) if spec and spec.origin and spec.origin.endswith(".py") else None


# Address of a bundle: a hash of all its ingredients. Torch-free.


# Files below farm/ whose code decides the content of bundles: a change of a file makes new bundles. A bundle depends
# only on the flow of its own backend.
_RECIPE = (
    "builds/compile/flows/*.py", "builds/compile/flows/shortcuts/*.py", "builds/bundles/bundle.py",
    "builds/bundles/ready.py",
    "builds/program/canonical.py", "builds/program/pte.py", "builds/program/flatbuffer.py",
)  # fmt: skip
# Further files of the recipe for cases that generate text.
_RECIPE_OF_TEXT = (
    "builds/compile/llm/*.py", "builds/bundles/generation.py", "suites/generate.py",
    "suites/prompts.py", "suites/tasks.py",
)  # fmt: skip

CONTENT = "_content"
"""Suffix of version names whose value is a SHA-256 of the content: `executorch_content`, `qnn_content`."""
HOST_CPU = "host_cpu"
"""Name of a version: the processor that calls QNN, `arm` or, on virtual devices, `x86`. It counts for backends with
`host_cpus`, and for programs whose methods share weights."""


def recipe_files(backend: str, *, text: bool = True) -> list[Path]:
    """Return the files of the recipe of bundles for `backend`, sorted.

    Without `text`: the recipe of cases that generate no text.
    """
    root = Path(__file__).parents[2]
    flows = {name: _module_file(one.flow) for name, one in BACKENDS.items()}
    patterns = (*_RECIPE, *(_RECIPE_OF_TEXT if text and find_backend(backend).generates_text else ()))
    found = {path for pattern in patterns for path in root.glob(pattern)}
    return sorted({*found.difference(flows.values()), flows[backend]})


def recipe_now(backend: str, *, text: bool = True) -> str:
    """Return the hash of farm's recipe of bundles for `backend` on the disk now, as hex.

    An upgrade of farm during this process changes it. Without `text`: the recipe of cases that generate no text.
    """
    digest = hashlib.sha256()
    for path in recipe_files(backend, text=text):
        digest.update(path.read_bytes())
    return digest.hexdigest()


recipe_digest = functools.cache(recipe_now)
"""Hash of the recipe at the first call in this process."""


def _module_file(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise MissingToolError(f"the compile flow {name} is not installed")
    return Path(spec.origin)


def relevant_versions(backend: str, versions: Mapping[str, str], case: Case | None = None) -> dict[str, str]:
    """Return the part of `versions` that a bundle of `case` for `backend` depends on: without QNN on the CPU."""
    found = find_backend(backend)
    per_host = bool(found.host_cpus) or (case is not None and _has_weights_to_share(case))
    foreign = ({"qnn", f"qnn{CONTENT}"} if found.on_cpu else set()) | (set() if per_host else {HOST_CPU})
    return {name: version for name, version in versions.items() if name not in foreign}


def shares_weights(job: Job, versions: Mapping[str, str]) -> bool:
    """Return whether the methods of a text-generating program of `job` share their weights: for attached devices only.

    The simulator of QNN 2.51 refuses such a program: "Shared weights buffer isn't supported on this platform".
    """
    return _has_weights_to_share(job.case) and versions.get(HOST_CPU) != "x86"


def _has_weights_to_share(case: Case) -> bool:
    return case.generate is not None and not case.pte and len(case.generate.methods) > 1


QNN_PRODUCT = "qnn_product"
"""Fact of a run: product name of the QNN SDK, from its sdk.yaml; absent without an SDK that has one."""


def stub_of(facts: Mapping[str, str]) -> str:
    """Return the product name of a stub in place of QNN among the facts of a run; "" for Qualcomm's libraries."""
    product = facts.get(QNN_PRODUCT, "")
    return product if "stub" in product.lower() else ""


def facts_of(versions: Mapping[str, str]) -> dict[str, str]:
    """Return versions as a run records them, with hashes cut to 16 characters."""
    return {
        name: version[:16] if name.endswith(CONTENT) else version
        for name, version in versions.items()
        if name != HOST_CPU
    }


def bundle_key(job: Job, versions: Mapping[str, str]) -> str:
    """Return the key of the bundle of `job`, as hex.

    The key leaves out case name, suite, tolerances, known issues and run-time options, which do not affect compiling.
    """
    case, target = job.case, job.target
    backend, soc = find_backend(target.backend), find_soc(target.soc)
    parts = {
        "case": case.definition,
        "source": _source_digest_of(job),
        # On the CPU only the SoC's name counts: the manifest has it, and a device refuses bundles of another SoC.
        "soc": (soc.name, *(() if backend.on_cpu else (soc.soc_id, soc.htp_arch, soc.vtcm_mb, soc.lpai_version))),
        "backend": (backend.name, backend.qnn_type, backend.online_prepare),
        "precision": target.precision,
        "options": compile_numbers(target),
        "versions": relevant_versions(target.backend, versions, case),
        "recipe": recipe_digest(target.backend, text=case.generate is not None),
    }
    return hashlib.sha256(msgspec.json.encode(parts, order="sorted")).hexdigest()


class _ReadSource(NamedTuple):
    digest: str
    as_of_ns: int


_read_sources: dict[tuple[str, ...], _ReadSource] = {}


def forget_sources() -> None:
    """Clear the remembered code of suites, so that a long-running process sees the user's edits."""
    _read_sources.clear()
    package_state.cache_clear()


def source_as_of_ns(job: Job) -> int:
    """Return the time at which the code of the job's suite was read for the key, in epoch nanoseconds; 0 if unread."""
    source = _read_sources.get(source_place(job.case))
    return source.as_of_ns if source else 0


def _source_digest_of(job: Job) -> str:
    # The digest is computed once per process and module: a suite has a hundred jobs over one file.
    where = source_place(job.case)
    source = _read_sources.get(where)
    if source is None:
        let_the_clock_pass(suite_files(job.case))
        as_of_ns = time.time_ns()
        # Another thread may remove the entry at any moment, so the local variable is used.
        source = _read_sources[where] = _ReadSource(source_digest(job.case), as_of_ns)
    return source.digest
