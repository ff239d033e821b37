"""Commands that execute bundles of a past run use the toolchain of that run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner
from in_process import refusal
from log_lines import LogLines

from farm.base.config.settings import Config, load_config
from farm.base.errors import FarmError, UsageError
from farm.cli.main import cli
from farm.cli.running.cell_steps import confirm_suspected
from farm.dispatch.request.records import config_of_run, config_to_run_again, leave_intent
from farm.dispatch.request.request import RunRequest
from farm.numbers.regressions.confirm_run import RunFindings
from farm.store.records import RunRecord, RunToolchain, RunView
from farm.store.rows import now_ms
from farm.store.store import open_store

MAIN = RunToolchain("main", "main")
FINDINGS = RunFindings(
    run_id="", alerts=(), shifts=(), not_measured=0, problems=(), changed=0, changed_not_measured=0, insufficient=0
)
Begin = Callable[..., RunView]
Measured = list[tuple[str, float | None]]
"""Toolchain and budget of each measurement."""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.setenv("FARM_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("FARM_STORE", f"sqlite:///{tmp_path / 'farm.db'}")
    monkeypatch.chdir(tmp_path)
    sdk = tmp_path / "sdk"
    (tmp_path / "farm.toml").write_text(f'[toolchain.main]\nqnn = "{sdk}"\n[toolchain.other]\nqnn = "{sdk}"\n')
    # These tests need no real SDK.
    monkeypatch.setattr("farm.builds.toolchains.selection.resolve_qnn", lambda _config, qnn: Path(qnn))
    return load_config(tmp_path / "farm.toml")


@pytest.fixture
def begin(config: Config) -> Begin:
    def begin(toolchain: RunToolchain = MAIN, request: RunRequest | None = None, ref: str | None = None) -> RunView:
        with open_store(config.store_url) as store:
            run_id = store.begin_run(RunRecord("farm run", "ada", "bench", {}, now_ms(), toolchain=toolchain))
            store.finish_run(run_id, 0)
            if request is not None or ref is not None:
                leave_intent(config.run_folder(run_id), request, (), ref or "")
            return store.runs.view(run_id)

    return begin


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Measured:
    """Toolchain and budget of each measurement of a run's suspected changes."""
    found: Measured = []

    def confirm_run(config: Config, *_: object, budget_s: float | None = None) -> RunFindings:
        found.append((config.toolchain.name, budget_s))
        return FINDINGS

    monkeypatch.setattr("farm.numbers.regressions.confirm_run.confirm_run", confirm_run)
    return found


def asked(toolchain: str) -> RunRequest:
    return RunRequest(socs=("SM8650",), suites=("smoke",), toolchain=toolchain)


def selected(config: Config, run: RunView, given: str = "") -> str:
    return config_of_run(config, run, given).toolchain.name


def test_a_past_run_is_run_again_with_its_toolchain(config: Config, begin: Begin) -> None:
    assert selected(config, begin(request=asked("main"))) == "main"
    # A bundle of the run before, and an imported run.
    assert selected(config, begin(ref="other")) == "other"
    assert selected(config, begin()) == "main"
    assert selected(config, begin(RunToolchain())) == ""
    assert selected(config, begin(), "other") == "other"
    assert selected(config, begin(), "default") == ""


def test_a_lost_toolchain_is_named_and_no_program_of_others_started(
    config: Config, begin: Begin, tmp_path: Path
) -> None:
    theirs = tmp_path / "env" / "bin" / "python"
    theirs.parent.mkdir(parents=True)
    theirs.write_text(f"#!/bin/sh\ntouch {tmp_path}/started\n")
    theirs.chmod(0o755)
    for run in (begin(RunToolchain("gone", "gone")), begin(RunToolchain(str(theirs), private=True))):
        with pytest.raises(UsageError):
            selected(config, run)
        output = LogLines()
        assert config_to_run_again(config, run, "") is config
        assert len(output) == 1
        assert f"the toolchain of run {run.id} cannot be used" in output[0]
        with pytest.raises(FarmError):
            config_to_run_again(config, run, "nope")
    assert not (tmp_path / "started").exists()


def test_a_night_measures_with_the_toolchain_of_its_run(config: Config, begin: Begin, measured: Measured) -> None:
    output = LogLines()
    confirm_suspected(config, begin(request=asked("main")).id, 60.0)
    confirm_suspected(config, begin(RunToolchain(), request=asked("")).id, None)
    assert (measured, output) == ([("main", 60.0), ("", None)], [])
    run = begin(RunToolchain("gone", "gone"))
    confirm_suspected(config, run.id, 60.0)
    assert measured[2:] == [("", 0.0)]
    assert len(output) == 1
    assert f"suspected changes of run {run.id} are not measured" in output[0]


@pytest.mark.usefixtures("config")
def test_suspected_changes_are_measured_with_the_toolchain_of_their_run(begin: Begin, measured: Measured) -> None:
    begin(RunToolchain())
    main, gone = begin(request=asked("main")).id, begin(RunToolchain("gone", "gone")).id
    for words, name in (
        (("--run", main), "main"),
        ((), ""),
        (("--run", main, "--toolchain", "other"), "other"),
        (("--toolchain", "main"), "main"),
        (("--run", gone, "--toolchain", "default"), ""),
    ):
        assert CliRunner().invoke(cli, ["perf", "confirm", "--json", *words]).exit_code == 0
        assert measured.pop()[0] == name
    code, said = refusal("perf", "confirm", "--run", gone)
    assert (code, f"the toolchain of run {gone} cannot be used: unknown toolchain" in said) == (2, True), said
    assert "--toolchain measures with another one" in said
    assert measured == []


@pytest.mark.parametrize(
    ("arguments", "module", "name"),
    [
        (("perf", "confirm", "s/c"), "farm.numbers.regressions.stored_pairs", "confirm_job"),
        (("perf", "bisect", "s/c", "--good", "a", "--bad", "b"), "farm.numbers.regressions.stored_pairs", "bisect"),
        (("jobs", "rerun", "s/c"), "farm.replay.repro", "repro"),
    ],
)
def test_commands_use_the_toolchain_of_the_newer_run(
    begin: Begin, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], module: str, name: str
) -> None:
    class Past(msgspec.Struct):
        run: RunView
        description: str = ""
        is_heap: bool = False

    old, new = Past(begin(RunToolchain())), Past(begin())
    monkeypatch.setattr("farm.numbers.regressions.stored_pairs.choose_results", lambda *_: (old, new))
    monkeypatch.setattr("farm.numbers.regressions.stored_pairs.find_ends", lambda *_: (old, new))
    monkeypatch.setattr("farm.replay.stored_result.find_stored_result", lambda *_: new)
    used: list[str] = []

    def work(config: Config, *_: Any, **_limits: Any) -> None:
        used.append(config.toolchain.name)
        raise UsageError("enough")

    monkeypatch.setattr(f"{module}.{name}", work)
    assert (refusal(*arguments), used) == ((2, "enough"), ["main"])
