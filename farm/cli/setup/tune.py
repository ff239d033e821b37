"""`farm suites tune`."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import TYPE_CHECKING

import click

from farm.cli.options import json_option, named
from farm.cli.output import echo, notice, opened, print_json

if TYPE_CHECKING:
    from collections.abc import Iterator

    from farm.dispatch.request.tuning import TunedPrecision, Tuning
    from farm.results.analysis.tolerances import SuggestedLimit


@click.command("tune", short_help="Suggest limits for a case, as a diff.")
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
    case: str,
    ref: str | None,
    precisions: tuple[str, ...],
    margin: float,
    config_file: Path | None,
    *,
    looser: bool,
    apply_it: bool,
    as_json: bool,
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
    from farm.base.atomic import write_atomically
    from farm.base.socs import PRECISIONS
    from farm.dispatch.request.tuning import TuneRequest, tune
    from farm.suites.edit import with_tolerances

    unknown = [precision for precision in precisions if precision not in PRECISIONS]
    if unknown:
        from farm.base.errors import UnknownNameError

        raise UnknownNameError("precision", unknown[0], PRECISIONS)
    request = TuneRequest(name=case, run=ref, precisions=precisions, margin=margin, looser=looser)
    with opened(config_file, readonly=True, existing=True) as (config, store):
        tuning = tune(config, store, request)
    for line in _lines(tuning):
        notice(line)
    text, shown = tuning.manifest.read_text(encoding="utf-8"), _shown(tuning.manifest)
    changed = with_tolerances(tuning.manifest, text, tuning.case, tuning.wanted, _comment(tuning))
    diff = "".join(
        difflib.unified_diff(
            text.splitlines(keepends=True),
            changed.splitlines(keepends=True),
            fromfile=shown,
            tofile=shown,
        )
    )
    applied = apply_it and bool(diff)
    if applied:
        write_atomically(tuning.manifest, changed, mode=tuning.manifest.stat().st_mode & 0o777)
    if as_json:
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
