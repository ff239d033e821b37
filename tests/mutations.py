"""Is a broken program caught by the limits of its case? Outputs as a right device gives them, with one thing wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from warm_torch import run_script

from farm.base.socs import find_soc
from farm.builds.bundles.bundle import Bundle
from farm.builds.bundles.cache import BundleCache
from farm.devices.execution.raw import RawResult
from farm.results.attempt import Verdict
from farm.results.outputs import compare_outputs, decide
from farm.suites.manifests import find_suites, resolve_suite
from farm.suites.suite import Job, plan

SCALE = 1.05
"""A scale that is 5 % off."""
ELEMENT = 1 / 8
"""How far off one element is, as a share of the range of its output."""


def check_mutations(view: Mapping[str, Any], cache: Path, folder: Path) -> Counter[str]:
    """Assert that 95 % of each kind of mutation are caught, over all jobs of a run with a bundle; return the counts.

    `view` is the run as `farm run --json` prints it.
    """
    suites = sorted({job["suite"] for job in view["jobs"]})
    broken = folder / "broken"
    cases = sorted({f"{job['suite']}/{job['case']}" for job in view["jobs"]})
    run_script(Path(__file__).with_name("mutating.py"), str(broken), *cases, cache=cache, folder=folder)
    known = find_suites()
    jobs = {job.id: job for job in plan([resolve_suite(name, known) for name in suites], [find_soc("SM8650")], "htp")}
    tried, caught, missed = Counter[str](), Counter[str](), []
    for row in view["jobs"]:
        bundle = BundleCache(cache).lookup(row["attempts"][-1]["bundle_key"])
        if bundle is None:
            continue
        job = jobs[row["id"]]
        for name, found in caught_mutations(
            job, bundle, np.load(broken / job.case.suite / f"{job.case.name}.npz"), folder
        ):
            tried[name] += 1
            caught[name] += found
            if not found:
                missed.append(f"{name}: {job.id}")
    shares = {name: caught[name] / tried[name] for name in tried}
    assert len(shares) == 5, tried
    assert min(shares.values()) >= 0.95, (shares, missed)
    return tried


def caught_mutations(
    job: Job, bundle: Bundle, broken: Mapping[str, np.ndarray], folder: Path
) -> Iterator[tuple[str, bool]]:
    """Yield each mutation that changes an output, and whether it fails the job.

    A correct device returns its closest reference. Raises AssertionError when this reference fails.
    """
    kind = bundle.manifest.references[-1]
    right = {
        (sample, index): bundle.reference(kind, sample, index)
        for sample in range(bundle.manifest.samples)
        for index in range(len(bundle.manifest.outputs))
    }
    assert _verdict(job, bundle, right, folder) is Verdict.PASSED, job.id
    for index in range(len(bundle.manifest.outputs)):
        original = right[0, index]
        for name, wrong in _mutations(original, index, broken):
            if not np.array_equal(wrong, original, equal_nan=wrong.dtype.kind == "f"):
                yield name, _verdict(job, bundle, {**right, (0, index): wrong}, folder) is Verdict.FAILED


def _mutations(right: np.ndarray, index: int, broken: Mapping[str, np.ndarray]) -> Iterator[tuple[str, np.ndarray]]:
    floating = right.dtype.kind == "f"
    if floating:
        yield "wrong scale", (right * SCALE).astype(right.dtype)
    axis = 1 if right.ndim >= 3 else right.ndim - 1
    if right.ndim and right.shape[axis] > 1:
        order = np.arange(right.shape[axis])
        order[:2] = 1, 0
        yield "swapped channel", np.take(right, order, axis)
    if f"unbiased_{index}" in broken and floating:
        moved = broken[f"unbiased_{index}"].astype(np.float64) - broken[f"output_{index}"]
        yield "dropped bias", (right + moved).astype(right.dtype)
    yield "one wrong element", _one_wrong(right)
    yield "stale output", broken[f"stale_{index}"].astype(right.dtype)


def _one_wrong(right: np.ndarray) -> np.ndarray:
    wrong = right.copy()
    place = np.random.default_rng(right.size).integers(right.size)
    if right.dtype.kind == "b":
        wrong.flat[place] = not wrong.flat[place]
    elif right.dtype.kind == "f":
        finite = right[np.isfinite(right)]
        wrong.flat[place] += ELEMENT * (float(np.ptp(finite)) or abs(float(finite[0])))
    else:
        wrong.flat[place] += 1
    return wrong


def _verdict(job: Job, bundle: Bundle, outputs: Mapping[tuple[int, int], np.ndarray], folder: Path) -> Verdict:
    raw = RawResult(job_id=job.id, serial="", workspace=PurePosixPath("/"), folder=folder, started_ms=0)
    for (sample, index), values in outputs.items():
        raw.output(sample, index).write_bytes(np.ascontiguousarray(values).tobytes())
    return decide(job, bundle, compare_outputs(bundle, raw)).verdict
