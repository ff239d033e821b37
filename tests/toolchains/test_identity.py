from __future__ import annotations

import base64
import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from executorch_checkout import commit, make_checkout, make_repository, run_git
from waiting import await_later_file_time

from farm.base import hashes
from farm.base.config.settings import load_config
from farm.base.errors import UsageError
from farm.builds.bundles.key import bundle_key
from farm.builds.toolchains.content.distributions import parts_of
from farm.builds.toolchains.content.identity import PackageTree, ToolchainIdentity, identify
from farm.builds.toolchains.content.source_state import developed_roots, source_state
from farm.builds.toolchains.interpreters import InterpreterFacts, PackageFacts, inspect, own_facts
from farm.builds.toolchains.prepare import prepare
from farm.builds.toolchains.select import select, toolchain_of
from farm.builds.toolchains.toolchain import SourceState, Toolchain
from farm.suites.manifests import find_suites, load_suite
from farm.suites.suite import Case, InputSpec, Job, Target

PASS = "executorch/backends/qualcomm/_passes/fold.py"
DECODER = "executorch/examples/qualcomm/oss_scripts/llama/model/static_llama.py"
DECODER_CONFIG = "executorch/examples/models/qwen3/config/0_6b_config.json"
FILES = {
    PASS: "def fold():\n    return 1\n",
    "executorch/exir/_serialize/program.fbs": "table Program {}\n",
    "executorch/lib/libexecutorch.so": "\x7fELF executorch",
    "executorch/data/bin/flatc": "\x7fELF flatc",
    "executorch/version.py": '__version__ = "1.5.1"\n',
    DECODER: "layers = 2\n",
    DECODER_CONFIG: '{"dim": 64}\n',
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

    def __init__(self, root: Path) -> None:
        self.root, self.cache = root, root / "cache"
        self.site, self.sdk = root / "lib" / "site-packages", root / "sdk"
        self.python = root / "bin" / "python"
        for name, text in FILES.items():
            self.write(f"lib/site-packages/{name}", text)
        self.write("bin/python", "\x7fELF python")
        self.write("qnn/libQnnHtp.so", "\x7fELF QNN")
        self.write("sdk/libQnnHtp.so", "\x7fELF the bridge")
        (self.sdk / "real").mkdir()
        (self.sdk / "real" / "libQnnHtp.so").symlink_to(root / "qnn" / "libQnnHtp.so")

    def write(self, name: str, text: str) -> Path:
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


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    return Environment(tmp_path / "env")


def kept_times(path: Path, text: str) -> None:
    """Edit a file without a change of its size and modification time."""
    status = path.stat()
    assert len(text) == status.st_size
    path.write_text(text)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


SITE = "lib/site-packages"
EDITS: dict[str, tuple[str, Callable[[Environment], object]]] = {
    "a pass": ("executorch", lambda env: env.write(f"{SITE}/{PASS}", "def fold():\n    raise ValueError\n")),
    "a pass, same size and time": (
        "executorch",
        lambda env: kept_times(env.site / PASS, FILES[PASS].replace("1", "2")),
    ),
    "a decoder of the examples": ("executorch", lambda env: env.write(f"{SITE}/{DECODER}", "layers = 3\n")),
    "a configuration of the examples": ("executorch", lambda env: env.write(f"{SITE}/{DECODER_CONFIG}", "{}")),
    "what was stood in for": ("packages", lambda env: env.write(f"{SITE}/torchtune/__init__.py", "")),
    "a data file": ("executorch", lambda env: env.write(f"{SITE}/executorch/exir/_serialize/program.fbs", "x")),
    "a shared library": ("executorch", lambda env: env.write(f"{SITE}/executorch/lib/libexecutorch.so", "\x7fELF 2")),
    "a tool": ("executorch", lambda env: env.write(f"{SITE}/executorch/data/bin/flatc", "\x7fELF flatc 2")),
    "a new file": ("executorch", lambda env: env.write(f"{SITE}/executorch/backends/qualcomm/_passes/new.py", "")),
    "a file that is gone": ("executorch", lambda env: (env.site / PASS).unlink()),
    "a file of another name": ("executorch", lambda env: (env.site / PASS).rename(env.site / PASS.replace("fo", "x"))),
    "a library of torch": ("torch", lambda env: env.write(f"{SITE}/torch/lib/libtorch_cpu.so", "\x7fELF torch 2")),
    "torchao": ("torchao", lambda env: env.write(f"{SITE}/torchao/__init__.py", "two = 2\n")),
    "a dependency": ("packages", lambda env: env.write(f"{SITE}/sympy/core.py", "one = 2\n")),
    "a library of a dependency": ("packages", lambda env: env.write(f"{SITE}/numpy.libs/libopenblas.so", "\x7fELF 2")),
    "a module": ("packages", lambda env: env.write(f"{SITE}/typing_extensions.py", "two = 2\n")),
    "a new dependency": ("packages", lambda env: env.write(f"{SITE}/pydot/__init__.py", "")),
    "a plugin": (
        "packages",
        lambda env: env.write(f"{SITE}/x-1.dist-info/entry_points.txt", "[torch.backends]\nx=x\n"),
    ),
    "code that runs at the start": ("packages", lambda env: env.write(f"{SITE}/sitecustomize.py", "import torch\n")),
    "a version": ("packages", lambda env: env.write(f"{SITE}/numpy-2.4.dist-info/METADATA", "Version: 2.5\n")),
    "a .pth file": ("packages", lambda env: env.write(f"{SITE}/x.pth", "import x\n")),
    "the interpreter": ("python", lambda env: env.write("bin/python", "\x7fELF python 2")),
    "a library of QNN, behind a link": ("qnn", lambda env: env.write("qnn/libQnnHtp.so", "\x7fELF Qnn")),
    "the same, same size and time": ("qnn", lambda env: kept_times(env.root / "qnn/libQnnHtp.so", "\x7fELF Qnn")),
}


def test_the_bridge_counts_by_its_source_as_other_machines_compile_it_to_other_bytes(
    environment: Environment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = environment.content()["qnn_content"]
    environment.write("sdk/libQnnHtp.so", "\x7fELF the same bridge of another compiler")
    assert environment.content()["qnn_content"] == before
    (tmp_path / "sources" / "bridge").mkdir(parents=True)
    (tmp_path / "sources" / "bridge" / "qnn_bridge.cpp").write_text("// edited")
    monkeypatch.setattr("farm.builds.toolchains.content.identity.data_folder", lambda _name: tmp_path / "sources")
    assert environment.content()["qnn_content"] != before


@pytest.mark.parametrize("name", EDITS)
def test_every_edit_is_seen_where_it_belongs_and_taken_back_it_is_what_it_was(
    name: str, environment: Environment, tmp_path: Path
) -> None:
    where, edit = EDITS[name]
    before = environment.content()
    shutil.copytree(environment.root, tmp_path / "kept", symlinks=True, ignore=shutil.ignore_patterns("cache"))
    edit(environment)
    after = environment.content()
    assert {key for key in before if before[key] != after[key]} == {f"{where}_content"}
    for part in ("bin", "lib", "qnn", "sdk"):
        shutil.rmtree(environment.root / part)
        shutil.copytree(tmp_path / "kept" / part, environment.root / part, symlinks=True)
    assert environment.content() == before


def test_what_no_compile_reads_changes_nothing(environment: Environment) -> None:
    before = environment.content()
    for name in (
        "executorch/__pycache__/x.cpython-311.pyc", "executorch/include/x.h", "executorch/runtime/x.h", "torch/x.pyi",
        "executorch/README.md", "executorch/backends/x.cpp", "sympy/tests/test_core.py", "executorch/.git/index",
        "numpy-2.4.dist-info/RECORD",
        "executorch/cmake-out/CMakeCache.txt", "executorch/cmake-out/x/y.json", "pip/__init__.py",
    ):  # fmt: skip
        environment.write(f"{SITE}/{name}", "new")
    assert environment.content() == before
    # But a library that a build leaves there may be loaded from there.
    environment.write(f"{SITE}/executorch/cmake-out/lib/libqnn.so", "\x7fELF")
    assert environment.content() != before


def test_the_same_code_elsewhere_is_the_same(environment: Environment, tmp_path: Path) -> None:
    shutil.copytree(environment.root, tmp_path / "copy", symlinks=True)
    copy = Environment.__new__(Environment)
    copy.__dict__.update(environment.__dict__, root=tmp_path / "copy", site=tmp_path / "copy" / SITE)
    assert copy.content() == environment.content()


def test_links_are_what_they_lead_to_also_in_a_circle(environment: Environment, tmp_path: Path) -> None:
    package, elsewhere = environment.site / "executorch", tmp_path / "tree"
    plain = environment.content()
    package.rename(elsewhere)
    package.symlink_to(elsewhere)
    assert environment.content() == plain
    (elsewhere / "exir" / "again").symlink_to(elsewhere)
    (elsewhere / "exir" / "nowhere.py").symlink_to(tmp_path / "missing.py")
    round_about = environment.content()
    (elsewhere / "backends" / "qualcomm" / "_passes" / "fold.py").write_text("raise ValueError\n")
    assert environment.content()["executorch_content"] != round_about["executorch_content"]


def test_what_stands_in_front_of_an_installed_package_counts(environment: Environment, tmp_path: Path) -> None:
    # The interpreter is farm's own: imports of a suite there are in the keys of its bundles.
    home, environment.python = tmp_path / "home", Path(sys.executable)
    (home / "letters").mkdir(parents=True)
    (home / "letters" / "__init__.py").touch()
    plain = environment.content(home)
    (home / "letters" / "__init__.py").write_text("dear = 1\n")
    assert environment.content(home) == plain
    (home / "sympy").mkdir()
    (home / "sympy" / "core.py").write_text("one = 3\n")
    assert environment.content(home)["packages_content"] != plain["packages_content"]


def test_of_another_interpreter_every_package_on_its_path_counts(environment: Environment, tmp_path: Path) -> None:
    code = tmp_path / "home" / "letters" / "__init__.py"
    code.parent.mkdir(parents=True)
    code.touch()
    plain = environment.content(tmp_path / "home")
    code.write_text("dear = 1\n")
    assert environment.content(tmp_path / "home")["packages_content"] != plain["packages_content"]


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
        for _ in range(20):
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
    with pytest.raises(UsageError, match=r"site-packages/executorch/memory\.py: .*: make it readable, or take it out"):
        environment.content()


def test_a_damaged_memory_costs_nothing_but_time_and_its_number_is_bounded(
    environment: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = environment.content()
    memories = list((environment.cache / "hashes").glob("*.json"))
    for path, damage in zip(memories, [b"", b"{", b"[]\n{}", b"\xff"] * 3, strict=False):
        path.write_bytes(damage)
    assert environment.content() == before
    monkeypatch.setattr(hashes, "_MOST_MEMORIES", 6)
    for number in range(8):
        hashes.hash_tree(environment.cache, environment.site, unread=frozenset({str(number)}))
    assert len(list((environment.cache / "hashes").glob("*.json"))) == 6
    assert environment.content() == before


def test_a_warm_look_opens_no_file_of_the_environment(
    environment: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hashes, "_YOUNG_S", 0.0)
    await_later_file_time(environment.cache.parent)
    before = environment.content()
    monkeypatch.setattr(hashes, "sha256_of", lambda path: pytest.fail(f"{path} was read"))
    assert environment.content() == before


def test_bytecode_of_the_code_from_before_is_not_run(environment: Environment) -> None:
    def runs() -> str:
        folder = str((environment.site / PASS).parent)
        argv = [
            sys.executable,
            "-I",
            "-c",
            f"import sys; sys.path.insert(0, {folder!r}); import fold; print(fold.fold())",
        ]
        return subprocess.run(argv, capture_output=True, text=True, check=True).stdout.strip()

    environment.content()
    assert runs() == "1"
    kept_times(environment.site / PASS, FILES[PASS].replace("1", "2"))
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


@pytest.mark.parametrize("how", ["pth", "finder"])
def test_an_editable_dependency_counts(how: str, environment: Environment, tmp_path: Path) -> None:
    code = tmp_path / "src" / "sympy" / "core.py"
    (environment.site / "sympy").rename(environment.root / "away")
    code.parent.mkdir(parents=True)
    code.write_text("one = 1\n")
    environment.write(f"{SITE}/executorch-1.dist-info/METADATA", "Name: executorch\nVersion: 1\nRequires-Dist: sympy\n")
    environment.write(f"{SITE}/sympy-1.dist-info/METADATA", "Name: sympy\nVersion: 1\n")
    if how == "finder":
        text = f"MAPPING: dict[str, str] = {{'sympy': {str(code.parent)!r}}}\n"
        environment.write(f"{SITE}/__editable___sympy_1_finder.py", text)
    before = [code.parents[1]] if how == "pth" else []
    clean = environment.content(*before)
    code.write_text("one = 2\n")
    assert environment.content(*before)["packages_content"] != clean["packages_content"]
    code.write_text("one = 1\n")
    assert environment.content(*before) == clean


@pytest.mark.parametrize("how", ["pth", "finder", "finder of a module"])
def test_of_farms_own_interpreter_every_editable_package_counts(
    how: str, environment: Environment, tmp_path: Path
) -> None:
    # Nothing requires it, and any package imports it where it is found.
    environment.python = Path(sys.executable)
    code = tmp_path / "vision" / ("letters.py" if how.endswith("module") else "letters/__init__.py")
    code.parent.mkdir(parents=True)
    code.write_text("one = 1\n")
    if how == "pth":
        environment.write(f"{SITE}/letters.pth", f"{tmp_path / 'vision'}\n")
    else:
        mapping = {"letters": str(tmp_path / "vision" / "letters")}
        environment.write(f"{SITE}/__editable___letters_1_finder.py", f"MAPPING: dict[str, str] = {mapping!r}\n")
    before = [tmp_path / "vision"] if how == "pth" else []
    clean = environment.content(*before)
    code.write_text("one = 2\n")
    assert environment.content(*before)["packages_content"] != clean["packages_content"]
    code.write_text("one = 1\n")
    assert environment.content(*before) == clean


@pytest.mark.parametrize("how", ["pth", "finder"])
def test_farms_own_repository_installed_as_editable_does_not_count(
    how: str, environment: Environment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The parts of farm that make programs are in the keys by themselves.
    environment.python = Path(sys.executable)
    for name in ("farm", "bench"):
        (tmp_path / "work" / name).mkdir(parents=True)
        (tmp_path / "work" / name / "__init__.py").touch()
    monkeypatch.setattr("farm.__file__", str(tmp_path / "work" / "farm" / "__init__.py"))
    if how == "pth":
        environment.write(f"{SITE}/farm.pth", f"{tmp_path / 'work'}\n")
    else:
        mapping = {name: str(tmp_path / "work" / name) for name in ("farm", "bench")}
        environment.write(f"{SITE}/__editable___farm_1_finder.py", f"MAPPING: dict[str, str] = {mapping!r}\n")
    before = [tmp_path / "work"] if how == "pth" else []
    clean = environment.content(*before)
    for name in ("farm", "bench"):
        (tmp_path / "work" / name / "__init__.py").write_text("one = 2\n")
    assert environment.content(*before) == clean


@pytest.mark.parametrize("name", ["sitecustomize", "usercustomize"])
def test_what_python_imports_at_its_start_counts_also_from_pythonpath(
    name: str, environment: Environment, tmp_path: Path
) -> None:
    environment.python = Path(sys.executable)
    code = tmp_path / "home" / f"{name}.py"
    code.parent.mkdir()
    code.write_text("import torch\n")
    clean = environment.content(code.parent)
    code.write_text("import numpy\n")
    assert environment.content(code.parent)["packages_content"] != clean["packages_content"]


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
    named = environment.content()
    assert named["executorch_content"] != brought["executorch_content"]
    flatc.write_text("\x7fELF another flatc, built again")
    assert environment.content()["executorch_content"] not in (
        named["executorch_content"],
        brought["executorch_content"],
    )
    # ExecuTorch 1.3 uses the compiler in PATH.
    monkeypatch.delenv("FLATC_EXECUTABLE")
    monkeypatch.setenv("PATH", str(flatc.parent))
    facts = environment.facts()
    older = msgspec.structs.replace(
        facts, packages=facts.packages | {"executorch": PackageFacts("1.3.1", (environment.site / "executorch",))}
    )
    for found, counts in ((facts, False), (older, True)):
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


@pytest.mark.whole
def test_an_edit_of_a_real_checkout_is_another_bundle(
    tmp_path: Path, farm_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FARM_CACHE_DIR", str(farm_cache))
    commit = make_checkout(tmp_path / "executorch")
    config = load_config(folder=tmp_path)
    config = select(config, toolchain_of(config, str(tmp_path / "executorch")))
    case = Case(suite="s", name="relu", module="torch.nn:ReLU", inputs=(InputSpec(shape=(1, 4)),))
    targets = (("htp", "8a8w"), ("xnnpack", "fp32"))
    keys: dict[str, tuple[str, ...]] = {}
    states: dict[str, Toolchain] = {}

    def look(name: str) -> None:
        states[name] = tools = prepare(config, virtual=True)
        keys[name] = tuple(bundle_key(Job(case, Target("SM8650", *to)), tools.versions) for to in targets)

    look("clean")
    tools = states["clean"]
    assert tools.source.commit == commit
    assert (tools.source.branch, tools.source.dirty, tools.private) == ("main", False, True)
    folder = tmp_path / "executorch" / "backends" / "qualcomm"
    edited = folder / "_passes" / "annotate_quant_attrs.py"
    text = edited.read_text()
    edited.write_text(text + "raise RuntimeError('planted')\n")
    look("raises")
    assert states["raises"].source.changed == ("backends/qualcomm/_passes/annotate_quant_attrs.py",)
    edited.write_text(text)
    look("back")
    # A builder loads another library from there, though git ignores it.
    [library] = (folder / "python").glob("PyQnnManagerAdaptor*.so")
    copy = library.read_bytes()
    library.unlink()
    library.write_bytes(copy + b"\0")
    look("library")
    assert keys["clean"] == keys["back"]
    assert len({keys[name][0] for name in keys}) == len({keys[name][1] for name in keys}) == 3


def test_all_that_decoders_are_made_of_is_in_the_keys_of_their_bundles() -> None:
    root = Path(next(iter(own_facts().packages["executorch"].folders)))
    files = list((root / "examples" / "qualcomm" / "oss_scripts" / "llama").rglob("*.py"))
    files += root.glob("examples/models/*/config/*.json")
    assert len(files) > 50
    assert not [path for path in files if not hashes.is_read(path.relative_to(root).as_posix())]
    [case] = [case for case in load_suite(find_suites()["llm_tiny"]).cases if case.name == "qwen3"]
    job = Job(case, Target("SM8650", "htp", "16a8w"))
    versions = {"qnn": "2.51", "executorch_content": "a", "packages_content": "a"}
    keys = {
        bundle_key(job, {**versions, **changed})
        for changed in ({}, {"executorch_content": "b"}, {"packages_content": "b"})
    }
    assert len(keys) == 3


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


@pytest.mark.parametrize("around", ["a wheel", "a checkout", "the same checkout"])
def test_an_edited_checkout_of_torchao_is_dirty(around: str, environment: Environment, tmp_path: Path) -> None:
    code = "torchao/quantization.py"
    home = tmp_path / "executorch" / "third-party" / "ao"
    trees = environment.look().trees
    make_repository(tmp_path / "ao", {code: "one = 1\n"})
    if around == "a wheel":
        hashes_of = {
            name: hashlib.sha256(text.encode()).digest() for name, text in FILES.items() if "executorch/" in name
        }
        encoded = {name: base64.urlsafe_b64encode(digest).decode().rstrip("=") for name, digest in hashes_of.items()}
        record = "".join(f"{name},sha256={digest},\n" for name, digest in encoded.items())
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
