"""Environments that farm makes, releases of ExecuTorch, and farm's own code in foreign interpreters."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import click
import msgspec
import pytest
from farm_home import FarmHome
from made_environments import farm_without, make_environment, make_executorch_wheel, make_source_tree, make_wheel
from small_disk import small_disk
from waiting import until

from farm.base.errors import InfraError, MissingToolError, UsageError
from farm.builds.toolchains.environments import about, environment_folder, environments_folder, made_environment
from farm.builds.toolchains.interpreters import handover, inspect, process_environment

# Environments that farm makes of a release: of real wheels, of an ExecuTorch that is a few empty files.


RELEASE = "1.4.7"
_MAKE = """
import logging, sys
from pathlib import Path
from farm.builds.toolchains.environments import made_environment
logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
print(made_environment(Path(sys.argv[1]), sys.argv[2]))
"""


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """All that pip finds: a folder of wheels."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def _making(cache: Path) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", _MAKE, str(cache), RELEASE], stdout=subprocess.PIPE, text=True)


def test_what_fits_is_linked_and_what_does_not_is_installed_beside_it(index: Path, tmp_path: Path) -> None:
    make_executorch_wheel(
        index, RELEASE, ["numpy>=1", "click==0.0.7", "scikit-learn==0.0.1", "gone; python_version<'3'"]
    )
    make_wheel(index, "click", "0.0.7", {"click/__init__.py": "mine = True\n"}, ["iniconfig<0.0.2"])
    make_wheel(index, "iniconfig", "0.0.1", {"iniconfig/__init__.py": ""})
    folder = made_environment(tmp_path / "cache", RELEASE)
    [site] = folder.glob("lib/python*/site-packages")
    facts = inspect(folder / "bin" / "python")
    assert facts.packages["executorch"].folders == (site / "executorch",)
    assert facts.version_of("executorch") == RELEASE
    assert (facts.folder("torch"), facts.version_of("torch")) == (site / "torch", version("torch"))
    assert (site / "torch").is_symlink()
    assert not (site / "executorch").is_symlink()
    code = "import click, numpy; print(click.mine, numpy.ones(2).sum())"
    done = subprocess.run([folder / "bin" / "python", "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "True 2.0\n", done.stderr
    assert not hasattr(click, "mine"), "what is linked is farm's own, and stays as it is"
    made = about(folder)
    assert made is not None
    assert made.installed == (f"executorch=={RELEASE}", "click==0.0.7", "iniconfig<0.0.2")
    # Again nothing is asked of pip.
    shutil.rmtree(index)
    assert made_environment(tmp_path / "cache", RELEASE) == folder
    with pytest.raises(MissingToolError, match="is the package index reachable"):
        made_environment(tmp_path / "cache", "1.4.9")


@pytest.mark.parametrize("ending", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.whole)])
def test_one_that_is_ended_midway_leaves_nothing_half(index: Path, tmp_path: Path, ending: signal.Signals) -> None:
    # Large enough that pip is at it for a while.
    make_executorch_wheel(index, RELEASE, more="x" * 120_000_000)
    cache = tmp_path / "cache"
    process = _making(cache)
    half = "*.partial/lib/*/site-packages"
    until(lambda: list(environments_folder(cache).glob(half)) or process.poll() is not None, half)
    assert process.poll() is None
    process.send_signal(ending)
    process.wait(timeout=60)
    assert not [folder for folder in environments_folder(cache).glob("*") if about(folder)]
    make_executorch_wheel(index, RELEASE)
    folder = made_environment(cache, RELEASE)
    assert inspect(folder / "bin" / "python").version_of("executorch") == RELEASE
    assert not list(environments_folder(cache).glob("*.partial"))


def test_what_cannot_be_made_is_said(index: Path, tmp_path: Path) -> None:
    make_executorch_wheel(index, "1.4.1", ["not-there-at-all"])
    for release, kind, problem in (
        (RELEASE, UsageError, r"no ExecuTorch 1.4.7 for Python 3.\d+: the index has 1.4.1"),
        ("1.4.1", MissingToolError, "pip cannot install not-there-at-all: .*is the package index reachable"),
        ("1.3.0", UsageError, "too old"),
    ):
        with pytest.raises(kind, match=problem):
            made_environment(tmp_path / "cache", release)
    assert not list(environments_folder(tmp_path / "cache").glob("*/*"))


def test_a_full_disk_is_said_to_be_one(index: Path, tmp_path: Path) -> None:
    make_executorch_wheel(index, RELEASE, more="x" * 20_000_000)
    with small_disk(tmp_path / "disk", "4m") as disk:
        with pytest.raises(InfraError, match="farm setup cache prune"):
            made_environment(disk, RELEASE)
        assert not list(environments_folder(disk).glob("*/*"))


def test_another_package_in_farms_environment_makes_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = environment_folder(tmp_path, RELEASE)
    info = tmp_path / "site-packages" / "more-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "RECORD").write_text("more-1.0.dist-info/RECORD,,\n")
    monkeypatch.syspath_prepend(tmp_path / "site-packages")
    assert environment_folder(tmp_path, RELEASE) != before


def test_commands_make_show_and_remove_them(home: FarmHome, index: Path, tmp_path: Path) -> None:
    make_executorch_wheel(index, RELEASE)
    env = {name: os.environ[name] for name in ("PIP_NO_INDEX", "PIP_FIND_LINKS")} | {"FARM_CACHE_DIR": str(tmp_path)}

    def setup(*words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        return home.farm("setup", *words, env=env, code=code)

    assert "is no release of ExecuTorch" in setup("toolchain", "make", "newest", code=2).stderr
    made = setup("toolchain", "make", RELEASE)
    assert f"making an environment with ExecuTorch {RELEASE}, once" in made.stderr
    assert made.stdout.startswith(f"ExecuTorch {RELEASE}, torch {version('torch')}, ")
    listed = json.loads(setup("toolchain", "list", "--json").stdout)
    [row] = listed["environments"]
    assert (row["executorch"], row["current"]) == (RELEASE, True)
    assert listed["toolchains"][0]["versions"]["executorch"] == version("executorch")
    assert "environment" not in setup("cache", "prune", "--older", "1h").stdout
    assert "and 1 environment of toolchains" in setup("cache", "prune", "--all").stdout
    assert "--yes does it" in setup("toolchain", "remove", RELEASE, code=2).stderr
    assert setup("toolchain", "remove", RELEASE, "--yes").stdout.startswith("removed 1 environment, ")
    assert "there is none" in setup("toolchain", "remove", RELEASE, code=2).stderr


# farm's code under the interpreter of a toolchain.


_LOADED = """
import sys
import farm.builds.compile.builder, farm.builds.compile.debug.debugger
print(*sorted({name.partition(".")[0] for name in sys.modules} - set(sys.stdlib_module_names) - {"__main__"}))
print(farm.__file__)
import coverage.tracer
try:
    import sqlalchemy
except ImportError:
    print("no sqlalchemy")
"""


def test_a_builder_starts_under_an_interpreter_that_has_nothing_of_farm(tmp_path: Path) -> None:
    python = make_environment(tmp_path / "env")
    folder = handover(tmp_path / "cache", python, inspect(python))
    env = process_environment({"PYTHONPATH": str(folder)})
    done = subprocess.run([python, "-c", _LOADED], env=env, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == ["farm msgspec", f"{folder}/farm/__init__.py", "no sqlalchemy"], done.stderr
    assert handover(tmp_path / "cache", python, inspect(python)) == folder


def test_what_is_gone_behind_a_link_is_handed_over_anew(tmp_path: Path) -> None:
    python = make_environment(tmp_path / "env")
    folder = handover(tmp_path / "cache", python, inspect(python))
    (folder / "msgspec").unlink()
    assert (handover(tmp_path / "cache", python, inspect(python)) / "msgspec" / "__init__.py").is_file()


def test_an_interpreter_of_another_abi_needs_its_own_msgspec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = make_environment(tmp_path / "env")
    facts = msgspec.structs.replace(inspect(python), abi="cpython-399-x86_64-linux-gnu")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(MissingToolError, match=r"needs msgspec==.* \(cpython-399.*is the package index reachable"):
        handover(tmp_path / "cache", python, facts)
    assert not [path for path in (tmp_path / "cache").rglob("packages-*") if path.is_dir()]


# Real releases of ExecuTorch, and a farm that has none of its own.


SMOKE = ("run", "--soc", "SM8650", "--suite", "smoke", "--virtual", "1")


@pytest.mark.whole
def test_farm_compiles_through_another_environment_without_torch_of_its_own(home: FarmHome, tmp_path: Path) -> None:
    python = farm_without(tmp_path / "env", "torch", "executorch", "torchao", "transformers", "torchgen", "functorch")
    alone = replace(home, interpreter=str(python))
    listed = alone.farm(*SMOKE, "--collect-only")
    assert (listed.returncode, len(listed.stdout.splitlines())) == (0, 8), listed.stderr
    refused = alone.farm(*SMOKE, code=6)
    assert "or name an environment that has it with --toolchain" in refused.stderr
    assert "no executorch, torch, torchao" in " ".join(alone.farm("setup", "toolchain", "list").stdout.split())
    wanted = ("doctor", "--soc", "SM8650", "--backend", "xnnpack")
    assert [alone.farm(*wanted, *more).returncode for more in ((), ("--toolchain", sys.executable))] == [6, 0]
    # The runner is built against the C++ of that environment, which the shared cache has.
    answer = alone.json("setup", "toolchain", "check", sys.executable, timeout_s=300)
    assert [(check["backend"], check["ok"]) for check in answer["checks"]] == [("htp", True), ("xnnpack", True)]


@pytest.mark.whole
def test_a_source_tree_that_cannot_be_imported_says_why(home: FarmHome, tmp_path: Path) -> None:
    tree = make_source_tree(tmp_path / "tree", "1.5.9", built=True)
    (tree / "exir" / "__init__.py").write_text("raise RuntimeError('half an edit')\n")
    checked = home.farm("setup", "toolchain", "check", str(tree), timeout_s=300, code=1)
    assert checked.stdout.count("RuntimeError: half an edit") >= 2


# With -m whole, the next test has jobs of the oldest, which is the most different.
@pytest.mark.parametrize(
    "release",
    [
        pytest.param("1.3.1", marks=pytest.mark.soak),
        pytest.param("1.4.1", marks=pytest.mark.soak),
        pytest.param("1.5.0", marks=pytest.mark.soak),
    ],
)
def test_a_release_compiles_smoke_and_its_programs_run(home: FarmHome, release: str) -> None:
    home.use_one_builder()
    facts = home.json(*SMOKE, "--toolchain", release, timeout_s=900)["fingerprint"]
    assert (facts["executorch"], facts["toolchain"]) == (release, release)
    home.farm("setup", "toolchain", "check", release, timeout_s=300, code=0)


@pytest.mark.whole
def test_several_toolchains_are_one_run_each_and_layers_are_compared_with_any(home: FarmHome) -> None:
    home.use_one_builder()
    both = home.farm(*SMOKE, "-k", "add", "--toolchain", "default", "--toolchain", "1.3.1", timeout_s=600, code=0)
    assert both.stdout.count("1 passed") == 2
    assert "toolchain default" in both.stderr
    home.farm(
        "debug", "smoke/conv2d", "--soc", "SM8650", "--precision", "8a8w", "--virtual", "--toolchain", "1.3.1",
        timeout_s=600, code=0)  # fmt: skip
