"""Files that a compiler process loads: imports from source, their age, and the trace of executed lines. Torch-free."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import os
import sys
import sysconfig
import threading
from importlib.machinery import SourceFileLoader, SourcelessFileLoader
from pathlib import Path
from typing import TYPE_CHECKING, Any

import farm
from farm.base.errors import InfraError
from farm.base.hashes import CLOCK_STEP_NS, remembered_files, sha256_of
from farm.builds.bundles.cache import builder_folders
from farm.builds.bundles.key import suite_files
from farm.builds.bundles.reuse import FileTrace, Trace, keep_source, to_bits
from farm.builds.toolchains.probe import PACKAGES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from types import CodeType, FrameType

    from farm.base.hashes import HashedFile
    from farm.suites.suite import Case


# Imports from source, and a check that files are older than keys.
#
# Keys are computed before the first import. If a user saved a file between the two and restored it later, the bundles
# of the saved file would lie under the key of the restored file.


_INSTALLED = ("stdlib", "platstdlib", "purelib", "platlib")
_SITES = ("site-packages", "dist-packages")
# Prefix of QNN's libraries, which are in the keys from any folder.
_QNN = "libQnn"
_REPLACED = " (deleted)"
# Permissions of writable shared memory, such as a semaphore, which is as young as its processes and holds no code.
_SHARED_MEMORY = b"rw-s"


class LoadedFiles:
    """Modules and libraries of a toolchain that was read at `as_of_ns`; 0 turns the check off.

    Create it before other code changes sys.path.
    """

    def __init__(self, as_of_ns: int, cache_root: Path) -> None:
        self._as_of_ns, self._cache_root = as_of_ns, cache_root
        self._path = _with_targets(entry for entry in sys.path if os.path.isabs(entry))  # noqa: PTH117 - text, as below
        # Files of farm, and files that a compiler writes into the builder's folders, are in no key.
        self._own = _with_targets([os.path.dirname(farm.__file__), str(builder_folders(cache_root))])  # noqa: PTH120
        self._seen: set[str] = set()
        self._known: dict[int, list[tuple[str, HashedFile]]] | None = None
        self.problem = ""
        """Reason why bundles of this process do not belong to their keys: the first changed file; empty for none."""

    def look(self, suite: str = "") -> None:
        """Check the files loaded since the last call, except files in the folder of a suite.

        A key covers the files of its suite as of the time when the key was computed.
        """
        if not self._as_of_ns or self.problem:
            return
        found = _files_loaded() - self._seen
        self._seen |= found
        main = _main_folders()
        sites = (*(entry for entry in self._path if Path(entry).name in _SITES), *main)
        roots = (*self._path, *main)
        suites = _with_targets([suite]) if suite else ()
        for path in sorted(found):
            if _is_below(path, suites) and not _is_below(path, sites):
                continue
            if _is_below(path, roots) or Path(path).name.startswith(_QNN):
                self._look_at(path)

    def require_old(self, case: Case, suite_as_of_ns: int) -> None:
        """Check as `look` does; raise InfraError if a file of this or an earlier call is younger than the keys.

        Files in the key of `case` must not have been changed or removed since `suite_as_of_ns`, unless that is 0.
        """
        self.look(case.folder)
        if self.problem:
            raise InfraError(self.problem)
        if suite_as_of_ns:
            folders = _with_targets([case.folder])
            gone = (Path(path) for path in self._seen if _is_below(path, folders) and not Path(path).exists())
            for path in (*suite_files(case), *gone):
                require_older(path, suite_as_of_ns)

    def _look_at(self, path: str) -> None:
        if _is_below(path, self._own):
            return
        try:
            status = os.stat(path)  # noqa: PTH116
        except OSError:
            return  # memory by the name of a file, or a library that was removed
        if status.st_ctime_ns < self._as_of_ns - CLOCK_STEP_NS or self._is_as_keyed(path, status):
            return
        self.problem = self.problem or _was_changed(path)

    def _is_as_keyed(self, path: str, status: os.stat_result) -> bool:
        """Return whether only the time has changed: another link to a file, as uv makes them, or its permissions."""
        if self._known is None:
            self._known = {}
            for name, entry in remembered_files(self._cache_root):
                if 0 < entry.ctime_ns < self._as_of_ns:
                    self._known.setdefault(entry.inode, []).append((name, entry))
        names = (path, os.path.realpath(path))
        return any(
            (entry.size, entry.mtime_ns) == (status.st_size, status.st_mtime_ns)
            and any(one == name or one.endswith(f"/{name}") for one in names)
            and sha256_of(Path(path)) == entry.sha256
            for name, entry in self._known.get(status.st_ino, ())
        )


def import_from_source(developed: Iterable[str] = ()) -> None:
    """Read no bytecode, and write none, of files outside the installed packages or in the folders `developed`.

    Keys contain the source of suites and checkouts. Python runs a file of `__pycache__` instead if it records the size
    and the second of the source or is marked as unchecked, and it runs a folder's `x.pyc` without an `x.py`: a user
    with write access there could run code that is in no key.
    """
    paths = sysconfig.get_paths()
    installed = _with_targets([*(paths[name] for name in _INSTALLED), os.path.dirname(farm.__file__)])  # noqa: PTH120
    own = _with_targets(developed)
    path_stats, get_code = SourceFileLoader.path_stats, SourcelessFileLoader.get_code

    def is_installed(path: str) -> bool:
        absolute = os.path.abspath(path)  # noqa: PTH100 - once for each module
        if _is_below(absolute, own):
            return False
        return _is_below(absolute, installed) or any(part in _SITES for part in Path(absolute).parts)

    def path_stats_of_installed(loader: SourceFileLoader, path: str) -> Mapping[str, object]:
        if is_installed(path):
            return path_stats(loader, path)
        raise OSError(f"{path}: no bytecode is used")

    def code_of_installed(loader: SourcelessFileLoader, name: str) -> CodeType | None:
        if is_installed(path := loader.get_filename(name)):
            return get_code(loader, name)
        raise ImportError(f"{path} is bytecode without its source", name=name, path=path)

    SourceFileLoader.path_stats = path_stats_of_installed  # type: ignore[method-assign, assignment]
    SourcelessFileLoader.get_code = code_of_installed  # type: ignore[method-assign, assignment]


def require_older(path: Path, as_of_ns: int) -> None:
    """Raise InfraError for a file that was changed or removed since `as_of_ns`."""
    try:
        is_older = path.stat().st_ctime_ns < as_of_ns - CLOCK_STEP_NS
    except FileNotFoundError:
        is_older = False
    if not is_older:
        raise InfraError(_was_changed(path))


def _was_changed(path: Path | str) -> str:
    return f"{path} was changed after the start of the run: run it again, to compile with the present file"


def _files_loaded() -> set[str]:
    """Return the absolute paths of loaded modules and libraries."""
    found = set(_mapped_files())
    for module in list(sys.modules.values()):
        # `getattr` would make some modules import others; `__dict__` does not.
        path = getattr(module, "__dict__", {}).get("__file__")
        if isinstance(path, str) and path.startswith("/"):
            found.add(path)
    return found


def _mapped_files() -> Iterator[str]:
    for line in Path("/proc/self/maps").read_bytes().splitlines():
        mapping, slash, rest = line.partition(b"/")
        if slash and mapping.split()[1] != _SHARED_MEMORY:
            # For a replaced library, the file in its place shows the time of the change.
            yield "/" + os.fsdecode(rest).removesuffix(_REPLACED)


def _main_folders() -> tuple[str, ...]:
    """Return the folders of the main packages: targets of links, with all packages installed beside them."""
    folders: list[str] = []
    for name in PACKAGES:
        for folder in getattr(sys.modules.get(name), "__path__", ()):
            real = os.path.realpath(folder)
            above = os.path.dirname(real)  # noqa: PTH120
            folders += [folder, above if Path(above).name in _SITES else real]
    return tuple(dict.fromkeys(folders))


def _with_targets(folders: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(path for folder in folders for path in (folder, os.path.realpath(folder))))


def _is_below(path: str, folders: Iterable[str]) -> bool:
    return any(path.startswith(f"{folder}/") for folder in folders)


# Tracer of the lines of developed folders that run in this process, from before ExecuTorch's import.
#
# The C tracer of coverage.py collects the lines; a coverage.py without it is too slow to be of use. In addition:
#
# * torch's dynamo reads the bytecode of functions that it inlines, and does not run it: their lines count as run.
# * The whole text of a Python file in such a folder counts if `inspect` or other code opens it, except for an import
#   or a traceback.
# * Another trace function, a thread that Python's `threading` did not start, a forked copy or a child process that
#   may run Python makes the trace incomplete, and there is no trace.

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
    return Tracer(folders)


class Tracer:
    """Tracer of all code that runs from now on, in this process or a fork of it."""

    def __init__(self, folders: Sequence[str]) -> None:
        """Begin to watch; a process has one tracer."""
        import coverage

        self._roots = [os.path.realpath(folder) for folder in folders]
        self._folders = list(folders)
        include = [f"{root}/*" for root in self._roots]
        self._coverage = coverage.Coverage(data_file=None, include=include, config_file=False, messages=False)
        self._lines: dict[str, set[int]] = {}
        """Lines of functions that dynamo inlined, by file."""
        self._whole: set[str] = set()
        self.problem = ""
        """Reason why there is no trace; empty while there is one."""
        self.hears_own = True
        """True while events are caused by the tracer or the builder, and are ignored."""
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
