"""`farm runs watch` and `farm runs cancel`: follow or end a submitted run of a shared farm."""

from __future__ import annotations

from pathlib import Path

import click

from farm.base.config.settings import load_config
from farm.base.interrupts import INTERRUPTED
from farm.cli.options import OUTPUT_FILE, json_option
from farm.cli.output import asked_server, deliver, echo, notice, opened, print_json, show

# Seconds within which even a busy agent ends the running jobs of a cancelled run.
_AWAIT_SECONDS = 15.0


@click.command("watch")
@click.argument("run", default="latest")
@click.option("--junitxml", type=OUTPUT_FILE, help="Write a JUnit XML file as well.")
@click.option("--html", type=OUTPUT_FILE, help="Write the report here as well.")
@json_option("Print the run as JSON instead of a summary.")
def watch_command(
    run: str, config_file: Path | None, *, html: Path | None, junitxml: Path | None, as_json: bool
) -> int:
    """Follow RUN on a shared farm until it ends, like the command that submitted it.

    Without RUN it is your newest. Ctrl-C asks whether to leave it running or
    to cancel it. The exit code is the run's, as of farm run; 130 for a run
    that was left or cancelled.
    """
    server = asked_server()
    if server is not None:
        from farm.cli.cluster.following import follow_there

        return follow_there(server, run, html=html, junitxml=junitxml, as_json=as_json)
    from farm.cli.cluster.following import asking, show_left
    from farm.cli.progress import make_front
    from farm.dispatch.cluster.client.attach import attach
    from farm.dispatch.cluster.client.devices import require_shared

    config = load_config(config_file)
    require_shared(config.is_shared)
    with make_front() as front:
        outcome = attach(config, run, front, asking(front))
    if outcome.left:
        return show_left(outcome, as_json=as_json)
    deliver(outcome.view, report=outcome.report, html=html, junitxml=junitxml, as_json=as_json)
    if outcome.exit_code == INTERRUPTED:
        notice(f"cancelled: 'farm run --resume {outcome.view.id}' executes the missing jobs")
    return outcome.exit_code


@click.command("cancel")
@click.argument("runs", nargs=-1, required=True, metavar="RUN...")
@click.option("--force", is_flag=True, help="Cancel a run of another user as well.")
@json_option()
def cancel_command(*, runs: tuple[str, ...], force: bool, as_json: bool, config_file: Path | None) -> None:
    """Cancel RUN on a shared farm: its jobs end at once, and its devices are free.

    Results so far are kept, and farm run --resume RUN executes the missing
    jobs. A run outside of a shared farm ends by Ctrl-C.
    """
    server = asked_server()
    if server is not None:
        done = {run: server.act("cancel", run=run, force=force) for run in dict.fromkeys(runs)}
        answer = [{"run": one.run_id} for one in done.values()]
        show({"cancelled": answer}, [one.done for one in done.values()], as_json=as_json)
        return
    from farm.dispatch.cluster.client.cancel import await_end, cancel
    from farm.dispatch.cluster.client.devices import require_shared

    require_shared(load_config(config_file).is_shared)
    with opened(config_file, existing=True) as (_, store):
        users = {}
        for run_id in dict.fromkeys(store.runs.resolve(run, own=not force) for run in runs):
            users[run_id] = user = cancel(store, run_id, store.user, force=force).user
            if not as_json:
                echo(f"run {run_id}{f' of {user}' if user != store.user else ''} is cancelled")
        ended = {run_id: await_end(store, run_id, _AWAIT_SECONDS) for run_id in users}
    for run_id in (run_id for run_id, has_ended in ended.items() if not has_ended):
        notice(f"run {run_id}: an agent does not answer: its devices are free once its leases are over")
    if as_json:
        print_json({"cancelled": [{"run": run, "user": users[run], "ended": ended[run]} for run in ended]})
