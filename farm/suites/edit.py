"""A manifest edited in the tolerances of one case, with everything else in it left as its author wrote it.

tomlkit 0.15.2 puts a new key or table behind the comment of the next table.
"""

from __future__ import annotations

import itertools
import json
import re
import tomllib
from typing import TYPE_CHECKING, Any

from farm.base.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    LimitsByReference = Mapping[str, Mapping[str, float]]

_HEADER = re.compile(r"\s*(\[\[?.*?\]\]?)\s*(#.*)?$")
_INLINE = re.compile(r"(\s*tolerance\s*=\s*)(\{.*\})(\s*(?:#.*)?)$")
_REFERENCE = re.compile(r"(\s*(?P<name>fp32|quantized)\s*=\s*)(\{.*\})(\s*(?:#.*)?)$")
_FIGURE = re.compile(r"(\s*(?P<name>\w+)\s*=\s*)([-+\w.]+)(\s*(?:#.*)?)$")
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_QUOTES = ('"""', "'''")


def with_tolerances(file: Path, text: str, case: str, wanted: Mapping[str, LimitsByReference], comment: str) -> str:
    """Return the manifest `text` of `file` with the limits of a case, by precision and reference.

    `comment` stands behind the header of a table that is new. Raises ConfigError where the file is written so that
    these cannot be changed without other things.
    """
    changed = text if text.endswith("\n") or not text else f"{text}\n"
    for precision, limits in wanted.items():
        changed = _edited(changed.splitlines(keepends=True), case, precision, limits, comment)
    if not _says(changed, text, case, wanted):
        problem = (
            "is written in a way that farm does not edit: write these limits yourself, as the lines above have them"
        )
        raise ConfigError(file, f"case.{case}.tolerance", problem)
    return changed


def toml_limits(limits: Mapping[str, float]) -> str:
    """Return limits as a manifest has them: `{ sqnr_db = 30.0, cosine = 0.999 }`."""
    return f"{{ {', '.join(f'{name} = {_number(value)}' for name, value in limits.items())} }}"


def toml_value(value: object) -> str:
    """Return a value of JSON's kinds as a manifest has it, on one line."""
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{_key(key)} = {toml_value(one)}' for key, one in value.items())} }}"
    if isinstance(value, list):
        return f"[{', '.join(map(toml_value, value))}]"
    # TOML has no pairs of surrogates, which JSON's escapes would be, and DEL only as an escape.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _key(name: object) -> str:
    return str(name) if _BARE_KEY.fullmatch(str(name)) else json.dumps(str(name))


def _number(value: float) -> str:
    text = f"{value:.12g}"
    return text if "." in text or "e" in text else f"{text}.0"


def _says(changed: str, text: str, case: str, wanted: Mapping[str, LimitsByReference]) -> bool:
    """Return whether the changed manifest has the `wanted` limits of `case`, and is otherwise equal to `text`."""
    table = tomllib.loads(text)
    if case not in table.get("case", {}):
        return False
    tolerance = table["case"][case].setdefault("tolerance", {})
    for precision, limits in wanted.items():
        tolerance.setdefault(precision, {}).update({name: dict(figures) for name, figures in limits.items()})
    try:
        return tomllib.loads(changed) == table
    except tomllib.TOMLDecodeError:
        return False


def _edited(lines: list[str], case: str, precision: str, limits: LimitsByReference, comment: str) -> str:
    place = ("case", case, "tolerance", precision)
    sections = list(_sections(lines))
    for path, start, end in sections:
        if path == place[:2] and (found := _in_line(lines[start:end], precision, limits)):
            return "".join([*lines[:start], *found, *lines[end:]])
    if not any(path[:4] == place for path, _, _ in sections):
        table = [f"\n[{'.'.join(place)}]{f'  # {comment}' if comment else ''}\n"]
        table += [f"{reference} = {toml_limits(figures)}\n" for reference, figures in limits.items()]
        return _inserted(lines, _end_of(sections, lines, place[:2]), table)
    for reference, figures in limits.items():
        lines = _with_reference(lines, place, reference, figures).splitlines(keepends=True)
    return "".join(lines)


def _with_reference(lines: list[str], place: tuple[str, ...], reference: str, figures: Mapping[str, float]) -> str:
    sections = list(_sections(lines))
    for path, start, end in sections:
        if path == (*place, reference):
            return "".join([*lines[:start], *_with_figures(lines[start:end], figures), *lines[end:]])
        if path == place:
            for number in range(start + 1, end):
                match = _REFERENCE.match(lines[number].rstrip("\n"))
                if match and match["name"] == reference:
                    lines[number] = f"{match[1]}{toml_limits(figures)}{match[4]}\n"
                    return "".join(lines)
    for path, start, end in sections:
        if path == place:
            return _inserted(lines, _last(lines, start, end), [f"{reference} = {toml_limits(figures)}\n"])
    table = [f"\n[{'.'.join((*place, reference))}]\n", *(f"{n} = {_number(v)}\n" for n, v in figures.items())]
    return _inserted(lines, _end_of(sections, lines, place), table)


def _with_figures(lines: list[str], figures: Mapping[str, float]) -> list[str]:
    """Return the table of a reference, the header first, with these limits."""
    left = dict(figures)
    done = []
    for line in lines:
        match = _FIGURE.match(line.rstrip("\n"))
        if match and match["name"] in left:
            done.append(f"{match[1]}{_number(left.pop(match['name']))}{match[4]}\n")
        else:
            done.append(line)
    end = _last(done, 0, len(done))
    return [*done[:end], *(f"{name} = {_number(value)}\n" for name, value in left.items()), *done[end:]]


def _in_line(lines: list[str], precision: str, limits: LimitsByReference) -> list[str] | None:
    """Return the table of a case with its `tolerance = { .. }` changed; None where it has none on one line."""
    for number, line in enumerate(lines):
        match = _INLINE.match(line.rstrip("\n"))
        if not match:
            continue
        try:
            table: dict[str, Any] = tomllib.loads(f"t = {match[2]}")["t"]
        except tomllib.TOMLDecodeError:
            return None
        table.setdefault(precision, {}).update(limits)
        parts = (f"{name} = {{ {_references(by_reference)} }}" for name, by_reference in table.items())
        return [*lines[:number], f"{match[1]}{{ {', '.join(parts)} }}{match[3]}\n", *lines[number + 1 :]]
    return None


def _references(limits: LimitsByReference) -> str:
    return ", ".join(f"{reference} = {toml_limits(one)}" for reference, one in limits.items())


def _sections(lines: list[str]) -> Iterator[tuple[tuple[str, ...], int, int]]:
    """Yield the tables: the path of each, its first line and the one after its last."""
    heads = [(0, ()), *_headers(lines), (len(lines), ())]
    for (start, path), (end, _) in itertools.pairwise(heads):
        yield path, start, end


def _headers(lines: list[str]) -> Iterator[tuple[int, tuple[str, ...]]]:
    quote = ""
    for number, line in enumerate(lines):
        if not quote and (match := _HEADER.match(line.rstrip("\n"))) and (path := _path(match[1])):
            yield number, path
        for mark in _QUOTES:
            if (not quote or mark == quote) and line.count(mark) % 2:
                quote = "" if quote else mark


def _path(header: str) -> tuple[str, ...]:
    """Return the keys of `[a.b]` or `[[a.b]]`; none for another line, such as an element of a list."""
    try:
        table: Any = tomllib.loads(header)
    except tomllib.TOMLDecodeError:
        return ()
    path = []
    while isinstance(table, dict) and table:
        [(name, table)] = table.items()
        path.append(name)
        table = table[0] if isinstance(table, list) and table else table
    return tuple(path)


def _end_of(sections: list[tuple[tuple[str, ...], int, int]], lines: list[str], place: tuple[str, ...]) -> int:
    """Return the line after the last that belongs to the tables below `place`."""
    mine = [(start, end) for path, start, end in sections if path[: len(place)] == place]
    return _last(lines, *mine[-1]) if mine else len(lines)


def _last(lines: list[str], start: int, end: int) -> int:
    """Return the line after the last between `start` and `end` that is neither empty nor a comment."""
    while end > start + 1 and (not lines[end - 1].strip() or lines[end - 1].lstrip().startswith("#")):
        end -= 1
    return end


def _inserted(lines: list[str], at: int, new: list[str]) -> str:
    return "".join([*lines[:at], *new, *lines[at:]])
