"""Selection of jobs by `-k`."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

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


def test_one_word_selects_what_pytest_would_select_without_its_import() -> None:
    jobs = [*JOBS, "mine/ü_None[SM8650-htp-fp16]"]
    selected = {}
    for word in ("add", "CONV2D", "softmax_", "8550", "and8a8w", "None", "nothing", "jobs", "ü", "fp16"):
        request = RunRequest(socs=("SM8650",), suites=("smoke",), keyword=word)
        selected[word] = []
        with contextlib.suppress(NothingSelectedError):
            selected[word] = [job.id for job in choose._select(request, [SimpleNamespace(id=one) for one in jobs])]
    assert selected == {word: matching(jobs, word) for word in selected}


@pytest.mark.parametrize("expression", ["(", "add or", "and", "a b"])
def test_an_invalid_expression_is_named(capfd: pytest.CaptureFixture[str], expression: str) -> None:
    with pytest.raises(UsageError) as refused:
        matching(JOBS, expression)
    assert str(refused.value).startswith(f"pytest does not understand -k {expression}: at column ")
    assert "\n" not in str(refused.value)
    assert capfd.readouterr() == ("", "")


def test_settings_and_files_of_the_user_have_no_effect_and_stay(
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
    before = sorted(tmp_path.iterdir()), dict(os.environ)
    assert matching(JOBS, "add or nothing") == [JOBS[0]]
    assert capfd.readouterr() == ("", "")
    assert (sorted(tmp_path.iterdir()), dict(os.environ)) == before


def test_thousands_of_jobs_with_odd_names_are_selected() -> None:
    jobs = [f"suite/case-{number}::a b[SM8650-htp-{'ü' if number % 2 else '8a8w'}]" for number in range(3_000)]
    expected = [job for job in jobs if "8a8w" in job and not job.startswith("suite/case-2")]
    assert matching(jobs, "8a8w and not case-2") == expected
