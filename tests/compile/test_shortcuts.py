"""Programs that are compiled with shortcuts equal programs that are compiled without."""

from __future__ import annotations

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
