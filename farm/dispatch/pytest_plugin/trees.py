"""Source trees of upstream's tests that pytest collects from their folder: a root, a conftest and file names."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from farm.base.errors import UsageError
from farm.base.text import one_line

if TYPE_CHECKING:
    from collections.abc import Sequence

    from farm.builds.toolchains.toolchain import Compiler


class TestTree(NamedTuple):
    """Tree of upstream's tests."""

    folder: tuple[str, ...]
    """Place in the package `executorch`."""
    files: str = ""
    """Pattern of the names of its test files; empty for pytest's own."""
    filled_in: tuple[str, ...] = ()
    """Options of its conftest that farm fills in for each worker: docs/guides/pytest.md."""

    @property
    def package(self) -> str:
        """Name of its package."""
        return ".".join(("executorch", *self.folder))


REWORK = TestTree(
    ("backends", "qualcomm", "tests", "rework"),
    "test.py",
    ("--device", "--host", "--soc_model", "--backend", "--build_folder", "--target", "--config_file"),
)
ALL_BACKENDS = TestTree(("backends", "test", "suite"))
_TREES = (REWORK, ALL_BACKENDS)

_INSTALLED = (
    "import importlib.util as u; s = u.find_spec('executorch'); "
    "print(*(s and s.submodule_search_locations or ()), sep='\\n')"
)


def find_tree(arguments: Sequence[str], folder: Path) -> tuple[TestTree, Path] | None:
    """Return the tree with an argument of pytest, which is relative to `folder`, and the folder of that tree."""
    for argument in arguments:
        path = Path(os.path.normpath(folder / argument.partition("::")[0]))
        if argument.startswith("-") or not path.exists():
            continue
        for parent in (path, *path.parents):
            for tree in _TREES:
                if parent.parts[-len(tree.folder) :] == tree.folder and (parent / "conftest.py").is_file():
                    return tree, parent
    return None


def rooted_arguments(arguments: Sequence[str], folder: Path) -> list[str]:
    """Return further arguments of pytest for collecting these tests from a source tree in any place.

    Their conftest declares options and markers, and pytest looks for a conftest only below its root; many modules have
    one name. Empty for other tests. Raises UsageError for options of these tests that farm fills in.
    """
    found = find_tree(arguments, folder)
    if found is None:
        return []
    tree, place = found
    names = [argument.partition("=")[0] for argument in arguments]
    if named := next((name for name in names if name in tree.filled_in), ""):
        raise UsageError(f"{named} is filled in for each device: say --soc, --backend or --device, before the --")
    wanted = {
        "-c": os.devnull,
        "--rootdir": str(place.parent),
        "--confcutdir": str(place),
        "--import-mode": "importlib",
    }
    chosen = [word for name, value in wanted.items() if name not in names for word in (name, value)]
    return [*chosen, *(("-o", f"python_files={tree.files}") if tree.files else ())]


def require_tree(arguments: Sequence[str], folder: Path, compiler: Compiler) -> None:
    """Raise UsageError if these tests would import their own modules from another source tree."""
    found = find_tree(arguments, folder)
    if found is None:
        return
    tree, place = found
    if not any(tree.package.encode() in path.read_bytes() for path in place.rglob("*.py")):
        return
    done = subprocess.run(
        [compiler.python, "-c", _INSTALLED],
        env={**os.environ, **compiler.env},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    trees = [Path(line) for line in done.stdout.splitlines() if line]
    if not any(one.joinpath(*tree.folder).resolve() == place.resolve() for one in trees):
        installed = one_line(done.stdout) or "no executorch"
        raise UsageError(
            f"{place} would be run with {installed}, which is another tree: say --toolchain with an environment that "
            "tree is installed in, or run the tests that are installed there"
        )
