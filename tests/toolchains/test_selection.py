"""Toolchains by name, path and release: their selection, environments that farm makes, and farm's code in them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import sysconfig
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import click
import msgspec
import pytest
from click.testing import CliRunner
from farm_home import FarmHome
from made_environments import farm_without, make_environment, make_executorch_wheel, make_source_tree, make_wheel
from small_disk import small_disk
from waiting import until

from farm.base.config.settings import Config, load_config
from farm.base.config.toolchains import ToolchainConfig, release_of
from farm.base.errors import ConfigError, InfraError, MissingToolError, UnknownNameError, UsageError
from farm.builds.bundles.key import stub_of
from farm.builds.runtime.qnn_sdk import sdk_product, sdk_version
from farm.builds.toolchains.environments import about, environment_folder, environments_folder, made_environment
from farm.builds.toolchains.identity import identify
from farm.builds.toolchains.interpreters import (
    InterpreterFacts,
    PackageFacts,
    generation_of,
    handover,
    inspect,
    newer_than_known,
    process_environment,
    variables_of,
)
from farm.builds.toolchains.selection import (
    branch_of,
    import_environment,
    is_private,
    look_into,
    select,
    toolchain_of,
    use_toolchain,
)
from farm.builds.toolchains.toolchain import Compiler, Toolchain
from farm.cli.main import cli
from farm.dispatch.request.records import run_record
from farm.store.records import Purpose, RunToolchain
from farm.store.store import open_store

# Selection of a toolchain, and the marks of a stub of QNN.


# Values of `--toolchain`: tables of farm.toml, paths and releases; with real interpreters in empty environments.


ALL = ("torch", "executorch")


def config_of(folder: Path, text: str = "") -> Config:
    (folder / "farm.toml").write_text(text + f'\n[paths]\ncache = "{folder}/cache"\n')
    return load_config(folder / "farm.toml")


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.delenv("FARM_CACHE_DIR")
    tables = ('main]\ncheckout = "et"', 'env]\npython = "env/bin/python"', 'old]\nversion = "1.4.1"')
    return config_of(tmp_path, "".join(f"[toolchain.{table}\n" for table in tables))


def test_a_name_of_farm_toml_comes_first_then_a_path_then_a_release(config: Config, tmp_path: Path) -> None:
    main = toolchain_of(config, "main")
    assert (main.checkout, branch_of(config, main), is_private(main)) == (tmp_path / "et", "main", False)
    release = toolchain_of(config, "1.5.0")
    assert (release.version, branch_of(config, release), is_private(release)) == ("1.5.0", "1.5.0", False)
    tree = toolchain_of(config, str(make_source_tree(tmp_path / "et", "1.6.0a0", built=True)))
    assert (tree.checkout, branch_of(config, tree), is_private(tree)) == (tmp_path / "et", "", True)
    python = make_environment(tmp_path / "env", ALL)
    assert toolchain_of(config, str(python)).python == toolchain_of(config, str(tmp_path / "env")).python == python
    assert use_toolchain(config, "") is use_toolchain(config, "default") is config
    default = config.toolchain
    assert (branch_of(config, default), is_private(default)) == ("", False)


def test_what_cannot_be_is_said_in_one_line(config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    for ref, kind, problem in (
        ("mein", UnknownNameError, "did you mean 'main'"),
        ("zzz", UnknownNameError, "known are default, env, main, old (a path and a version of ExecuTorch will do"),
        ("here", UnknownNameError, "(the folder is ./here)"),
        ("./nothing", UsageError, "nothing is not there"),
        ("./here", UsageError, "here is none of them"),
        (".venv", UsageError, ".venv is not there"),
        ("~no-such-user/et", UsageError, "~no-such-user/et: there is no such home"),
        ("1.2.0", UsageError, "ExecuTorch 1.2.0 is too old: farm compiles with 1.3.1 and newer"),
        ("main", UsageError, f"toolchain main: {tmp_path}/et: a source tree of ExecuTorch is expected, it is not"),
        ("env", MissingToolError, f"{tmp_path}/env/bin/python cannot be started: No such file"),
    ):
        with pytest.raises(kind, match=f"^[^\n]*{re.escape(problem)}[^\n]*$"):
            use_toolchain(config, ref)


def test_an_environment_without_torch_or_executorch_says_what_to_install(config: Config, tmp_path: Path) -> None:
    for packages, missing in (((), "torch"), (("torch",), "executorch")):
        python = make_environment(tmp_path / missing, packages)
        with pytest.raises(MissingToolError, match=f"{python} has no {missing}: {python} -m pip install {missing}"):
            use_toolchain(config, str(python))
    with pytest.raises(UsageError, match=r"1\.2\.0 is too old"):
        use_toolchain(config, str(make_environment(tmp_path / "old", ALL, version="1.2.0")))


def test_what_is_no_python_or_an_old_one_is_said(config: Config, tmp_path: Path) -> None:
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\necho hello\n")
    script.chmod(0o755)
    with pytest.raises(MissingToolError, match="is no Python that farm can use"):
        use_toolchain(config, str(script))
    # The answer of any Python, with an old version.
    answer = json.dumps({"version": [3, 9, 2], "abi": "x", "prefix": "/", "path": [], "packages": {}})
    script.write_text(f"#!/bin/sh\necho loading\necho '{answer}'\n")
    with pytest.raises(MissingToolError, match=r"is Python 3\.9: a toolchain needs Python 3\.11 or newer"):
        use_toolchain(config, str(script))


def test_a_source_tree_is_imported_alone_under_whatever_name_its_folder_has(config: Config, tmp_path: Path) -> None:
    tree = make_source_tree(tmp_path / "my-tree", "1.6.0a0", built=True)
    # The tree's interpreter has a wheel as well, with a module that the tree lacks.
    python = make_environment(tree / ".venv", ALL)
    [site] = (tree / ".venv").glob("lib/python*/site-packages")
    (site / "executorch" / "wheel_only.py").touch()
    selected = use_toolchain(config, str(tree))
    assert (selected.toolchain.python, selected.toolchain.executorch) == (python, tree)
    assert look_into(selected, selected.toolchain).version_of("executorch") == "1.6.0a0"
    env = process_environment(import_environment(selected, selected.toolchain))
    code = "import executorch.exir as e; print(e.__file__)\n"
    code += "try: import executorch.wheel_only\nexcept ImportError: print('alone')"
    done = subprocess.run([python, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert done.stdout.split() == [str(tree / "exir" / "__init__.py"), "alone"], done.stderr


def test_a_source_tree_may_have_its_package_in_src(config: Config, tmp_path: Path) -> None:
    package = make_source_tree(tmp_path / "tree" / "src" / "executorch", "x", built=True)
    (package / "version.txt").rename(tmp_path / "tree" / "version.txt")
    make_environment(tmp_path / "tree" / ".venv", ("torch",))
    (tmp_path / "tree" / "version.txt").write_text("1.7.0\n")
    selected = use_toolchain(config, f"{tmp_path}/tree/")
    assert selected.toolchain.executorch == package
    assert look_into(selected, selected.toolchain).version_of("executorch") == "1.7.0"


def test_a_source_tree_that_is_not_built_says_how_to_build_it(config: Config, tmp_path: Path) -> None:
    tree = make_source_tree(tmp_path / "tree", "1.6.0a0", built=False)
    make_environment(tree / ".venv", ALL)
    with pytest.raises(MissingToolError, match=r"has no PyQnnManagerAdaptor\*\.so: build it with .*/build\.sh"):
        use_toolchain(config, str(tree))


def test_an_interpreter_that_farm_finds_by_itself_is_trusted_only_where_nobody_else_could_write_it(
    config: Config, tmp_path: Path
) -> None:
    tree = make_source_tree(tmp_path / "tree", "1.6.0a0", built=True)
    python = make_environment(tree / ".venv", ALL)
    python.parent.chmod(0o777)
    with pytest.raises(MissingToolError, match="another user could have written it: .*can be written by all users"):
        use_toolchain(config, str(tree))
    named = config_of(tmp_path, f'[toolchain.main]\ncheckout = "tree"\npython = "{python}"\n')
    assert use_toolchain(named, "main").toolchain.python == python, "what the user names is the user's to trust"


def test_neither_the_current_folder_nor_the_users_path_replaces_what_is_named(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = make_environment(tmp_path / "env", ALL)
    make_source_tree(tmp_path / "executorch", "1.9.0", built=True)
    monkeypatch.chdir(tmp_path)
    assert inspect(python).version_of("executorch") == "1.5.0"
    tree = make_source_tree(tmp_path / "tree", "1.6.0a0", built=True)
    make_environment(tree / ".venv", ("torch",))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert use_toolchain(config, str(tree)).toolchain.executorch == tree


def test_qnn_of_a_toolchain_and_of_the_environment_must_be_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sdk = tmp_path / "sdk" / "lib" / "x86_64-linux-clang"
    sdk.mkdir(parents=True)
    (sdk / "libQnnHtp.so").touch()
    config = config_of(tmp_path, '[toolchain.sdk]\nqnn = "./sdk"\n')
    assert use_toolchain(config, "sdk").sdk_root == tmp_path / "sdk"
    monkeypatch.setenv("QNN_SDK_ROOT", str(tmp_path / "sdk"))
    assert use_toolchain(config, "sdk").sdk_root == tmp_path / "sdk"
    monkeypatch.setenv("QNN_SDK_ROOT", "/opt/other")
    with pytest.raises(UsageError, match="toolchain sdk has qnn = .* and QNN_SDK_ROOT is /opt/other: unset one"):
        select(config, config.toolchains["sdk"])


def test_a_table_that_cannot_be_is_named(tmp_path: Path) -> None:
    version, address = '[toolchain.a]\nversion = "1.5.0"', "no address of a commit"
    for table, problem in (
        ('[toolchain.default]\nversion = "1.5.0"', "is no name of a toolchain"),
        ('[toolchain."1.5.0"]\nversion = "1.5.0"', "is no name of a toolchain"),
        ("[toolchain.a]\n", "is empty"),
        (f'{version}\ncheckout = "x"', "more than one of"),
        ('[toolchain.a]\nsource = "x"', r"toolchain\.a: unknown key 'source'.*checkout"),
        (f'{version}\nbuild = "make"', r"toolchain\.a.*build"),
        ('[toolchain]\ncheckout = "x"', r"each toolchain has a name, as in \[toolchain\.main\]"),
        ('[toolchain.a]\nversion = "latest"', "no release of ExecuTorch"),
        ('[toolchain.a]\nversion = "1.5.0 @ https://x/y.whl"', "no release of ExecuTorch"),
        (f'{version}\ncommit_url = "javascript:alert({{commit}})"', address),
        (f'{version}\ncommit_url = "https://x/{{commit}}?a={{b}}"', address),
        (f'{version}\ncommit_url = "https://me:token@x/{{commit}}"', "without a password"),
    ):
        with pytest.raises(ConfigError, match=problem):
            config_of(tmp_path, table)


def test_releases_are_told_from_names_and_know_what_they_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = ("1.5.0", "1.6.0rc1", "1.5", "v1.5.0", "main", "1", "1.*", "latest", "1.5.0 @ https://x/y.whl")
    assert [release_of(text) for text in written] == ["1.5.0", "1.6.0rc1", "1.5.0", "1.5.0", *[""] * 5]
    assert generation_of("1.3.1").needs_flatc
    assert generation_of("1.6.0a0+abc") == generation_of("1.5.1") == generation_of("unknown")
    assert [newer_than_known(text) for text in ("1.5.9", "1.6.0a0", "")] == [False, True, False]
    monkeypatch.delenv("FLATC_EXECUTABLE", raising=False)
    flatc = tmp_path / "data" / "bin" / "flatc"
    flatc.parent.mkdir(parents=True)
    flatc.touch(mode=0o755)
    for release, variables in (("1.3.1", {"FLATC_EXECUTABLE": str(flatc)}), ("1.4.1", {})):
        packages = {"executorch": PackageFacts(release, (tmp_path,))}
        assert variables_of(InterpreterFacts((3, 11, 0), "", tmp_path, (), packages)) == variables


def test_commands_refuse_what_cannot_be_before_anything_begins(home: FarmHome) -> None:
    run = ("run", "--soc", "SM8650", "--suite", "smoke", "--virtual", "1")
    for arguments, problem in (
        ((*run, "--toolchain", "nope"), "unknown toolchain 'nope'"),
        ((*run, "--toolchain", "default", "--toolchain", "nope"), "unknown toolchain 'nope'"),
        ((*run, "--toolchain", "default", "--toolchain", "1.5.0", "--json"), "--json is of one run"),
        (("run", "--resume", "latest", "--toolchain", "1.5.0"), "leave --toolchain out"),
        (("setup", "toolchain", "show", "nope"), "unknown toolchain 'nope'"),
        (("debug", "smoke/add", "--soc", "SM8650", "--virtual", "--toolchain", "nope"), "unknown toolchain 'nope'"),
    ):
        assert problem in home.farm(*arguments, code=2).stderr
        assert not (home.state / "runs").exists()


def test_listing_shows_what_can_be_used_and_why_something_cannot(home: FarmHome) -> None:
    tables = '[toolchain.gone]\ncheckout = "nowhere"\n[toolchain.later]\nversion = "1.5.77"\n'
    (home.cwd / "farm.toml").write_text(tables)
    done = home.farm("setup", "toolchain", "list", code=0)
    assert max(map(len, done.stdout.splitlines())) <= 80 + len(str(home.cwd))
    rows = home.json("setup", "toolchain", "list")["toolchains"]
    kinds = [(row["name"], row["kind"]) for row in rows]
    assert kinds == [("default", "default"), ("gone", "checkout"), ("later", "version")]
    assert rows[0]["python"] == sys.executable
    assert "is not there" in rows[1]["problem"]
    assert rows[2]["problem"] == "not made"
    assert not os.path.exists(home.state)


@pytest.mark.parametrize(
    "arguments",
    [
        "run --soc SM8650 --suite smoke --virtual 1 --toolchain", "exec x.pte --toolchain", "setup toolchain show",
        "perf compare --suite smoke --toolchain 1.5.0 --toolchain", "perf compare --suite smoke --checkout . --base",
    ],
)  # fmt: skip
def test_a_name_that_is_empty_is_no_default(arguments: str) -> None:
    done = CliRunner().invoke(cli, [*arguments.split(), ""])
    assert done.exit_code == 2
    assert "is empty, and names nothing: is a variable not set?" in " ".join(done.stderr.split())


# A stub of a QNN SDK by its product name: part of the fingerprint, and a branch of its own.


@pytest.fixture
def sdk(tmp_path: Path) -> Path:
    (tmp_path / "sdk").mkdir()
    return tmp_path / "sdk"


@pytest.mark.parametrize(
    ("text", "product", "stub"),
    [
        ("product: stub\nversion: 2.51.0.1\n", "stub", "stub"),
        ("product: 'LPAI Stub'\nversion: 2.51.0.1\n", "LPAI Stub", "LPAI Stub"),
        ("product: QAIRT\nversion: 2.51.0.1\n", "QAIRT", ""),
        ("version: 2.51.0.1\n", "", ""),
        ("product: \x1b[2Jstub\nversion: 2.51.0.1\n", "stub", "stub"),
    ],
)
def test_the_product_of_an_sdk_is_that_of_its_file(sdk: Path, text: str, product: str, stub: str) -> None:
    (sdk / "sdk.yaml").write_text(text)
    assert sdk_product(sdk) == product
    assert sdk_version(sdk) == "2.51.0.1"
    tools = Toolchain({"qnn": "2.51"}, Compiler("", {}), "runner", qnn_product=product)
    facts = tools.fingerprint("virtual")
    assert facts.get("qnn_product", "") == product
    assert stub_of(facts) == stub


def test_no_sdk_has_no_product(sdk: Path) -> None:
    assert (sdk_product(None), sdk_product(sdk)) == ("", "")


def test_runs_over_a_stub_have_a_line_of_their_own(sdk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARM_STATE_DIR", str(tmp_path / "state"))
    config = load_config(folder=tmp_path)
    main = ToolchainConfig(name="main", named=True)
    assert (branch_of(config), branch_of(config, main)) == ("", "main")
    (sdk / "sdk.yaml").write_text("product: stub\nversion: 2.51.0.1\n")
    config = msgspec.structs.replace(config, sdk_root=sdk)
    assert (branch_of(config), branch_of(config, main)) == ("stub", "main stub")


@pytest.mark.parametrize(
    ("then", "now", "branch"),
    [("main", "", "main"), ("main", "stub", "stub"), ("stub", "", ""), ("main stub", "stub", "main stub")],
)
def test_a_program_that_is_run_again_over_a_stub_is_not_compared_with_the_line_of_qualcomms_libraries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, then: str, now: str, branch: str
) -> None:
    monkeypatch.setenv("FARM_STATE_DIR", str(tmp_path / "state"))
    config = load_config(folder=tmp_path)
    tools = Toolchain({"executorch": "1.5.1"}, Compiler("", {}), "runner", branch=now)
    with open_store(config.store_url) as store:
        again = RunToolchain(name="main", branch=then)
        record = run_record(
            config, store, tools, command="farm jobs rerun", facts={}, purpose=Purpose.LOCAL, again=again
        )
    assert (record.toolchain.branch, record.toolchain.private) == (branch, True)


# Environments that farm makes, releases of ExecuTorch, and farm's own code in foreign interpreters.


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


def test_packages_that_fit_are_shared_and_others_are_installed(
    index: Path, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_executorch_wheel(index, RELEASE, ["numpy>=1", "click==0.0.7", "gone; python_version<'3'"])
    make_wheel(index, "click", "0.0.7", {"click/__init__.py": "mine = True\n"}, ["iniconfig<0.0.2"])
    make_wheel(index, "iniconfig", "0.0.1", {"iniconfig/__init__.py": ""})
    selected = use_toolchain(config, RELEASE).toolchain
    folder, python = environment_folder(config.cache_dir, RELEASE), selected.python
    assert python == folder / "bin" / "python"
    [site] = folder.glob("lib/python*/site-packages")
    facts = look_into(config, selected)
    # farm's own ExecuTorch, which is on the path behind this one, is no part of it.
    assert (facts.packages["executorch"].folders, selected.executorch) == ((site / "executorch",), site / "executorch")
    assert facts.version_of("executorch") == RELEASE
    own = Path(sysconfig.get_path("purelib"))
    assert (facts.folder("torch"), facts.version_of("torch")) == (own / "torch", version("torch"))
    assert {path.name for path in site.glob("*.dist-info")} == {
        f"executorch-{RELEASE}.dist-info", "click-0.0.7.dist-info", "iniconfig-0.0.1.dist-info"
    }  # fmt: skip
    code = "import click, numpy; print(click.mine, numpy.ones(2).sum())"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "True 2.0\n", done.stderr
    assert not hasattr(click, "mine"), "farm's own package stays as it is"

    # The place of farm's packages is no part of the identity.
    before = identify(config.cache_dir, python, facts, {}).content
    with (site / "farm.pth").open("a") as file:
        file.write("\n/not/there\n")
    assert identify(config.cache_dir, python, facts, {}).content == before
    # Again nothing is asked of pip.
    monkeypatch.setenv("PIP_FIND_LINKS", "/not/there")
    assert made_environment(config.cache_dir, RELEASE) == folder
    with pytest.raises(MissingToolError, match="is the package index reachable"):
        made_environment(config.cache_dir, "1.4.9")


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
        ("1.4.1", MissingToolError, "cannot be made: .*not-there-at-all.*is the package index reachable"),
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


def test_commands_list_and_remove_them(home: FarmHome, index: Path, tmp_path: Path) -> None:
    make_executorch_wheel(index, RELEASE)
    made_environment(tmp_path, RELEASE)
    env = {"FARM_CACHE_DIR": str(tmp_path)}

    def setup(*words: str) -> str:
        return home.farm("setup", *words, env=env, code=0).stdout

    listed = json.loads(setup("toolchain", "list", "--json"))
    [row] = listed["environments"]
    assert (row["executorch"], row["torch"], row["current"]) == (RELEASE, version("torch"), True)
    assert listed["toolchains"][0]["versions"]["executorch"] == version("executorch")
    assert "environment" not in setup("cache", "prune", "--older", "1h")
    assert "and 1 environment of toolchains" in setup("cache", "prune", "--all", "--yes")
    assert not environment_folder(tmp_path, RELEASE).exists()


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


@pytest.mark.usefixtures("index")
def test_an_interpreter_of_another_abi_needs_its_own_msgspec(tmp_path: Path) -> None:
    python = make_environment(tmp_path / "env")
    facts = msgspec.structs.replace(inspect(python), abi="cpython-399-x86_64-linux-gnu")
    with pytest.raises(MissingToolError, match=r"needs msgspec==.* \(cpython-399.*is the package index reachable"):
        handover(tmp_path / "cache", python, facts)
    assert not [path for path in (tmp_path / "cache").rglob("packages-*") if path.is_dir()]


# Real releases of ExecuTorch, and a farm that has none of its own.


SMOKE = ("run", "--soc", "SM8650", "--suite", "smoke", "--virtual", "1")
COMPILE = ("run", "--compile-only", "--soc", "SM8650", "--suite", "smoke", "-k", "add")


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
    alone.farm(*COMPILE, "--toolchain", sys.executable, timeout_s=300, code=0)


@pytest.mark.whole
def test_a_source_tree_that_cannot_be_imported_says_why(home: FarmHome, tmp_path: Path) -> None:
    tree = make_source_tree(tmp_path / "tree", "1.5.9", built=True)
    (tree / "exir" / "__init__.py").write_text("raise RuntimeError('half an edit')\n")
    failed = home.farm(*COMPILE, "--toolchain", str(tree), timeout_s=300, code=1)
    assert "RuntimeError: half an edit" in failed.stdout


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


@pytest.mark.whole
def test_several_toolchains_are_one_run_each_and_layers_are_compared_with_any(home: FarmHome) -> None:
    home.use_one_builder()
    both = home.farm(*SMOKE, "-k", "add", "--toolchain", "default", "--toolchain", "1.3.1", timeout_s=600, code=0)
    assert both.stdout.count("1 passed") == 2
    assert "toolchain default" in both.stderr
    home.farm(
        "debug", "smoke/conv2d", "--soc", "SM8650", "--precision", "8a8w", "--virtual", "--toolchain", "1.3.1",
        timeout_s=600, code=0)  # fmt: skip
