"""Edits that are hard to detect: no earlier bundle is served after them, unless it is still valid.

Each case is a small package in the place of a toolchain. It is run with the tracer of builders, edited, and run again
without: if the edit does not concern the trace, both runs must have the same output. farm/builds/bundles/reuse.py
lists the known gaps.
"""

from __future__ import annotations

import functools
import hashlib
import os
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import pytest
import traced_tool
from forked_command import call

from farm.builds.bundles import reuse
from farm.builds.bundles.reuse import DevelopedRoot, read_trace
from farm.builds.compile.loaded import may_run_python


class Case(NamedTuple):
    """Edit of the last file of package `tool`."""

    old: str
    new: str
    part: str
    more: Mapping[str, str] = MappingProxyType({})


class Tool:
    """Package `tool` in a folder, traced as it is at first."""

    def __init__(self, folder: Path, files: Mapping[str, str], first: str = "") -> None:
        self.root, self.out, self.cache = (folder / name for name in ("root", "out", "cache"))
        for one in (self.root / "tool", self.out, self.cache):
            one.mkdir(parents=True)
        for name, text in {"job.py": JOB, **files}.items():
            (self.root / "tool" / name).write_text(textwrap.dedent(text).lstrip("\n"))
        self.then = self.developed()
        self.before = self.printed("traced", self.out, self.cache, *([first] if first else []))

    def developed(self) -> DevelopedRoot:
        files = {str(path.relative_to(self.root)): path for path in sorted(self.root.rglob("*.py"))}
        hashes = {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.items()}
        return DevelopedRoot.of("tool_content", self.root, hashes)

    def printed(self, how: str, *words: object) -> str:
        """Return the output of the program, or its error."""
        command = [sys.executable, traced_tool.__file__, how, str(self.root), *map(str, words)]
        done = call(command, env=os.environ, cwd=self.root, timeout_s=60)
        return done.stdout if done.returncode == 0 else f"failed: {done.stderr.splitlines()[-1]}"

    def edit(self, name: str, old: str, new: str) -> None:
        file = self.root / "tool" / name
        text = file.read_text()
        assert old in text
        file.write_text(text.replace(old, new, 1))

    @property
    def is_served(self) -> bool:
        """Return whether the earlier run serves for the present package, as `farm.builds.bundles.reuse` decides."""
        now, trace = self.developed(), read_trace(self.out)
        is_same = trace is not None and now.rest == self.then.rest
        return is_same and reuse.holds(trace, (now,), functools.partial(reuse.edit_from, self.cache))


JOB = "from tool import part\ndef run():\n    return part.answer()\n"
# fmt: off
CASES = {
    "a body that does not compile": Case("return 1", "x = 1\n    global x", """
            def helper():
                return 1
            def answer():
                return 1
            """),
    "a docstring that another function reads": Case('"one"', '"two"', """
            def helper():
                "one"
                return 1
            def answer():
                return helper.__doc__
            """),
    "a docstring that is read at import": Case('"one"', '"two"', """
            def helper():
                "one"
                return 1
            X = helper.__doc__
            def answer():
                return X
            """),
    "a function that consists of an annotation": Case("x: int", "SEEN.append(1)", """
            SEEN = []
            def note():
                x: int
            def answer():
                note()
                return SEEN
            """),
    "a module that could not be parsed and was done without": Case("X = = 1", "X = 1", """
            def answer():
                try:
                    from tool import more
                except Exception:
                    return 0
                return more.X
            """, {"more.py": "X = = 1\n"}),
    "a file that is read as data by the loader": Case("X = 1", "X = 2", """
            import pkgutil
            def answer():
                return pkgutil.get_data('tool', 'table.py')
            """, {"__init__.py": "", "table.py": "X = 1\n"}),
    "a file that is read by a name of bytes": Case("X = 1", "X = 2", """
            import os
            def answer():
                return open(os.path.join(os.path.dirname(os.fsencode(__file__)), b'table.py')).read()
            """, {"table.py": "X = 1\n"}),
    "a file that is read by a relative name": Case("X = 1", "X = 2", """
            import os
            def answer():
                os.chdir(os.path.dirname(__file__))
                return open('table.py').read()
            """, {"table.py": "X = 1\n"}),
    "a trace function that pauses": Case("return 1", "return 2", """
            import sys
            def helper():
                return 1
            def answer():
                kept = sys.gettrace()
                sys.settrace(None)
                try:
                    return helper()
                finally:
                    sys.settrace(kept)
            """),
    "a program that reads a file": Case("X = 1", "X = 2", """
            import os, subprocess
            def answer():
                file = os.path.join(os.path.dirname(__file__), 'table.py')
                return subprocess.run(['cat', file], capture_output=True).stdout
            """, {"table.py": "X = 1\n"}),
    "a generator that becomes a function": Case("yield 1", "return 0", """
            def helper():
                yield 1
            def answer():
                return bool(helper())
            """),
    "a method that a class looks for by name": Case("return 1", "return 1\n    def second(self):\n        return 1", """
            class A:
                def first(self):
                    return 1
            def answer():
                return sorted(vars(A))[-1]
            """),
    "code in a cell of its class": Case("return 1", "return __class__", """
            class M(type):
                def __new__(m, n, b, s):
                    m.seen = '__classcell__' in s
                    return super().__new__(m, n, b, s)
            class A(metaclass=M):
                def f(self):
                    return 1
            def answer():
                return M.seen
            """),
}
# fmt: on


@pytest.mark.parametrize("name", CASES)
def test_no_edit_that_changes_the_output_is_served_from_before(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    tool = Tool(tmp_path, {"part.py": case.part, **case.more})
    tool.edit([*case.more][-1] if case.more else "part.py", case.old, case.new)
    assert tool.printed("plain") != tool.before
    assert not tool.is_served


def test_what_ran_before_the_tracer_began_is_not_missed(tmp_path: Path) -> None:
    """An environment may load a toolchain as Python starts: `.pth` files and `sitecustomize` do."""
    part = "def first():\n    return 1\nX = []\ndef fill():\n    X.append(first())\ndef answer():\n    return X\n"
    tool = Tool(tmp_path, {"part.py": part}, first="from tool import part; part.fill()")
    assert tool.before == "[1]"
    tool.edit("part.py", "return 1", "return 2")
    assert not tool.is_served


def test_an_edit_that_concerns_nobody_is_served(tmp_path: Path) -> None:
    """A positive case, without which the tests above would prove nothing."""
    tool = Tool(tmp_path, {"part.py": "def helper():\n    return 1\ndef answer():\n    return 3\n"})
    assert tool.printed("plain") == tool.before == "3"
    tool.edit("part.py", "return 1", "return 5")
    assert tool.printed("plain") == tool.before
    assert tool.is_served


@pytest.mark.parametrize(
    "command",
    [
        [sys.executable, "-c", ""], ["timeout", "5", sys.executable, "-c", ""], ["nice", "python3", "x.py"],
        ["setsid", "-w", sys.executable], ["xargs", "python3"], ["env", "-i", "python3"], ["taskset", "1", "python3"],
    ],
    ids=lambda command: Path(command[0]).name,
)  # fmt: skip
def test_a_program_that_starts_python_may_run_python(command: list[str]) -> None:
    assert may_run_python(command[0], command)
    assert may_run_python(None, command)
