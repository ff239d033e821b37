from __future__ import annotations

import pytest
from farm_home import FarmHome

from farm.base.resources import data_folder
from farm.suites.manifests import load_suite


def test_small_models_are_those_of_full_size() -> None:
    small, full = (
        load_suite(data_folder("test_suites") / name / "suite.toml").cases for name in ("models_small", "models")
    )
    names = [{case.name: case.module.rpartition(".")[2] for case in cases} for cases in (small, full)]
    assert names[0] == names[1]
    assert len(small) >= 12
    for case in (*small, *full):
        assert case.expect, f"{case.name} does not say how much of it is delegated"
        assert all(precision in case.tolerances for precision in case.precisions)


@pytest.mark.parametrize(
    ("soc", "chosen"),
    [
        # Text with state, vision, and speech: every precision and metric of the suite.
        pytest.param("SM8650", ("-k", "16a4w or mobilenet_v3 or vit or wav2vec2 or edsr"), marks=pytest.mark.whole),
        pytest.param("SM8650", (), marks=pytest.mark.soak),
        pytest.param("SM8850", (), marks=pytest.mark.soak),
    ],
)
def test_small_models_pass_on_the_simulator(soc: str, chosen: tuple[str, ...], home: FarmHome) -> None:
    home.farm("run", "--soc", soc, "--suite", "models_small", "--virtual", "1", *chosen, timeout_s=1800, code=0)
