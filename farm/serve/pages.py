"""Values of each page from the store and an address, and the JSON that the command of the same name prints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from farm.base.errors import UsageError
from farm.dispatch.pool.inventory import DeviceRow, remembered, resolve_device, wanted_of
from farm.report.html.page import diff_values
from farm.report.model import format as fmt
from farm.report.model.alerts import by_range, change_of, remark_text, word_of
from farm.report.model.diff import read_diff
from farm.report.model.drift import drift_of, health_check_chart, health_check_p50
from farm.report.model.history import USUAL, tables
from farm.report.model.status import TITLES, counts, ended_text, purpose_text, reasons_of, unsure_lines
from farm.report.model.status_query import history_answer, read_status, records_of, steps_of
from farm.store.queries.browse import STATES, Progress, RunFilter
from farm.store.toolchains import line_text
from farm.store.view import Purpose

if TYPE_CHECKING:
    from collections.abc import Callable

    from farm.policy.situation import Lease
    from farm.serve.address import Address
    from farm.store.records import HistoryPoint
    from farm.store.store import Store

_EVENTS, _ATTEMPTS_SHOWN, _ATTEMPTS = 200, 40, 1000
_JOBS_A_PAGE = 8
_MOST_JOBS = 200
_MOST_FILES = 2000
_MOST_CASES = 1000
_MOST_PAGE = 100_000


class PageAnswer(msgspec.Struct, frozen=True):
    """Template, values and JSON document of a page."""

    template: str
    values: dict[str, Any]
    answer: Callable[[], dict[str, Any]]
    """Make the JSON document."""


def status_page(store: Store, address: Address) -> PageAnswer:
    """Return the state of the farm and its results, as `farm status`."""
    limit = address.number("limit", 20, 1, 1000)
    run = address.text("run")
    status = read_status(store, store.runs.resolve(run, own=False) if run else None, address.text("branch") or None)
    groups = []
    for standing, title in TITLES.items():
        if jobs := status.jobs(standing):
            groups.append((str(standing), title, jobs[:limit], len(jobs)))
    values = {
        "status": status,
        "groups": groups,
        "reliability": [
            (key, title, found[:limit], len(found))
            for key, title, found in (
                ("flaky", "Newly flaky", status.records("newly_flaky")),
                ("healed", "Healed", status.records("healed")),
            )
            if found
        ],
        "ranges": [(good, bad, found[:limit], len(found)) for good, bad, found in by_range(status.regressions)[:limit]],
        "counts": counts,
        "ended_text": ended_text,
        "purpose_text": purpose_text,
        "reasons_of": reasons_of,
        "record_text": fmt.record,
        "remark_text": remark_text,
        "word_of": word_of,
        "unsure": unsure_lines(status),
        "change_of": change_of,
        "progress": {one.run_id: one for one in store.browse.progress()},
        "progress_text": progress_text,
        "known": len(store.devices.all()),
        "lines": list(map(line_text, store.status.lines())),
        "shown": sorted({line_text(one.run.toolchain.line if one.run.toolchain else "") for one in status.runs}),
    }
    return PageAnswer("status.html.j2", values, lambda: {"schema": 3, "status": status})


def runs_page(store: Store, address: Address) -> PageAnswer:
    """Return all runs, newest first."""
    wanted = RunFilter(
        user=address.text("user"),
        purpose=address.one_of("purpose", [str(one) for one in Purpose]),
        soc=address.text("soc"),
        suite=address.text("suite"),
        state=address.one_of("state", STATES),
        line=address.text("branch"),
    )
    limit = address.number("limit", 25, 1, 100)
    number = address.number("page", 1, 1, _MOST_PAGE)
    found, total = store.browse.runs(wanted, limit, (number - 1) * limit)
    values = {
        "runs": found,
        "total": total,
        "wanted": wanted,
        "known": store.browse.known(),
        "lines": list(map(line_text, store.status.lines())),
        "states": STATES,
        "purposes": [str(one) for one in Purpose],
        "number": number,
        "pages": max(1, -(-total // limit)),
        "progress_text": progress_text,
    }
    return PageAnswer("runs.html.j2", values, lambda: {"schema": 2, "runs": found, "total": total})


def files_page(store: Store, address: Address, run: str) -> PageAnswer:
    """Return the artifacts of a run."""
    del address
    run_id = store.runs.resolve(run, own=False)
    files = store.browse.files(run_id, _MOST_FILES)
    return PageAnswer("files.html.j2", {"run_id": run_id, "files": files}, lambda: {"files": files})


def diff_page(store: Store, address: Address) -> PageAnswer:
    """Return the comparison of two runs, as `farm diff`."""
    names = address.text("a", "latest~1"), address.text("b", "latest")
    limit = address.number("limit", 50, 1, 1000)
    diff, virtual = read_diff(store, *(store.runs.resolve(name, own=False) for name in names))
    values = diff_values(diff, virtual=virtual)
    keys = [part.key for part in values["parts"]]
    chosen, words = address.one_of("part", keys), address.text("q").casefold().split()
    values["choices"] = [(part.key, part.title, len(part.rows)) for part in values["parts"]]
    values["parts"] = [
        part._replace(rows=[row for row in part.rows if all(word in " ".join(row).casefold() for word in words)])
        for part in values["parts"]
        if chosen in ("", part.key)
    ]
    return PageAnswer("diff.html.j2", {**values, "names": names, "limit": limit}, lambda: {"diff": diff})


def devices_page(store: Store, address: Address) -> PageAnswer:
    """Return every device in the store, without contacting it."""
    found = device_rows(store)
    socs, states = sorted({row.soc for row in found}), sorted({row.state for row in found})
    soc, state, health = address.text("soc"), address.text("state"), address.text("health")
    words = address.text("q").casefold().split()
    rows = [
        row
        for row in found
        if soc in ("", row.soc)
        and state in ("", row.state)
        and health in ("", row.health)
        and all(word in f"{row.name} {row.id} {row.product} {' '.join(row.labels)}".casefold() for word in words)
    ]
    values = {"rows": rows, "total": len(found), "socs": socs, "states": states, "soc": soc, "state": state}
    waiting, known = store.leases.waiting(), {row.id: row for row in found}
    values |= {"health": health, "waiting": [(one, wanted_of(one, known)) for one in waiting]}
    return PageAnswer("devices.html.j2", values, lambda: {"devices": rows, "waiting": waiting})


def device_page(store: Store, address: Address, device: str) -> PageAnswer:
    """Return one device, as `farm devices show`, with its recent attempts and its drift."""
    known = resolve_device(store, device, forgotten=True)
    events = store.devices.health_events(known.id, _EVENTS)
    lease = next((lease for lease in store.leases.all() if lease.device == known.id), None)
    row = remembered(known, lease)
    attempts = store.browse.on_device(known.serial, known.kind, _ATTEMPTS) if known.serial else []
    drift = drift_of(events, attempts)
    limit = address.number("limit", _ATTEMPTS_SHOWN, 1, _ATTEMPTS)
    values = {
        "device": known,
        "row": row,
        "events": events,
        "chart": health_check_chart(events),
        "attempts": attempts[:limit],
        "looked_at": len(attempts),
        "drift": drift,
        "health_check_p50": health_check_p50,
        "lease": lease,
        "host_shared": known.kind == "virtual" and known.id != known.serial,
    }
    answer = {"schema": 2, "device": known, "events": events, "now": row, "attempts": attempts[:limit], "drift": drift}
    return PageAnswer("device.html.j2", values, lambda: answer)


def history_page(store: Store, address: Address) -> PageAnswer:
    """Return numbers run by run, as `farm history`."""
    pattern, soc = address.text("job"), address.text("soc")
    metrics = tuple(one.strip() for one in address.text("metric").split(",") if one.strip())
    limit = address.number("limit", 20, 1, 200)
    number = address.number("page", 1, 1, _MOST_PAGE)
    line = store.status.line_to_show(address.text("branch") or None)
    values: dict[str, Any] = {
        "pattern": pattern,
        "soc": soc,
        "metric": ", ".join(metrics),
        "limit": limit,
        "line": line_text(line),
        "lines": list(map(line_text, store.status.lines())),
        "commit_url": store.status.newest_toolchain(line).commit_url,
        "number": number,
        "cases": store.browse.cases(_MOST_CASES),
        "socs": store.browse.known().socs,
        "tables": [],
        "jobs": 0,
        "pages": 1,
    }
    if not pattern:
        return PageAnswer("history.html.j2", values, lambda: {"points": []})
    names = store.history.job_names(pattern, soc or None)
    shown = names[(number - 1) * _JOBS_A_PAGE : number * _JOBS_A_PAGE]

    def answer() -> dict[str, Any]:
        if len(names) > _MOST_JOBS:
            raise UsageError(
                f"{len(names)} jobs match {pattern!r}, at most {_MOST_JOBS} are listed as JSON: name fewer"
            )
        asked: tuple[str | None, ...] = metrics or (None,)
        points = [point for one in asked for point in _points(store, pattern, one, soc, limit, line)]
        return history_answer(points, records_of(store, points, line), steps_of(store, points, metrics, line), line)

    found = [point for name in shown for point in _points(store, name, None, "", limit, line)]
    facts = store.history.fingerprints(point.fingerprint for point in found)
    values |= {"tables": tables(found, metrics or USUAL, facts), "jobs": len(names)}
    values |= {"records": records_of(store, found, line), "record_text": fmt.record}
    values |= {"steps": steps_of(store, found, metrics, line), "change_of": change_of, "word_of": word_of}
    values["pages"] = max(1, -(-len(names) // _JOBS_A_PAGE))
    return PageAnswer("history.html.j2", values, answer)


def _points(store: Store, pattern: str, metric: str | None, soc: str, limit: int, line: str) -> list[HistoryPoint]:
    """Return points of a branch and the local runs of the user of this server process."""
    return store.history.points(pattern, metric, soc or None, limit, line, local_runs_of=store.user)


def progress_answer(store: Store) -> dict[str, Any]:
    """Return the progress of runs and the leases of devices, which a page polls."""
    return {
        "runs": [
            {
                **msgspec.structs.asdict(one),
                "done": one.done,
                "told": progress_text(one),
            }
            for one in store.browse.progress()
        ],
        "devices": [
            {"id": row.id, "state": row.state, "held": held(row), "health": row.health, "reason": row.health_reason}
            for row in device_rows(store)
        ],
    }


def device_rows(store: Store) -> list[DeviceRow]:
    """Return every device in the store, sorted by name."""
    leases: dict[str, Lease] = {lease.device: lease for lease in store.leases.all()}
    rows = [remembered(one, leases.get(one.id)) for one in store.devices.all()]
    return sorted(rows, key=lambda row: (row.name or row.serial or row.id, row.id))


def progress_text(progress: Progress) -> str:
    """Return the progress of a run in words: `12 of 40 jobs: 11 passed, 1 failed`."""
    words = {"known": "known issues", "failed": "failed", "passed": "passed", "infra": "infra", "skipped": "skipped"}
    parts = [f"{progress.counts[key]} {word}" for key, word in words.items() if progress.counts.get(key)]
    parts += [f"{progress.skipped} skipped"] if progress.skipped else []
    jobs = f"{progress.done} of {progress.planned} jobs"
    return f"{jobs}: {', '.join(parts)}" if parts else jobs


def held(row: DeviceRow) -> str:
    """Return holder, end of the reservation and purpose of a device; empty for a free device."""
    if not row.holder:
        return ""
    until = f" until {fmt.clock(row.until_ms)}" if row.until_ms else ""
    return f"{row.holder}{until}{f', {row.purpose}' if row.purpose else ''}"
