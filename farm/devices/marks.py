"""How what farm starts on a device is found and ended, when its connection does not do that: by a mark.

A program has the mark in its environment, which its children inherit, also those that left its session.
"""

from __future__ import annotations

import secrets

_VARIABLE = "FARM_SESSION"

END_MARKED = r"""
read -r mark || exit 1
rest=${mark#?}
pattern="[${mark%"$rest"}]$rest"
quiet=0 round=0
while [ "$quiet" -lt 2 ] && [ "$round" -lt 50 ]; do
    round=$((round + 1))
    found=$(
        head -c 1000000 /proc/[0-9]*/environ /proc/[0-9]*/cmdline 2>/dev/null | tr '\000' '\n' |
            LC_ALL=C sed -n -e '/^==> .* <==$/h' -e "/$pattern/{g;s/[^0-9]*//;s/[^0-9].*//;p;}"
    )
    if [ -z "$found" ]; then quiet=$((quiet + 1)); sleep 0.05; continue; fi
    quiet=1
    kill -KILL $found
done 2>/dev/null
"""
"""A script for a device's shell, with the mark as a line of its standard input, which ends every process that has it in
its environment, or in its command line before it has an environment of its own; a second look after the first, as one
that was just forked shows neither.

`head` names the process before what it has, and NULs are replaced before anything looks for the mark: busybox's `grep`
reads up to the first one. The pattern is not the mark itself, so that `sed` is not found.
"""


def new_mark() -> str:
    """Return a mark that no other program has: hexadecimal digits."""
    return secrets.token_hex(12)


def export_mark(mark: str) -> str:
    """Return the shell command after which every program that the shell starts has the mark."""
    return f"export {_VARIABLE}={mark}"
