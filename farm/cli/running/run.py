"""`farm run`, on this machine, on a shared farm, or by the server of $FARM_SERVER."""

from __future__ import annotations

import base64
import tempfile
from collections import Counter
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import click

from farm.base.backends.registry import BACKENDS, DEFAULT_BACKEND, cpu_backends
from farm.base.config.settings import Config
from farm.base.errors import ExitCode, InfraError, UsageError
from farm.base.interrupts import INTERRUPTED
from farm.base.paths import is_suite_path
from farm.cli import options as opt
from farm.cli.output import (
    as_called,
    asked_server,
    deliver,
    echo,
    find_pull_request,
    notice,
    post_review,
    review_of_run,
    show,
    width,
)
from farm.cli.progress import Front, make_front
from farm.devices.execution.raw import MOST_SECONDS
from farm.dispatch.request.profiling import Profile
from farm.report.model import format as fmt
from farm.report.model.status import change_line
from farm.report.terminal.layout import columns, wrapped

if TYPE_CHECKING:
    from collections.abc import Collection

    from farm.dispatch.cluster.client.submit_options import SubmitOptions
    from farm.dispatch.notify.pull_request import PullRequest
    from farm.dispatch.request.request import RunOutcome, RunRequest
    from farm.dispatch.run.compiling import Compilation, CompiledJob
    from farm.serve.client import Server

# Exit codes after which --confirm measures: all jobs have ended.
_CONFIRMED_AFTER = (ExitCode.PASSED, ExitCode.FAILED, ExitCode.INFRA)
# Exit codes of several runs by urgency: the last that occurs is the exit code of the command.
_WORST = (
    ExitCode.PASSED, ExitCode.NOTHING, ExitCode.REGRESSION, ExitCode.FAILED, ExitCode.INFRA, INTERRUPTED,
)  # fmt: skip
_NO_RUN = "no run is recorded that has it: leave {} out"
_EXCLUDED: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("collect_only", _NO_RUN, ("name", "pull_request")),
    ("collect_only", "the jobs within a budget depend on the devices: leave {} out to list the jobs", ("budget_s",)),
    ("compile_only", _NO_RUN, ("name", "purpose", "pull_request")),
    ("compile_only", "--compile-only runs nothing on a device: leave {} out", (
        *opt.ATTACHED, "budget_s", "heap", "seconds", "confirm", "watch", "iterations", "warm_up",
        "exitfirst", "maxfail", "failed_first", "collect_only", "html", "junitxml",
    )),
    ("heap", "--heap times nothing: leave {} out", ("warm_up",)),
    ("confirm", "--confirm measures again: leave {} out", ("collect_only",)),
    ("rebuild", "--rebuild compiles everything once: leave {} out", ("watch", "collect_only")),
    ("detach", "a submitted run has no report yet, 'farm runs watch' writes it: leave {} out",
     ("html", "junitxml", "pull_request", "watch", "confirm")),
    ("watch", "--watch runs changed jobs until Ctrl-C: leave {} out", (
        "as_json", "pull_request", "collect_only", "confirm", "shard", "changed_since", "last_failed", "budget_s",
    )),
)  # fmt: skip
"""Parameters of a fresh run that exclude others, with the reason and the excluded ones."""


@click.command("run")
@click.option("--soc", "socs", multiple=True, metavar="SOC", help="SoC to compile for and run on; repeatable.")
@click.option("--suite", "suites", multiple=True, metavar="SUITE", help="Suite, by name or path; repeatable.")
@click.option("--backend", default=DEFAULT_BACKEND, show_default=True, metavar="BACKEND",
              help=f"{', '.join(BACKENDS)}; on {', '.join(cpu_backends())}, the CPU, any case runs.")  # fmt: skip
@click.option("--precision", "precisions", multiple=True, metavar="PRECISION",
              help="Only these precisions; repeatable.")  # fmt: skip
@opt.devices_options
@click.option("--toolchain", "toolchains", multiple=True, callback=opt.named, metavar="NAME|PATH|VERSION",
              help=f"{opt.COMPILING_TOOLCHAIN}; repeatable: one run after the other.")  # fmt: skip
@opt.purpose_options
@click.option("--resume", metavar="RUN", help="Execute the missing and skipped jobs of a run: latest, or its id.")
@click.option("--option", "options", multiple=True, metavar="NAME=VALUE[,VALUE]",
              help="Backend option; repeatable. Every combination of values is a target of its own.")  # fmt: skip
@click.option("--profile", type=click.Choice([profile.value for profile in Profile]), default=Profile.AUTO.value,
              show_default=True, help="Profiling level of every program: see farm jobs profile.")  # fmt: skip
@click.option("--heap", is_flag=True,
              help="Measure the DSP's heap alone; each iteration, 1 by default, has a process of its own.")  # fmt: skip
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
@click.option("--budget", "budget_s", metavar="TIME", callback=opt.duration,
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
              help="Timed inferences of every sample; 3 by default, 1 on virtual devices.")  # fmt: skip
@click.option("--warm-up", type=click.IntRange(0, 100_000),
              help="Inferences before those, not timed; 1 by default.")  # fmt: skip
@click.option("--seconds", type=click.IntRange(1, MOST_SECONDS), metavar="S",
              help="Programs generate text for S seconds, to measure the loss of rate by heat.")  # fmt: skip
@opt.timeout_option("Time limit of a job on the device.")
@click.option("--junitxml", type=opt.OUTPUT_FILE, help="Write a JUnit XML file as well.")
@click.option("--html", type=opt.OUTPUT_FILE, help="Write the report here as well.")
@opt.pull_request_option()
@opt.json_option("Print the run as JSON instead of a summary.")
@click.argument("words", nargs=-1, metavar="")
def command(words: tuple[str, ...], **options: Any) -> int:
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
    opt.require_no_words(words)
    asked, server = SimpleNamespace(**options), asked_server()
    if server is not None:
        return _run_there(server, asked)
    return _execute(asked)


def _execute(asked: SimpleNamespace) -> int:
    from farm.dispatch.cluster.client.anywhere import run
    from farm.dispatch.request.choose import collect

    if asked.resume is not None:
        pull = find_pull_request(asked.pull_request)
        return _deliver(_resumed(asked), pull, opt.configured(), asked)
    _check(asked)
    requests = _requests(asked)
    config = opt.configured()
    if asked.collect_only:
        from farm.dispatch.cluster.client.devices import kind_of

        for job_id in collect(config, requests[0], kind_of=kind_of):
            echo(job_id)
        return 0

    from farm.builds.toolchains.selection import use_toolchain

    pull = find_pull_request(asked.pull_request)
    if asked.watch:
        return _watched(config, requests[0], asked)
    if len(requests) > 1:
        # A missing toolchain is reported before the first run spends an hour.
        for request in requests:
            use_toolchain(config, request.toolchain)
    codes = []
    for request in requests:
        if len(requests) > 1:
            notice(f"toolchain {request.toolchain}")
        if asked.compile_only:
            codes.append(_compile_and_show(config, request))
        else:
            with make_front() as front:
                outcome = run(config, request, front, options=_submit_options(asked, front))
            codes.append(_deliver(_confirmed(config, outcome), pull, config, asked))
        if codes[-1] == INTERRUPTED:
            break
    return max(codes, key=_WORST.index)


def _compile_and_show(config: Config, request: RunRequest) -> int:
    """Compile the jobs, print the result of each, and return the exit code."""
    from farm.dispatch.run.compiling import compile_only

    with make_front() as front:
        compilation = compile_only(config, request, front)
    answer = {"exit_code": compilation.exit_code, "interrupted": compilation.interrupted, "jobs": compilation.jobs}
    show(answer, compiled_lines(compilation, width()))
    return compilation.exit_code


def compiled_lines(compilation: Compilation, columns_at_most: int) -> list[str]:
    """Return the result of each job, the reasons of failures, and the number of jobs by outcome."""
    from farm.dispatch.run.compiling import CompileOutcome

    rows = [["job", "", "took", "size", "partitions", "left to the CPU"], *map(_row, compilation.jobs)]
    counts = Counter(job.outcome for job in compilation.jobs)
    failures = [job for job in compilation.jobs if job.reason]
    lines = columns(rows, right=(2, 3, 4))
    if max(map(len, lines)) > columns_at_most:
        # A narrow terminal needs two lines a job, since neither its name nor its operators on the CPU can be cut.
        figures = columns([row[1:] for row in rows], right=(1, 2, 3), indent="  ")
        lines = [line for row, below in zip(rows, figures, strict=True) for line in (row[0], below)]
    lines = [_cut(line, columns_at_most) for line in lines]
    for job in failures:
        lines += ["", *wrapped(f"{job.job}: {job.reason}", columns_at_most)]
        lines += [f"  output of the compiler: {job.log}"] if job.log else []
    total = ", ".join(f"{counts[outcome]} {outcome}" for outcome in CompileOutcome if counts[outcome])
    return [*lines, "", f"{total}; nothing was run, and nothing is recorded"]


def _cut(line: str, most: int) -> str:
    return line if len(line) <= most else f"{line[: most - 1]}…"


def _row(job: CompiledJob) -> list[str]:
    took = f"{job.seconds:.1f} s" if job.seconds else ""
    if not job.folder:
        return [job.job, job.outcome, took, "", "", ""]
    left = ", ".join(f"{name} x{count}" for name, count in sorted(job.fallback_ops.items()))
    return [job.job, job.outcome, took, fmt.size(job.pte_bytes), str(job.partitions), left or fmt.NOTHING]


def _submit_options(asked: SimpleNamespace, front: Front) -> SubmitOptions:
    """Return the options of a submission to a shared farm."""
    from farm.cli.looking.runs import asking
    from farm.dispatch.cluster.client.submit_options import SubmitOptions

    return SubmitOptions(detach=asked.detach, build_here=asked.build == "here", wait=asked.wait, ask=asking(front))


def _watched(config: Config, request: RunRequest, asked: SimpleNamespace) -> int:
    """Run jobs again that edits touch, until Ctrl-C; return the last exit code."""
    from farm.dispatch.cluster.client.anywhere import run
    from farm.dispatch.run.watch import Watch

    code = 0

    def run_round(config: Config, request: RunRequest, front: Front, *, only: Collection[str]) -> RunOutcome:
        return run(config, request, front, options=_submit_options(asked, front), only=only)

    def after(outcome: RunOutcome) -> None:
        nonlocal code
        code = _deliver(outcome, None, config, asked)
        if code == INTERRUPTED:
            raise KeyboardInterrupt

    with suppress(KeyboardInterrupt):
        Watch(config, request, run_round).rounds(make_front, after)
    return code


def _check(asked: SimpleNamespace) -> None:
    """Raise UsageError for options of a fresh run that exclude each other."""
    missing = [option for option, values in (("--soc", asked.socs), ("--suite", asked.suites)) if not values]
    if missing:
        raise UsageError(f"{' and '.join(missing)} must be given; 'farm devices socs' and 'farm suites' list them")
    opt.refuse_attached(virtual=asked.virtual)
    for option, because, excluded in _EXCLUDED:
        if opt.given(option):
            opt.refuse_given(because, *excluded)
    several = len(asked.toolchains) > 1
    if asked.watch and (several or asked.purpose == "nightly"):
        option = "a second --toolchain" if several else "--purpose nightly"
        raise UsageError(f"--watch runs changed jobs until Ctrl-C: leave {option} out")
    if several and asked.collect_only:
        raise UsageError("the jobs of one run are listed: leave a second --toolchain out")
    if several:
        because = "{} is of one run, and every --toolchain is a run of its own: give one, or leave it out"
        opt.refuse_given(because, "html", "junitxml", "as_json", "pull_request")


def _requests(asked: SimpleNamespace) -> list[RunRequest]:
    """Return the request of a fresh run for each toolchain; most options have the name of their field."""
    from farm.builds.toolchains.selection import absolute_ref
    from farm.dispatch.pool.fleet import Choice
    from farm.dispatch.request.request import RunRequest
    from farm.dispatch.request.selection import parse_shard
    from farm.store.records import Purpose

    same = {name: value for name, value in vars(asked).items() if name in RunRequest.__struct_fields__}
    fields = same | {
        "keyword": asked.keyword or "",
        "most_failures": 1 if asked.exitfirst else asked.maxfail,
        **opt.executions(asked.iterations, asked.warm_up),
        "profile": Profile(asked.profile),
        "purpose": Purpose(asked.purpose or "local"),
        "command": as_called(),
        "choice": Choice(asked.devices, asked.labels, asked.heap),
        "shard": None if asked.shard is None else parse_shard(asked.shard),
    }
    # A run may be resumed from another folder, so paths are stored as absolute.
    refs = dict.fromkeys(map(absolute_ref, asked.toolchains)) or ("",)
    return [RunRequest(**fields, toolchain=ref) for ref in refs]


def _confirmed(config: Config, outcome: RunOutcome) -> RunOutcome:
    """Return the outcome after measuring suspected changes again, if --confirm was given."""
    if not outcome.confirm or outcome.exit_code not in _CONFIRMED_AFTER:
        return outcome
    import msgspec

    from farm.base.interrupts import InterruptHandler
    from farm.builds.toolchains.selection import use_toolchain
    from farm.numbers.regressions.confirm_run import confirm_run
    from farm.numbers.regressions.stored_pairs import PairsRequest
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


def _resumed(asked: SimpleNamespace) -> RunOutcome:
    from farm.dispatch.cluster.client.anywhere import resume

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
    names = [str(one.name) for one in click.get_current_context().command.params]
    opt.refuse_given("--resume keeps the options of the run: leave {} out", *(one for one in names if one not in own))
    config = opt.configured()
    with make_front() as front:
        outcome = resume(config, asked.resume, front, asked.budget_s, options=_submit_options(asked, front))
    return _confirmed(config, outcome)


def _deliver(outcome: RunOutcome, pull: PullRequest | None, config: Config, asked: SimpleNamespace) -> int:
    from farm.report.formats.github import add_summary, run_markdown
    from farm.report.formats.spans import send_spans

    if outcome.left:
        from farm.cli.looking.runs import show_left

        return show_left(outcome)
    add_summary(lambda: run_markdown(outcome.view))
    deliver(outcome.view, report=outcome.report, html=asked.html, junitxml=asked.junitxml)
    post_review(pull, lambda: review_of_run(config, outcome.view))
    if problem := send_spans(outcome.view):
        notice(problem)
    if outcome.exit_code == INTERRUPTED:
        notice(f"interrupted: 'farm run --resume {outcome.view.id}' executes the missing jobs")
    return outcome.exit_code


def _run_there(server: Server, asked: SimpleNamespace) -> int:
    """Start a run on the server of $FARM_SERVER, and follow it. Raises UsageError for options that it does not take."""
    from farm.serve.submission import RUN_OPTIONS

    context = click.get_current_context()
    fields = {"socs", "suites", "keyword", "name", "virtual", "detach", "resume", "html", "junitxml", "as_json"}
    sent = {
        str(option.name): (option, long)
        for option in context.command.params
        for long in option.opts
        if long in RUN_OPTIONS and opt.is_given(context, option)
    }
    opt.require_for_server({*fields, *sent})
    words: list[str] = []
    for name, (option, long) in sent.items():
        values = context.params[name]
        words += [_word(option, long, one) for one in (values if isinstance(values, tuple) else [values])]
    if asked.resume is not None:
        if words or asked.socs or asked.suites:
            raise UsageError("--resume keeps the options of the run: leave the others out")
        done = server.act("resume", run=asked.resume)
    elif asked.socs and asked.suites:
        suites = [_uploaded(server, suite) for suite in asked.suites]
        done = server.act(
            "run", soc=",".join(asked.socs), suite=",".join(suites), keyword=asked.keyword or "",
            name=asked.name or "", virtual=asked.virtual or 0, options=words, followed=not asked.detach,
        )  # fmt: skip
    else:
        raise UsageError("--soc and --suite must be given")
    if not asked.detach and not done.run_id:
        raise InfraError(f"{done.done}, and has no id yet: 'farm runs list' shows it")
    if asked.detach:
        # A server of one machine starts the command, whose run it does not know yet.
        show({"done": done.done, "run": done.run_id, "log": done.log}, [done.run_id or done.done])
        return 0
    notice(done.done)
    from farm.cli.looking.runs import follow_there

    return follow_there(server, done.run_id, html=asked.html, junitxml=asked.junitxml)


def _word(option: click.Parameter, long: str, value: object) -> str:
    if value is True:
        return long
    return f"{long}={value}s" if option.callback is opt.duration else f"{long}={value}"


def _uploaded(server: Server, suite: str) -> str:
    """Return the name of a suite on the server, after an upload of a suite that is given by its path."""
    if not is_suite_path(suite):
        return suite
    from farm.dispatch.cluster.files import suite_members
    from farm.store.objects.archive import write_archive
    from farm.suites.manifests import load_suite, resolve_suite

    loaded = resolve_suite(str(Path(suite).resolve()), {})
    manifest = Path(loaded.path)
    files = {f"suites/{manifest.parent.name}/{manifest.name}": manifest}
    # Included suites are whole, as the server reads their manifests.
    for one in {manifest, *(case.manifest for case in loaded.cases if case.manifest.is_file())}:
        for case in load_suite(one).cases:
            files |= suite_members(case)
    with tempfile.TemporaryDirectory() as folder:
        archive = Path(folder, "suite.tar")
        write_archive(files, archive)
        content = base64.b64encode(archive.read_bytes()).decode()
    return server.act("upload", name=manifest.parent.name, content=content).suite
