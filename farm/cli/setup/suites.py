"""`farm suites`, `farm suites tune` and `farm devices socs`."""

from __future__ import annotations

import difflib
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import click

from farm.base.errors import UnknownNameError
from farm.base.files import write_atomically
from farm.base.socs import PRECISIONS, load_socs
from farm.cli.options import ListingGroup, configured, is_json, json_option, named
from farm.cli.output import echo, notice, opened, print_json, show, width
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


@suites_command.command("tune", short_help="Suggest limits for a case, as a diff.")
@click.argument("case", callback=named, metavar="SUITE/CASE")
@click.option("--run", "ref", metavar="RUN",
              help="Take the results of this run: latest, or an id; otherwise the newest of each job.")  # fmt: skip
@click.option("--precision", "precisions", metavar="PRECISION", multiple=True,
              help="Only these precisions; repeatable.")  # fmt: skip
@click.option("--margin", type=click.FloatRange(0, 10), default=1.0, show_default=True, metavar="FACTOR",
              help="Factor of the margin, which is the distance from worst to median.")  # fmt: skip
@click.option("--looser", is_flag=True, help="Loosen limits as well, if the measurements violate them.")
@click.option("--apply", "apply_it", is_flag=True, help="Write them into the manifest; comments stay.")
@json_option("Print JSON instead of a diff.")
def tune_command(
    case: str, ref: str | None, precisions: tuple[str, ...], margin: float, *, looser: bool, apply_it: bool
) -> None:
    """Suggest limits for a case from its measurements, as a diff of its manifest.

    Every SoC and backend with a result of the case counts, by its newest
    result; a limit holds for a precision, so the worst result decides. Check
    the figures before you take them: they show the present state, not the
    correct one.

    \b
    farm suites tune my_suite/residual            the diff; nothing is written
    farm suites tune my_suite/residual --apply    written

    Exit codes: 0, also when there is nothing to change; 2 usage; 7 there
    is no result to take limits from.
    """
    from farm.dispatch.request.tuning import TuneRequest, tune
    from farm.suites.edit import with_tolerances

    unknown = [precision for precision in precisions if precision not in PRECISIONS]
    if unknown:
        raise UnknownNameError("precision", unknown[0], PRECISIONS)
    request = TuneRequest(name=case, run=ref, precisions=precisions, margin=margin, looser=looser)
    with opened(readonly=True, existing=True) as (config, store):
        tuning = tune(config, store, request)
    for line in _lines(tuning):
        notice(line)
    text, shown = tuning.manifest.read_text(encoding="utf-8"), _shown(tuning.manifest)
    changed = with_tolerances(tuning.manifest, text, tuning.case, tuning.wanted, _comment(tuning))
    diff = "".join(
        difflib.unified_diff(
            text.splitlines(keepends=True), changed.splitlines(keepends=True), fromfile=shown, tofile=shown
        )
    )
    applied = apply_it and bool(diff)
    if applied:
        write_atomically(tuning.manifest, changed, mode=tuning.manifest.stat().st_mode & 0o777)
    if is_json():
        about = {"precisions": tuning.precisions, "left_out": tuning.left_out, "diff": diff, "applied": applied}
        print_json({"manifest": str(tuning.manifest), "case": tuning.case, **about})
        return
    echo(diff, nl=False)
    notice("nothing to change" if not diff else f"{shown}: {'written' if applied else 'nothing was written'}")


def _shown(manifest: Path) -> str:
    """Return the path relative to the current folder, as `patch` takes it, if it is below that folder."""
    resolved = manifest.resolve()
    return str(resolved.relative_to(Path.cwd()) if resolved.is_relative_to(Path.cwd()) else resolved)


def _comment(tuning: Tuning) -> str:
    """Return the origin of the limits for the manifest: without runs, which exist in one store only."""
    places = (place.partition(" (")[0] for one in tuning.precisions for place in one.places)
    return f"measured on {'; '.join(dict.fromkeys(places))}"


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
    if limit.written == limit.now:
        return f"{line}, but {limit.now:.6g} stays, which is tighter: --looser writes it"
    return f"{line}, LOOSER than {limit.now:.6g}"


def _unmeasured(one: TunedPrecision) -> Iterator[str]:
    """Yield the limits that stay since nothing was measured for them."""
    seen = {(limit.reference, limit.figure) for limit in one.limits}
    for reference, figures in one.written.items():
        for name, value in figures.items():
            if (reference, name) not in seen:
                yield f"  {name} against {reference}: {value:.6g} stays, nothing was measured for it"
