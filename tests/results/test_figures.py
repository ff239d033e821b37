"""A figure is declared once: the recipe of docs/developers/recipes.md, from the manifest to the report."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from recipe import FarmCopy, recipe_code

from farm.results.attempt import Comparison, Direction
from farm.suites.figures import COLUMNS, COMPARED, FIGURES, figure_of
from farm.suites.suite import Limits

MANIFEST = """
[suite]
name = "signs"
description = "one case, and a limit on a figure of our own"
precisions = ["fp32"]

[suite.tolerance.fp32.fp32]
sqnr_db = 100.0
sign_flips = -1.0

[case.add]
module = "torch.nn:Linear"
args = [4, 4]
inputs = [{ shape = [1, 4] }]
"""
JOB = "signs/add[SM8650-xnnpack-fp32]"


def test_names_of_metrics_lead_to_their_figures() -> None:
    assert figure_of("sqnr_quantized[2]") is FIGURES["sqnr_db"]
    assert figure_of("psnr[0]") is FIGURES["psnr_db"]
    assert figure_of("latency") is None
    assert figure_of("cosine") is None


def test_each_compared_figure_has_a_limit_and_columns_are_those_of_a_comparison() -> None:
    assert Limits.__struct_fields__ == tuple(figure.name for figure in COMPARED)
    assert set(COLUMNS) < set(Comparison.__struct_fields__)


@pytest.mark.parametrize(
    ("name", "value", "limit", "text", "excess"),
    [
        ("sqnr_db", 14.0, 20.0, "sqnr 14 dB < 20 dB", 1.9953),
        ("loss_db", 9.0, 3.0, "loss 9 dB > 3 dB", 1.9953),
        ("cosine", 0.96, 0.99, "cosine 0.96 < 0.99", 2.0),
        ("steps", 6.0, 2.0, "steps 6 > 2", 3.0),
    ],
)
def test_direction_and_unit_say_how_a_limit_is_broken(
    name: str, value: float, limit: float, text: str, excess: float
) -> None:
    figure = FIGURES[name]
    assert figure.breaks(value, limit)
    assert not figure.breaks(limit, limit)
    assert figure.breaks(float("nan"), limit)
    assert figure.broken_text(value, limit) == text
    assert figure.excess(value, limit) == pytest.approx(excess, rel=1e-3)
    assert figure.worst([value, limit]) == value
    assert (figure.direction is Direction.HIGHER) == ("<" in text)


@pytest.fixture(scope="module")
def farm(tmp_path_factory: pytest.TempPathFactory, farm_cache: Path) -> FarmCopy:
    copy = FarmCopy.make(tmp_path_factory.mktemp("recipe"), farm_cache)
    function, entry = recipe_code("developers/recipes.md", "Adding a figure")
    copy.insert("farm/suites/figures.py", "_LOWER, _HIGHER = ", function)
    copy.insert("farm/suites/figures.py", '        Figure("top1"', f"{entry.rstrip()},\n")
    suite = copy.folder / "signs"
    suite.mkdir()
    (suite / "suite.toml").write_text(MANIFEST, encoding="utf-8")
    return copy


@pytest.mark.whole
def test_a_new_figure_is_judged_stored_and_shown(farm: FarmCopy) -> None:
    suite = str(farm.folder / "signs")
    ran = farm.farm("run", "--soc", "SM8650", "--suite", suite, "--backend", "xnnpack", "--virtual", "1", "--json")
    assert ran.returncode == 1, ran.stderr
    (attempt,) = json.loads(ran.stdout)["jobs"][0]["attempts"]
    assert attempt["reason"] == "output 0 against fp32: sign_flips 0 > -1"
    assert attempt["comparisons"][0]["violations"] == ["sign_flips 0 > -1"]
    measured = {one["metric"]: one for one in attempt["measurements"]}["sign_flips_fp32[0]"]
    assert (measured["unit"], measured["direction"], measured["samples"]) == ("1", "lower", [0.0])

    history = farm.farm("history", JOB, "--metric", "sign_flips_fp32[0]", "--json")
    assert "sign_flips_fp32[0]" in history.stdout, history.stderr
    page = farm.folder / "report.html"
    assert farm.farm("report", "latest", "--html", str(page)).returncode in (0, 1)
    assert "sign_flips_fp32[0]" in page.read_text(encoding="utf-8")
    assert "sign_flips 0 > -1" in farm.farm("report", "latest").stdout


@pytest.mark.whole
def test_an_unknown_figure_is_refused(farm: FarmCopy) -> None:
    manifest = farm.folder / "wrong" / "suite.toml"
    manifest.parent.mkdir()
    text = MANIFEST.replace('"signs"', '"wrong"').replace("sign_flips", "sign_flops")
    manifest.write_text(text, encoding="utf-8")
    refused = farm.farm("run", "--soc", "SM8650", "--suite", str(manifest), "--backend", "xnnpack", "--virtual", "1")
    assert refused.returncode == 2
    assert re.search("unknown key 'sign_flops': did you mean 'sign_flips'", refused.stderr)
