"""Runs `job.run()` of the package `tool` in a folder, with or without the tracer of builders, and prints its result.

`python traced_tool.py plain ROOT` or `python traced_tool.py traced ROOT OUT CACHE [STATEMENT]`, with the file for the
trace, a cache, and a statement to run first.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from farm.builds.bundles.reuse import write_trace
from farm.builds.compile.loaded import Tracer


def _result(root: str) -> object:
    # An edit may leave the size and the second of a file as they were.
    sys.dont_write_bytecode = True
    sys.path.insert(0, root)
    return importlib.import_module("tool.job").run()


def main(how: str, root: str, *words: str) -> None:
    """Print the result of `plain` code, or of `traced` code."""
    if how == "plain":
        sys.stdout.write(repr(_result(root)))
        return
    out, cache, *first = words
    for statement in first:
        sys.path.insert(0, root)
        exec(statement)  # noqa: S102 - a test's own, in place of a file that Python runs at its start
    tracer = Tracer([root])
    result = _result(root)
    trace = tracer.finish(0, Path(cache))
    if trace is not None:
        write_trace(Path(out), trace)
    sys.stdout.write(repr(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
