"""Marks that find and end programs on a device after the loss of their connection.

A program has the mark in its environment, which its children inherit, also in other sessions.
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
"""Script for a device's shell, with the mark as a line of its standard input, that ends every process with the mark in
its environment or command line; it looks twice, as a process just forked shows neither.

`head` prints the process before its data, and NULs are replaced before the search, because busybox's `grep` reads up to
the first NUL. The pattern differs from the mark, so that `sed` is not found.
"""


def new_mark() -> str:
    """Return a mark that no other program has: hexadecimal digits."""
    return secrets.token_hex(12)


def export_mark(mark: str) -> str:
    """Return the shell command after which every program that the shell starts has the mark."""
    return f"export {_VARIABLE}={mark}"
