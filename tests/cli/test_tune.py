"""`farm suites tune`: limits from recorded results, as a diff of the manifest that keeps what its author wrote."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
from farm_home import FarmHome
from made_runs import PHONE, attempt_of, record_run
from programs import run_program

from farm.base.errors import ConfigError
from farm.results.analysis.tolerances import MeasuredOutput, suggest_limits
from farm.results.attempt import Comparison, Direction, Measurement
from farm.store.store import open_store
from farm.suites.edit import with_tolerances
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


def test_what_several_socs_measured_becomes_a_diff_that_patch_and_apply_take_alike(
    home: FarmHome, manifest: Path
) -> None:
    _record(
        home, ("SM8650", "8a8w", 40.0, 1.0), ("SM8750", "8a8w", 38.0, 2.0), ("SM8650", "fp16", 60.0, None)
    )  # fmt: skip
    done = home.farm("suites", "tune", "./mine/relu", code=0)
    # The worst of 38, 39, 43, 40, 41 and 45 dB is 38 and the median 40.5: 35.5 dB, and so on.
    added = [line[1:] for line in done.stdout.splitlines() if line.startswith("+") and not line.startswith("+++")]
    assert added == [
        "[case.relu.tolerance.8a8w]  # measured on SM8650-htp, hardware; SM8750-htp, hardware",
        "fp32 = { loss_db = 1.0, sqnr_db = 35.5, cosine = 0.9998 }",
        "quantized = { steps = 2.5 }",
        "",
        "[case.relu.tolerance.fp16]  # measured on SM8650-htp, hardware; SM8750-htp, hardware",
        "fp32 = { peak = 0.003, sqnr_db = 58.0 }",
        "",
    ]
    assert "sqnr_db against fp32: worst 38 dB on SM8750-htp, hardware, median 40.5 dB, of 6: 35.5 dB" in done.stderr
    assert (manifest.read_text(), "nothing was written" in done.stderr) == (MANIFEST, True)

    assert home.json("suites", "tune", "./mine/relu", "--apply")["applied"] is True
    written = manifest.read_text()
    assert all(line in written.splitlines() for line in MANIFEST.splitlines())
    relu, conv = load_suite(manifest).cases
    assert (relu.tolerance("8a8w").quantized.steps, relu.tolerance("8a8w").fp32.cosine) == (2.5, 0.9998)
    assert conv.tolerance("8a8w").fp32.sqnr_db == 20.0
    manifest.write_text(MANIFEST)
    run_program(["patch", "-p0"], input=done.stdout, cwd=home.cwd)
    assert manifest.read_text() == written

    again = home.farm("suites", "tune", "./mine/relu", code=0)
    assert (again.stdout, "nothing to change" in again.stderr) == ("", True)


def test_nothing_is_loosened_without_being_told_and_asked_for(home: FarmHome, manifest: Path) -> None:
    _record(home, ("SM8650", "8a8w", 18.0, 1.0))
    kept = home.farm("suites", "tune", "./mine/relu", "--json", code=0)
    assert "16 dB, but 20 stays, which is tighter: --looser writes it" in kept.stderr
    [precision] = json.loads(kept.stdout)["precisions"]
    assert precision["written"]["fp32"]["sqnr_db"] == 20.0
    loosened = home.farm("suites", "tune", "./mine/relu", "--looser", "--apply")
    assert "16 dB, LOOSER than 20" in loosened.stderr
    assert load_suite(manifest).cases[0].tolerance("8a8w").fp32.sqnr_db == 16.0


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


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("tolerance = { 8a8w = { fp32 = { sqnr_db = 9.0 } }, fp16 = { fp32 = { peak = 1.0 } } } # why",
         "tolerance = { 8a8w = { fp32 = { sqnr_db = 35.0 } }, fp16 = { fp32 = { peak = 1.0 } } } # why"),
        ("[case.a.tolerance.8a8w]  # why\nquantized = { steps = 1.5 }\nfp32 = { sqnr_db = 9.0 }   # and why",
         "[case.a.tolerance.8a8w]  # why\nquantized = { steps = 1.5 }\nfp32 = { sqnr_db = 35.0 }   # and why"),
        ("[case.a.tolerance.8a8w]\nquantized = { steps = 1.5 }\n\n# of b",
         "[case.a.tolerance.8a8w]\nquantized = { steps = 1.5 }\nfp32 = { sqnr_db = 35.0 }\n\n# of b"),
        ("[case.a.tolerance.8a8w.fp32]\nsqnr_db = 9 # why\n\n# of b",
         "[case.a.tolerance.8a8w.fp32]\nsqnr_db = 35.0 # why\n\n# of b"),
        ("[case.a.tolerance.8a8w.quantized]\nsteps = 1.5\n\n# of b",
         "[case.a.tolerance.8a8w.quantized]\nsteps = 1.5\n\n[case.a.tolerance.8a8w.fp32]\nsqnr_db = 35.0\n\n# of b"),
    ],
)  # fmt: skip
def test_a_manifest_keeps_its_form_and_its_comments(before: str, after: str) -> None:
    text = f'[case.a]\nmodule = "x:Y" # ours\n{before}\n[case.b]\nmodule = "x:Z"\n'
    changed = with_tolerances(Path("suite.toml"), text, "a", {"8a8w": {"fp32": {"sqnr_db": 35.0}}}, "")
    assert changed == text.replace(before, after)


@pytest.mark.parametrize(
    "text", ["[case.a]\ntolerance.8a8w.fp32.sqnr_db = 9\n", "[case]\na = { module = 'x' }\n", "[case.b]\n"]
)
def test_a_manifest_that_cannot_be_edited_is_left_alone(text: str) -> None:
    with pytest.raises(ConfigError, match=r"case.a.tolerance: is written in a way that farm does not edit"):
        with_tolerances(Path("suite.toml"), text, "a", {"8a8w": {"fp32": {"sqnr_db": 35.0}}}, "")


def test_the_margin_is_the_measured_spread_and_a_least_one() -> None:
    def limit(name: str, values: list[float], **more: Any) -> float:
        seen = [MeasuredOutput("here", "fp32", {name: values})]
        [one] = suggest_limits(seen, {"fp32": Limits(**{name: 0.5})}, looser=True, **more)
        return one.suggested

    assert [limit("sqnr_db", [50.0]), limit("sqnr_db", [50.0, 60.0, 60.0])] == [48.0, 40.0]
    assert limit("sqnr_db", [50.0], margin=2.0) == 46.0
    assert [limit("sqnr_db", [math.inf]), limit("sqnr_db", [140.0])] == [100.0, 100.0]
    assert [limit("steps", [1.0, 1.0]), limit("mismatch", [0.0]), limit("peak", [0.001])] == [1.5, 0.0, 0.0015]
    assert limit("cosine", [0.999]) == pytest.approx(0.998)
    with pytest.raises(ValueError, match="sqnr against fp32 has no finite value on here"):
        limit("sqnr_db", [50.0, -math.inf])
