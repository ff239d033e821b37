"""Selection of jobs by `-k`, and `-x`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from stub_home import make_stub_home

from farm.base.errors import NothingSelectedError, UsageError
from farm.dispatch.request import choose
from farm.dispatch.request.keyword import matching
from farm.dispatch.request.request import RunRequest

JOBS = [
    "smoke/add[SM8650-htp-8a8w]",
    "smoke/conv2d[SM8650-htp-8a8w]",
    "smoke/conv2d[SM8550-htp-fp16]",
    "smoke/Softmax_large[SM8650-htp-8a8w]",
]
SUITE = """
[suite]
name = "mine"
description = "jobs that all fail"
[suite.tolerance.8a8w.fp32]
sqnr_db = 500.0
""" + "".join(
    f"""
[case.{name}]
module = "stub:Stub"
kwargs = {{ words = "wrong 20" }}
inputs = [{{ shape = [16] }}]
"""
    for name in ("add", "mul", "sub")
)


@pytest.mark.parametrize(
    ("expression", "numbers"),
    [
        ("add", [0]),
        ("conv2d", [1, 2]),
        ("conv2d and 8550", [2]),
        ("not conv2d", [0, 3]),
        ("add or (conv2d and fp16)", [0, 2]),
        # pytest does not distinguish capitals.
        ("SOFTMAX", [3]),
        ("smoke", [0, 1, 2, 3]),
        ("nothing_of_that_name", []),
        # Names of pytest's own, and of the folder of its session.
        ("jobs", []),
        ("farm-select", []),
    ],
)
def test_an_expression_selects_jobs_by_their_ids_in_their_order(expression: str, numbers: list[int]) -> None:
    assert matching(JOBS, expression) == [JOBS[number] for number in numbers]


@pytest.mark.parametrize(
    "word", ["add", "CONV2D", "softmax_", "8550", "and8a8w", "None", "nothing", "jobs", "ü", "fp16"]
)
def test_one_word_selects_what_pytest_would_select_without_its_import(word: str) -> None:
    jobs = [*JOBS, "mine/ü_None[SM8650-htp-fp16]"]
    request = RunRequest(socs=("SM8650",), suites=("smoke",), keyword=word)
    try:
        selected = [job.id for job in choose._select(request, [SimpleNamespace(id=one) for one in jobs])]
    except NothingSelectedError:
        selected = []
    assert selected == matching(jobs, word)


@pytest.mark.parametrize("expression", ["(", "add or", "and", "a b"])
def test_an_expression_that_pytest_does_not_accept_is_named_and_nothing_else_is_printed(
    capfd: pytest.CaptureFixture[str], expression: str
) -> None:
    with pytest.raises(UsageError) as refused:
        matching(JOBS, expression)
    assert str(refused.value).startswith(f"pytest does not understand -k {expression}: at column ")
    assert "\n" not in str(refused.value)
    assert capfd.readouterr() == ("", "")


def test_settings_and_files_of_the_user_have_no_effect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --no-such-option\npython_files = *\n")
    (tmp_path / "conftest.py").write_text("raise SystemExit('the conftest of the user')\n")
    (tmp_path / "knows.py").write_text("raise SystemExit('the plugin of the user')\n")
    (tmp_path / "test_mine.py").write_text("def test_add(): ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTEST_ADDOPTS", "--deselect=smoke --no-such-option")
    monkeypatch.setenv("PYTEST_PLUGINS", "knows")
    monkeypatch.delenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", raising=False)
    before = sorted(tmp_path.iterdir())
    assert matching(JOBS, "add") == [JOBS[0]]
    assert capfd.readouterr() == ("", "")
    assert sorted(tmp_path.iterdir()) == before


def test_the_environment_is_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_ADDOPTS", "-q")
    monkeypatch.delenv("PYTEST_PLUGINS", raising=False)
    before = dict(os.environ)
    matching(JOBS, "add")
    assert dict(os.environ) == before


def test_ten_thousand_jobs_with_odd_names_are_selected() -> None:
    jobs = [f"suite/case-{number}::a b[SM8650-htp-{'ü' if number % 2 else '8a8w'}]" for number in range(10_000)]
    assert matching(jobs, "8a8w and not case-2") == [
        job for job in jobs if "8a8w" in job and not job.startswith("suite/case-2")
    ]


@pytest.mark.whole
def test_after_the_first_failure_nothing_begins(tmp_path: Path) -> None:
    home = make_stub_home(tmp_path / "stub")
    (home.cwd / "mine").mkdir()
    (home.cwd / "mine" / "suite.toml").write_text(SUITE)
    run = ("run", "--soc", "SM8650", "--virtual", "1", "--suite", "./mine")
    done = home.farm(*run, "-x", "--json", timeout_s=240, code=1)
    verdicts = [attempt["verdict"] for job in json.loads(done.stdout)["jobs"] for attempt in job["attempts"]]
    assert verdicts == ["failed"]
