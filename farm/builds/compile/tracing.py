"""Tracer of the lines of developed folders that run in this process, from before ExecuTorch's import. Torch-free.

The C tracer of coverage.py collects the lines; a coverage.py without it is too slow to be of use. In addition:

* torch's dynamo reads the bytecode of functions that it inlines, and does not run it: their lines count as run.
* The whole text of a Python file in such a folder counts if `inspect` or other code opens it, except for an import or a
  traceback.
* Another trace function, a thread that Python's `threading` did not start, a forked copy or a child process that may
  run Python makes the trace incomplete, and there is no trace.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import os
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from farm.builds.bundles.trace import FileTrace, Trace, keep_source, to_bits
from farm.builds.compile.loaded import require_older

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import CodeType, FrameType

# Characters that make a path a pattern for coverage.
_PATTERN = "*?[]{}"
_FORKS = frozenset({"os.fork", "os.forkpty", "os.system", "os.exec"})
_SPAWNS = {"subprocess.Popen": 0, "os.posix_spawn": 0, "os.spawn": 1}
"""Index of the program among the arguments of the event; the program's own arguments come next."""
# Programs that start with these may load a Python of the toolchain.
_INTERPRETERS = ("python", "pypy", "sh", "bash", "dash", "zsh", "env")
# py-cpuinfo reads the processor's data in a child process, which loads the standard library alone.
_HARMLESS_SCRIPTS = ("cpuinfo/cpuinfo.py",)
# Programs that report on a file or the machine and run no other: `platform` calls `file` on Python's executable.
_READERS = ("file", "uname", "lscpu")
_IMPORTS = "<frozen importlib._bootstrap_external>"
# Modules that read lines or names of functions only to print them, such as dynamo for its log.
_PRINTERS = ("/traceback.py", "/warnings.py", "/torch/_dynamo/funcname_cache.py")


def start_tracer(folders: Sequence[str]) -> Tracer | None:
    """Return a started tracer of `folders`.

    None without folders, if one is a pattern for coverage, or without coverage's C tracer, which alone is fast enough.
    """
    if not folders or any(set(folder) & set(_PATTERN) for folder in folders):
        return None
    try:
        importlib.import_module("coverage.tracer")
    except ImportError:
        return None
    tracer = Tracer(folders)
    tracer.start()
    return tracer


class Tracer:
    """Tracer of all code that runs from `start` on, in this process or a fork of it."""

    def __init__(self, folders: Sequence[str]) -> None:
        import coverage

        self._roots = [os.path.realpath(folder) for folder in folders]
        self._folders = list(folders)
        include = [f"{root}/*" for root in self._roots]
        self._coverage = coverage.Coverage(data_file=None, include=include, config_file=False, messages=False)
        self._lines: dict[str, set[int]] = {}
        """Lines of functions that dynamo inlined, by file."""
        self._whole: set[str] = set()
        self.problem = "it was not started"
        """Reason why there is no trace; empty while there is one."""
        self.hears_own = True
        """True while events are caused by the tracer or the builder, and are ignored."""

    def start(self) -> None:
        """Begin to watch; call it once in a process."""
        self.problem = ""
        loaded = [getattr(module, "__file__", None) or "" for module in list(sys.modules.values())]
        if early := [path for path in loaded if self._place(path) is not None]:
            self.drop(f"{early[0]} was loaded as Python started")
        sys.addaudithook(self._hear)
        self._watch_inspect()
        self._coverage.start()
        self._trace_function = sys.gettrace()
        self.hears_own = False

    def watch_dynamo(self) -> None:
        """Record the functions that dynamo inlines; call it after the import of torch."""
        try:
            from torch._dynamo.symbolic_convert import InstructionTranslatorBase as Translator
        except ImportError as error:
            self.problem = f"dynamo cannot be watched: {error}"
            return
        begin = Translator.__init__

        def watched(translator: Any, *args: Any, **kwargs: Any) -> None:
            begin(translator, *args, **kwargs)
            self._read(getattr(translator, "f_code", None))

        Translator.__init__ = watched

    def finish(self, as_of_ns: int, cache_root: Path) -> Trace | None:
        """Return the trace, None for an incomplete one, and keep the sources. This process stops watching.

        Raises InfraError for a file that is younger than the key of its bundle, OSError.
        """
        if sys.gettrace() is not self._trace_function:
            self.drop("the trace function was replaced")
        if any(isinstance(thread, threading._DummyThread) for thread in threading.enumerate()):  # noqa: SLF001 - no other name
            self.drop("a foreign thread ran Python")
        self.hears_own = True
        self._coverage.stop()
        data = self._coverage.get_data()
        measured = {path: set(data.lines(path) or ()) for path in data.measured_files()}
        loaded = {path for module in list(sys.modules.values()) if (path := getattr(module, "__file__", None))}
        roots: tuple[dict[str, FileTrace], ...] = tuple({} for _ in self._roots)
        for path in sorted({*measured, *self._lines, *self._whole, *loaded}):
            place = self._place(path)
            if place is None or not path.endswith(".py"):
                continue
            number, name = place
            real = os.path.realpath(path)
            is_watched = real == f"{self._roots[number]}/{name}"
            lines = measured.get(real, set()) | self._lines.get(real, set())
            file = Path(path)
            if as_of_ns:
                require_older(file, as_of_ns)
            source = file.read_bytes()
            sha256 = hashlib.sha256(source).hexdigest()
            keep_source(cache_root, sha256, source)
            roots[number][name] = FileTrace(sha256, to_bits(lines), real in self._whole or not is_watched)
        return None if self.problem else Trace(roots)

    def _place(self, path: str) -> tuple[int, str] | None:
        """Return the number of the root of a file, and its path there; None for a file outside of all roots."""
        for number, (root, folder) in enumerate(zip(self._roots, self._folders, strict=True)):
            for start in (root, folder):
                if path.startswith(f"{start}/"):
                    return number, path[len(start) + 1 :]
        return None

    def drop(self, problem: str) -> None:
        """Leave no trace because of `problem`; the first problem counts."""
        self.problem = self.problem or problem

    def _read(self, code: CodeType | None) -> None:
        if code is None:
            self.drop("dynamo does not list inlined code")
        elif self._place(code.co_filename) is not None:
            lines = self._lines.setdefault(os.path.realpath(code.co_filename), set())
            lines.update(line for _, _, line in code.co_lines() if line)

    def _watch_inspect(self) -> None:
        find = inspect.findsource

        def watched(thing: Any) -> Any:
            try:
                path = inspect.getsourcefile(thing) or inspect.getfile(thing)
            except TypeError:
                path = ""
            if self._place(path) is not None:
                self._whole.add(os.path.realpath(path))
            return find(thing)

        inspect.findsource = watched  # type: ignore[assignment]

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Process an audit event of Python (PEP 578)."""
        if event == "open":
            name = arguments[0]
            if self.hears_own or not isinstance(name, str | bytes):
                return
            path = os.path.abspath(os.fsdecode(name))  # noqa: PTH100 - links stay, as module paths have them
            if path.endswith(".py") and self._place(path) is not None:
                self._opened(path, sys._getframe(1))  # noqa: SLF001 - who opens it, there is no other way
        elif self.hears_own:
            return
        elif event in _FORKS:
            self.drop(event)
        elif event == "sys.settrace":
            # coverage itself sets its trace function in a new thread.
            if not sys._getframe(1).f_code.co_filename.endswith("/coverage/collector.py"):  # noqa: SLF001 - see below
                self.drop("another trace function was set")
        elif event in _SPAWNS:
            program, command = arguments[_SPAWNS[event]], arguments[_SPAWNS[event] + 1]
            if may_run_python(program, command) or any(self._names_file(word) for word in _words(command)):
                self.drop(f"it started {program or command}")

    def _names_file(self, word: str) -> bool:
        """Return whether a word of a command is the path of a traced Python file."""
        path = os.path.abspath(word)  # noqa: PTH100 - as above
        return path.endswith(".py") and self._place(path) is not None

    def _opened(self, path: str, frame: FrameType | None) -> None:
        while frame is not None and frame.f_code.co_filename.endswith(("/tokenize.py", "/linecache.py")):
            frame = frame.f_back
        opener = frame.f_code.co_filename if frame is not None else ""
        if not _is_import(frame) and not opener.endswith(_PRINTERS):
            self._whole.add(os.path.realpath(path))


def _is_import(frame: FrameType | None) -> bool:
    """Return whether a file is opened to be run, and not by a caller of `get_data` that reads its text."""
    if frame is None or frame.f_code.co_filename != _IMPORTS:
        return False
    asker = frame.f_back
    return frame.f_code.co_name != "get_data" or (asker is not None and asker.f_code.co_name == "get_code")


def may_run_python(program: object, command: object) -> bool:
    """Return whether a child process may run Python code of the toolchain: an interpreter, a shell, a script."""
    words = _words(command)
    name = os.fsdecode(program) if isinstance(program, str | bytes | os.PathLike) else (words[0] if words else "")
    if len(words) > 1 and words[1].endswith(_HARMLESS_SCRIPTS):
        return False
    if Path(name).name in _READERS:
        return False
    # A program may run another, as in `timeout 5 python`.
    if not name or any(_is_interpreter(word) for word in (name, *words)):
        return True
    import shutil

    found = shutil.which(name)
    if found is None:
        return False
    with Path(found).open("rb") as file:
        return file.read(4) != b"\x7fELF"


def _is_interpreter(word: str) -> bool:
    return Path(word).name.startswith(_INTERPRETERS) or word.endswith(".py")


def _words(command: object) -> list[str]:
    given = [command] if isinstance(command, str | bytes) else command if isinstance(command, list | tuple) else []
    return [os.fsdecode(word) for word in given if isinstance(word, str | bytes | os.PathLike)]
