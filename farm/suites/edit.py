"""A manifest edited in the tolerances of one case, with everything else in it left as its author wrote it.

tomlkit 0.15.2 puts a new key or table behind the comment of the next table.
"""

from __future__ import annotations

import itertools
import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from farm.base.errors import ConfigError

LimitsByReference = Mapping[str, Mapping[str, float]]

_HEADER = re.compile(r"\s*(\[\[?.*?\]\]?)\s*(#.*)?$")
_INLINE = re.compile(r"(\s*(?P<name>[\w-]+)\s*=\s*)(\{.*\})(\s*(?:#.*)?)$")
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
        for reference, figures in limits.items():
            path = ("case", case, "tolerance", precision, reference)
            changed = _edited(changed.splitlines(keepends=True), path, figures, comment)
    if not _says(changed, text, case, wanted):
        problem = (
            "is written in a way that farm does not edit: write these limits yourself, as the lines above have them"
        )
        raise ConfigError(file, f"case.{case}.tolerance", problem)
    return changed


def toml_limits(limits: Mapping[str, Any]) -> str:
    """Return limits, or tables of them, as a manifest has them: `{ sqnr_db = 30.0, cosine = 0.999 }`."""
    texts = (_number(one) if isinstance(one, int | float) else toml_limits(one) for one in limits.values())
    return f"{{ {', '.join(f'{name} = {text}' for name, text in zip(limits, texts, strict=True))} }}"


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


def _edited(lines: list[str], path: tuple[str, ...], figures: Mapping[str, float], comment: str) -> str:
    """Return the manifest with the limits of the table `path`: in its own table, inside of another line, or as new."""
    place, reference = path[:-1], path[-1]
    line = f"{reference} = {toml_limits(figures)}\n"
    sections = list(_sections(lines))
    for found, start, end in sections:
        if found == path:
            return "".join([*lines[:start], *_with_figures(lines[start:end], figures), *lines[end:]])
        if found[:2] == path[:2] and found == path[: len(found)]:
            for number in range(start + 1, end):
                if changed := _with_inline(lines[number], path[len(found) :], figures):
                    return "".join([*lines[:number], changed, *lines[number + 1 :]])
    for found, start, end in sections:
        if found == place:
            return _inserted(lines, _last(lines, start, end), [line])
    if any(found[:4] == place for found, _, _ in sections):
        table = [f"\n[{'.'.join(path)}]\n", *(f"{name} = {_number(value)}\n" for name, value in figures.items())]
        return _inserted(lines, _end_of(sections, lines, place), table)
    table = [f"\n[{'.'.join(place)}]{f'  # {comment}' if comment else ''}\n", line]
    return _inserted(lines, _end_of(sections, lines, place[:2]), table)


def _with_inline(line: str, keys: tuple[str, ...], figures: Mapping[str, float]) -> str:
    """Return `line`, an inline table called keys[0], with the limits below the other keys; "" for another line."""
    match = _INLINE.match(line.rstrip("\n"))
    if not match or match["name"] != keys[0]:
        return ""
    try:
        table = tomllib.loads(f"t = {match[3]}")["t"]
    except tomllib.TOMLDecodeError:
        return ""
    return f"{match[1]}{toml_limits(_nested(table, keys[1:], figures))}{match[4]}\n"


def _nested(table: Mapping[str, Any], keys: tuple[str, ...], figures: Mapping[str, float]) -> Mapping[str, Any]:
    return {**table, keys[0]: _nested(table.get(keys[0], {}), keys[1:], figures)} if keys else figures


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
