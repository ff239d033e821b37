from __future__ import annotations

import base64
import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest
from executorch_checkout import commit, make_repository, run_git

from farm.base import hashes
from farm.base.config.settings import load_config
from farm.base.errors import UsageError
from farm.builds.bundles.key import bundle_key
from farm.builds.toolchains.identity import (
    PackageTree,
    ToolchainIdentity,
    developed_roots,
    identify,
    parts_of,
    source_state,
)
from farm.builds.toolchains.interpreters import InterpreterFacts, PackageFacts, inspect, own_facts
from farm.builds.toolchains.selection import prepare
from farm.builds.toolchains.toolchain import SourceState
from farm.suites.manifests import find_suites, load_suite
from farm.suites.suite import Job, Target

SITE = "lib/site-packages"
PASS = "executorch/backends/qualcomm/_passes/fold.py"
DECODER = "qualcomm/oss_scripts/llama/model/static_llama.py"
DECODER_CONFIG = "models/qwen3/config/0_6b_config.json"
FILES = {
    PASS: "def fold():\n    return 1\n",
    "executorch/exir/_serialize/program.fbs": "table Program {}\n",
    "executorch/lib/libexecutorch.so": "\x7fELF executorch",
    "executorch/data/bin/flatc": "\x7fELF flatc",
    "executorch/version.py": '__version__ = "1.5.1"\n',
    f"executorch/examples/{DECODER}": "layers = 2\n",
    f"executorch/examples/{DECODER_CONFIG}": '{"dim": 64}\n',
    "torch/__init__.py": "",
    "torch/lib/libtorch_cpu.so": "\x7fELF torch",
    "torchao/__init__.py": "",
    "sympy/core.py": "one = 1\n",
    "numpy/__init__.py": "",
    "numpy.libs/libopenblas.so": "\x7fELF openblas",
    "numpy-2.4.dist-info/METADATA": "Name: numpy\nVersion: 2.4\n",
    "typing_extensions.py": "",
}


class Environment:
    """Made-up environment, with its identity."""

    def __init__(self, root: Path, python: str = "bin/python") -> None:
        self.root, self.cache, self.python = root, root / "cache", root / python
        self.site, self.sdk = root / SITE, root / "sdk"
        for name, text in FILES.items():
            self.write(f"{SITE}/{name}", text)
        self.write("bin/python", "\x7fELF python")
        self.write("qnn/libQnnHtp.so", "\x7fELF QNN")
        self.write("sdk/libQnnHtp.so", "\x7fELF the bridge")
        (self.sdk / "real").mkdir()
        (self.sdk / "real" / "libQnnHtp.so").symlink_to(root / "qnn" / "libQnnHtp.so")

    def write(self, name: str | Path, text: str) -> Path:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def facts(self, *before: Path) -> InterpreterFacts:
        packages = {name: PackageFacts("1", (self.site / name,)) for name in ("executorch", "torch", "torchao")}
        path = (*map(str, before), str(self.site))
        return InterpreterFacts((3, 11, 7), "cpython-311", self.root, path, packages)

    def look(self, *before: Path) -> ToolchainIdentity:
        return identify(self.cache, self.python, self.facts(*before), {}, qnn=self.sdk)

    def content(self, *before: Path) -> dict[str, str]:
        return self.look(*before).content

    def changed_by(self, name: str | Path, text: str | None, *before: Path, keep_time: bool = False) -> set[str]:
        """Return the parts that an edit of a file changes, None for its removal; without the edit, none has changed."""
        path, clean = self.root / name, self.content(*before)
        old = path.read_text() if path.exists() else None
        status = path.stat() if keep_time else None
        path.unlink() if text is None else self.write(path, text)
        if status is not None:
            assert path.stat().st_size == status.st_size
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        edited = self.content(*before)
        path.unlink() if old is None else self.write(path, old)
        assert self.content(*before) == clean
        return {key.removesuffix("_content") for key in clean if clean[key] != edited[key]}


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    return Environment(tmp_path / "env")


@pytest.fixture
def own(environment: Environment) -> Environment:
    """Environment of farm's own interpreter: imports of a suite there are in the keys of its bundles."""
    environment.python = Path(sys.executable)
    return environment


EDITS = [
    ("executorch", f"{SITE}/{PASS}", "def fold():\n    raise ValueError\n"),
    ("executorch", f"{SITE}/{PASS}", None),
    ("executorch", f"{SITE}/executorch/examples/{DECODER}", "layers = 3\n"),
    ("executorch", f"{SITE}/executorch/examples/{DECODER_CONFIG}", "{}"),
    ("executorch", f"{SITE}/executorch/exir/_serialize/program.fbs", "x"),
    ("executorch", f"{SITE}/executorch/lib/libexecutorch.so", "\x7fELF 2"),
    ("executorch", f"{SITE}/executorch/data/bin/flatc", "\x7fELF flatc 2"),
    ("executorch", f"{SITE}/executorch/backends/qualcomm/_passes/new.py", ""),
    # A library that a build leaves there may be loaded from there.
    ("executorch", f"{SITE}/executorch/cmake-out/lib/libqnn.so", "\x7fELF"),
    ("torch", f"{SITE}/torch/lib/libtorch_cpu.so", "\x7fELF torch 2"),
    ("torchao", f"{SITE}/torchao/__init__.py", "two = 2\n"),
    ("packages", f"{SITE}/sympy/core.py", "one = 2\n"),
    ("packages", f"{SITE}/numpy.libs/libopenblas.so", "\x7fELF 2"),
    ("packages", f"{SITE}/typing_extensions.py", "two = 2\n"),
    ("packages", f"{SITE}/pydot/__init__.py", ""),
    # farm stands in for a package that is missing.
    ("packages", f"{SITE}/torchtune/__init__.py", ""),
    ("packages", f"{SITE}/x-1.dist-info/entry_points.txt", "[torch.backends]\nx=x\n"),
    ("packages", f"{SITE}/sitecustomize.py", "import torch\n"),
    ("packages", f"{SITE}/numpy-2.4.dist-info/METADATA", "Version: 2.5\n"),
    ("packages", f"{SITE}/x.pth", "import x\n"),
    ("python", "bin/python", "\x7fELF python 2"),
    ("qnn", "qnn/libQnnHtp.so", "\x7fELF Qnn"),
]


def test_every_edit_is_seen_where_it_belongs_and_taken_back_it_is_what_it_was(environment: Environment) -> None:
    for part, name, text in EDITS:
        assert environment.changed_by(name, text) == {part}, name
    # Also with an unchanged size and time.
    for part, name, text in (
        ("executorch", f"{SITE}/{PASS}", FILES[PASS].replace("1", "2")),
        ("qnn", "qnn/libQnnHtp.so", "\x7fELF Qnn"),
    ):
        assert environment.changed_by(name, text, keep_time=True) == {part}, name


def test_the_bridge_counts_by_its_source_as_other_machines_compile_it_to_other_bytes(
    environment: Environment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = environment.content()["qnn_content"]
    assert environment.changed_by("sdk/libQnnHtp.so", "\x7fELF the same bridge of another compiler") == set()
    environment.write(tmp_path / "sources/bridge/qnn_bridge.cpp", "// edited")
    monkeypatch.setattr("farm.builds.toolchains.identity.data_folder", lambda _name: tmp_path / "sources")
    assert environment.content()["qnn_content"] != before


def test_what_no_compile_reads_changes_nothing_and_neither_does_the_place(
    environment: Environment, tmp_path: Path
) -> None:
    before = environment.content()
    for name in (
        "executorch/__pycache__/x.cpython-311.pyc", "executorch/include/x.h", "executorch/runtime/x.h", "torch/x.pyi",
        "executorch/README.md", "executorch/backends/x.cpp", "sympy/tests/test_core.py", "executorch/.git/index",
        "numpy-2.4.dist-info/RECORD",
        "executorch/cmake-out/CMakeCache.txt", "executorch/cmake-out/x/y.json", "pip/__init__.py",
    ):  # fmt: skip
        environment.write(f"{SITE}/{name}", "new")
    assert environment.content() == before
    assert Environment(tmp_path / "elsewhere").content() == before


def test_links_are_what_they_lead_to_also_in_a_circle(environment: Environment, tmp_path: Path) -> None:
    package, elsewhere = environment.site / "executorch", tmp_path / "tree"
    plain = environment.content()
    package.rename(elsewhere)
    package.symlink_to(elsewhere)
    assert environment.content() == plain
    (elsewhere / "exir" / "again").symlink_to(elsewhere)
    (elsewhere / "exir" / "nowhere.py").symlink_to(tmp_path / "missing.py")
    edited = elsewhere / "backends" / "qualcomm" / "_passes" / "fold.py"
    assert environment.changed_by(edited, "raise ValueError\n") == {"executorch"}


def test_what_stands_in_front_of_an_installed_package_counts(own: Environment, tmp_path: Path) -> None:
    home = tmp_path / "home"
    for name in ("letters", "sitecustomize", "usercustomize"):
        own.write(home / f"{name}.py", "import torch\n")
    own.write(home / "sympy" / "core.py", "one = 1\n")
    assert own.changed_by(home / "letters.py", "dear = 1\n", home) == set()
    assert own.changed_by(home / "sympy" / "core.py", "one = 3\n", home) == {"packages"}
    # Python imports these at its start.
    for name in ("sitecustomize", "usercustomize"):
        assert own.changed_by(home / f"{name}.py", "import numpy\n", home) == {"packages"}


def test_of_another_interpreter_every_package_on_its_path_counts(environment: Environment, tmp_path: Path) -> None:
    code = environment.write(tmp_path / "home" / "letters" / "__init__.py", "")
    assert environment.changed_by(code, "dear = 1\n", tmp_path / "home") == {"packages"}


def test_files_that_come_and_go_meanwhile(environment: Environment) -> None:
    before, done = environment.content(), threading.Event()

    def churn() -> None:
        number = 0
        while not done.is_set():
            path = environment.write(f"{SITE}/executorch/exir/made{number % 7}.py", str(number))
            path.unlink()
            number += 1

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        for _ in range(8):
            # The content may never come to rest; then the error reports that.
            with contextlib.suppress(UsageError):
                environment.content()
    finally:
        done.set()
        thread.join()
    assert environment.content() == before


def test_a_file_that_cannot_be_read_is_named(environment: Environment) -> None:
    # A regular file whose reading fails, for root as well.
    path = environment.site / "executorch" / "memory.py"
    path.symlink_to("/proc/self/mem")
    with pytest.raises(UsageError, match=r"site-packages/executorch/memory\.py: .*: make it readable, or remove it"):
        environment.content()


def test_bytecode_of_the_code_from_before_is_not_run(environment: Environment) -> None:
    def runs() -> str:
        folder = str((environment.site / PASS).parent)
        code = f"import sys; sys.path.insert(0, {folder!r}); import fold; print(fold.fold())"
        argv = [sys.executable, "-I", "-c", code]
        return subprocess.run(argv, capture_output=True, text=True, check=True).stdout.strip()

    environment.content()
    assert runs() == "1"
    path, status = environment.site / PASS, (environment.site / PASS).stat()
    path.write_text(FILES[PASS].replace("1", "2"))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert runs() == "1", "Python compares size and seconds"
    environment.content()
    assert runs() == "2"


def test_what_only_farm_needs_takes_no_part(tmp_path: Path) -> None:
    parts = parts_of(tmp_path, own_facts().path)
    assert {"sqlalchemy", "paramiko", "ruff", "pytest", "pip"} <= parts.without
    counted = {"executorch", "torch", "torchao", "numpy", "sympy", "transformers", "pydot", "yaml", "mpmath"}
    assert not parts.without & counted
    assert {"sympy", "numpy", "mpmath", "yaml"} <= parts.required
    assert not parts.required & {"transformers", "rich"}
    assert parts_of(tmp_path, own_facts().path) == parts


def install_editable(environment: Environment, name: str, folder: Path, how: str) -> list[Path]:
    """Install the packages in a folder as `pip install -e` does; return the folders that come first on the path."""
    if how == "pth":
        environment.write(f"{SITE}/{name}.pth", f"{folder}\n")
        return [folder]
    mapping = {path.stem: str(path.with_suffix("")) for path in folder.iterdir()}
    environment.write(f"{SITE}/__editable___{name}_1_finder.py", f"MAPPING: dict[str, str] = {mapping!r}\n")
    return []


@pytest.mark.parametrize("how", ["pth", "finder"])
def test_an_editable_dependency_counts(how: str, environment: Environment, tmp_path: Path) -> None:
    (environment.site / "sympy").rename(environment.root / "away")
    code = environment.write(tmp_path / "src" / "sympy" / "core.py", "one = 1\n")
    environment.write(f"{SITE}/executorch-1.dist-info/METADATA", "Name: executorch\nVersion: 1\nRequires-Dist: sympy\n")
    environment.write(f"{SITE}/sympy-1.dist-info/METADATA", "Name: sympy\nVersion: 1\n")
    before = install_editable(environment, "sympy", tmp_path / "src", how)
    assert environment.changed_by(code, "one = 2\n", *before) == {"packages"}


@pytest.mark.parametrize("how", ["pth", "finder"])
@pytest.mark.parametrize("file", ["letters/__init__.py", "letters.py"])
def test_of_farms_own_interpreter_every_editable_package_counts(
    how: str, file: str, own: Environment, tmp_path: Path
) -> None:
    # Nothing requires it, and any package imports it where it is found.
    code = own.write(tmp_path / "vision" / file, "one = 1\n")
    before = install_editable(own, "letters", tmp_path / "vision", how)
    assert own.changed_by(code, "one = 2\n", *before) == {"packages"}


@pytest.mark.parametrize("how", ["pth", "finder"])
def test_farms_own_repository_installed_as_editable_does_not_count(
    how: str, own: Environment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The parts of farm that make programs are in the keys by themselves.
    files = [own.write(tmp_path / "work" / name / "__init__.py", "") for name in ("farm", "bench")]
    monkeypatch.setattr("farm.__file__", str(files[0]))
    before = install_editable(own, "farm", tmp_path / "work", how)
    for file in files:
        assert own.changed_by(file, "one = 2\n", *before) == set()


def test_a_schema_compiler_that_the_user_names_counts_though_the_package_brings_one(
    environment: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    brought = environment.content()
    own = environment.site / "executorch" / "data" / "bin" / "flatc"
    own.chmod(0o755)
    monkeypatch.setenv("FLATC_EXECUTABLE", str(own))
    assert environment.content() == brought
    flatc = environment.write("bin/flatc", "\x7fELF another flatc")
    flatc.chmod(0o755)
    monkeypatch.setenv("FLATC_EXECUTABLE", str(flatc))
    assert environment.content()["executorch_content"] != brought["executorch_content"]
    assert environment.changed_by(flatc, "\x7fELF another flatc, built again") == {"executorch"}
    # ExecuTorch 1.3 uses the compiler in PATH.
    monkeypatch.delenv("FLATC_EXECUTABLE")
    monkeypatch.setenv("PATH", str(flatc.parent))
    facts = environment.facts()
    old = {**facts.packages, "executorch": PackageFacts("1.3.1", (environment.site / "executorch",))}
    for found, counts in ((facts, False), (msgspec.structs.replace(facts, packages=old), True)):
        identity = identify(environment.cache, environment.python, found, {}, qnn=environment.sdk)
        assert bool(identity.flatc) == counts


@pytest.mark.whole
def test_what_builders_load_counts(farm_cache: Path) -> None:
    # The flows' imports all count, except the modules that carry requests.
    code = (
        "import sys, farm.builds.compile.flows.compiler as c\n"
        "from farm.base.backends.registry import BACKENDS\n"
        "[c.flow_of(name) for name in BACKENDS]\n"
        "print(*{name.partition('.')[0] for name, one in sys.modules.items() if getattr(one, '__file__', None)})"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert {"executorch", "torch", "numpy"} <= loaded
    assert loaded & parts_of(farm_cache, own_facts().path).without <= {"farm", "msgspec", "pip"}


def test_this_process_and_another_find_the_same(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # The user's folder and pytest's path may put other modules in front.
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert own_facts() == inspect(Path(sys.executable))


def test_all_that_decoders_are_made_of_is_in_the_keys_of_their_bundles() -> None:
    root = Path(next(iter(own_facts().packages["executorch"].folders)))
    files = list((root / "examples" / "qualcomm" / "oss_scripts" / "llama").rglob("*.py"))
    files += root.glob("examples/models/*/config/*.json")
    assert len(files) > 50
    assert not [path for path in files if not hashes.is_read(path.relative_to(root).as_posix())]
    case = next(case for case in load_suite(find_suites()["llm_tiny"]).cases if case.name == "qwen3")
    job = Job(case, Target("SM8650", "htp", "16a8w"))
    contents = (("a", "a"), ("b", "a"), ("a", "b"))
    versions = [{"qnn": "2.51", "executorch_content": one, "packages_content": other} for one, other in contents]
    assert len({bundle_key(job, one) for one in versions}) == 3


def test_edited_wheels_are_dirty_and_developed(environment: Environment) -> None:
    wheel = own_facts().packages["torchao"].folders[0]
    name = next(wheel.parent.glob("torchao-*.dist-info")).name
    shutil.rmtree(environment.site / "torchao")
    shutil.copytree(wheel, environment.site / "torchao", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(wheel.parent / name, environment.site / name)
    for folder in ("executorch", "torch"):
        facts = "".join(f"{file},,\n" for file in FILES if file.startswith(f"{folder}/"))
        environment.write(f"{SITE}/{folder}-1.dist-info/RECORD", facts)
    trees = {"torchao": environment.look().trees["torchao"]}
    assert not source_state(environment.cache, trees).dirty
    edited = environment.site / "torchao" / "utils.py"
    edited.write_text(edited.read_text() + "\n# edited\n")
    (environment.site / "torchao" / "_models" / "new.py").parent.mkdir(exist_ok=True)
    (environment.site / "torchao" / "_models" / "new.py").touch()
    found = environment.look()
    state = source_state(environment.cache, {"torchao": found.trees["torchao"]})
    assert state.dirty
    assert state.changed == ("torchao/_models/new.py", "torchao/utils.py")
    [root] = [one for one in developed_roots(environment.cache, found) if one.content == "torchao_content"]
    assert "utils.py" in root.files


def digest_of(text: str) -> str:
    """Return the hash of a file as a RECORD has it."""
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()


@pytest.mark.parametrize("around", ["a wheel", "a checkout", "the same checkout"])
def test_an_edited_checkout_of_torchao_is_dirty(around: str, environment: Environment, tmp_path: Path) -> None:
    code = "torchao/quantization.py"
    home = tmp_path / "executorch" / "third-party" / "ao"
    trees = environment.look().trees
    make_repository(tmp_path / "ao", {code: "one = 1\n"})
    if around == "a wheel":
        files = ((name, text) for name, text in FILES.items() if name.startswith("executorch/"))
        record = "".join(f"{name},sha256={digest_of(text)},\n" for name, text in files)
        environment.write(f"{SITE}/executorch-1.dist-info/RECORD", record)
        executorch, home = trees["executorch"], tmp_path / "ao"
    else:
        make_repository(tmp_path / "executorch", {"exir/passes.py": "one = 1\n"})
        if around == "a checkout":
            add = ("submodule", "--quiet", "add", str(tmp_path / "ao"), "third-party/ao")
            run_git(tmp_path / "executorch", "-c", "protocol.file.allow=always", *add)
        else:
            (home / "torchao").mkdir(parents=True)
            (home / code).write_text("one = 1\n")
        commit(tmp_path / "executorch", "With torchao")
        executorch = (PackageTree(tmp_path / "executorch", "-"),)

    def state() -> SourceState:
        torchao = (PackageTree(home / "torchao", "-"),)
        return source_state(environment.cache, {"executorch": executorch, "torchao": torchao})

    clean = state()
    assert (clean.dirty, clean.changed) == (False, ())
    assert bool(clean.commit) == (around != "a wheel"), "the commit is ExecuTorch's"
    (home / code).write_text("one = 2\n")
    assert state().dirty
    prefix = "third-party/ao/" if around == "the same checkout" else "torchao: "
    assert state().changed == (f"{prefix}{code}",)
    (home / code).write_text("one = 1\n")
    assert state() == clean


@pytest.mark.parametrize("hidden", ["untracked", "skip-worktree", "assume-unchanged"])
def test_what_git_was_told_not_to_show_is_dirty_all_the_same(
    hidden: str, environment: Environment, tmp_path: Path
) -> None:
    tree = tmp_path / "executorch"
    make_repository(tree, {"exir/passes.py": "one = 1\n", "exir/other.py": "two = 2\n"})
    if hidden == "untracked":
        run_git(tree, "config", "status.showUntrackedFiles", "no")
        edited = tree / "exir/new_pass.py"
    else:
        run_git(tree, "update-index", f"--{hidden}", "exir/passes.py")
        edited = tree / "exir/passes.py"
    edited.write_text("one = 2\n")
    state = source_state(environment.cache, {"executorch": (PackageTree(tree, "-"),)})
    assert (state.dirty, state.changed) == (True, (str(edited.relative_to(tree)),))


def test_a_library_that_is_older_than_its_sources_is_told_of(environment: Environment) -> None:
    library = environment.write(f"{SITE}/executorch/backends/qualcomm/python/PyQnnManagerAdaptor.so", "\x7fELF")
    source = environment.write(f"{SITE}/executorch/backends/qualcomm/runtime/QnnManager.cpp", "int main;")
    os.utime(library, (1, 1))
    state = source_state(environment.cache, environment.look().trees)
    [warning] = [line for line in state.warnings if " is older than " in line]
    assert "python/PyQnnManagerAdaptor.so is older than backends/qualcomm/runtime/QnnManager.cpp" in warning
    assert "scripts/build.sh builds it again" in warning
    os.utime(source, (0, 0))
    assert "is older than" not in str(source_state(environment.cache, environment.look().trees).warnings[1:])


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_checkout_that_git_does_not_trust_is_told_of_and_no_commit(environment: Environment) -> None:
    folder = environment.site / "executorch"
    run_git(folder, "init", "-q")
    run_git(folder, "add", "-A")
    run_git(folder, "commit", "-q", "-m", "The beginning")
    os.chown(folder, 12345, 12345)
    os.chown(folder / ".git", 12345, 12345)
    state = source_state(environment.cache, environment.look().trees)
    assert (state.commit, state.dirty) == ("", True)
    assert f"git config --global --add safe.directory {folder}" in state.warnings[0]


def test_facts_are_short_and_of_words(tmp_path: Path) -> None:
    tools = prepare(load_config(folder=tmp_path), virtual=True)
    facts = tools.fingerprint("virtual")
    assert {len(facts[name]) for name in facts if name.endswith("_content")} == {16}
    assert not tools.source.dirty
    assert not tools.private
    assert msgspec.json.encode(tools.versions)
