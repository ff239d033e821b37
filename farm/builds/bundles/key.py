"""Address of a bundle: a hash of all its ingredients. Torch-free."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from farm.base.backends.registry import BACKENDS, find_backend
from farm.base.errors import MissingToolError
from farm.base.hashes import let_the_clock_pass
from farm.base.socs import find_soc
from farm.builds.bundles.source import package_state, source_digest, source_place, suite_files
from farm.suites.options import compile_numbers

if TYPE_CHECKING:
    from collections.abc import Mapping

    from farm.suites.suite import Case, Job

# Files below farm/ whose code decides the content of bundles: a change of a file makes new bundles. A bundle depends
# only on the flow of its own backend.
_RECIPE = (
    "builds/compile/flows/*.py", "builds/compile/flows/shortcuts/*.py", "builds/bundles/bundle.py",
    "builds/bundles/origins.py", "builds/bundles/ready.py",
    "builds/program/canonical.py", "builds/program/pte.py", "builds/program/flatbuffer.py", "builds/program/layout.py",
)  # fmt: skip
# Further files of the recipe for cases that generate text.
_RECIPE_OF_TEXT = (
    "builds/compile/llm/*.py", "builds/bundles/generation.py", "suites/architectures.py", "suites/generate.py",
    "suites/prompts.py", "suites/accuracy/*.py",
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


@functools.cache
def recipe_digest(backend: str, *, text: bool = True) -> str:
    """Return the hash of farm's recipe of bundles for `backend` at the first call in this process, as hex.

    Without `text`: the recipe of cases that generate no text.
    """
    return recipe_now(backend, text=text)


def recipe_now(backend: str, *, text: bool = True) -> str:
    """Return the hash of the recipe on the disk now; it differs after an upgrade of farm during this process."""
    digest = hashlib.sha256()
    for path in recipe_files(backend, text=text):
        digest.update(path.read_bytes())
    return digest.hexdigest()


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
