"""`farm suites`, `farm suites tune` and `farm devices socs`."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

import click
import msgspec

from farm.base.socs import load_socs
from farm.cli.options import ListingGroup, configured, json_option, named
from farm.cli.output import notice, opened, show, width
from farm.report.terminal.layout import columns

if TYPE_CHECKING:
    from collections.abc import Iterator

    from farm.dispatch.request.tuning import TunedPrecision, Tuning
    from farm.results.analysis.tolerances import SuggestedLimit
    from farm.suites.suite import Case


@click.group("suites", cls=ListingGroup, takes_names=True)
def suites_command() -> None:
    """List suites, or the cases of some; suggest limits.

    \b
    farm suites                           the suites that farm knows
    farm suites smoke ./my_suite          the cases of those suites
    farm suites tune my_suite/residual    limits from its measurements
    """


@suites_command.command("list")
@click.argument("suite_names", nargs=-1, metavar="[NAMES]...")
@json_option("Print JSON instead of a table.")
def list_command(suite_names: tuple[str, ...]) -> None:
    """List the suites; with NAMES (or paths), the cases of those.

    The list has the jobs and precisions that a suite declares. Every case also
    runs on the CPU of any SoC: farm run --backend xnnpack.
    """
    from farm.base.backends.registry import cpu_backends
    from farm.suites.manifests import find_suites, load_suite, resolve_suite

    known = find_suites(configured().suite_folders)
    suites = [resolve_suite(name, known) for name in suite_names] or [load_suite(path) for path in known.values()]
    lines: list[str] = []
    for suite in suites:
        jobs = sum(len(case.precisions) for case in suite.cases)
        about = textwrap.fill(suite.description, min(width(), 100), initial_indent="  ", subsequent_indent="  ")
        lines += [f"{suite.name}: {len(suite.cases)} cases, {jobs} jobs a SoC", about]
        if suite_names:
            backends = {*suite.backends, *cpu_backends()}
            rows = [[case.name, f"{', '.join(case.precisions)}{_known_issues(case, backends)}"] for case in suite.cases]
            lines += [f"  {suite.path}", *columns(rows, indent="    ")]
    show({"suites": suites}, lines)


def _known_issues(case: Case, backends: set[str]) -> str:
    """Return the precisions of a case with known issues on these backends, with the number of SoCs; "" without any."""
    places = []
    for issue in case.known_issues:
        precisions = [
            precision
            for backend in issue.backends
            if backend in backends
            for precision in case.precisions_on(backend)
            if not issue.precisions or precision in issue.precisions
        ]
        if precisions:
            socs = f" on {len(issue.socs)} SoCs" if issue.socs else ""
            places.append(f"{', '.join(dict.fromkeys(precisions))}{socs}")
    return f"  (known issue: {'; '.join(places)})" if places else ""


@click.command("socs")
@json_option("Print JSON instead of a table.")
def socs_command() -> None:
    """List the SoCs that farm knows, with their hardware and backends."""
    socs = list(load_socs().values())
    rows = [["SoC", "id", "HTP", "VTCM", "LPAI", "backends", "product"]]
    for soc in socs:
        lpai = f"v{soc.lpai_version}" if soc.lpai_version else "-"
        cells = [f"V{soc.htp_arch}", f"{soc.vtcm_mb} MiB", lpai, ", ".join(soc.backends), soc.product]
        rows.append([soc.name, str(soc.soc_id), *cells])
    show({"socs": socs}, columns(rows, right=(1, 3)))


@suites_command.command("tune", short_help="Suggest limits for a case.")
@click.argument("case", callback=named, metavar="SUITE/CASE")
@click.option("--run", "ref", metavar="RUN",
              help="Take the results of this run: latest, or an id; otherwise the newest of each job.")  # fmt: skip
@json_option("Print JSON instead of tables for the manifest.")
def tune_command(case: str, ref: str | None) -> None:
    """Suggest limits for a case from its measurements, as tables for its manifest.

    Every SoC and backend with a result of the case counts, by its newest
    result; a limit holds for a precision, so the worst result decides. Check
    the figures before you take them: they show the present state, not the
    correct one. The tables are for the case in suite.toml; nothing is written.

    Exit codes: 0, also when there is nothing to change; 2 usage; 7 there
    is no result to take limits from.
    """
    from farm.dispatch.request.tuning import tune

    with opened(readonly=True, existing=True) as (config, store):
        tuning = tune(config, store, case, ref)
    for line in _lines(tuning):
        notice(line)
    changed = [one for one in tuning.precisions if one.changes]
    tables: list[str] = []
    for one in changed:
        places = dict.fromkeys(place.partition(" (")[0] for place in one.places)
        tables.append(f"[case.{tuning.case}.tolerance.{one.precision}]  # measured on {'; '.join(places)}")
        for reference, limits in one.written.items():
            tables.append(f"{reference} = {{ {', '.join(f'{name} = {limit}' for name, limit in limits.items())} }}")
    show({"schema": 2, **msgspec.structs.asdict(tuning)}, tables)
    notice(f"for {tuning.manifest}; nothing was written" if changed else "nothing to change")


def _lines(tuning: Tuning) -> Iterator[str]:
    for one in tuning.precisions:
        yield f"{one.precision}, measured on {'; '.join(one.places)}"
        yield from (f"  {_limit_line(limit)}" for limit in one.limits)
        yield from _unmeasured(one)
    yield from (f"left out: {line}" for line in tuning.left_out)


def _limit_line(limit: SuggestedLimit) -> str:
    from farm.suites.figures import FIGURES

    unit = " dB" if FIGURES[limit.figure].unit == "dB" else ""
    of = f"worst {limit.worst:.4g}{unit} on {limit.worst_place.partition(' (')[0]}, median {limit.median:.4g}{unit}"
    line = f"{limit.figure} against {limit.reference}: {of}, of {limit.observations}: {limit.suggested:.6g}{unit}"
    if not limit.would_loosen:
        return line if limit.now is None or limit.now == limit.suggested else f"{line}, tighter than {limit.now:.6g}"
    return f"{line}, but {limit.now:.6g} stays, which is tighter"


def _unmeasured(one: TunedPrecision) -> Iterator[str]:
    """Yield the limits that stay since nothing was measured for them."""
    seen = {(limit.reference, limit.figure) for limit in one.limits}
    for reference, figures in one.written.items():
        for name, value in figures.items():
            if (reference, name) not in seen:
                yield f"  {name} against {reference}: {value:.6g} stays, nothing was measured for it"
