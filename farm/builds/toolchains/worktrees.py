"""Commits of a checkout's repository, which is only read, and source trees of single commits in the cache."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import shutil
import sys
import time
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path, PurePosixPath

import msgspec

from farm.base.backends.registry import cpu_backends
from farm.base.config.settings import Config
from farm.base.config.toolchains import ToolchainConfig
from farm.base.errors import InfraError, NativeBuildError, UsageError
from farm.base.files import is_at, make_folders, published, withdraw
from farm.base.git import ask_git, git
from farm.base.hashes import digest_of, name_of
from farm.base.processes import Supervisor, ending
from farm.builds.bundles.cache import folder_size
from farm.builds.toolchains.selection import package_in, require_libraries

# Repository of a checkout: commits, their changes, and untracked outputs. It is only read, never changed.


_SUBMODULE = "160000"
# Files that decide about the native parts of a checkout: sources, generators and build files.
_NATIVE_SUFFIXES = frozenset(
    (".c", ".cc", ".cpp", ".cxx", ".h", ".hh", ".hpp", ".hxx", ".inc", ".inl", ".s", ".cu", ".cuh", ".fbs", ".proto",
     ".cmake", ".lds", ".map")
)  # fmt: skip
_NATIVE_NAMES = frozenset(("CMakeLists.txt", "CMakePresets.json", "setup.py", "build.sh"))
_GENERATORS = ("codegen/", "tools/cmake/")
_YAML = frozenset((".yaml", ".yml"))
# Backends that farm compiles and runs with; other folders of backends are ignored.
_BACKENDS = frozenset(("qualcomm", *cpu_backends()))
_UNUSED = frozenset(("test", "tests", "testing", "benchmark", "benchmarks", "docs", "examples", "android", "apple"))
# Untracked folders of a checkout that no compiler needs.
_NO_OUTPUT = frozenset(
    ("__pycache__", ".git", ".venv", "venv", "node_modules", ".mypy_cache", ".pytest_cache", ".ruff_cache", ".cache",
     ".idea", ".vscode", ".hypothesis")
)  # fmt: skip
_EXPORT_SECONDS = 600.0
_LOADED = ("*.so", "*.so.*", "*.pyd", "*.dylib")
_FIELDS = "%H%x00%P%x00%an <%ae>%x00%aI%x00%s"


class Commit(msgspec.Struct, frozen=True):
    """Commit of a repository."""

    sha: str
    """Full hash."""
    parents: tuple[str, ...]
    author: str
    """`name <address>`."""
    date: str
    """Time of the author's commit, ISO 8601."""
    subject: str

    @property
    def short(self) -> str:
        """First ten digits of the hash."""
        return self.sha[:10]


class Checkout:
    """Repository of a source tree of ExecuTorch; values are read once and kept."""

    def __init__(self, folder: Path) -> None:
        """Raise UsageError unless `folder` is the top folder of a repository, MissingToolError without git."""
        if not folder.is_dir():
            raise UsageError(f"{folder}: no such folder: name a checkout of ExecuTorch")
        self.folder = folder.resolve()
        top = Path(git(self.folder, "rev-parse", "--show-toplevel").rstrip("\n"))
        if top.resolve() != self.folder:
            raise UsageError(f"{folder} is inside the repository {top}: name its top folder")
        self.objects = self._path("objects")
        self.key = hashlib.sha256(str(self._path(".")).encode()).hexdigest()[:16]
        """Key of the repository, the same for all of its worktrees."""

    def _path(self, name: str) -> Path:
        """Return a path in the folder that all worktrees of the repository share."""
        common = git(self.folder, "rev-parse", "--git-common-dir").rstrip("\n")
        return (self.folder / common / name).resolve()

    @cached_property
    def object_format(self) -> str:
        """`sha1` or `sha256`."""
        return git(self.folder, "rev-parse", "--show-object-format").strip()

    def commit(self, ref: str) -> Commit:
        """Return the commit that `ref` names. Raises UsageError."""
        if ref.startswith("-"):
            raise UsageError(f"{ref!r} is no commit")
        code, text = ask_git(
            self.folder, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{ref}^{{commit}}", okay=(0, 1, 128)
        )
        if code:
            raise UsageError(f"{self.folder} has no commit {ref!r}: 'git fetch' may bring it")
        [found] = _commits(git(self.folder, "log", "-1", "-z", f"--format={_FIELDS}", text.strip()))
        return found

    def between(self, good: Commit, bad: Commit) -> list[Commit]:
        """Return the commits after `good` up to `bad`, oldest first, along first parents: a merge is one commit.

        Raises UsageError if `good` is not an ancestor of `bad`.
        """
        if good.sha == bad.sha:
            raise UsageError(f"{good.short} is both ends: name a good commit that is older than the bad one")
        code, _ = ask_git(self.folder, "merge-base", "--is-ancestor", good.sha, bad.sha, okay=(0, 1))
        if code:
            code, text = ask_git(self.folder, "merge-base", good.sha, bad.sha, okay=(0, 1))
            base = text.split()[0] if text.split() else ""
            if base == bad.sha:
                hint = f"it is the other way round: try {bad.short}..{good.short}"
            elif base:
                hint = f"both come from {base[:10]}: try {base[:10]}..{bad.short}"
            else:
                hint = "is the clone a shallow one?"
            raise UsageError(f"{good.short} is no ancestor of {bad.short}: {hint}")
        span = f"{good.sha}..{bad.sha}"
        text = git(self.folder, "log", "--first-parent", "--reverse", "-z", f"--format={_FIELDS}", span)
        return _commits(text)

    def files(self, commit: Commit) -> dict[str, str]:
        """Return mode and hash of every file and submodule of a commit, by path."""
        found = {}
        for entry in git(self.folder, "ls-tree", "-r", "-z", commit.sha).split("\0"):
            if entry:
                facts, path = entry.split("\t", 1)
                mode, _, sha = facts.split(" ")
                found[path] = f"{mode} {sha}"
        return found

    def changed_files(self, commit: Commit) -> list[str]:
        """Return the changes of a commit against its first parent: status and path, as `M\texir/emit.py`."""
        since = [f"{commit.sha}^1"] if commit.parents else []
        raw = git(
            self.folder, "diff-tree", "-r", "-z", "--name-status", "--no-renames", "--no-commit-id", "--root", *since,
            commit.sha,
        )  # fmt: skip
        parts = raw.split("\0")
        return [f"{status}\t{path}" for status, path in zip(parts[::2], parts[1::2], strict=False) if path]

    def submodules(self, commit: Commit) -> dict[str, str]:
        """Return the commits that a commit pins, by the path of the submodule."""
        files = self.files(commit).items()
        return {path: facts.split(" ")[1] for path, facts in files if facts.startswith(_SUBMODULE)}

    def native_key(self, commit: Commit) -> str:
        """Return a hash of the sources of the native parts at a commit."""
        return digest_of(sorted(one for one in self.files(commit).items() if is_native(*one)))

    @cached_property
    def built_key(self) -> str:
        """Hash like `native_key` for the files of the checkout; with edited native sources no commit has it."""
        head = self.commit("HEAD")
        options = ("--raw", "--no-renames", "--no-ext-diff", "--ignore-submodules=dirty", "-z")
        raw = git(self.folder, *self._no_filters(), "diff", *options, "HEAD")
        parts = raw.split("\0")
        # `:MODE MODE HASH HASH STATUS` and the path in turns.
        pairs = zip(parts[::2], parts[1::2], strict=False)
        edited = [(path, "edited") for facts, path in pairs if is_native(path, facts[1:])]
        return digest_of(sorted([(head.sha, "edited"), *edited])) if edited else self.native_key(head)

    def _no_filters(self) -> list[str]:
        """Return options that keep git from running configured filters on changed files."""
        _, text = ask_git(self.folder, "config", "--name-only", "-z", "--get-regexp", r"^filter\.", okay=(0, 1))
        names = {name.rpartition(".")[0] for name in text.split("\0") if name}
        parts = ("clean=", "smudge=", "process=", "required=false")
        off = (f"{name}.{part}" for name in sorted(names) for part in parts)
        return [word for setting in off for word in ("-c", setting)]

    @cached_property
    def outputs(self) -> tuple[str, ...]:
        """Ignored and untracked files, and whole folders (with a `/` at the end), that a compiler may need.

        Paths are relative. Of untracked files only libraries are listed: the others are the user's own.
        """
        return tuple(outputs_of(self.folder))


def outputs_of(folder: Path, *, own: bool = False) -> Iterator[str]:
    """Yield the paths of `Checkout.outputs` for the folder of any repository."""
    listed = ("ls-files", "--others", "--exclude-standard", "-z")
    ignored = git(folder, *listed, "--ignored", "--directory", own=own).split("\0")
    unknown = git(folder, *listed, "--", *(f":(glob)**/{pattern}" for pattern in _LOADED), own=own).split("\0")
    for path in sorted({*ignored, *unknown} - {""}):
        parts = PurePosixPath(path).parts
        if not _NO_OUTPUT.intersection(parts) and not path.endswith((".pyc", ".egg-info/", ".o", ".log")):
            yield path


def make_borrowing(folder: Path, own: Path, repository: Checkout, *options: str) -> None:
    """Make a repository in `folder` with the git folder `own`, which refers to the objects of `repository`.

    `options` are options of `git init`.
    """
    folder.mkdir(parents=True)
    words = ("init", "--quiet", "--template=", f"--object-format={repository.object_format}", *options)
    git(folder, *words, own=True)
    (own / "objects" / "info").mkdir(parents=True, exist_ok=True)
    (own / "objects" / "info" / "alternates").write_text(f"{repository.objects}\n", encoding="utf-8")
    if (shallow := repository.objects.with_name("shallow")).is_file():
        shutil.copyfile(shallow, own / "shallow")


def export(tree: Path, repository: Checkout, commit: Commit) -> None:
    """Make `tree`, a repository of its own with the files of a commit and without submodules.

    The tree refers to the objects of `repository`. Raises UsageError for a repository that lacks some of them.
    """
    make_borrowing(tree, tree / ".git", repository)
    try:
        # These settings give the same bytes on every machine, independent of its configuration.
        settings = ("-c", "core.autocrlf=false", "-c", "core.symlinks=true", "-c", "advice.detachedHead=false")
        git(tree, *settings, "checkout", "--quiet", "--detach", commit.sha, timeout_s=_EXPORT_SECONDS, own=True)
    except UsageError as error:
        raise UsageError(
            f"{repository.folder}: {commit.short} is not all here (a partial clone?): {error}: 'git fetch --refetch'"
        ) from None


def is_native(path: str, facts: str = "") -> bool:
    """Return whether a file takes part in farm's native parts, or a submodule, by the `facts` of `files`."""
    pure = PurePosixPath(path)
    folders = pure.parts[:-1]
    if _UNUSED.intersection(folders) or (len(folders) > 1 and folders[0] == "backends" and folders[1] not in _BACKENDS):
        return False
    if facts.startswith(_SUBMODULE):
        return True
    suffix = pure.suffix.lower()
    if suffix in _NATIVE_SUFFIXES or pure.name in _NATIVE_NAMES or path.startswith(_GENERATORS):
        return True
    return suffix in _YAML and folders[:1] == ("kernels",)


def _commits(text: str) -> list[Commit]:
    """Return the commits that git printed in _FIELDS, each ended by NUL."""
    # Messages and names may be in any encoding.
    fields = text.encode(errors="surrogateescape").decode(errors="replace").removesuffix("\0").split("\0")
    rows = (fields[at : at + 5] for at in range(0, len(fields) - 4, 5))
    return [
        Commit(sha.strip(), tuple(parents.split()), author, date, subject)
        for sha, parents, author, date, subject in rows
    ]


# Source trees of single commits in the cache: files of the checkout's repository at that commit, and built parts.
#
# A worktree is a separate repository that refers to the objects of the user's repository, which is never written.
# Untracked files that a compiler needs (libraries, generated schemas) are linked from the checkout, or from a build.


logger = logging.getLogger(__name__)

PACKAGE = "executorch"
STALE_S = 14 * 86400.0
"""Time without use after which the next command that makes a worktree removes an old one."""

# Time limit of a build.
_BUILD_SECONDS = 2 * 3600.0
# Both streams of a build are in one file, in their order.
_INTO_ONE = "import os, sys; os.dup2(2, 1); os.execvp(sys.argv[1], sys.argv[1:])"

_STAMP, _IN_USE = "worktree.json", ".in-use"
_VIRTUAL_ENVIRONMENTS = (".venv", "venv")
# Locks of the worktrees that this process uses, until it ends.
_held: dict[Path, int] = {}


class Worktree(msgspec.Struct, frozen=True):
    """Source tree of a commit, ready for compiling."""

    commit: Commit
    toolchain: ToolchainConfig
    """Toolchain of the checkout, with this source tree in its place."""
    warnings: tuple[str, ...] = ()
    """Warnings of native parts and submodules from another commit."""


class WorktreeEntry(msgspec.Struct, frozen=True):
    """Worktree or build in the cache, for lists and pruning."""

    path: str
    files: int
    nbytes: int
    used_ms: int
    """Epoch, milliseconds."""


def worktree(config: Config, checkout: Path | Checkout, ref: str | Commit) -> Worktree:
    """Return the source tree of a commit of `checkout`, made if missing; it stays until this process ends.

    The toolchain comes from farm.toml (or `config.toolchain`) if one has this checkout, else it has the checkout alone.
    Native parts come from the checkout if the commit has equal native sources; otherwise the toolchain's `build` makes
    them, or `warnings` names them as parts of another commit. Raises UsageError for an invalid checkout or commit,
    NativeBuildError, MissingToolError, InfraError.
    """
    repository = checkout if isinstance(checkout, Checkout) else Checkout(checkout)
    commit = ref if isinstance(ref, Commit) else repository.commit(ref)
    base = toolchain_at(config, repository.folder)
    source, warnings = repository.folder, list[str]()
    built: Path | None = None
    if repository.native_key(commit) != repository.built_key:
        if base.build:
            built = source = _build(config, repository, commit, base)
        else:
            warnings.append(
                f"{commit.short} has other native sources than {repository.folder}, whose libraries are used: "
                "give the command that builds them: build = [...] in farm.toml, or --build-command"
            )
    outputs = tuple(outputs_of(source, own=True)) if built else repository.outputs
    more, links = _submodules(repository, commit, built)
    warnings += more
    links |= {path.rstrip("/"): source / path.rstrip("/") for path in outputs}
    links |= {name: here for name in _VIRTUAL_ENVIRONMENTS if (here := repository.folder / name).is_dir()}
    folder = _made(config, repository, commit, links)
    name = f"{base.name}@{commit.short}" if base.name else commit.short
    toolchain = msgspec.structs.replace(base, name=name, named=False, checkout=folder / PACKAGE)
    return Worktree(commit, toolchain, tuple(warnings))


def require_built(config: Config, repository: Checkout, commit: Commit) -> None:
    """Raise MissingToolError for a commit that needs the libraries of a checkout without libraries.

    Call this before `worktree`, whose error would name a folder in the cache instead of the checkout.
    """
    base, folder = toolchain_at(config, repository.folder), repository.folder
    if not base.build or repository.native_key(commit) == repository.built_key:
        require_libraries(msgspec.structs.replace(base, name=base.name or str(folder)), package_in(folder))


def toolchain_at(config: Config, checkout: Path) -> ToolchainConfig:
    """Return the toolchain whose checkout is this folder; without one, a toolchain with the checkout alone."""
    for one in (config.toolchain, *config.toolchains.values()):
        if one.checkout is not None and one.checkout.resolve() == checkout:
            return one
    return msgspec.structs.replace(config.toolchain, name="", named=False, version="", checkout=checkout)


def worktrees(cache_dir: Path) -> list[WorktreeEntry]:
    """Return the worktrees and builds in the cache, most recently used first."""
    found = (WorktreeEntry(str(folder), *folder_size(folder), _used_ms(folder)) for folder in _folders(cache_dir))
    return sorted(found, key=lambda entry: -entry.used_ms)


def prune_worktrees(cache_dir: Path, *, older_than_s: float, dry_run: bool = False) -> list[WorktreeEntry]:
    """Remove, and return, the worktrees and builds that were not used for so long and that no process is using."""
    horizon_ms = (time.time() - older_than_s) * 1000
    removed = []
    for folder in _folders(cache_dir):
        if folder in _held:
            continue
        with _alone(folder) as is_alone:
            # The lock is held now: a process that used the worktree before has set its time, and another command may
            # have removed the worktree.
            used_ms = _used_ms(folder) if is_alone and (folder / _STAMP).is_file() else None
            if used_ms is None or used_ms > horizon_ms:
                continue
            removed.append(WorktreeEntry(str(folder), *folder_size(folder), used_ms))
            if not dry_run:
                withdraw(folder)
                _lock_file(folder).unlink(missing_ok=True)
    return removed


def _made(config: Config, repository: Checkout, commit: Commit, links: dict[str, Path]) -> Path:
    """Return the folder of a worktree with `links`, made if it is missing or differs from its commit."""
    parent = config.cache_dir / "toolchains" / "worktrees" / repository.key
    folder = parent / f"{commit.sha}-{digest_of(sorted(links.items()))[:12]}"

    def fill(partial: Path) -> None:
        tree = partial / PACKAGE
        export(tree, repository, commit)
        linked = [done for path, target in links.items() for done in _link(tree, path, target)]
        exclude = "".join(f"/{_pattern(path)}\n" for path in linked)
        (tree / ".git" / "info").mkdir(exist_ok=True)
        (tree / ".git" / "info" / "exclude").write_text(exclude, encoding="utf-8", errors="surrogateescape")
        (partial / _STAMP).write_bytes(_stamp(repository, commit))

    if not folder.is_dir():
        prune_worktrees(config.cache_dir, older_than_s=STALE_S)
    try:
        # The lock comes first, so that no other process removes the worktree.
        _hold(folder)
        published(folder, fill, is_whole=_is_whole)
        os.utime(folder / _STAMP)
    except OSError as error:
        raise InfraError(f"{folder}: cannot be made: {error.strerror or error}") from error
    return folder


def _is_whole(folder: Path) -> bool:
    """Return whether a worktree has the files of its commit; False allows to make it anew.

    Raises UsageError for an edited worktree that another process uses, InfraError after git's time limit.
    """
    problem = "is damaged"
    if (folder / _STAMP).is_file():
        try:
            edited = git(folder / PACKAGE, "status", "--porcelain", "--ignore-submodules=all", "-uno", own=True)
        except UsageError:
            edited = ""
        else:
            if not edited:
                return True
            problem = f"was edited ({edited.splitlines()[0].strip()})"
    with _alone(folder) as is_alone:
        if is_alone:
            return False
    raise UsageError(
        f"{folder / PACKAGE} {problem}, and another process of farm works with it: wait until that has ended, "
        "and it is made anew; edit the checkout, which this is a copy of"
    )


def _submodules(repository: Checkout, commit: Commit, built: Path | None) -> tuple[list[str], dict[str, Path]]:
    """Return warnings, and links to the submodules of the checkout, or of the build, which has the right commits."""
    warnings, links = [], {}
    for path, sha in repository.submodules(commit).items():
        here = (built or repository.folder) / path
        if not here.is_dir() or not any(here.iterdir()):
            continue
        links[path] = here
        if built is None and (there := _head_of(here)) not in (sha, ""):
            warnings.append(f"{commit.short} wants {sha[:10]} of {path}: the checkout's {there[:10]} is used")
    return warnings, links


def _head_of(submodule: Path) -> str:
    """Return the commit that is checked out in a submodule; empty if unknown."""
    try:
        return git(submodule, "rev-parse", "HEAD").strip() if (submodule / ".git").exists() else ""
    except UsageError:
        return ""


def _link(tree: Path, path: str, target: Path) -> list[str]:
    """Put a link to `target` into a worktree and return its path; files of the commit stay.

    For a folder that the commit has as well, its content is linked.
    """
    link = tree / path
    if not link.parent.resolve().is_relative_to(tree.resolve()):
        return []
    if link.is_dir() and not link.is_symlink():
        if any(link.iterdir()):
            inside = sorted(one.name for one in target.iterdir()) if target.is_dir() else []
            return [done for name in inside for done in _link(tree, f"{path}/{name}", target / name)]
        # git leaves an empty folder for a submodule.
        link.rmdir()
    if os.path.lexists(link):
        return []
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(target)
    return [path]


def _pattern(path: str) -> str:
    """Return a path as a line of git's exclude files."""
    return "".join(f"\\{char}" if char in "\\*?[]!# " else char for char in path)


def _build(config: Config, repository: Checkout, commit: Commit, toolchain: ToolchainConfig) -> Path:
    """Return a source tree in which the native parts of a commit are built; commits with the same sources share it."""
    # The empty part keeps the names of earlier builds.
    key = name_of(repository.native_key(commit), *toolchain.build, str(toolchain.python), toolchain.qnn, "")
    folder = config.cache_dir / "toolchains" / "builds" / repository.key / key

    def fill(partial: Path) -> None:
        # At its last place from the beginning: libraries remember where they were built.
        shutil.rmtree(folder, ignore_errors=True)
        make_folders(folder)
        export(folder / PACKAGE, repository, commit)
        _run_build(folder / PACKAGE, repository, commit, toolchain, folder.with_suffix(".log"))
        for place in (folder, partial):
            (place / _STAMP).write_bytes(_stamp(repository, commit))

    _hold(folder)
    published(folder.with_name(f"{folder.name}-built"), fill, is_whole=lambda _: (folder / _STAMP).is_file())
    os.utime(folder / _STAMP)
    return folder / PACKAGE


def _run_build(tree: Path, repository: Checkout, commit: Commit, toolchain: ToolchainConfig, log: Path) -> None:
    """Run the toolchain's build command in `tree` with the commit's submodules; its output goes to `log`.

    Raises NativeBuildError, which names the log.
    """
    _fill_submodules(tree, repository, commit)
    logger.info("building the native parts of %s: %s (log: %s)", commit.short, " ".join(toolchain.build), log)
    environment = {**os.environ, "EXECUTORCH_ROOT": str(tree)}
    if toolchain.python is not None:
        environment["PATH"] = os.pathsep.join([str(toolchain.python.parent), os.environ.get("PATH", os.defpath)])
    argv = [sys.executable, "-c", _INTO_ONE, *toolchain.build]
    with Supervisor() as supervisor:
        child = supervisor.spawn(argv, name=toolchain.build[0], env=environment, cwd=tree, stderr=log)
        with child.limited(_BUILD_SECONDS) as overdue:
            code = child.process.wait()
    if code:
        how = f"did not finish in {_BUILD_SECONDS:g} s" if overdue.is_set() else f"ended with {ending(code)}"
        raise NativeBuildError(f"{commit.short} does not build: {toolchain.build[0]} {how}: see {log}")


def _fill_submodules(tree: Path, repository: Checkout, commit: Commit) -> None:
    """Fill the submodules that the user's checkout has, and their submodules, with the pinned commits.

    Raises NativeBuildError for a pinned commit that the checkout lacks.
    """
    for path, sha in repository.submodules(commit).items():
        here = repository.folder / path
        if not (here / ".git").exists():
            continue
        place = tree / path
        if not place.parent.resolve().is_relative_to(tree.resolve()):
            continue
        try:
            inner = Checkout(here)
            wanted = inner.commit(sha)
            if place.is_dir() and not any(place.iterdir()):
                place.rmdir()
            export(place, inner, wanted)
        except UsageError as error:
            raise NativeBuildError(
                f"{commit.short} does not build: it wants {sha[:10]} of the submodule {path}: {error}"
            ) from None
        _fill_submodules(place, inner, wanted)


def _stamp(repository: Checkout, commit: Commit) -> bytes:
    """Return the content of the file that marks a complete worktree; its time is the time of the last use."""
    return msgspec.json.encode({"checkout": str(repository.folder), "commit": commit})


def _hold(folder: Path) -> None:
    """Protect a worktree, even a future one, from removal until this process ends."""
    if folder in _held:
        return
    make_folders(folder.parent)
    while True:
        number = os.open(_lock_file(folder), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        fcntl.flock(number, fcntl.LOCK_SH)
        # The removal of a worktree also removes the lock file, and another process may have made a new one.
        if is_at(_lock_file(folder), number):
            _held[folder] = number
            return
        os.close(number)


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[bool]:
    """Yield whether no other process holds a worktree; if True, none can take it inside the context."""
    mine = _held.get(folder)
    try:
        number = mine if mine is not None else os.open(_lock_file(folder), os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        yield True
        return
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_alone = True
    except OSError:
        is_alone = False
    try:
        yield is_alone
    finally:
        if mine is None:
            os.close(number)
        else:
            # The attempt at an exclusive lock releases the shared one, so it is taken again.
            fcntl.flock(number, fcntl.LOCK_SH)
            if not is_at(_lock_file(folder), number):
                os.close(_held.pop(folder))
                _hold(folder)


def _lock_file(folder: Path) -> Path:
    return folder.with_name(folder.name + _IN_USE)


def _folders(cache_dir: Path) -> Iterator[Path]:
    for kind in ("worktrees", "builds"):
        for stamp in (cache_dir / "toolchains" / kind).glob(f"*/*/{_STAMP}"):
            # Unfinished folders and links out of the cache are left out.
            if "." not in stamp.parent.name and not stamp.parent.is_symlink() and (stamp.parent / PACKAGE).is_dir():
                yield stamp.parent


def _used_ms(folder: Path) -> int:
    return (folder / _STAMP).stat().st_mtime_ns // 1_000_000
