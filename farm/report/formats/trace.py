"""Run -> trace for Perfetto and chrome://tracing.

Format: "Trace Event Format", JSON object form, complete events (`ph` X) and metadata (`ph` M). Pure.
"""

from __future__ import annotations

from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import msgspec

from farm.base.text import one_line
from farm.report.formats import export_format

if TYPE_CHECKING:
    from collections.abc import Mapping

    from farm.results.attempt import Attempt
    from farm.store.records import RunView

_PROCESS = 1
_NAME_LIMIT = 200
_TEXT_LIMIT = 1000
_LONGEST_S = 1e9


@export_format("trace", suffix="trace.json", about="the timeline, for ui.perfetto.dev or chrome://tracing")
def render_trace(view: RunView) -> str:
    """Return the trace of a run as JSON."""
    return msgspec.json.encode(run_trace(view)).decode()


def run_trace(view: RunView) -> dict[str, Any]:
    """Return a trace of a run: a track for each device, a slice for each attempt, from the first start on.

    A device executes one job at a time while files of other jobs are transferred. The seconds of an attempt include
    transfers, which may precede its start. A slice ends at the latest where the next begins; `args.seconds` is the
    whole time. Attempts without a start have no track and are counted in `otherData.not_shown`.
    """
    numbered = [
        (attempt, number) for job in view.jobs for number, attempt in enumerate(job.attempts, 1) if attempt.started_ms
    ]
    kinds = {device.serial: device.kind for device in view.devices}
    serials = list(dict.fromkeys([*kinds, *sorted(attempt.device for attempt, _ in numbered)]))
    tracks = {serial: track for track, serial in enumerate(serials, start=1)}
    begin_ms = min([view.started_ms, *(attempt.started_ms for attempt, _ in numbered)])
    events = [_named("process_name", 0, f"farm run {view.id}")]
    for serial, track in tracks.items():
        kind = kinds.get(serial, "")
        events.append(_named("thread_name", track, f"{serial} ({kind})" if kind else serial or "no device"))
        on_it = sorted((one for one in numbered if one[0].device == serial), key=lambda one: one[0].started_ms)
        following = [attempt.started_ms for attempt, _ in on_it[1:]]
        for (attempt, number), next_ms in zip_longest(on_it, following):
            length = _ns(attempt.seconds)
            room = length if next_ms is None else min(length, (next_ms - attempt.started_ms) * 1_000_000)
            start = (attempt.started_ms - begin_ms) * 1_000_000
            events.append(
                _complete(attempt.job_id, attempt.verdict.value, track, start, room, _attempt_facts(attempt, number))
            )
    facts = {
        "run": view.id,
        "command": view.command,
        "device_kinds": ", ".join(sorted(set(kinds.values()))),
        "begin_ms": str(begin_ms),
        "not_shown": str(sum(len(job.attempts) for job in view.jobs) - len(numbered)),
    }
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": _clean(facts)}


def _attempt_facts(attempt: Attempt, number: int) -> dict[str, Any]:
    texts = {
        "verdict": attempt.verdict.value,
        "stage": attempt.stage.value,
        "cause": attempt.cause.value,
        "reason": attempt.reason,
        "known_issue": attempt.known_issue,
    }
    shown = {name: one_line(text, _TEXT_LIMIT) for name, text in texts.items() if text}
    return {**shown, "attempt": number, "seconds": _ns(attempt.seconds) / 1e9}


def _ns(seconds: float) -> int:
    # A negative, infinite or absurdly long time is shown with length 0.
    return round(seconds * 1e9) if 0 <= seconds < _LONGEST_S else 0


def _complete(name: str, category: str, track: int, start: int, length: int, facts: dict[str, Any]) -> dict[str, Any]:
    # The format uses microseconds; three decimal digits keep the ns.
    times = {"ts": round(start / 1000, 3), "dur": round(length / 1000, 3)}
    shown = one_line(name, _NAME_LIMIT) or "unnamed"
    return {"name": shown, "cat": category, "ph": "X", "pid": _PROCESS, "tid": track, **times, "args": facts}


def _named(what: str, track: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": _PROCESS, "tid": track, "args": {"name": one_line(name, _NAME_LIMIT)}}


def _clean(facts: Mapping[str, str]) -> dict[str, str]:
    return {one_line(key, _NAME_LIMIT): one_line(value, _NAME_LIMIT) for key, value in facts.items()}
