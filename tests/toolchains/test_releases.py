"""Real releases of ExecuTorch, and a farm that has none of its own."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from farm_home import FarmHome
from made_environments import farm_without, make_source_tree

SMOKE = ("run", "--soc", "SM8650", "--suite", "smoke", "--virtual", "1")


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
    answer = alone.json("setup", "toolchain", "check", sys.executable, timeout_s=300)
    assert [(check["backend"], check["ok"]) for check in answer["checks"]] == [("htp", True), ("xnnpack", True)]


@pytest.mark.whole
def test_a_source_tree_that_cannot_be_imported_says_why(home: FarmHome, tmp_path: Path) -> None:
    tree = make_source_tree(tmp_path / "tree", "1.5.9", built=True)
    (tree / "exir" / "__init__.py").write_text("raise RuntimeError('half an edit')\n")
    checked = home.farm("setup", "toolchain", "check", str(tree), timeout_s=300, code=1)
    assert checked.stdout.count("RuntimeError: half an edit") >= 2


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
    home.farm("setup", "toolchain", "check", release, timeout_s=300, code=0)


@pytest.mark.whole
def test_several_toolchains_are_one_run_each_and_layers_are_compared_with_any(home: FarmHome) -> None:
    home.use_one_builder()
    both = home.farm(*SMOKE, "-k", "add", "--toolchain", "default", "--toolchain", "1.3.1", timeout_s=600, code=0)
    assert both.stdout.count("1 passed") == 2
    assert "toolchain default" in both.stderr
    home.farm(
        "debug", "smoke/conv2d", "--soc", "SM8650", "--precision", "8a8w", "--virtual", "--toolchain", "1.3.1",
        timeout_s=600, code=0)  # fmt: skip
