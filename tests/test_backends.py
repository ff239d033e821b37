"""A backend is one descriptor and one line: the recipe of docs/developers/recipes.md, followed literally."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from recipe import FarmCopy, recipe_code

from farm.base.backends.registry import BACKENDS
from farm.suites.options import parse_options


def test_a_descriptor_is_complete() -> None:
    for name, backend in BACKENDS.items():
        assert backend.name == name
        assert backend.health_check_precision in backend.precisions
        assert backend.on_cpu == (backend.qnn_type is None)
        assert parse_options([], name) == ((),)


@pytest.fixture(scope="module")
def farm(tmp_path_factory: pytest.TempPathFactory, farm_cache: Path) -> FarmCopy:
    copy = FarmCopy.make(tmp_path_factory.mktemp("recipe"), farm_cache)
    (code,) = recipe_code("developers/recipes.md", "Adding a backend")
    (copy.folder / "farm" / "base" / "backends" / "cpu_stub.py").write_text(code, encoding="utf-8")
    copy.insert("farm/base/backends/registry.py", '    "xnnpack",\n', '    "cpu_stub",\n')
    return copy


@pytest.mark.whole
def test_a_new_backend_is_compiled_and_run(farm: FarmCopy) -> None:
    ran = farm.farm(
        *("run", "--soc", "SM8650", "--suite", "smoke", "--backend", "cpu_stub", "--virtual", "1"),
        *("-k", "conv2d", "--option", "effort=low,high", "--json"),
    )
    assert ran.returncode == 0, ran.stderr
    attempts = {job["id"]: job["attempts"] for job in json.loads(ran.stdout)["jobs"]}
    names = [f"smoke/conv2d[SM8650-cpu_stub-fp32-effort={effort}]" for effort in ("high", "low")]
    assert sorted(attempts) == names
    assert all(one["verdict"] == "passed" for found in attempts.values() for one in found)
    keys = {one["bundle_key"] for found in attempts.values() for one in found}
    assert len(keys) == 2


@pytest.mark.whole
def test_it_is_known_wherever_backends_are(farm: FarmCopy) -> None:
    assert "cpu_stub" in farm.farm("devices", "socs", "--json").stdout
    assert "cpu_stub" in farm.farm("run", "--help").stdout
    assert "cpu_stub" in farm.farm("doctor", "--soc", "SM8650").stdout
    refused = farm.farm(
        "run", "--soc", "SM8650", "--suite", "smoke", "--backend", "cpu_stub", "--option", "use_dlbc=true"
    )
    assert refused.returncode == 2
    assert "option use_dlbc is for htp, not for the cpu_stub backend" in refused.stderr
