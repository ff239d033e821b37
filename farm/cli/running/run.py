"""`farm run`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import click

from farm.base.backends.registry import BACKENDS, DEFAULT_BACKEND, cpu_backends
from farm.base.config.settings import Config, load_config
from farm.base.errors import UsageError
from farm.base.exit_codes import ExitCode
from farm.base.interrupts import INTERRUPTED
from farm.cli.options import (
    FOR_ATTACHED,
    OUTPUT_FILE,
    TOOLCHAIN_VALUES,
    devices_options,
    duration,
    executions,
    is_given,
    json_option,
    named,
    pull_request_option,
    purpose_options,
    refuse_together,
    require_no_words,
    timeout_option,
)
from farm.cli.output import as_called, asked_server, deliver, echo, notice
from farm.cli.running.reviews import find_pull_request, post_review, review_of_run
from farm.devices.execution.raw import MOST_SECONDS
from farm.dispatch.request.profiling import Profile
from farm.report.model.alerts import change_line

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

    from farm.cli.progress import Front
    from farm.dispatch.cluster.client.submit_options import SubmitOptions
    from farm.dispatch.notify.pull_request import PullRequest
    from farm.dispatch.request.request import RunOutcome, RunRequest

# Exit codes after which --confirm measures: all jobs have ended.
_CONFIRMED_AFTER = (ExitCode.PASSED, ExitCode.FAILED, ExitCode.INFRA)
# Exit codes of several runs by urgency: the last that occurs is the exit code of the command.
_WORST = (
    ExitCode.PASSED, ExitCode.NOTHING, ExitCode.REGRESSION, ExitCode.FAILED, ExitCode.INFRA, INTERRUPTED,
)  # fmt: skip


@click.command("run")
@click.option("--soc", "socs", multiple=True, metavar="SOC", help="SoC to compile for and run on; repeatable.")
@click.option("--suite", "suites", multiple=True, metavar="SUITE", help="Suite, by name or path; repeatable.")
@click.option("--backend", default=DEFAULT_BACKEND, show_default=True, metavar="BACKEND",
              help=f"{', '.join(BACKENDS)}; on {', '.join(cpu_backends())}, the CPU, any case runs.")  # fmt: skip
@click.option("--precision", "precisions", multiple=True, metavar="PRECISION",
              help="Only these precisions; repeatable.")  # fmt: skip
@devices_options
@click.option("--toolchain", "toolchains", multiple=True, callback=named, metavar="NAME|PATH|VERSION",
              help=f"Toolchain that compiles: {TOOLCHAIN_VALUES}; repeatable: one run after the other.")  # fmt: skip
@purpose_options
@click.option("--nightly", is_flag=True, help="The same as --purpose nightly.")
@click.option("--resume", metavar="RUN", help="Execute the missing and skipped jobs of a run: latest, or its id.")
@click.option("--option", "options", multiple=True, metavar="NAME=VALUE[,VALUE]",
              help="Backend option; repeatable. Every combination of values is a target of its own.")  # fmt: skip
@click.option("--profile", type=click.Choice([profile.value for profile in Profile]), default=Profile.AUTO.value,
              show_default=True, help="Profiling level of every program: see farm jobs profile.")  # fmt: skip
@click.option(
    "--heap", is_flag=True, help="Measure the DSP's heap alone; each iteration, 1 by default, has a process of its own."
)
@click.option("-k", "keyword", metavar="EXPRESSION", help="Only jobs whose name matches, as in pytest.")
@click.option("-x", "--exitfirst", is_flag=True, help="Stop at the first job that is failed or infra.")
@click.option("--maxfail", type=click.IntRange(min=1), metavar="N", help="Stop after N jobs that are failed or infra.")
@click.option("--lf", "--last-failed", "last_failed", is_flag=True,
              help="Only the jobs that failed when you ran them last; all when none did.")  # fmt: skip
@click.option("--ff", "--failed-first", "failed_first", is_flag=True, help="The jobs of --lf first, then the others.")
@click.option(
    "--changed-since",
    metavar="RUN",
    help="Only jobs whose code, toolchain or limits differ from RUN's, or that have no verdict there.",
)
@click.option("--shard", metavar="I/N", help="Only part I of N, equally long by past durations: for N machines.")
@click.option("--budget", "budget_s", metavar="TIME", callback=duration,
              help="Longest time, as 1h30m: new and changed jobs first, then failed; the rest is skipped.")  # fmt: skip
@click.option("--confirm", is_flag=True,
              help="Measure suspected regressions, then changed programs again: exit code 3 if worse.")  # fmt: skip
@click.option("--detach", is_flag=True, help="Shared farm: submit the run and stop; farm runs watch follows it.")
@click.option("--build-on", "build", type=click.Choice(["hosts", "here"]),
              help="Shared farm: compile on build hosts, the default, or on this machine.")  # fmt: skip
@click.option("--wait-for-hosts", "wait", is_flag=True,
              help="Shared farm: wait for an SoC or a toolchain that no living host has, however long.")  # fmt: skip
@click.option("--watch", is_flag=True,
              help="Then wait, and run jobs again after edits of toolchain or suite, until Ctrl-C.")  # fmt: skip
@click.option("--collect-only", is_flag=True, help="List the jobs and stop.")
@click.option("--compile-only", is_flag=True,
              help="Compile and stop: no device is needed, and no run is recorded.")  # fmt: skip
@click.option("--rebuild", is_flag=True,
              help="Compile cached bundles as well, and report differences of the new programs.")  # fmt: skip
@click.option("--iterations", type=click.IntRange(1, 100_000),
              help="Timed inferences of every sample; 3 by default.")  # fmt: skip
@click.option("--warm-up", type=click.IntRange(0, 100_000),
              help="Inferences before those, not timed; 1 by default.")  # fmt: skip
@click.option("--seconds", type=click.IntRange(1, MOST_SECONDS), metavar="S",
              help="Programs generate text for S seconds, to measure the loss of rate by heat.")  # fmt: skip
@timeout_option("Time limit of a job on the device.")
@click.option("--junitxml", type=OUTPUT_FILE, help="Write a JUnit XML file as well.")
@click.option("--html", type=OUTPUT_FILE, help="Write the report here as well.")
@pull_request_option()
@json_option("Print the run as JSON instead of a summary.")
@click.argument("words", nargs=-1, metavar="")
def command(
    config_file: Path | None,
    words: tuple[str, ...],
    *,
    html: Path | None,
    junitxml: Path | None,
    as_json: bool,
    **given: Any,
) -> int:
    """Compile suites for SoCs, run them on devices, judge and report.

    Attached devices are leased for the run. A nightly run hands one over,
    between two jobs, to a person who waits for it. Ctrl-C finishes the running
    jobs and reports; a second one stops at once. farm run --resume latest
    executes the jobs that are left.

    --watch runs everything once, then looks twice a second at ExecuTorch's
    source tree and at the suites. After a save, jobs whose bundle has changed
    run again; after an edit of a source tree, only jobs that use the edited
    code are compiled. Ctrl-C while it waits ends it, with the last run's exit
    code.

    On a shared farm (store and artifacts in farm.toml) agents run the jobs,
    and the run goes on without you: Ctrl-C asks whether to leave or cancel
    it; without a terminal Ctrl-C and SIGTERM cancel it. With --virtual the
    jobs run on this machine.

    --compile-only leaves the bundles in the cache, and its exit code is 0 if
    all jobs compiled; farm jobs bundle --compiled copies one out.

    -k, --changed-since, --shard and --lf narrow the jobs, in this order;
    --budget then sorts them and leaves out jobs beyond the time.

    \b
    Exit codes: 0 all passed, known issues and skipped jobs aside; 1 a job
    failed; 2 usage or configuration; 3 no job failed, and with --confirm a
    number got worse; 4 no device or infrastructure; 5 nothing selected, or
    all skipped; 6 missing tool; 8 to 10 refusals and trouble of the store
    (reference/exit_codes of the site); 130 interrupted.
    """
    require_no_words(words)
    asked, server = SimpleNamespace(**given), asked_server()
    if server is not None:
        from farm.cli.running.run_there import run_there

        return run_there(server, asked, html=html, junitxml=junitxml, as_json=as_json)
    return _execute(config_file, asked, html=html, junitxml=junitxml, as_json=as_json)


def _execute(
    config_file: Path | None, asked: SimpleNamespace, *, html: Path | None, junitxml: Path | None, as_json: bool
) -> int:
    from farm.dispatch.cluster.client.anywhere import run
    from farm.dispatch.request.choose import collect

    if asked.resume is not None:
        pull = find_pull_request(asked.pull_request)
        outcome = _resumed(asked, config_file)
        return _deliver(outcome, pull, load_config(config_file), html=html, junitxml=junitxml, as_json=as_json)
    _check(asked, {"--html": html, "--junitxml": junitxml, "--json": as_json, "--pull-request": asked.pull_request})
    if asked.compile_only:
        from farm.cli.running.compile_only import check_compile_only

        check_compile_only(asked, {"--html": html, "--junitxml": junitxml})
    requests = _requests(asked)
    config = load_config(config_file)
    if asked.collect_only:
        from farm.dispatch.cluster.client.devices import kind_of

        for job_id in collect(config, requests[0], kind_of=kind_of):
            echo(job_id)
        return 0

    from farm.builds.toolchains.select import use_toolchain
    from farm.cli.progress import make_front

    pull = find_pull_request(asked.pull_request)
    if asked.watch:
        return _watched(config, requests[0], asked, html=html, junitxml=junitxml)
    if len(requests) > 1:
        # A missing toolchain is reported before the first run spends an hour.
        for request in requests:
            use_toolchain(config, request.toolchain)
    codes = []
    for request in requests:
        if len(requests) > 1:
            notice(f"toolchain {request.toolchain}")
        if asked.compile_only:
            from farm.cli.running.compile_only import compile_and_show

            codes.append(compile_and_show(config, request, as_json=as_json))
        else:
            with make_front() as front:
                outcome = run(config, request, front, options=_submit_options(asked, front))
            outcome = _confirmed(config, outcome)
            codes.append(_deliver(outcome, pull, config, html=html, junitxml=junitxml, as_json=as_json))
        if codes[-1] == INTERRUPTED:
            break
    return max(codes, key=_WORST.index)


def _submit_options(asked: SimpleNamespace, front: Front) -> SubmitOptions:
    """Return the options of a submission to a shared farm."""
    from farm.cli.cluster.following import asking
    from farm.dispatch.cluster.client.submit_options import SubmitOptions

    return SubmitOptions(detach=asked.detach, build_here=asked.build == "here", wait=asked.wait, ask=asking(front))


def _watched(
    config: Config, request: RunRequest, asked: SimpleNamespace, *, html: Path | None, junitxml: Path | None
) -> int:
    """Run jobs again that edits touch, until Ctrl-C; return the last exit code."""
    from farm.cli.progress import make_front
    from farm.dispatch.cluster.client.anywhere import run
    from farm.dispatch.run.watch import Watch

    code = 0

    def run_round(config: Config, request: RunRequest, front: Front, *, only: Collection[str]) -> RunOutcome:
        return run(config, request, front, options=_submit_options(asked, front), only=only)

    def after(outcome: RunOutcome) -> None:
        nonlocal code
        code = _deliver(outcome, None, config, html=html, junitxml=junitxml, as_json=False)
        if code == INTERRUPTED:
            raise KeyboardInterrupt

    try:
        Watch(config, request, run_round).rounds(make_front, after)
    except KeyboardInterrupt:
        return code
    return code


def _check(asked: SimpleNamespace, outputs: dict[str, Any]) -> None:
    """Raise UsageError for options of a fresh run that exclude each other; `outputs` are options that name a result."""
    missing = [option for option, values in (("--soc", asked.socs), ("--suite", asked.suites)) if not values]
    if missing:
        raise UsageError(f"{' and '.join(missing)} must be given; 'farm devices socs' and 'farm suites' list them")
    if asked.virtual:
        attached = {"--device": asked.devices, "--label": asked.labels, "--max-devices": asked.most_devices}
        refuse_together(attached, FOR_ATTACHED)
    if asked.nightly and asked.purpose == "local":
        raise UsageError("--nightly is --purpose nightly, not local: leave one of them out")
    if asked.collect_only or asked.compile_only:
        purpose = asked.purpose if asked.compile_only else None
        of_a_run = {"--name": asked.name, "--purpose": purpose, "--pull-request": asked.pull_request}
        refuse_together(of_a_run, "no run is recorded that has it: leave {} out")
    if asked.heap and asked.warm_up is not None:
        raise UsageError("--heap times nothing: leave --warm-up out")
    if asked.confirm:
        refuse_together({"--collect-only": asked.collect_only}, "--confirm measures again: leave {} out")
    if asked.collect_only and asked.budget_s is not None:
        raise UsageError("the jobs within a budget depend on the devices: leave --budget out to list the jobs")
    if asked.rebuild:
        because = "--rebuild compiles everything once: leave {} out"
        refuse_together({"--watch": asked.watch, "--collect-only": asked.collect_only}, because)
    if asked.detach:
        because = "a submitted run has no report yet, 'farm runs watch' writes it: leave {} out"
        given = {name: value for name, value in outputs.items() if name != "--json"}
        refuse_together(given | {"--watch": asked.watch, "--confirm": asked.confirm}, because)
    if asked.watch:
        given = {name: outputs[name] for name in ("--json", "--pull-request")}
        given |= {"--collect-only": asked.collect_only, "--confirm": asked.confirm}
        narrowing = {"--shard": asked.shard, "--changed-since": asked.changed_since, "--lf": asked.last_failed}
        timed = {
            "--budget": asked.budget_s,
            "--purpose nightly": _purpose(asked) == "nightly",
            "a second --toolchain": asked.toolchains[1:],
        }
        refuse_together(given | narrowing | timed, "--watch runs changed jobs until Ctrl-C: leave {} out")
    if len(asked.toolchains) > 1:
        refuse_together({"a second --toolchain": asked.collect_only}, "the jobs of one run are listed: leave {} out")
        because = "{} is of one run, and every --toolchain is a run of its own: give one, or leave it out"
        refuse_together(outputs, because)


def _purpose(asked: SimpleNamespace) -> str:
    return "nightly" if asked.nightly else asked.purpose or "local"


def _requests(asked: SimpleNamespace) -> list[RunRequest]:
    """Return one request for each toolchain."""
    import msgspec

    from farm.builds.toolchains.select import absolute_ref

    request = _request(asked)
    # A run may be resumed from another folder, so paths are stored as absolute.
    refs = dict.fromkeys(map(absolute_ref, asked.toolchains)) or ("",)
    return [msgspec.structs.replace(request, toolchain=ref) for ref in refs]


def _request(asked: SimpleNamespace) -> RunRequest:
    """Return the request of a fresh run's options; most options have the name of their field."""
    from farm.dispatch.pool.fleet import Choice
    from farm.dispatch.request.request import RunRequest
    from farm.dispatch.request.selection import parse_shard
    from farm.store.view import Purpose

    same = {name: value for name, value in vars(asked).items() if name in RunRequest.__struct_fields__}
    return RunRequest(**same | {
        "keyword": asked.keyword or "",
        "most_failures": 1 if asked.exitfirst else asked.maxfail,
        **executions(asked.iterations, asked.warm_up),
        "profile": Profile(asked.profile),
        "purpose": Purpose(_purpose(asked)),
        "command": as_called(),
        "choice": Choice(asked.devices, asked.labels, asked.heap),
        "shard": None if asked.shard is None else parse_shard(asked.shard),
    })  # fmt: skip


def _confirmed(config: Config, outcome: RunOutcome) -> RunOutcome:
    """Return the outcome after measuring suspected changes again, if --confirm was given."""
    if not outcome.confirm or outcome.exit_code not in _CONFIRMED_AFTER:
        return outcome
    import msgspec

    from farm.base.interrupts import InterruptHandler
    from farm.builds.toolchains.select import use_toolchain
    from farm.numbers.regressions.confirm_job import PairsRequest
    from farm.numbers.regressions.confirm_run import confirm_run
    from farm.store.store import open_store

    run_id = outcome.view.id
    config = use_toolchain(config, outcome.toolchain)
    with open_store(config.store_url) as store, InterruptHandler():
        findings = confirm_run(config, store, run_id, PairsRequest(command=as_called()))
    for line in findings.left_out:
        notice(line)
    for one in findings.regressions:
        notice(f"{one.job_id}: {change_line(one)}")
    if findings.regressions and outcome.exit_code != ExitCode.FAILED:
        return msgspec.structs.replace(outcome, exit_code=ExitCode.REGRESSION)
    return outcome


def _resumed(asked: SimpleNamespace, config_file: Path | None) -> RunOutcome:
    from farm.cli.progress import make_front
    from farm.dispatch.cluster.client.anywhere import resume

    context = click.get_current_context()
    own = {
        "resume",
        "budget_s",
        "detach",
        "build",
        "wait",
        "html",
        "junitxml",
        "pull_request",
        "as_json",
        "config_file",
    }
    given = [p for p in context.command.params if p.name not in own and is_given(context, p)]
    if given:
        raise UsageError(f"--resume keeps the options of the run: leave {given[0].opts[-1]} out")
    config = load_config(config_file)
    with make_front() as front:
        outcome = resume(config, asked.resume, front, asked.budget_s, options=_submit_options(asked, front))
    return _confirmed(config, outcome)


def _deliver(
    outcome: RunOutcome,
    pull: PullRequest | None,
    config: Config,
    *,
    html: Path | None,
    junitxml: Path | None,
    as_json: bool,
) -> int:
    from farm.report.formats.github import add_summary, run_markdown
    from farm.report.formats.spans import send_spans

    if outcome.left:
        from farm.cli.cluster.following import show_left

        return show_left(outcome, as_json=as_json)
    add_summary(lambda: run_markdown(outcome.view))
    deliver(outcome.view, report=outcome.report, html=html, junitxml=junitxml, as_json=as_json)
    post_review(pull, lambda: review_of_run(config, outcome.view))
    if problem := send_spans(outcome.view):
        notice(problem)
    if outcome.exit_code == INTERRUPTED:
        notice(f"interrupted: 'farm run --resume {outcome.view.id}' executes the missing jobs")
    return outcome.exit_code
