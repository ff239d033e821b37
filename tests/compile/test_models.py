from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from farm_home import FarmHome

from farm.base.resources import data_folder
from farm.suites.manifests import load_suite
from farm.suites.suite import Suite


def suite(name: str) -> Suite:
    return load_suite(data_folder("test_suites") / name / "suite.toml")


@pytest.fixture(scope="module")
def drawn(printed_json: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    return printed_json(Path(__file__).with_name("drawing.py"))


def test_small_models_are_those_of_full_size() -> None:
    small, full = suite("models_small"), suite("models")
    assert {case.name: case.module.rpartition(".")[2] for case in small.cases} == {
        case.name: case.module.rpartition(".")[2] for case in full.cases
    }
    assert len(small.cases) >= 12
    for case in (*small.cases, *full.cases):
        assert case.expect, f"{case.name} does not say how much of it is delegated"
        assert all(precision in case.tolerances for precision in case.precisions)


def test_weights_and_inputs_are_the_same_every_time(drawn: dict[str, Any]) -> None:
    assert drawn["repeats"] == dict.fromkeys(drawn["repeats"], True)


def test_outputs_carry_signal_that_depends_on_the_input(drawn: dict[str, Any]) -> None:
    for name, model in drawn["models"].items():
        for deviation, between in zip(model["deviation"], model["between"], strict=True):
            assert 0.1 < deviation < 10, f"{name}: {model}"
            assert between > 0.03 * deviation, f"{name}: {model}"


def test_classes_depend_on_the_input(drawn: dict[str, Any]) -> None:
    for name in ("resnet", "mobilenet_v3", "efficientnet", "convnext", "vit", "bert", "mobilebert", "llama"):
        assert drawn["models"][name]["greatest"][0] > 1, name


def test_decoder_with_a_cache_gives_what_transformers_gives_for_all_tokens_at_once(drawn: dict[str, Any]) -> None:
    assert drawn["decoder_error"] < 1e-4


def test_detector_gives_what_transformers_gives_for_it(drawn: dict[str, Any]) -> None:
    assert drawn["detector_error"] < 1e-4


@pytest.mark.parametrize(
    ("soc", "chosen"),
    [
        # Text with state, vision, and speech: every precision and metric of the suite.
        pytest.param("SM8650", ("-k", "16a4w or mobilenet_v3 or vit or wav2vec2 or edsr"), marks=pytest.mark.whole),
        pytest.param("SM8650", (), marks=pytest.mark.soak),
        pytest.param("SM8850", (), marks=pytest.mark.soak),
    ],
)
def test_small_models_pass_on_the_simulator(
    soc: str, chosen: tuple[str, ...], farm_cache: Path, tmp_path: Path
) -> None:
    home = FarmHome(farm_cache, tmp_path, tmp_path)
    home.farm("run", "--soc", soc, "--suite", "models_small", "--virtual", "1", *chosen, timeout_s=1800, code=0)
