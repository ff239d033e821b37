"""Inputs and outputs of failed attempts: kept within a number and a size, so that nothing has to run again."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec
import pytest

from farm.base.config.retention import FailuresConfig
from farm.base.config.settings import load_config
from farm.base.errors import ConfigError
from farm.builds.bundles.bundle import INPUTS, MANIFEST, MODEL, Bundle, Manifest, TensorSpec, load_bundle
from farm.dispatch.device_run.artifacts import AttemptArtifacts, FailedFiles
from farm.dispatch.request.profiling import Profile
from farm.results.attempt import Attempt, Cause, Stage, Verdict
from farm.store.artifacts import ArtifactStore

WRONG = Attempt("s/c[SM8650-htp-8a8w]", Verdict.FAILED, Stage.NUMERICS, "sqnr", cause=Cause.NUMERICS)


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    contents = {MODEL: b"program", f"{INPUTS}/input_0_0.raw": b"input", f"{INPUTS}/input_1_0.raw": b"another"}
    for name, data in contents.items():
        (tmp_path / "bundle" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "bundle" / name).write_bytes(data)
    tensor = TensorSpec((2,), "float32")
    manifest = Manifest(
        key="k", job_id=WRONG.job_id, soc="SM8650", backend="htp", precision="8a8w", samples=2, inputs=(tensor,),
        outputs=(tensor,), pte_bytes=7, delegates={}, delegated_ops=0, fallback_ops={}, seconds={}, versions={},
        files={name: hashlib.sha256(data).hexdigest() for name, data in contents.items()},
    )  # fmt: skip
    (tmp_path / "bundle" / MANIFEST).write_bytes(msgspec.json.encode(manifest))
    return load_bundle(tmp_path / "bundle")


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
    "changes",
    [
        {"verdict": Verdict.PASSED, "cause": Cause.NONE},
        {"verdict": Verdict.INFRA, "cause": Cause.DAMAGE},
        {"known_issue": "wrong for a year"},
    ],
)
def test_no_file_of_other_attempts_is_kept(tmp_path: Path, bundle: Bundle, changes: dict[str, object]) -> None:
    attempt = msgspec.structs.replace(WRONG, **changes)  # type: ignore[arg-type]
    assert keep(tmp_path, bundle, attempt) == (attempt, {})


def test_the_number_is_that_of_all_workers_of_a_run_and_what_is_beyond_it_is_noted(
    tmp_path: Path, bundle: Bundle
) -> None:
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


def test_none_is_kept_or_noted_where_farm_toml_wants_none(tmp_path: Path, bundle: Bundle) -> None:
    assert keep(tmp_path, bundle, attempts=0) == (WRONG, {})


def test_an_attempt_without_outputs_takes_no_place(tmp_path: Path, bundle: Bundle) -> None:
    (tmp_path / "empty").mkdir()
    failed = FailedFiles(FailuresConfig(keep_attempts=1), tmp_path / "run")
    kept = AttemptArtifacts(tmp_path / "artifacts", Profile.OFF, failed=failed)
    crash = msgspec.structs.replace(WRONG, cause=Cause.CRASH)
    assert kept.keep(crash, bundle, tmp_path / "empty", lambda: pytest.fail("no session is needed")) == (crash, ())
    assert len(keep(tmp_path, bundle, attempts=1)[1]) == 5


def test_farm_toml_has_the_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARM_STATE_DIR", str(tmp_path / "state"))
    file = tmp_path / "farm.toml"
    file.write_text("[failures]\nkeep_attempts = 7\nkeep_mb = 8\n")
    assert load_config(file).failures == FailuresConfig(7, 8)
    for key in ("keep_attempts", "keep_mb"):
        file.write_text(f"[failures]\n{key} = -1\n")
        with pytest.raises(ConfigError, match=rf"failures\.{key}: is -1, expected at least 0"):
            load_config(file)
