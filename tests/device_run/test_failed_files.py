"""Inputs and outputs of failed attempts: kept within a number and a size, so that nothing has to run again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from made import write_bundle

from farm.base.config.retention import FailuresConfig
from farm.builds.bundles.bundle import INPUTS, MODEL, Bundle, Manifest
from farm.dispatch.device_run.artifacts import AttemptArtifacts, FailedFiles
from farm.dispatch.request.profiling import Profile
from farm.results.attempt import Attempt, Cause, Stage, Verdict
from farm.store.artifacts import ArtifactStore

WRONG = Attempt("s/c[SM8650-htp-8a8w]", Verdict.FAILED, Stage.NUMERICS, "sqnr", cause=Cause.NUMERICS)


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    contents = {MODEL: b"program", f"{INPUTS}/input_0_0.raw": b"input", f"{INPUTS}/input_1_0.raw": b"another"}
    return write_bundle(tmp_path / "bundle", contents, job_id=WRONG.job_id, samples=2)


def keep(
    tmp_path: Path, bundle: Bundle, attempt: Attempt = WRONG, *, attempts: int = 2, mb: int = 1, outputs: bytes = b"out"
) -> tuple[Attempt, dict[str, bytes]]:
    """Keep the files of an attempt as a worker of its own does; return its attempt and the contents by kind."""
    raw = tmp_path / "raw"
    raw.mkdir(exist_ok=True)
    for sample in range(2):
        (raw / f"output_{sample}_0.raw").write_bytes(outputs)
    failed = FailedFiles(FailuresConfig(keep_attempts=attempts, keep_mb=mb), tmp_path / "run")
    kept = AttemptArtifacts(tmp_path / "artifacts", Profile.OFF, failed=failed)
    noted, records = kept.keep(attempt, bundle, raw, lambda: pytest.fail("no session is needed"))
    store = ArtifactStore(tmp_path / "artifacts")
    return noted, {one.kind: store.path(one.sha256).read_bytes() for one in records}


def test_inputs_and_outputs_of_a_failed_attempt_are_kept(tmp_path: Path, bundle: Bundle) -> None:
    attempt, kept = keep(tmp_path, bundle)
    assert attempt == WRONG
    manifest = kept.pop("manifest:manifest.json")
    assert kept == {
        "input:input_0_0.raw": b"input", "input:input_1_0.raw": b"another",
        "output:output_0_0.raw": b"out", "output:output_1_0.raw": b"out",
    }  # fmt: skip
    assert msgspec.json.decode(manifest, type=Manifest).outputs == bundle.manifest.outputs


@pytest.mark.parametrize(
    ("changes", "attempts"),
    [
        ({"verdict": Verdict.PASSED, "cause": Cause.NONE}, 2),
        ({"verdict": Verdict.INFRA, "cause": Cause.DAMAGE}, 2),
        ({"known_issue": "wrong for a year"}, 2),
        # farm.toml wants none.
        ({}, 0),
    ],
)
def test_no_file_of_others_is_kept(tmp_path: Path, bundle: Bundle, changes: dict[str, Any], attempts: int) -> None:
    attempt = msgspec.structs.replace(WRONG, **changes)
    assert keep(tmp_path, bundle, attempt, attempts=attempts) == (attempt, {})


def test_attempts_beyond_the_number_of_a_run_are_noted(tmp_path: Path, bundle: Bundle) -> None:
    counts = [len(keep(tmp_path, bundle)[1]) for _ in range(2)]
    assert counts == [5, 5]
    attempt, kept = keep(tmp_path, bundle)
    assert kept == {}
    assert attempt.notes == (
        "inputs and outputs are not kept: 2 failed attempts have theirs (failures.keep_attempts in farm.toml)",
    )


def test_one_that_is_too_large_is_noted_and_takes_no_place(tmp_path: Path, bundle: Bundle) -> None:
    attempt, kept = keep(tmp_path, bundle, attempts=1, outputs=bytes(600_000))
    assert kept == {}
    assert attempt.notes == ("inputs and outputs are not kept: 2 MiB, at most 1 (failures.keep_mb in farm.toml)",)
    assert len(keep(tmp_path, bundle, attempts=1)[1]) == 5


def test_an_attempt_without_outputs_takes_no_place(tmp_path: Path, bundle: Bundle) -> None:
    (tmp_path / "empty").mkdir()
    failed = FailedFiles(FailuresConfig(keep_attempts=1), tmp_path / "run")
    kept = AttemptArtifacts(tmp_path / "artifacts", Profile.OFF, failed=failed)
    crash = msgspec.structs.replace(WRONG, cause=Cause.CRASH)
    assert kept.keep(crash, bundle, tmp_path / "empty", lambda: pytest.fail("no session is needed")) == (crash, ())
    assert len(keep(tmp_path, bundle, attempts=1)[1]) == 5
