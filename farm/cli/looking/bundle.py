"""`farm jobs bundle`: copies the bundle of a job into a folder."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

import click

from farm.base.errors import FarmError, NoStoreError, UsageError
from farm.cli.options import FOLDER, configured, json_option, named, toolchain_option
from farm.cli.output import opened, show

if TYPE_CHECKING:
    from pathlib import Path

    from farm.builds.bundles.bundle import Bundle
    from farm.store.view import JobView
    from farm.suites.suite import Job, Target


@click.command("bundle")
@click.argument("job", callback=named)
@click.option("--to", "folder", type=FOLDER, help="Folder for the bundle: a new or an empty one.")
@click.option("--as-suite", "suite", type=FOLDER, metavar="FOLDER",
              help="Make a suite of the bundles of all jobs that match JOB.")  # fmt: skip
@click.option("--run", "ref", metavar="RUN", help="Bundle of this run: latest, latest~1 or an id.")
@click.option("--compiled", is_flag=True,
              help="Bundle that JOB compiles to today, from the cache: of no run.")  # fmt: skip
@toolchain_option()
@json_option("Print the written files as JSON.")
def command(
    job: str, folder: Path | None, suite: Path | None, ref: str | None, toolchain: str, *, compiled: bool
) -> None:
    """Copy the bundle of JOB into a folder: the .pte, inputs, references,
    and a README.md with the commands to run it by hand with qnn_executor_runner.

    JOB is suite/case, a whole job id, or a pattern with * and ? that only one
    job matches. It is the exact bundle of its newest result, or of its result
    in --run. With --compiled JOB is a whole id, and the bundle is the result of
    farm run --compile-only. Nothing is overwritten.

    With --as-suite in place of --to the folder becomes a suite of those .pte
    files with their outputs as references, so that farm nightly shows whether
    later toolchains still run them. JOB may then match many jobs.

    \b
    Exit codes: 0 written; 2 usage; 4 the bundle could not be compiled again;
    7 no result, or its bundle is gone.
    """
    from farm.replay.bundle_folder import README, write_bundle_folder
    from farm.replay.scripts import require_new

    if suite is not None:
        if compiled or folder is not None:
            raise UsageError("--as-suite takes bundles that ran: leave --to and --compiled out")
        _keep(job, ref, suite, toolchain)
        return
    if folder is None:
        raise UsageError("name a folder: --to for the program, or --as-suite for a suite of it")
    require_new(folder)
    if compiled and ref is not None:
        raise UsageError("--compiled takes no result of a run: leave out --compiled or --run")
    bundle, job_id, target, about = _of_today(job, toolchain) if compiled else _of_result(job, ref, toolchain)
    write_bundle_folder(bundle, job_id, target, about, folder)
    answer = {"job": job_id, "key": bundle.manifest.key, "folder": str(folder), "about": about}
    show(answer, [*about, f"{folder}: {README} has the commands to run it"])


def _keep(job: str, ref: str | None, folder: Path, toolchain: str) -> None:
    from farm.replay.kept_suite import keep_suite
    from farm.replay.scripts import require_new
    from farm.replay.stored_result import find_stored_results

    require_new(folder)
    with opened(readonly=True, existing=True) as (config, store):
        results, missing = find_stored_results(store, job, ref)
    kept, left_out = keep_suite(config, results, folder, toolchain)
    left_out = [*missing, *left_out]
    first = kept[0].stored
    again = _run_command(folder, first.view, virtual=first.kind == "virtual")
    lines = [
        *(f"{one.name}: {one.stored.view.id}, judged by {one.judged_by}" for one in kept),
        *(f"left out: {reason}" for reason in left_out),
        f"{folder}: {len(kept)} of {len(kept) + len(left_out)} jobs; run them: {again}",
    ]
    answer = {
        "folder": str(folder),
        "cases": [
            {"name": one.name, "job": one.stored.view.id, "run": one.stored.run.id, "judged_by": one.judged_by,
             "compiled_with": one.compiled_with}
            for one in kept
        ],
        "left_out": left_out,
    }  # fmt: skip
    show(answer, lines)


def _run_command(folder: Path, view: JobView, *, virtual: bool) -> str:
    """Return the command that runs a kept suite."""
    words = ["farm", "run", "--soc", view.soc, "--backend", view.backend, "--suite", f"{folder}/"]
    return shlex.join([*words, *(["--virtual", "1"] if virtual else [])])


def _compile_command(job: Job, suite: str, toolchain: str) -> str:
    """Return the command that compiles one job; `suite` is its name or its path."""
    target = job.target
    words = ["farm", "run", "--compile-only", "--soc", target.soc, "--suite", suite, "--backend", target.backend]
    words += ["--precision", target.precision, "-k", job.case.name]
    words += [word for name, value in target.options for word in ("--option", f"{name}={value}")]
    return shlex.join([*words, *(["--toolchain", toolchain] if toolchain else [])])


def _of_result(job: str, ref: str | None, toolchain: str) -> tuple[Bundle, str, Target, list[str]]:
    from farm.dispatch.request.resume import config_to_run_again
    from farm.replay.stored_result import find_stored_result, stored_bundle, target_of

    try:
        with opened(readonly=True, existing=True) as (config, store):
            stored = find_stored_result(store, job, ref)
    except FarmError as error:
        if ref is not None or not isinstance(error, UsageError | NoStoreError):
            raise
        raise UsageError(f"{error}; --compiled takes the bundle that 'farm run --compile-only' left") from None
    selected = config_to_run_again(config, stored.run, toolchain)
    bundle = stored_bundle(selected, stored, virtual=stored.kind == "virtual")
    attempt = stored.attempt
    about = [
        f"The bundle of {stored.description}.",
        f"There it {attempt.verdict}{f': {attempt.reason}' if attempt.reason else ''}.",
    ]
    return bundle, stored.view.id, target_of(stored.view), about


def _of_today(job: str, toolchain: str) -> tuple[Bundle, str, Target, list[str]]:
    from farm.builds.bundles.cache import BundleCache
    from farm.builds.bundles.reuse import find_bundle_for
    from farm.builds.toolchains.prepare import prepare
    from farm.builds.toolchains.select import use_toolchain
    from farm.dispatch.request.named_job import named_job

    config = use_toolchain(configured(), toolchain)
    chosen = named_job(config, job, "farm jobs bundle --compiled")
    cache = BundleCache(config.cache_dir)
    found = find_bundle_for(chosen, prepare(config), cache)
    bundle = cache.lookup(found.key) if found.cached else None
    if bundle is None:
        suite = job.partition("[")[0].rpartition("/")[0]
        raise UsageError(f"{chosen.id} is not compiled as it is today: {_compile_command(chosen, suite, toolchain)}")
    return bundle, chosen.id, chosen.target, ["Bundle that the job compiles to today; it may never have run."]
