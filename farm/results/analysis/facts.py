"""Differences between the facts (versions, hashes) of two runs, and their names for people. Pure."""

from __future__ import annotations

from collections.abc import Mapping

CONTENTS = {
    "executorch_content": "sources of executorch",
    "torch_content": "files of torch",
    "torchao_content": "files of torchao",
    "packages_content": "packages beside torch",
    "python_content": "files of Python",
    "qnn_content": "libraries of QNN",
}
"""Names for facts whose values are hashes of content, which readers cannot interpret."""


SHORT_COMMIT = 10
"""Characters of a commit's hash that people are shown."""


def changed_facts(was: Mapping[str, str], now: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Return the differing facts, sorted by name: before and after, empty for a side without the fact.

    A content hash is skipped if one side lacks it, or if the version or commit differs as well.
    """
    return {
        name: (was.get(name, ""), now.get(name, ""))
        for name in sorted(was.keys() | now.keys())
        if was.get(name) != now.get(name) and not (name in CONTENTS and is_mute(name, was, now))
    }


def is_mute(content: str, was: Mapping[str, str], now: Mapping[str, str]) -> bool:
    """Return whether the fact `content`, from CONTENTS, adds nothing to the other facts of two runs."""
    names = [content.removesuffix("_content"), *(["commit"] if content == "executorch_content" else [])]
    return content not in was or content not in now or any(was.get(name) != now.get(name) for name in names)


def fact_row(name: str, was: str, now: str) -> tuple[str, str, str]:
    """Return a changed fact for a table: name, before, after."""
    return (CONTENTS[name], "", "changed") if name in CONTENTS else (name, was, now)


def fact_line(name: str, was: str, now: str) -> str:
    """Return a changed fact as text: `qnn: 2.47 -> 2.51`, `sources of executorch: changed`."""
    return f"{CONTENTS[name]}: changed" if name in CONTENTS else f"{name}: {was or 'nothing'} -> {now or 'nothing'}"
