from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import click
import pytest
from click.shell_completion import BashComplete
from farm_home import FarmHome
from programs import run_program

from farm.cli.completion import VARIABLE, complete_parameter
from farm.cli.main import cli
from farm.store.store import open_store

BIN = Path(sys.executable).parent
HOSTILE = ("$(touch${IFS}gone)", "`id`", "a;b", "x y", "line\nbreak", "'", "")


def plant(store: sqlite3.Connection, table: str, **values: str) -> None:
    """Insert a row, with arbitrary values in its other required columns."""
    columns = store.execute(f"PRAGMA table_info({table})").fetchall()
    needed = {name: 0 if "INT" in kind else "{}" for _, name, kind, is_needed, default, _ in columns
              if is_needed and default is None and name != "id"}  # fmt: skip
    row = needed | values
    marks = ", ".join("?" * len(row))
    store.execute(f"INSERT INTO {table} ({', '.join(row)}) VALUES ({marks})", tuple(row.values()))  # noqa: S608


@pytest.fixture(scope="module")
def stocked(tmp_path_factory: pytest.TempPathFactory) -> FarmHome:
    """A home whose store has a run with a name, a job and a device, and others with names that no shell may get."""
    folders = [tmp_path_factory.mktemp(name) for name in ("cache", "state", "cwd")]
    home = FarmHome(*folders)
    open_store(home.state / "farm.db").close()
    with closing(sqlite3.connect(home.state / "farm.db")) as store, store:
        plant(store, "fingerprint", hash="f")
        for number, name in enumerate(("before_the_pass", *HOSTILE)):
            plant(store, "run", id=f"20261101-20000{number}-abcdef", fingerprint_hash="f", run_name=name)
            plant(store, "device_state", id=f"d{number}", serial=name or "left-phone", name=name)
        plant(store, "job", name="gone_suite/relu[SM8650-htp-8a8w]", suite="gone_suite", case_name="relu", soc="SM8650")
    (home.cwd / "farm.toml").write_text(
        f"suites = ['mine']\n[toolchain.main]\npython = '{sys.executable}'\n[[device]]\nserial = 'A1'\nname = 'desk'\n"
    )
    suite = home.cwd / "mine" / "own_ops"
    suite.mkdir(parents=True)
    (suite / "suite.toml").write_text(
        "[suite]\nname = 'own_ops'\ndescription = 'x'\n"
        "[case.tanh]\nmodule = 'torch.nn:Tanh'\ninputs = [{shape = [1]}]\n"
    )
    return home


def tab(home: FarmHome, *words: str) -> subprocess.CompletedProcess[str]:
    """Return the answer to a shell that completes the last of `words`."""
    asked = {"COMP_WORDS": "\n".join(("farm", *words)), "COMP_CWORD": str(len(words))}
    return home.farm(env={**asked, "_FARM_COMPLETE": "bash_complete"})


@pytest.fixture
def offered(stocked: FarmHome, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Function that returns Tab's completions of the last word."""
    monkeypatch.chdir(stocked.cwd)
    monkeypatch.setenv("FARM_CACHE_DIR", str(stocked.cache))
    monkeypatch.setenv("FARM_STATE_DIR", str(stocked.state))

    monkeypatch.setattr(click.Parameter, "shell_complete", complete_parameter)

    def offered(*words: str) -> list[str]:
        found = BashComplete(cli, {}, "farm", VARIABLE).get_completions(list(words[:-1]), words[-1])
        return [one.value for one in found]

    return offered


def test_a_tab_offers_names_of_its_kind(offered: Callable[..., list[str]]) -> None:
    for words, among in {
        ("his",): "history",
        ("devices", "sh"): "show",
        ("run", "--soc", "sm86"): "SM8650",
        ("run", "--suite", ""): "own_ops quantized_ops smoke",
        ("history", "own"): "own_ops/",
        ("history", "own_ops/"): "own_ops/tanh",
        ("history", "gone_suite/"): "gone_suite/relu",
        ("show", "gone_suite/relu["): "gone_suite/relu[SM8650-htp-8a8w]",
        ("report", "l"): "latest latest~1",
        ("run", "--resume", "2026"): "20261101-200000-abcdef",
        ("diff", "latest", "be"): "before_the_pass",
        ("run", "--device", ""): "desk before_the_pass left-phone",
        ("run", "--toolchain", ""): "main default",
        ("run", "--precision", "16a8"): "16a8w",
        ("virtual", "fault", "x", "st"): "stall",
        ("data", "export", "--format", "ju"): "junit",
        ("suites", "smoke", "own"): "own_ops",
        ("suites", "tune", "own_ops/"): "own_ops/tanh",
    }.items():
        found = offered(*words)
        assert set(among.split()) <= set(found), words
        assert all(value.casefold().startswith(words[-1].casefold()) for value in found)
        assert not set(HOSTILE).intersection(found)


def test_it_never_tells_an_error(stocked: FarmHome, tmp_path: Path) -> None:
    home = FarmHome(stocked.cache, tmp_path, tmp_path)
    (tmp_path / "farm.toml").write_text("not [ what = it is")
    (tmp_path / "farm.db").write_text("nor this")
    for words in ("run --suite ", "report ", "run --no x y"):
        done = tab(home, *words.split(" "))
        assert (done.returncode, done.stderr) == (0, ""), words


def test_without_a_store_none_is_made(home: FarmHome) -> None:
    assert tab(home, "report", "").stdout.split() == ["plain,latest", "plain,latest~1"]
    assert not home.state.exists()


def test_it_loads_little(stocked: FarmHome) -> None:
    code = (
        "import atexit, sys; from farm.cli.main import main; heavy = {'torch', 'sqlalchemy', 'numpy', 'jinja2'};"
        "atexit.register(lambda: print('loaded', sorted(heavy & set(sys.modules)))); main()"
    )
    asked = {"COMP_WORDS": "farm\nrun\n--resume\n", "COMP_CWORD": "3", "_FARM_COMPLETE": "bash_complete"}
    done = run_program([sys.executable, "-c", code], env={**stocked.env, **asked}, cwd=stocked.cwd)
    assert "plain,before_the_pass" in done.stdout
    assert done.stdout.splitlines()[-1] == "loaded []"


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_bash_completes_names_as_they_are(stocked: FarmHome) -> None:
    # A job's id is a pattern to a shell, and this file would match it.
    (stocked.cwd / "gone_suite").mkdir()
    (stocked.cwd / "gone_suite" / "reluS").touch()
    script = (
        'eval "$(farm setup completion bash)"; COMP_WORDS=(farm show "gone_suite/relu["); COMP_CWORD=2; '
        '_farm_completion farm; printf "%s\\n" "${COMPREPLY[@]}"; complete -p farm; '
        'COMP_WORDS=(farm report ""); PATH=/usr/bin; _farm_completion farm; echo "none: ${#COMPREPLY[@]}"'
    )
    path = f"{BIN}:{os.environ['PATH']}"
    done = run_program(["bash", "--norc", "-c", script], env={**stocked.env, "PATH": path}, cwd=stocked.cwd)
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        "gone_suite/relu[SM8650-htp-8a8w]",
        "complete -o nosort -F _farm_completion farm",
        "none: 0",
    ]


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_get_theirs(stocked: FarmHome, shell: str) -> None:
    done = stocked.farm("setup", "completion", shell, code=0)
    assert f"{shell}_complete" in done.stdout
    if shutil.which(shell):
        checked = subprocess.run([shell, "-n"], input=done.stdout, capture_output=True, text=True, check=False)
        assert (checked.returncode, checked.stderr) == (0, "")
