"""Factors swapped one at a time: is a change the program's, the runner's, the SDK's or the device's?"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from farm.base.backends.registry import find_backend
from farm.base.errors import FarmError
from farm.base.socs import find_soc
from farm.builds.runtime.native.executorch import runner_executorch
from farm.builds.runtime.runtime import virtual_runtime
from farm.builds.runtime.simulator import older_runner, older_sdk
from farm.numbers.regressions.paired_test import confirm_change
from farm.replay.stored_result import target_of
from farm.results.analysis.confirmation import INFERENCES, PAIRS, Confirmation
from farm.results.analysis.factors import Explanation, Factor, explain

if TYPE_CHECKING:
    from farm.builds.runtime.runtime import Runtime
    from farm.numbers.regressions.interleaved_ab import InterleavedBench, Side
    from farm.numbers.regressions.paired_test import Compared
    from farm.replay.stored_result import StoredResult
    from farm.results.analysis.scale import Series

FACTS = {Factor.RUNTIME: "native_runner", Factor.SDK: "qnn"}
"""Fact of a run by factor."""
_LIBRARIES = "qnn_content"


class Attribution(msgspec.Struct, frozen=True):
    """Attribution of a change with its measurements."""

    metric: str
    explanation: Explanation
    whole: Confirmation
    """All old against all new."""
    alone: dict[Factor, Confirmation]
    """All old against all old but one."""
    differing: tuple[Factor, ...]
    not_swapped: dict[Factor, str]
    """Factors that are not the same in both runs and could not be swapped here, and why."""


class Swaps(msgspec.Struct, frozen=True):
    """Factors that can be swapped between two runs on a bench."""

    old: Side
    new: Side
    """All that can be had, as in the new run."""
    alone: dict[Factor, Side]
    """All old but for one factor."""
    not_swapped: dict[Factor, str]

    @property
    def differing(self) -> tuple[Factor, ...]:
        """Factors that differ between the runs."""
        return tuple(factor for factor in Factor if factor in self.alone or factor in self.not_swapped)


def plan_swaps(bench: InterleavedBench, good: StoredResult, new: StoredResult) -> Swaps:
    """Return what can be swapped; another device is leased for it. Raises UsageError for a bundle that is gone."""
    old, now = bench.side(good), bench.side(new)
    alone: dict[Factor, Side] = {}
    refused: dict[Factor, str] = {}
    parts = [factor for factor in FACTS if _is_other(good, new, factor)]
    for factor in parts:
        if problem := _problem(bench, good, new, factor):
            refused[factor] = problem
    parts = [factor for factor in parts if factor not in refused]
    if parts:
        was = {factor: _fact(good, factor) for factor in parts}
        became = {factor: _fact(new, factor) for factor in parts}
        old = msgspec.structs.replace(old, runtime=_runtime(bench, good, was))
        now = msgspec.structs.replace(now, runtime=_runtime(bench, new, became))
        for factor in parts:
            runtime = _runtime(bench, good, was | {factor: became[factor]})
            alone[factor] = msgspec.structs.replace(old, runtime=runtime)
    if good.attempt.bundle_key != new.attempt.bundle_key:
        alone[Factor.PROGRAM] = msgspec.structs.replace(old, bundle=now.bundle, job=now.job)
    if devices := _devices(bench, good, new):
        problem = _other_device(bench, good, new)
        if problem:
            refused[Factor.DEVICE] = problem
        else:
            old, now = (
                msgspec.structs.replace(one, device=serial) for one, serial in zip((old, now), devices, strict=True)
            )
            alone = {factor: msgspec.structs.replace(side, device=devices[0]) for factor, side in alone.items()}
            alone[Factor.DEVICE] = msgspec.structs.replace(old, device=devices[1])
    return Swaps(old, now, alone, refused)


def swap_factors(
    bench: InterleavedBench,
    series: Series,
    good: StoredResult,
    new: StoredResult,
    up: bool,
    pairs: int = PAIRS,
    inferences: int = INFERENCES,
    *,
    swaps: Swaps | None = None,
    program: Compared | None = None,
) -> Attribution:
    """Swap each factor that differs by itself, and name the factors that explain the change of `series`.

    `program` is the result of the two bundles on the runtime of the bench: without another factor to swap it is the
    whole answer, and no pairs are measured. Raises as `compare`.
    """
    swaps = swaps or plan_swaps(bench, good, new)
    if program is not None and swaps.alone.keys() <= {Factor.PROGRAM}:
        whole = program.confirmation
        alone = dict.fromkeys(swaps.alone, whole)
    else:
        whole = confirm_change(bench, series, swaps.old, swaps.new, up, pairs, inferences, fresh=True)
        # With one factor, all new is all old but that one.
        single = len(swaps.alone) == 1
        alone = {
            factor: whole
            if single
            else confirm_change(bench, series, swaps.old, side, up, pairs, inferences, fresh=True)
            for factor, side in swaps.alone.items()
        }
    explanation = explain(series.scale, whole, alone, swaps.differing)
    return Attribution(series.metric, explanation, whole, alone, swaps.differing, swaps.not_swapped)


def _is_other(good: StoredResult, new: StoredResult, factor: Factor) -> bool:
    """Return whether two runs had another one; libraries of one version may have been replaced in between."""
    libraries = {past.run.fingerprint.get(_LIBRARIES, "") for past in (good, new)}
    replaced = factor is Factor.SDK and len(libraries - {""}) > 1
    return replaced or _fact(good, factor) != _fact(new, factor)


def _fact(past: StoredResult, factor: Factor) -> str:
    return past.run.fingerprint.get(FACTS[factor], "")


def _problem(bench: InterleavedBench, good: StoredResult, new: StoredResult, factor: Factor) -> str:
    """Return why the runner or the SDK of these runs cannot be swapped here, empty when they can."""
    if bench.runtime.kind != "simulator":
        return "farm keeps none of those that devices had: only of virtual devices can it be swapped"
    if factor is Factor.SDK and not find_backend(good.view.backend).simulated:
        return "only that of the HTP simulator can be swapped"
    if _fact(good, factor) == _fact(new, factor):
        return f"both runs had QNN {_fact(new, factor)}, whose libraries were replaced in between: none are kept"
    return _gone(bench, good, factor) or _gone(bench, new, factor)


def _gone(bench: InterleavedBench, past: StoredResult, factor: Factor) -> str:
    """Return the reason why the runner or the SDK of a run is unavailable; empty for none."""
    cache, versions, value = bench.config.cache_dir, bench.tools.versions, _fact(past, factor)
    if not value:
        return f"run {past.run.id} does not note which it had"
    if factor is Factor.SDK and value != versions["qnn"] and older_sdk(cache, value) is None:
        return f"QNN {value} of run {past.run.id} is not in the cache any more"
    if factor is Factor.RUNTIME and older_runner(cache, value, runner_executorch(bench.config)) is None:
        return (
            f"the runner {value} of run {past.run.id} is not in the cache any more, or the ExecuTorch libraries that "
            "it was built against are not here"
        )
    return ""


def _runtime(bench: InterleavedBench, past: StoredResult, facts: dict[Factor, str]) -> Runtime:
    """Return the runtime of the bench with another runner, other QNN libraries or both."""
    cache, config = bench.config.cache_dir, bench.config
    here = runner_executorch(config)
    return virtual_runtime(
        config,
        find_soc(past.view.soc),
        past.view.backend,
        mode=target_of(past.view).mode,
        runner=older_runner(cache, facts[Factor.RUNTIME], here) if Factor.RUNTIME in facts else None,
        sdk=older_sdk(cache, facts[Factor.SDK]) if Factor.SDK in facts else None,
    )


def _devices(bench: InterleavedBench, good: StoredResult, new: StoredResult) -> tuple[str, str] | None:
    """Return the serials of the devices if the runs had two; virtual devices of runs are equal."""
    was, now = _device(good), _device(new)
    return None if bench.virtual or was == now else (was[0], now[0])


def _device(past: StoredResult) -> tuple[str, str]:
    serial = past.attempt.device
    return serial, next((one.build for one in past.run.devices if one.serial == serial), "")


def _other_device(bench: InterleavedBench, good: StoredResult, new: StoredResult) -> str:
    """Lease the missing devices of both runs, and return the reason of a failure; empty for success."""
    was, now = _device(good), _device(new)
    if was[0] == now[0]:
        return f"{was[0]} had another system then: {was[1]}"
    try:
        for serial, build in (was, now):
            bench.add_device(serial)
            if bench.build_of(serial) != build:
                return f"{serial} has another system now than in its run"
    except FarmError as error:
        return str(error)
    return ""
