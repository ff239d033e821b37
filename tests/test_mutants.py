"""tools/mutants.py: the mutants that it draws, and a toy checkout whose tests are mapped and run."""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tools")]

from mutant_sites import Sites, applied, draw  # noqa: E402 - tools/ is no package
from mutants import Bench, LineMap, make_map, run  # noqa: E402

_TOY = '''
"""Sizes."""

from __future__ import annotations

LIMIT: int = 3


def fits(size: int | None) -> bool:
    """Return whether 2 fit in 3."""
    return size is not None and size < LIMIT


def label(size: int) -> str:
    return f"{size + 1} bytes"


def unused(size: int) -> int:
    return size * 2
'''
_TOY_TEST = """
import subprocess, sys

import pytest

from farm.results.toy import fits


@pytest.fixture(scope="module")
def largest():
    return fits(2)


def test_first(largest):
    pass


def test_none():
    assert not fits(None)


def test_process():
    subprocess.run([sys.executable, "-c", "from farm.results.toy import label; label(1)"], check=True)
"""


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    package = tmp_path / "toy" / "farm" / "results"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").touch()
    (package / "toy.py").write_text(_TOY)
    (tmp_path / "toy" / "tests").mkdir()
    (tmp_path / "toy" / "tests" / "test_toy.py").write_text(_TOY_TEST)
    return tmp_path / "toy"


def test_equal_seeds_draw_equal_mutants_and_a_larger_count_keeps_those_of_a_smaller_one() -> None:
    packages = ("store/leases", "builds/compile/flows")
    drawn = draw(ROOT, 1, 8, packages)
    assert drawn == draw(ROOT, 1, 8, packages)
    assert len({(one["file"], one["line"]) for one in drawn}) == 8
    assert {one["package"] for one in drawn} == set(packages)
    assert {one["id"] for one in drawn} < {one["id"] for one in draw(ROOT, 1, 10, packages)}
    assert {one["id"] for one in drawn} != {one["id"] for one in draw(ROOT, 2, 8, packages)}


def test_a_mutant_changes_one_place_and_no_annotation_docstring_or_text(toy: Path) -> None:
    sites = Sites("results", "farm/results/toy.py", (toy / "farm/results/toy.py").read_bytes())
    changes = [one["change"] for one in sites.found]
    assert sorted(changes) == [
        *("* -> /", "2 -> 3", "3 -> 4", "< -> <=", "and -> or", 'f"{size + 1} bytes" -> None', "is not -> is"),
        *("size * 2 -> None", "size is not None and size < LIMIT -> not (size is not None and size < LIMIT)"),
    ]
    for one in sites.found:
        text = applied(one, toy)
        assert text is not None
        old, new = one["change"].split(" -> ", 1)
        assert len(text) == len(_TOY) + len(new) - len(old)
        differing = [pair for pair in zip(text.splitlines(), _TOY.splitlines(), strict=True) if pair[0] != pair[1]]
        assert len(differing) == 1
        ast.parse(text)


def test_a_mutant_is_killed_by_a_test_that_covers_it(
    toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("FARM_TEST_CACHE", raising=False)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    map_file, results = tmp_path / "map.json", tmp_path / "results.jsonl"
    (tmp_path / "work").mkdir()
    bench = Bench(toy, tmp_path / "work")
    assert make_map(bench, map_file, ["tests"]) == 0
    line_map = LineMap(map_file)
    sites = Sites("results", "farm/results/toy.py", (toy / "farm/results/toy.py").read_bytes()).found
    tests = {one["change"]: [name.split("::")[1] for name in line_map.covering(one, toy)] for one in sites}
    assert sorted(tests["< -> <="]) == ["test_first", "test_none"]
    assert tests['f"{size + 1} bytes" -> None'] == ["test_process"]
    assert sorted(tests["3 -> 4"]) == ["test_first", "test_none", "test_process"]
    mutants = [one for one in sites if one["change"] in ("< -> <=", "and -> or", "* -> /")]
    run(bench, mutants, line_map, results, 60)
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert summary["results"] == {"killed": 1, "survived": 1, "not covered": 1}
    states = {one["change"]: one for one in map(json.loads, results.read_text().splitlines())}
    assert states["and -> or"]["by"].startswith("tests/test_toy.py::test_none")
    assert (bench.tree / "farm/results/toy.py").read_text() == _TOY
    # A mutant with a result is not run again: here without any test.
    (bench.tree / "tests/test_toy.py").unlink()
    run(bench, mutants, line_map, results, 60)
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == summary
