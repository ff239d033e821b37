"""Which versions of the C and C++ runtime a set of ELF files asks a Linux device for."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

# Versions of symbols as GNU ld writes them into .dynstr; private ones (GLIBC_PRIVATE) have no number.
_VERSION = re.compile(rb"\0(GLIBCXX|GLIBC)_(\d+(?:\.\d+)+)(?=\0)")


def required_versions(files: Iterable[Path]) -> dict[str, str]:
    """Return the newest version of glibc (`GLIBC`) and of libstdc++ (`GLIBCXX`) that any of the files asks for.

    Taken from the strings of the files: libraries that define such versions themselves are not meant to be asked.
    """
    newest: dict[str, tuple[int, ...]] = {}
    for path in files:
        for name, text in _VERSION.findall(path.read_bytes()):
            version = tuple(int(part) for part in text.split(b"."))
            newest[name.decode()] = max(newest.get(name.decode(), ()), version)
    return {name: ".".join(map(str, version)) for name, version in sorted(newest.items())}
