"""Repository of a checkout: commits, their changes, and untracked outputs. It is only read, never changed."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path, PurePosixPath

import msgspec

from farm.base.backends.registry import cpu_backends
from farm.base.errors import UsageError
from farm.base.git import ask_git, git
from farm.base.hashes import digest_of

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
