"""`farm setup toolchain`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from farm.base.backends.registry import DEFAULT_BACKEND, cpu_backends
from farm.base.config.toolchains import release_of
from farm.base.errors import UsageError
from farm.base.exit_codes import ExitCode
from farm.cli.options import SuggestingGroup, configured, json_option, named, yes_option
from farm.cli.output import require_consent, show
from farm.report.model.format import plural, short_age, size
from farm.report.terminal.layout import columns, wrapped

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from farm.builds.compile.compile_check import CompileCheck
    from farm.builds.toolchains.overview import EnvironmentRow, ToolchainRow
    from farm.builds.toolchains.toolchain import SourceState, Toolchain

# A small job of each kind of flow: quantized on a Hexagon, and float on the CPU.
_TRIED = (DEFAULT_BACKEND, *cpu_backends())
_TRIED_SUITE, _TRIED_CASE, _TRIED_SOC = "quantized_ops", "add", "SM8650"
_SHOWN_LOG_LINES = 15
# Width of the name in a table of 80 columns.
_NAME_CHARS = 24


@click.group("toolchain", cls=SuggestingGroup)
def command() -> None:
    """List, show, check and make toolchains, which compile bundles.

    A toolchain is a Python interpreter with torch and ExecuTorch, and a QNN
    SDK. farm.toml names them ([toolchain.NAME]); a path or a version of
    ExecuTorch can stand in place of a NAME.
    """


@command.command("list")
@json_option()
def list_command() -> None:
    """List toolchains, and environments that farm made.

    The list has the environment farm runs in, the tables of farm.toml, and
    environments of releases in the cache.
    """
    from farm.builds.toolchains.overview import environment_rows, toolchain_rows

    config = configured()
    rows, environments = toolchain_rows(config), environment_rows(config.cache_dir)
    answer = {"toolchains": rows, "environments": environments}
    show(answer, [*_listed(rows), *_environments(environments)])


def _listed(rows: Sequence[ToolchainRow]) -> Iterator[str]:
    from farm.builds.toolchains.overview import NOT_MADE

    head = ("name", "kind", "executorch", "torch", "qnn", "commit")
    cells = [
        (
            row.name if len(row.name) <= _NAME_CHARS else f"{row.name[: _NAME_CHARS - 1]}…",
            row.kind,
            *(row.versions.get(name, "-") for name in ("executorch", "torch")),
            row.qnn,
            _state(row.source),
        )
        for row in rows
    ]
    table = columns([head, *cells])
    yield table[0]
    for line, row in zip(table[1:], rows, strict=True):
        yield from wrapped(line) if len(line) > 80 else [line]
        if row.kind not in ("version", "qnn"):
            yield f"  {row.place}"
        if row.problem:
            hint = (
                f": farm setup toolchain make {row.place}, or the first command with it"
                if row.problem == NOT_MADE
                else ""
            )
            yield from wrapped(f"  {row.problem}{hint}")


def _state(source: SourceState) -> str:
    words = [source.commit[:10], *([source.branch] if source.branch else []), *(["dirty"] if source.dirty else [])]
    return " ".join(filter(None, words))


def _environments(rows: Sequence[EnvironmentRow]) -> Iterator[str]:
    if not rows:
        return
    yield from ("", "environments that farm made (farm setup toolchain remove VERSION)")
    yield from columns(
        [
            (row.executorch, f"torch {row.torch}", size(row.nbytes), f"used {short_age(row.used_ms)} ago",
             "" if row.current else "old: farm's own packages have changed since")
            for row in rows
        ],
        right=(2,),
        indent="  ",
    )  # fmt: skip


@command.command("show")
@click.argument("name", callback=named, metavar="NAME|PATH|VERSION")
@json_option()
def show_command(name: str) -> int:
    """Show a toolchain in full, with remarks on possible problems.

    \b
    Exit codes: 0; 2 it does not exist; 6 a part of it is missing.
    """
    from farm.builds.toolchains.prepare import prepare
    from farm.builds.toolchains.select import use_toolchain

    config = use_toolchain(configured(), name)
    tools = prepare(config)
    selected = config.toolchain
    facts = {
        "schema": 2,
        "name": tools.name or "default",
        "python": tools.compiler.python,
        "executorch": str(selected.executorch or ""),
        "checkout": str(selected.checkout or ""),
        "branch": tools.branch,
        "private": tools.private,
        "qnn": str(config.sdk_root or ""),
        "native": {target: str(folder) for target, folder in selected.native.items()},
        "runner": tools.runner,
        "versions": tools.versions,
        "environment": tools.compiler.env,
        "source": tools.source,
    }
    show(facts, _shown(facts, tools))
    return 0


def _shown(facts: dict[str, object], tools: Toolchain) -> Iterator[str]:
    source = tools.source
    branch = tools.branch or "default"
    if tools.private:
        branch = f"compared with {branch}, and never part of it"
    rows = [
        ("python", tools.compiler.python),
        ("executorch in", str(facts["executorch"])),
        ("commit", source.commit),
        ("git branch", source.branch),
        ("subject", source.subject),
        *(("submodule", f"{path} {commit[:12]}") for path, commit in source.submodules.items()),
        ("state", "dirty" if source.dirty else ""),
        *(("changed", path) for path in source.changed),
        ("branch", branch),
        ("QNN SDK", str(facts["qnn"])),
        *((f"native {target}", folder) for target, folder in dict(facts["native"]).items()),  # type: ignore[call-overload]
        ("runner", tools.runner[:16]),
    ]
    yield str(facts["name"])
    yield from columns([row for row in rows if row[1]], indent="  ")
    yield from ("", "dependencies of its bundles")
    yield from columns([(name, text[:40]) for name, text in sorted(tools.versions.items())], indent="  ")
    yield from (["", "worth a look"] if source.warnings else [])
    for warning in source.warnings:
        yield from wrapped(f"  {warning}")


@command.command("check")
@click.argument("name", callback=named, metavar="[NAME|PATH|VERSION]", default="default")
@json_option()
def check_command(name: str) -> int:
    """Compile two small jobs, and list the missing parts.

    The jobs are a quantized one for the HTP and a float one for the CPU. The
    cache is neither used nor filled.

    \b
    Exit codes: 0 both compile; 1 a job does not compile; 2 the toolchain does
    not exist; 6 a part of it is missing.
    """
    from farm.builds.compile.compile_check import try_compiling
    from farm.builds.toolchains.prepare import prepare
    from farm.builds.toolchains.select import use_toolchain
    from farm.dispatch.request.choose import jobs_of
    from farm.dispatch.request.request import RunRequest

    config = use_toolchain(configured(), name)
    tools = prepare(config, virtual=True)
    jobs = [
        next(
            job
            for job in jobs_of(config, RunRequest(socs=(_TRIED_SOC,), suites=(_TRIED_SUITE,), backend=backend))
            if job.case.name == _TRIED_CASE
        )
        for backend in _TRIED
    ]
    checks = try_compiling(config, tools, jobs)
    answer = {"name": tools.name or "default", "versions": tools.versions, "warnings": tools.source.warnings}
    show({**answer, "schema": 2, "checks": checks}, [*_tried(tools, checks)])
    return 0 if all(check.ok for check in checks) else ExitCode.FAILED


def _tried(tools: Toolchain, checks: Sequence[CompileCheck]) -> Iterator[str]:
    versions = ", ".join(f"{name} {tools.versions[name]}" for name in ("executorch", "torch", "torchao", "qnn"))
    yield from wrapped(f"{tools.name or 'default'}: {versions}")
    yield f"  {tools.compiler.python}"
    for check in checks:
        what = f"compiled, {check.pte_bytes} bytes, {check.seconds:.1f} s" if check.ok else "does not compile"
        yield f"{check.backend:<8} {what}: {check.job}"
        if not check.ok:
            yield from wrapped(f"  {check.reason}")
            yield from (f"  | {line}" for line in check.log.splitlines()[-_SHOWN_LOG_LINES:])
    for warning in tools.source.warnings:
        yield from wrapped(f"worth a look: {warning}")


@command.command("make")
@click.argument("version")
@json_option()
def make_command(version: str) -> None:
    """Make the environment of a release of ExecuTorch.

    VERSION is a release such as 1.5.0. farm makes the environment itself when --toolchain VERSION first asks for it.
    The package index is needed; packages of farm's own environment are linked.
    """
    from farm.builds.toolchains.environments import made_environment
    from farm.builds.toolchains.overview import environment_rows

    release = release_of(version)
    if not release:
        raise UsageError(f"{version!r} is no release of ExecuTorch: expected one such as 1.5.0")
    config = configured()
    folder = made_environment(config.cache_dir, release)
    rows = [row for row in environment_rows(config.cache_dir) if row.folder == str(folder)]
    lines = [f"ExecuTorch {row.executorch}, torch {row.torch}, {size(row.nbytes)} on disk" for row in rows]
    show({"folder": str(folder), "environments": rows}, [*lines, str(folder)])


@command.command("remove")
@click.argument("version")
@yes_option
@json_option()
def remove_command(version: str, *, yes: bool) -> None:
    """Remove the environments of a release from the cache."""
    from farm.builds.toolchains.overview import environment_rows, remove_environment

    rows = environment_rows(configured().cache_dir)
    chosen = [row for row in rows if row.executorch == version]
    if not chosen:
        known = ", ".join(sorted({row.executorch for row in rows})) or "none"
        raise UsageError(f"the cache has no environment with ExecuTorch {version}: there is {known}")
    removed = f"{plural(len(chosen), 'environment')}, {size(sum(row.nbytes for row in chosen))}"
    require_consent(removed, [row.folder for row in chosen], yes=yes)
    for row in chosen:
        remove_environment(row)
    show({"removed": chosen}, [f"removed {removed}"])
