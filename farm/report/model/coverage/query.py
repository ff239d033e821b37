"""`farm jobs coverage`: suites, runs and the installed ExecuTorch -> table operator x precision."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from farm.base.backends.registry import runs_on_cpu
from farm.base.errors import IllegalTargetError, UsageError
from farm.base.socs import check_backend, find_soc
from farm.report.model import format as fmt
from farm.report.model.coverage.coverage import Coverage, CoveredJob, coverage, items_of, listed, made_of_others
from farm.store.rows import case_versions
from farm.suites.manifests import find_suites, resolve_suite
from farm.suites.op_builders import installed_builders, operators_in_tests, suite_operators
from farm.suites.suite import Job, Suite, plan

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from farm.store.records import ListedJob
    from farm.store.store import Store

# Suites of single operators.
_USUAL = ("quantized_ops", "fp_ops")


def read_coverage(
    store: Store,
    folders: Sequence[Path],
    soc_name: str | None,
    backend: str,
    names: Sequence[str],
    refs: Sequence[str],
    branch: str | None = None,
) -> tuple[Coverage, list[str]]:
    """Return the table of a SoC and backend, and the facts that its results depend on.

    `names` are suites, `refs` runs. Without runs the table has the newest result of every job in a branch; without
    suites it covers the suites of the runs, or of single operators. Without `soc_name` the SoC is the only one with
    jobs in these. `branch` has the meaning of `StatusReader.branch_to_show`. Raises UsageError for unknown names, and
    MissingToolError without ExecuTorch.
    """
    if runs_on_cpu(backend):
        raise IllegalTargetError(f"{backend} has none of the operators of ExecuTorch's Qualcomm backend: name another")
    run_ids = [store.runs.resolve(ref) for ref in refs] or None
    soc = find_soc(soc_name or _only_soc(store, folders, backend, names, run_ids or ()))
    precisions = check_backend(soc, backend).precisions
    planned = store.runs.planned_jobs(run_ids, soc.name, backend) if run_ids else []
    if run_ids and not planned:
        raise UsageError(f"{', '.join(refs)}: no job for {soc.name} and {backend}: name another run, SoC or backend")
    suites = _suites(folders, names, backend, planned)
    if names:
        planned = [job for job in planned if _suite_of(job) in {suite.name for suite in suites}]
    jobs: tuple[Job, ...] = plan(suites, [soc], backend) if suites else ()
    chosen = store.status.branch_to_show(branch)
    shown = {job.job_id: job for job in (*map(listed, jobs), *planned)}
    results = {found.result.job_id: found for found in store.status.job_results(shown, run_ids, chosen)}
    tools = store.history.fingerprints(found.fingerprint for found in results.values())
    declared: dict[tuple[str, str], tuple[str, ...]] = {}
    without: dict[str, str] = {}
    aten: dict[str, tuple[str, ...]] = {}
    tests: dict[str, tuple[str, ...]] = {}
    for folder in dict.fromkeys(job.case.folder for job in jobs):
        declared_by = suite_operators(Path(folder))
        without |= declared_by.without
        here = {job.case.name for job in jobs if job.case.folder == folder}
        aten |= {case: names for case, names in declared_by.aten.items() if case in here}
        tests |= declared_by.tests
        declared |= {
            (job.case.module, job.case.name): declared_by.cases[job.case.name]
            for job in jobs
            if job.case.folder == folder and job.case.name in declared_by.cases
        }
    # A named run shows its own results, even if the case has changed since.
    items = items_of(shown.values(), results, {} if run_ids else case_versions(jobs), declared)
    table = coverage(soc.name, backend, precisions, items, installed_builders(), without)
    tested = operators_in_tests()
    missing = sorted(set(tested).difference(*aten.values()))
    elsewhere = made_of_others(missing, tests, aten)
    untested = tuple(name for name in missing if name not in {found.name for found in elsewhere})
    table = msgspec.structs.replace(table, tested=tested, made_of_others=elsewhere, untested=untested)
    about = facts(table.items, tools.values())
    return table, [*about, f"branch {chosen}"] if chosen and not run_ids else about


def _only_soc(store: Store, folders: Sequence[Path], backend: str, names: Sequence[str], run_ids: Sequence[str]) -> str:
    """Return the only SoC with jobs in the runs, else in the suites. Raises UsageError for none or several."""
    if run_ids:
        jobs = (job for run_id in run_ids for job in store.runs.view(run_id).jobs)
        found = sorted({job.soc for job in jobs if job.backend == backend})
    else:
        known = find_suites(folders)
        found = store.history.socs([resolve_suite(name, known).name for name in names] or _USUAL)
    if len(found) == 1:
        return found[0]
    there = f"there are results on {', '.join(found)}" if found else "there is no result on any SoC"
    raise UsageError(f"name the SoC with --soc: {there}")


def facts(items: Iterable[CoveredJob], fingerprints: Collection[Mapping[str, str]]) -> list[str]:
    """Return the facts that the results of a table depend on: tools, kinds of devices, dates."""
    tried = [item for item in items if item.run_id]
    if not tried:
        return ["no result yet"]
    tools = [
        f"{label} {', '.join(sorted(versions))}"
        for name, label in (("executorch", "ExecuTorch"), ("qnn", "QNN"))
        if (versions := {facts[name] for facts in fingerprints if name in facts})
    ]
    kinds = {item.kind for item in tried} - {""}
    where = {"virtual": "on VIRTUAL devices, Qualcomm's HTP simulator", "hardware": "on hardware"}
    days = sorted({fmt.day(item.time_ms) for item in tried})
    runs = len({item.run_id for item in tried})
    return [
        ", ".join(
            [
                f"{len(tried)} results of {fmt.plural(runs, 'run')}",
                " and ".join(where.get(kind, kind) for kind in sorted(kinds)) or "without a device",
                *tools,
                days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}",
            ]
        )
    ]


def _suites(folders: Sequence[Path], names: Sequence[str], backend: str, planned: Sequence[ListedJob]) -> list[Suite]:
    """Return the named suites, else the suites of planned jobs, else the usual ones."""
    known = find_suites(folders)
    if names:
        return [resolve_suite(name, known) for name in dict.fromkeys(names)]
    # A suite that a run named by its path may be anywhere or deleted; its jobs are in the store.
    wanted = dict.fromkeys(map(_suite_of, planned)) or dict.fromkeys(_USUAL)
    found = [resolve_suite(name, known) for name in wanted if name in known]
    usable = [suite for suite in found if backend in suite.backends]
    if not usable and not planned:
        raise UsageError(f"no suite of operators is made for {backend}: name one with --suite (farm suites lists them)")
    return usable


def _suite_of(job: ListedJob) -> str:
    return job.job_id.partition("/")[0]
