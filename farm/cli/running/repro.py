"""`farm repro`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from farm.cli.options import config_option, one_off_options
from farm.cli.output import as_called, echo, print_json
from farm.config.settings import load_config
from farm.errors import UsageError
from farm.report.model import format as fmt

if TYPE_CHECKING:
    from farm.replay.repro import ReproOutcome
    from farm.replay.stored_result import StoredResult


@click.command("repro")
@click.argument("job")
@click.option("--run", "ref", metavar="RUN", help="Its result in this run: latest, latest~1 or an id.")
@click.option("--device", help="Run it on this device: name, serial or id, or 'same' for the one it ran on.")
@click.option("--script", type=click.Path(path_type=Path, file_okay=False), metavar="FOLDER",
              help="Run nothing: write all it takes to FOLDER, with a shell script that needs adb alone.")  # fmt: skip
@one_off_options
@click.option("--json", "as_json", is_flag=True, help="Print both results as JSON instead of a table.")
@config_option
def command(
    job: str,
    ref: str | None,
    device: str | None,
    virtual: int | None,
    script: Path | None,
    iterations: int,
    warm_up: int,
    timeout_s: float,
    config_file: Path | None,
    *,
    as_json: bool,
) -> int:
    """Run a past result of JOB again, from its exact bundle, and show both side by side.

    JOB is suite/case, a whole job id, or a pattern with * and ? that only one job matches. Without --run it is the
    newest result. It runs on the SoC that it ran on, on a device of the same kind.

    \b
    Exit codes: 0 it passes now; 1 it fails now; 2 usage, or its bundle
    is gone; 4 no device or infrastructure; 130 interrupted.
    """
    from farm.replay.repro import ReproRequest, repro
    from farm.replay.stored_result import find_stored_result
    from farm.store.store import open_store

    if virtual and device:
        raise UsageError("--device is for attached devices: leave it, or --virtual, out")
    if script is not None and (device or as_json):
        raise UsageError("--script runs nothing: leave --device and --json out")
    config = load_config(config_file)
    with open_store(config.store_url, readonly=script is not None, existing=True) as store:
        past = find_stored_result(store, job, ref)
        _say(past.told)
        if script is not None:
            from farm.replay.repro_script import write_script

            told = write_script(config, past, script, _say, virtual=bool(virtual), iterations=iterations,
                                warm_up=warm_up, timeout_s=timeout_s)  # fmt: skip
            echo("\n".join(told))
            return 0
        request = ReproRequest(
            virtual=bool(virtual),
            device=device or "",
            iterations=iterations,
            warm_up=warm_up,
            timeout_s=timeout_s,
            command=as_called(),
        )
        outcome = repro(config, store, past, request, _say)
    if as_json:
        print_json(_data(outcome))
    else:
        echo("\n".join(_text(outcome)))
    return outcome.now.exit_code


def _say(text: str) -> None:
    echo(f"farm: {text}", err=True)


def _text(outcome: ReproOutcome) -> list[str]:
    past, now = outcome.past, outcome.now
    if now.attempt is None:
        return ["interrupted"]
    table = [
        ["", "then", "now"],
        ["run", past.run.id, now.run_id],
        ["device", past.attempt.device, now.attempt.device],
        ["", past.kind, now.kind],
        ["verdict", _verdict(past), now.attempt.verdict],
        *(
            [row.name, _figure(row.then, row.unit), _figure(row.now, row.unit), "=" if row.then == row.now else ""]
            for row in outcome.rows
        ),
    ]
    widths = [max(len(line[column]) for line in table) for column in range(3)]
    lines = [past.view.id, f"the same bundle, {past.attempt.bundle_key[:12]}", ""]
    for line in table:
        cells = [
            line[0].ljust(widths[0]),
            *(cell.rjust(width) for cell, width in zip(line[1:3], widths[1:], strict=True)),
        ]
        lines.append("  ".join([*cells, *line[3:]]).rstrip())
    lines += ["", f"outputs: {outcome.outputs}"]
    for when, attempt in (("then", past.attempt), ("now", now.attempt)):
        lines += [f"{when}: {attempt.reason}"] if attempt.reason else []
    lines += [
        f"differs: {name}: {was or 'nothing'} -> {now or 'nothing'}" for name, (was, now) in outcome.differences.items()
    ]
    if now.kind == "virtual":
        lines.append("VIRTUAL: times and cycles are of a simulator, not comparable with hardware")
    return [*lines, f"report: {outcome.now.report}"]


def _verdict(past: StoredResult) -> str:
    return "known issue" if past.attempt.known_issue else past.attempt.verdict


def _figure(value: float | None, unit: str) -> str:
    return fmt.NOTHING if value is None else fmt.quantity(value, unit)


def _data(outcome: ReproOutcome) -> dict[str, object]:
    past, now = outcome.past, outcome.now
    return {
        "job": past.view.id,
        "bundle": past.attempt.bundle_key,
        "then": {"run": past.run.id, "attempt_number": past.number, "kind": past.kind, "attempt": past.attempt},
        "now": {"run": now.run_id, "kind": now.kind, "attempt": now.attempt, "exit_code": now.exit_code},
        "rows": outcome.rows,
        "outputs": outcome.outputs,
        "differences": outcome.differences,
        "report": str(now.report),
    }
