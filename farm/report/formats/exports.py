"""RunView -> the bytes of a file in one of the formats of other tools."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from farm.store.view import RunView

SUFFIXES = {
    "jsonl": "jsonl",
    "ctrf": "ctrf.json",
    "junit": "junit.xml",
    "hud": "hud.json",
    "trace": "trace.json",
}
"""What a file in each format is called at its end; `jsonl` is written by the store: `farm.store.transfer.runs`."""


def rendered(view: RunView, form: str) -> bytes:
    """Return one run as `ctrf`, `junit`, `hud` or `trace`."""
    if form == "ctrf":
        from farm.report.formats.ctrf import render_ctrf

        return render_ctrf(view).encode() + b"\n"
    if form == "junit":
        from farm.report.formats.junit import render_junit

        return render_junit(view).encode()
    if form == "hud":
        from farm.report.formats.hud import render_hud

        return render_hud(view).encode() + b"\n"
    import msgspec

    from farm.report.formats.trace import run_trace

    return msgspec.json.encode(run_trace(view)) + b"\n"
