"""Programs that are compiled with shortcuts equal programs that are compiled without."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import equal_programs
import pytest
import warm_torch
from test_bench import DOCUMENTED

# A small sample, as shortcuts change seldom: bench/equal_programs.py compares whole suites after such a change.
SEED = int(os.environ.get("FARM_SAMPLE_SEED", "739948"))


@pytest.mark.parametrize(
    ("suites", "count"),
    [
        (["quantized_ops", "fp_ops"], 3),
        pytest.param(["models_small"], 1, marks=pytest.mark.whole),
        pytest.param(["llm_tiny"], 1, marks=pytest.mark.soak),
    ],
)
def test_programs_and_references_are_equal_with_and_without_shortcuts(
    suites: list[str], count: int, farm_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def run_warm(words: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        warm_torch.run_script(Path(words[1]), *words[2:], cache=farm_cache, folder=tmp_path)
        return subprocess.CompletedProcess(words, 0)

    monkeypatch.setattr(equal_programs, "subprocess", SimpleNamespace(run=run_warm))
    drawn = ("--sample", str(count), "--seed", str(SEED), "--kept", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["equal_programs.py", *suites, *drawn])
    equal_programs.main()
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(found) == DOCUMENTED["equal_programs.py"]
    assert found["jobs"] == count
    # The hash of a program with blocks of weights differs from one compilation to the next, without shortcuts as well.
    assert [job for job in found["different"] if "_block" not in job] == [], f"FARM_SAMPLE_SEED={SEED}"


# Versions of the code that a compiler process imports, which decide about shortcuts. torch is a stub.


SAY = "import json\nfrom farm.builds.compile.flows.shortcuts.tried import installed\nprint(json.dumps(installed()))"


def versions(folder: Path) -> dict[str, str]:
    (folder / "torch.py").write_text("__version__ = '2.13.0'")
    env = {**os.environ, "PYTHONPATH": str(folder), "PYTHONSAFEPATH": "1"}
    done = subprocess.run([sys.executable, "-c", SAY], env=env, capture_output=True, text=True, check=True)
    found: dict[str, str] = json.loads(done.stdout)
    return found


def test_an_installed_package_has_its_version(tmp_path: Path) -> None:
    expected = {name: importlib.metadata.version(name) for name in ("executorch", "torchao")}
    assert versions(tmp_path) == {**expected, "torch": "2.13.0"}


def test_a_checkout_has_not_the_version_of_the_installed_package(tmp_path: Path) -> None:
    (tmp_path / "executorch" / "exir").mkdir(parents=True)
    assert versions(tmp_path)["executorch"] == ""


def test_a_link_to_the_installed_package_has_its_version(tmp_path: Path) -> None:
    package = importlib.metadata.distribution("executorch").locate_file("executorch")
    (tmp_path / "executorch").symlink_to(str(package))
    assert versions(tmp_path)["executorch"] == importlib.metadata.version("executorch")
