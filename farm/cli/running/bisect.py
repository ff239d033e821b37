"""`farm bisect`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from farm.cli.options import config_option, pairs_options
from farm.cli.output import echo, print_json, wrapped
from farm.cli.running.confirm import (
    REGRESSION,
    change,
    compared_data,
    pairs_request,
    result_data,
    say,
    table,
    what_differs,
)
from farm.config.settings import load_config
from farm.system.text import one_line

if TYPE_CHECKING:
    from collections.abc import Iterator

    from farm.regressions.bisect import BisectOutcome
    from farm.regressions.confirming import Probe
    from farm.replay.stored_result import StoredResult

_WORDS = {"confirmed": "bad", "refuted": "good", "unknown": "unknown"}


@click.command("bisect")
@click.argument("job")
@click.option("--good", required=True, metavar="RUN", help="A run before it got worse: an id, or latest~20.")
@click.option("--bad", required=True, metavar="RUN", help="A run after it: an id, or latest.")
@click.option("--metric", default="", help="Otherwise htp_cycles, or latency without them.")
@pairs_options
@click.option("--json", "as_json", is_flag=True, help="Print everything, with all samples, as JSON.")
@config_option
def command(
    job: str,
    good: str,
    bad: str,
    metric: str,
    pairs: int,
    inferences: int,
    device: str | None,
    config_file: Path | None,
    *,
    virtual: bool,
    as_json: bool,
) -> int:
    """Find the run since which JOB is worse, by running stored bundles again.

    First the whole step is measured, as by 'farm confirm'. Then, while runs are left between the last good and the
    first bad one, the bundle of one of them is compared with that of the good run. What is nearer to the bad level is
    bad. Runs of one bundle are measured once; at most 8 bundles are. Nothing is compiled unless the same bundle comes
    of it, and nothing is recorded.

    \b
    Exit codes: 0 no step is confirmed; 3 it got worse, and since when is
    told; 2 usage, or a bundle of the ends is gone; 4 no device or
    infrastructure; 130 interrupted.
    """
    from farm.regressions.bisect import bisect, find_ends
    from farm.store.store import open_store

    request = pairs_request(virtual=virtual, device=device, pairs=pairs, inferences=inferences)
    config = load_config(config_file)

    def told(past: StoredResult, probe: Probe) -> None:
        line = f"{past.run.id}  {_WORDS[probe.answer]}: {probe.reason}"
        echo("\n".join(wrapped(line)), err=as_json)

    with open_store(config.store_url, existing=True) as store:
        old, new = find_ends(store, job, good, bad)
        outcome = bisect(config, store, old, new, request, say, metric, told)
    if as_json:
        print_json(_data(outcome))
    else:
        echo("\n".join(_text(outcome)))
    return REGRESSION if outcome.found else 0


def _text(outcome: BisectOutcome) -> Iterator[str]:
    yield one_line(outcome.runs[-1].view.id)
    yield from table([outcome.whole])
    if not outcome.whole.pairs:
        yield from wrapped(outcome.whole.confirmation.reason)
    yield ""
    if outcome.found:
        yield from _found(outcome)
    else:
        said = "there is no step" if outcome.whole.confirmation.answer == "refuted" else "a step is not confirmed"
        yield from wrapped(f"{said} from {outcome.runs[0].run.id} to {outcome.runs[-1].run.id}")
    if outcome.left_out:
        yield from wrapped(f"{outcome.left_out} runs between are left out: their case is another test")
    if outcome.kind == "virtual":
        yield "VIRTUAL: times and cycles are of a simulator, not comparable with hardware"


def _found(outcome: BisectOutcome) -> Iterator[str]:
    last, first = outcome.last_good, outcome.first_bad
    yield f"last good: {last.run.id}"
    yield f"first bad: {first.run.id}"
    if outcome.bracket.exact:
        yield "exact: there is no other result between them"
    else:
        yield from wrapped(f"a range, as these cannot tell: {outcome.reason}")
    yield f"{outcome.whole.series.metric}: {change(outcome.whole.series.scale, outcome.whole.confirmation)}"
    yield from what_differs(last, first, outcome.differences)


def _data(outcome: BisectOutcome) -> dict[str, object]:
    return {
        "job": outcome.runs[-1].view.id,
        "device": outcome.device,
        "kind": outcome.kind,
        "found": outcome.found,
        "whole": compared_data(outcome.whole),
        "runs": [
            {**result_data(past), "value": value} for past, value in zip(outcome.runs, outcome.values, strict=True)
        ],
        "left_out": outcome.left_out,
        "probes": [
            {"run": outcome.runs[probe.number].run.id, "answer": probe.answer, "reason": probe.reason,
             "confirmation": probe.confirmation}
            for probe in outcome.probes
        ],
        "last_good": result_data(outcome.last_good) if outcome.found else None,
        "first_bad": result_data(outcome.first_bad) if outcome.found else None,
        "exact": outcome.found and outcome.bracket.exact,
        "reason": outcome.reason if outcome.found else "",
        "differences": outcome.differences if outcome.found else {},
    }  # fmt: skip
