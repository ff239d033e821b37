"""Preparation of a build on a build host: the job with this host's code, and its key computed anew."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from farm.base.errors import FarmError, UsageError
from farm.base.resources import data_folder
from farm.builds.bundles.key import HOST_CPU, bundle_key, source_as_of_ns
from farm.builds.bundles.source import named_files
from farm.builds.compile.protocol import BuildRequest

if TYPE_CHECKING:
    from collections.abc import Callable

    from farm.builds.toolchains.toolchain import Toolchain
    from farm.store.cluster.records import NewBuild
    from farm.suites.suite import Case, Job

# Legal module names of a manifest: a path may reach the folder beside the suite's, but no further.
_MODULE = re.compile(r"(\.{0,2}[\w-]+(\.[\w-]+)*:[\w.]+)?")
_HOST_CPUS = ("arm", "x86")


class RefusedBuildError(FarmError):
    """Refusal of this host to make a bundle of that key; another host may make it."""


def prepare_build(task: NewBuild, tools: Toolchain, job: Job, log: Path) -> BuildRequest:
    """Return the request to a builder; `job` is the task's job, with its code on this host.

    The key is computed anew: a bundle is only made under the key that this host's toolchain, farm and copy of the code
    give. Raises RefusedBuildError if that key differs from the key of `task`.
    """
    require_inside(job.case)
    wanted = task.versions.get(HOST_CPU, "")
    versions = tools.versions | ({HOST_CPU: wanted} if wanted in _HOST_CPUS else {})
    try:
        key = bundle_key(job, versions)
    except (OSError, UsageError) as error:
        raise RefusedBuildError(f"the code of {job.id} cannot be read: {error}") from error
    if key != task.key:
        raise RefusedBuildError(why_another_key(task, job))
    return BuildRequest(job, key, versions, str(log), anew=task.anew, suite_as_of_ns=source_as_of_ns(job))


def why_another_key(task: NewBuild, job: Job) -> str:
    """Return why a host with the toolchain of `task` computes another key, and the user's next step."""
    if not task.source:
        return (
            f"its suite {Path(job.case.folder).name or job.case.suite} is not as it was where {job.id} was submitted: "
            "install the same version of farm on both"
        )
    return (
        f"{job.id} has another key here: a package that its suite imports is not as it was where the run was "
        "submitted: install the same wheels on both, or submit with --build-on here"
    )


def job_here(task: NewBuild, unpack: Callable[[str, Job], Job]) -> Job:
    """Return the job of `task` with its code on this host: a suite of farm, or an archive unpacked by `unpack`.

    Raises RefusedBuildError if the farm of this host has no such suite.
    """
    if task.source:
        return unpack(task.source, task.job)
    case = task.job.case
    if not case.folder:
        return task.job
    folder = data_folder("test_suites") / Path(case.folder).name
    if not folder.is_dir():
        raise RefusedBuildError(f"farm has no suite {folder.name} here: install the version that submitted the run")
    return msgspec.structs.replace(task.job, case=msgspec.structs.replace(case, folder=str(folder)))


def require_inside(case: Case) -> None:
    """Raise RefusedBuildError for a case whose files or module lead out of its suite: no loaded manifest has such.

    The agent itself reads these files, to compute the key.
    """
    root = Path(case.folder).resolve()
    folders = case.generate.folders if case.generate is not None else ()
    for name in case.files:
        path = (root / name).resolve()
        is_there = path.is_dir() if name in folders else path.is_file()
        if not case.folder or not path.is_relative_to(root.parent) or not is_there:
            raise RefusedBuildError(f"{case.suite}/{case.name}: {name!r} is no file of its suite")
    for path in named_files(case):
        if not path.resolve().is_relative_to(root.parent):
            raise RefusedBuildError(f"{case.suite}/{case.name}: {path.name!r} is no file of its suite")
    if not _MODULE.fullmatch(case.module):
        raise RefusedBuildError(f"{case.suite}/{case.name}: {case.module!r} is no module")
