"""Numbers, times, ages and logs as text for people. Pure; `None` is an en dash everywhere."""

from __future__ import annotations

import math
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from farm.results.analysis.history import Record

DAY_S = 86_400
NOTHING = "–"  # noqa: RUF001 - an en dash is what a table shows for nothing


def count(value: float | None) -> str:
    """Return an integer with thousands separators."""
    # A count fits in 64 bits; a greater value is shown like a float.
    return _finite(value, lambda number: f"{round(number):,}" if abs(number) < 2**64 else f"{number:.3g}")


def decibel(value: float | None) -> str:
    """Return an SQNR without its unit; infinite for equal outputs."""
    return _finite(value, "{:.1f}".format)


def cosine(value: float | None) -> str:
    """Return a cosine similarity with six decimals: the digits after the nines matter."""
    return _finite(value, "{:.6f}".format)


def small(value: float | None) -> str:
    """Return a difference or a share to three significant digits."""
    return _finite(value, "{:.3g}".format)


def percent(share: float | None) -> str:
    """Return a share, 0 to 1, in per cent."""
    return _finite(share, lambda part: f"{100 * part:.1f} %")


def record(one: Record) -> str:
    """Return the pass rate of a job: `passed 18 of 20 (70 to 97 %), flaky since 20261121-014501-4f7a12`."""
    low, high = math.floor(100 * one.low), math.ceil(100 * one.high)
    rate = f"passed {one.passed} of {one.tries} ({low} to {high} %)"
    words = {"flaky": "flaky since", "newly flaky": "newly flaky since", "healed": "flaky before, healed in"}
    return f"{rate}, {words[one.reliability]} {one.since}" if one.since else rate


def milliseconds(value: float | None) -> str:
    """Return a time given in ms, without its unit, to about four significant digits."""
    forms = ((10, "{:.3f}"), (100, "{:.2f}"), (1000, "{:.1f}"), (math.inf, "{:,.0f}"))
    return _finite(value, lambda number: next(form.format(number) for bound, form in forms if abs(number) < bound))


def seconds(value: float | None) -> str:
    """Return a wall time given in s, without its unit."""
    return _finite(value, "{:,.1f}".format)


def rate(value: float | None) -> str:
    """Return a rate without its unit: three significant digits below 100, else a whole number."""
    # 99.97 to three significant digits is `100.`, whose point is removed.
    return _finite(value, lambda number: f"{number:#.3g}".rstrip(".") if abs(number) < 100 else count(number))


def duration(value: float) -> str:
    """Return a wall time given in s, with units: `0.4 s`, `12 s`, `3 min 05 s`, `1 h 02 min`."""
    if not math.isfinite(value) or value < 0:
        return NOTHING
    if value < 10:
        return f"{value:.1f} s"
    whole = round(value)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def quantity(value: float | None, unit: str) -> str:
    """Return a value of a measurement with its unit; ns are shown as ms, and the unit `1` is omitted."""
    if unit == "ns":
        return f"{milliseconds(None if value is None else value / 1e6)} ms"
    if unit in {"bytes", "cycles", "count"}:
        return count(value) if unit == "count" else f"{count(value)} {unit}"
    if unit in _SHORT:
        return f"{_SHORT[unit](value)} {unit}"
    return f"{_finite(value, '{:.6g}'.format)} {unit}".removesuffix(" 1")


_SHORT = {"dB": decibel, "tokens/s": rate, "C": decibel}
"""Formatters of units that are shown with fewer digits than others."""


def local_time(epoch_ms: int) -> datetime | None:
    """Return a time in this machine's zone; None for a time outside of the calendar."""
    try:
        return datetime.fromtimestamp(epoch_ms / 1000, tz=UTC).astimezone()
    except (OverflowError, OSError, ValueError):
        return None


def clock(epoch_ms: int) -> str:
    """Return a time in this machine's zone, with the zone: `2026-03-01 14:05:09 CET (UTC+01:00)`, `... UTC`."""
    moment = local_time(epoch_ms)
    if moment is None:
        return "unknown time"
    offset = moment.strftime("%z")
    zone = "UTC" if moment.tzname() == "UTC" else f"{moment.tzname()} (UTC{offset[:3]}:{offset[3:5]})"
    return f"{moment:%Y-%m-%d %H:%M:%S} {zone}"


def day(epoch_ms: int) -> str:
    """Return the day of a time in this machine's zone: `2026-03-01`."""
    moment = local_time(epoch_ms)
    return "unknown time" if moment is None else f"{moment:%Y-%m-%d}"


def plural(number: int, what: str, several: str = "") -> str:
    """Return a number of things: `1 job`, `2 jobs`."""
    return f"{number} {what if number == 1 else several or f'{what}s'}"


def first_of(names: Sequence[str], most: int, others: str = "more") -> str:
    """Return names in a row: at most `most` of them, and the number of the others."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} {others}" if len(names) > most else "")


def age(seconds: float) -> str:
    """Return an elapsed time: `3 min 05 s`, and from two days on `12 days`."""
    seconds = max(0.0, seconds)
    return f"{round(seconds / DAY_S)} days" if seconds >= 2 * DAY_S else duration(seconds)


def short_age(epoch_ms: int) -> str:
    """Return the age of a time in its greatest unit: `3 d`, `5 h`, `20 min`, `12 s`."""
    seconds = max(0.0, time.time() - epoch_ms / 1000)
    for unit, factor in (("d", DAY_S), ("h", 3600), ("min", 60)):
        if seconds >= factor:
            return f"{seconds // factor:.0f} {unit}"
    return f"{seconds:.0f} s"


def size(nbytes: int) -> str:
    """Return a size in decimal units: `512 B`, `1.5 kB`, `20.0 GB`."""
    if nbytes < 1000:
        return f"{nbytes} B"
    value, units = float(nbytes), ["GB", "MB", "kB"]
    while value >= 1000 and units:
        value, unit = value / 1000, units.pop()
    return f"{value:.1f} {unit}"


def days(seconds: float) -> str:
    """Return an elapsed time in whole days if it is at least one: `1 day`, `3 min 05 s`."""
    seconds = max(0.0, seconds)
    return plural(int(seconds // DAY_S), "day") if seconds >= DAY_S else duration(seconds)


def cut_log(text: str, limit: int) -> tuple[str, int, str]:
    """Return the head of a log, the number of characters cut after it, and the tail.

    Errors are usually at the end, so the tail gets three quarters of `limit`. A log that fits is all head.
    """
    if len(text) <= limit:
        return text, 0, ""
    head = limit // 4
    tail = limit - head
    return text[:head], len(text) - head - tail, text[-tail:] if tail else ""


def short_log(text: str, limit: int) -> str:
    """Return a log of about `limit` characters, with a note of the number of characters cut."""
    head, cut, tail = cut_log(text, limit)
    return f"{head}\n[... {cut} characters cut ...]\n{tail}" if cut else head


def share_between(least: float, most: float, value: float) -> float:
    """Return the place of `value` from `least`, 0, to `most`, 1; one half where the two are equal."""
    # Halved first: the difference of two great numbers may overflow to infinity, and half of a tiny one may be 0.
    span = most / 2 - least / 2
    return (value / 2 - least / 2) / span if span else 0.5


def _finite(value: float | None, show: Callable[[float], str]) -> str:
    """Return a finite number by `show`, and other values as a sign or a word."""
    if value is None:
        return NOTHING
    if math.isnan(value):
        return "NaN"
    return show(value) if math.isfinite(value) else "∞" if value > 0 else "-∞"
