"""`farm status`."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from farm.cli.options import config_option
from farm.cli.output import print_json
from farm.config import load_config

if TYPE_CHECKING:
    from farm.analysis.flakiness import Record
    from farm.report.status import SickDevice
    from farm.store.records import RunStatus
    from farm.store.store import Store


@click.command("status")
@click.argument("run", required=False)
@click.option("--limit", type=click.IntRange(min=1), default=10, show_default=True, help="Most jobs of a kind.")
@click.option("--json", "as_json", is_flag=True, help="Print every job as JSON.")
@config_option
def command(run: str | None, limit: int, config_file: Path | None, *, as_json: bool) -> None:
    """Show how things stand: newly red, still red, not tested, infra, fixed, newly flaky; devices that are not fit.

    Without RUN it is about the newest nightly run of the last eight days, or else the newest run. A failure is new
    when the job did not fail the last time that it had a verdict on this kind of device.
    """
    from farm.report.status import status_lines, status_of
    from farm.store.store import open_store

    with open_store(load_config(config_file).store_url, readonly=True) as store:
        run_id = store.resolve_run(run) if run else store.run_to_show()
        shown = store.run_status(run_id) if run_id else None
        status = status_of(shown, _sick(store), store.unfinished_runs(), _records(store, shown))
    if as_json:
        print_json({"status": status})
        return
    now_ms = time.time_ns() // 1_000_000
    click.echo("\n".join(status_lines(status, now_ms, limit, shutil.get_terminal_size().columns)))


def _records(store: Store, run: RunStatus | None) -> dict[str, Record]:
    if run is None:
        return {}
    jobs = [job.job_id for job in run.jobs]
    return store.reliability(jobs, run.device_kind, run.run_id, failed_of_late=True)


def _sick(store: Store) -> list[SickDevice]:
    from farm.report.status import SickDevice

    found = []
    for device in store.registry.all():
        name = device.name or device.id
        if not device.in_service:
            found.append(SickDevice(name, "out of service", device.service_note))
        elif device.health != "healthy":
            found.append(SickDevice(name, device.health, device.health_reason))
    return found
