"""ETDump or run -> trace for Perfetto and chrome://tracing.

Format: "Trace Event Format", JSON object form, complete events (`ph` X) and metadata (`ph` M). Pure.
"""

from __future__ import annotations

from collections import Counter
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import msgspec

from farm.base.text import one_line
from farm.report.formats import export_format
from farm.results.profile.event_names import CALL, names_node, unit_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from farm.results.attempt import Attempt
    from farm.results.profile.etdump import Block, ProfileEvent
    from farm.store.records import RunView

_PROCESS = 1
_RUNTIME_TRACK = 1
_NAME_LIMIT = 200
_TEXT_LIMIT = 1000
_LONGEST_S = 1e9

BY_CLOCK = "by the delegate's clock"
IN_PROPORTION = "in proportion to its value: the delegate gives no times"


def chrome_trace(blocks: Sequence[Block], facts: Mapping[str, str], delegates: Collection[str] = ()) -> dict[str, Any]:
    """Return a trace of all executions in an ETDump, warm-ups included, from the first event on.

    Events that the runtime timed keep their times, on one track. Nodes inside a delegate call have a track of that
    call: at the times of the delegate if these are inside the call, otherwise one after the other with lengths in
    proportion to their values, which is an illustration and not a measurement. `args.placed` of a node names the
    method. `facts` are notes for the reader.
    """
    from farm.results.profile.etdump import delegate_calls

    calls = delegate_calls((event for block in blocks for event in block.events), delegates)
    tracks = {place: _RUNTIME_TRACK + 1 + number for number, place in enumerate(calls)}
    begin = min((event.start for block in blocks for event in block.events if not event.is_delegate), default=0)
    events = [_named("process_name", 0, facts.get("job", "farm")), _named("thread_name", _RUNTIME_TRACK, "runtime")]
    events += [_named("thread_name", tracks[place], f"inside of {label}") for place, label in calls.items()]
    for number, block in enumerate(blocks):
        events += _block(block, number, begin, tracks)
    notes = {
        "placed": f"nodes of a delegate lie on a track of its call, {BY_CLOCK} or {IN_PROPORTION}; see their args",
        "executions": "all, warm-ups included",
    }
    return {"traceEvents": events, "displayTimeUnit": "ns", "otherData": {**_clean(facts), **notes}}


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


def _block(block: Block, number: int, begin: int, tracks: Mapping[tuple[int, int], int]) -> Iterable[dict[str, Any]]:
    # A delegate reports its nodes before ExecuTorch closes the event of the call.
    inside: dict[tuple[int, int], list[ProfileEvent]] = {}
    for event in block.events:
        place = (event.chain, event.instruction)
        if event.is_delegate:
            inside.setdefault(place, []).append(event)
            continue
        facts: dict[str, Any] = {
            "block": f"{one_line(block.name, _NAME_LIMIT)} {number}",
            "instruction": event.instruction,
        }
        reported = inside.pop(place, []) if event.name == CALL else []
        for about in reported:
            unit = unit_of(about.name)
            if unit and not names_node(about.name):
                facts[one_line(about.name, _NAME_LIMIT)] = about.value
        yield _complete(event.name, "runtime", _RUNTIME_TRACK, event.start - begin, event.value, facts)
        if reported:
            yield from _nodes(event, reported, begin, tracks[place])


def _nodes(call: ProfileEvent, reported: Sequence[ProfileEvent], begin: int, track: int) -> Iterable[dict[str, Any]]:
    timed = [event for event in reported if not unit_of(event.name)]
    if timed:
        inside = all(call.start <= event.start and event.end <= call.end for event in timed)
        yield from _placed(timed, begin, track) if inside else _shared(call, timed, "ns", begin, track)
        return
    nodes = [event for event in reported if names_node(event.name)]
    # Values on one track need one unit: the unit of most nodes.
    ((unit, _),) = Counter(event.unit for event in nodes).most_common(1) or [("", 0)]
    yield from _shared(call, [event for event in nodes if event.unit == unit], unit, begin, track)


def _placed(nodes: Sequence[ProfileEvent], begin: int, track: int) -> Iterable[dict[str, Any]]:
    for node in nodes:
        facts = {"ns": node.value, "placed": BY_CLOCK}
        yield _complete(node.name, "node", track, node.start - begin, node.value, facts)


def _shared(
    call: ProfileEvent, nodes: Sequence[ProfileEvent], unit: str, begin: int, track: int
) -> Iterable[dict[str, Any]]:
    total = sum(node.value for node in nodes)
    before = 0
    for node in nodes:
        # Rounded to whole ns, so that each node ends where the next begins.
        start, end = (call.value * value // total if total else 0 for value in (before, before + node.value))
        before += node.value
        facts = {unit: node.value, "placed": IN_PROPORTION}
        name = node.name.removesuffix(f" ({unit})")
        yield _complete(name, "node", track, call.start - begin + start, end - start, facts)


def _complete(name: str, category: str, track: int, start: int, length: int, facts: dict[str, Any]) -> dict[str, Any]:
    # The format uses microseconds; three decimal digits keep the ns.
    times = {"ts": round(start / 1000, 3), "dur": round(length / 1000, 3)}
    shown = one_line(name, _NAME_LIMIT) or "unnamed"
    return {"name": shown, "cat": category, "ph": "X", "pid": _PROCESS, "tid": track, **times, "args": facts}


def _named(what: str, track: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": _PROCESS, "tid": track, "args": {"name": one_line(name, _NAME_LIMIT)}}


def _clean(facts: Mapping[str, str]) -> dict[str, str]:
    return {one_line(key, _NAME_LIMIT): one_line(value, _NAME_LIMIT) for key, value in facts.items()}
