"""`farm suites tune`: limits from recorded results, as tables for its manifest."""

from __future__ import annotations

import json
import math
from pathlib import Path

import msgspec
import pytest
from farm_home import FarmHome
from made_runs import PHONE, attempt_of, record_run

from farm.results.analysis.tolerances import MeasuredOutput, suggest_limits
from farm.results.attempt import Comparison, Direction, Measurement
from farm.store.store import open_store
from farm.suites.manifests import load_suite
from farm.suites.suite import Job, Limits, Target

MANIFEST = """\
[suite]
name = "mine"   # ours
description = "d"
precisions = ["8a8w"]

[suite.tolerance.8a8w]
fp32 = { sqnr_db = 20.0, cosine = 0.9 }

[case.relu]     # the first
module = "torch.nn:ReLU"
inputs = [{ shape = [1, 8] }]
precisions = ["8a8w", "fp16"]

[[case.relu.known_issues]]
reason = "elsewhere"
precisions = ["16a8w"]
evidence = '''
[case.relu.tolerance.8a8w]
is no table here
'''

# What follows is about conv.
[case.conv]
module = "torch.nn:ReLU"
inputs = [{ shape = [1, 8] }]
"""


def _record(home: FarmHome, *results: tuple[str, str, float, float | None]) -> str:
    """Record a run of the case relu in `mine`: by SoC and precision the SQNR against FP32, and the steps."""
    [case] = [one for one in load_suite(home.cwd / "mine" / "suite.toml").cases if one.name == "relu"]
    jobs = [Job(case, Target(soc, "htp", precision)) for soc, precision, _, _ in results]
    with open_store(f"sqlite:///{home.state / 'farm.db'}") as store:
        run_id = record_run(store, jobs, (), fingerprint={"device_kind": "hardware"})
        for job, (soc, _, sqnr_db, steps) in zip(jobs, results, strict=True):
            phone = msgspec.structs.replace(PHONE, serial=f"phone-{soc}", soc=soc)
            fp32 = Comparison(0, "fp32", sqnr_db=sqnr_db, cosine=0.9999, max_abs=0.1, mismatch=None, peak=0.002,
                              loss_db=None if steps is None else 0.1)  # fmt: skip
            quantized = Comparison(0, "quantized", sqnr_db=40.0, cosine=1.0, max_abs=0.1, mismatch=None, steps=steps)
            samples = Measurement("sqnr_fp32[0]", "dB", Direction.HIGHER, (sqnr_db, sqnr_db + 1, sqnr_db + 5))
            attempt = attempt_of(
                job, device=phone.serial, bundle_key="b" * 64, measurements=(samples,),
                comparisons=(fp32,) if steps is None else (fp32, quantized),
            )  # fmt: skip
            store.record_attempt(run_id, attempt, phone)
    return run_id


@pytest.fixture
def manifest(home: FarmHome) -> Path:
    (home.cwd / "mine").mkdir()
    path = home.cwd / "mine" / "suite.toml"
    path.write_text(MANIFEST)
    return path


def test_measurements_of_several_socs_become_tables_for_the_manifest(home: FarmHome, manifest: Path) -> None:
    _record(
        home, ("SM8650", "8a8w", 40.0, 1.0), ("SM8750", "8a8w", 38.0, 2.0), ("SM8650", "fp16", 60.0, None)
    )  # fmt: skip
    done = home.farm("suites", "tune", "./mine/relu", code=0)
    # The worst of 38, 39, 43, 40, 41 and 45 dB is 38 and the median 40.5: 35.5 dB, and so on.
    assert done.stdout.splitlines() == [
        "[case.relu.tolerance.8a8w]  # measured on SM8650-htp, hardware; SM8750-htp, hardware",
        "fp32 = { loss_db = 1.0, sqnr_db = 35.5, cosine = 0.9998 }",
        "quantized = { steps = 2.5 }",
        "[case.relu.tolerance.fp16]  # measured on SM8650-htp, hardware",
        "fp32 = { peak = 0.003, sqnr_db = 58.0 }",
    ]
    assert "sqnr_db against fp32: worst 38 dB on SM8750-htp, hardware, median 40.5 dB, of 6: 35.5 dB" in done.stderr
    assert (manifest.read_text(), "nothing was written" in done.stderr) == (MANIFEST, True)

    manifest.write_text(f"{MANIFEST}\n{done.stdout}")
    relu, conv = load_suite(manifest).cases
    assert (relu.tolerance("8a8w").quantized.steps, relu.tolerance("8a8w").fp32.cosine) == (2.5, 0.9998)
    assert conv.tolerance("8a8w").fp32.sqnr_db == 20.0
    again = home.farm("suites", "tune", "./mine/relu", code=0)
    assert (again.stdout, "nothing to change" in again.stderr) == ("", True)


@pytest.mark.usefixtures("manifest")
def test_a_tighter_limit_stays_and_is_named(home: FarmHome) -> None:
    _record(home, ("SM8650", "8a8w", 18.0, 1.0))
    kept = home.farm("suites", "tune", "./mine/relu", "--json", code=0)
    assert "16 dB, but 20 stays, which is tighter" in kept.stderr
    [precision] = json.loads(kept.stdout)["precisions"]
    assert precision["written"]["fp32"]["sqnr_db"] == 20.0


def test_what_is_no_measurement_of_this_case_is_left_out_and_named(home: FarmHome, manifest: Path) -> None:
    run_id = _record(home, ("SM8650", "8a8w", 40.0, 1.0))
    manifest.write_text(
        MANIFEST.replace('ReLU"\ninputs = [{ shape = [1, 8] }]\npre', 'ReLU6"\ninputs = [{ shape = [1, 8] }]\npre')
    )
    changed = home.farm("suites", "tune", "./mine/relu", code=7)
    assert f"mine/relu[SM8650-htp-8a8w] of run {run_id}: the case, or its code, has changed since" in changed.stderr
    for named in ("./mine", "./mine/"):
        assert "is a suite: name a case of it, as in ./mine/CASE" in home.farm("suites", "tune", named, code=2).stderr
    assert "tune quantized_ops/conv2d" in home.farm("suites", "tune", "smoke/conv2d", code=2).stderr


def test_the_margin_is_the_measured_spread_and_a_least_one() -> None:
    def limit(name: str, values: list[float]) -> float:
        seen = [MeasuredOutput("here", "fp32", {name: values})]
        [one] = suggest_limits(seen, {"fp32": Limits(**{name: 0.5})})
        return one.suggested

    assert [limit("sqnr_db", [50.0]), limit("sqnr_db", [50.0, 60.0, 60.0])] == [48.0, 40.0]
    assert [limit("sqnr_db", [math.inf]), limit("sqnr_db", [140.0])] == [100.0, 100.0]
    assert [limit("steps", [1.0, 1.0]), limit("mismatch", [0.0]), limit("peak", [0.001])] == [1.5, 0.0, 0.0015]
    assert limit("cosine", [0.999]) == pytest.approx(0.998)
    with pytest.raises(ValueError, match="sqnr against fp32 has no finite value on here"):
        limit("sqnr_db", [50.0, -math.inf])
