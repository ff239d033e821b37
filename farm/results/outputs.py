"""The outputs of an execution that went well, against both references and the limits of the case."""

from __future__ import annotations

import itertools
from types import MappingProxyType
from typing import TYPE_CHECKING

import msgspec

from farm.bundles.bundle import read_tensor
from farm.errors import BundleError
from farm.results.attempt import Cause, Comparison, Ending, Stage, Verdict, failed, infra
from farm.results.measurements import measure
from farm.results.numerics import Figures, Violation, compare, is_decided, signal_problem, violations, with_loss, worst
from farm.suites.figures import COLUMNS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from farm.bundles.bundle import Bundle
    from farm.execution.raw import RawResult
    from farm.results.attempt import Measurement
    from farm.results.runner_report import RunnerReport
    from farm.suites.suite import Job, Limits

FiguresByOutput = dict[tuple[int, str], list[Figures]]
"""By output and reference: the figures of each sample, in order."""

UNJUDGED = "it ran; nothing says what its outputs should be"
"""Note of what ran without any reference."""


def outputs_problem(bundle: Bundle, raw: RawResult, report: RunnerReport) -> Ending | None:
    """Return why the outputs cannot be compared; None when every file is there and fits the references."""
    manifest = bundle.manifest
    if len(report.inferences) != manifest.samples:
        return infra(Stage.EXECUTE, f"the runner ran {len(report.inferences)} of {manifest.samples} inferences")
    if len(report.outputs) != len(manifest.outputs):
        return _wrong(f"the model gives {len(report.outputs)} outputs, the reference {len(manifest.outputs)}")
    for index, (written, expected) in enumerate(zip(report.outputs, manifest.outputs, strict=True)):
        # Without a reference the program's own description is all there is, and that has the bounds of a dynamic shape.
        if (manifest.references or manifest.generation) and (written.dtype, written.shape) != (
            expected.dtype,
            expected.shape,
        ):
            return _wrong(f"output {index} is {written}, the reference is {expected}")
        for sample in range(manifest.samples):
            path = raw.output(sample, index)
            try:
                size = path.stat().st_size
            except FileNotFoundError:
                return infra(Stage.PULL, f"{path.name} is not there although the runner reported success")
            if size != written.nbytes:
                return infra(Stage.PULL, f"{path.name} has {size} bytes, the runner wrote {written.nbytes}")
    return None


class NoSignalError(ValueError):
    """A reference that nothing can be judged by."""


def compare_outputs(bundle: Bundle, raw: RawResult) -> FiguresByOutput:
    """Return the figures of every output of every sample.

    Raises NoSignalError for a reference that carries no signal, BundleError when one cannot be read.
    """
    figures: FiguresByOutput = {}
    manifest = bundle.manifest
    for index, sample in itertools.product(range(len(manifest.outputs)), range(manifest.samples)):
        references = {kind: _reference(bundle, kind, sample, index) for kind in manifest.references}
        for kind, reference in references.items():
            if problem := signal_problem(reference):
                raise NoSignalError(
                    f"the {kind} reference of output {index}, sample {sample}, {problem}: "
                    f"nothing can be judged by it; give the case other inputs or weights"
                )
        if not references:
            continue  # the shapes of its outputs are not known
        actual = _output(bundle, raw, sample, index)
        for kind, reference in references.items():
            found = compare(actual, reference, manifest.outputs[index].step, logits=manifest.generation is not None)
            if manifest.generation is not None and manifest.generation.likelihoods is not None:
                # Of two logarithms of probabilities there is no distribution.
                found = msgspec.structs.replace(found, kl=None)
            if kind == "fp32" and "quantized" in references:
                found = with_loss(found, compare(references["quantized"], reference))
            figures.setdefault((index, kind), []).append(found)
    return figures


def compared(output: int, reference: str, figures: Figures, broken: Iterable[str] = ()) -> Comparison:
    """Return one output against one reference as an attempt keeps it, with the limits that it breaks."""
    columns = {name: getattr(figures, name) for name in COLUMNS}
    return Comparison(output, reference, violations=tuple(broken), **columns)


def measure_outputs(job: Job, bundle: Bundle, raw: RawResult) -> tuple[tuple[Measurement, ...], dict[int, list[str]]]:
    """Return the metrics of the case, and by output which of their limits are broken."""
    measured, broken = [], dict[int, list[str]]()
    for metric in job.case.metrics if "fp32" in bundle.manifest.references else ():
        if metric.output >= len(bundle.manifest.outputs):
            broken.setdefault(0, []).append(f"{metric.name} is wanted of output {metric.output}, which there is not")
            continue
        pairs = [
            (_output(bundle, raw, sample, metric.output), _reference(bundle, "fp32", sample, metric.output))
            for sample in range(bundle.manifest.samples)
        ]
        measurement, problem = measure(metric, pairs)
        measured.append(measurement)
        if problem:
            broken.setdefault(metric.output, []).append(problem)
    return tuple(measured), broken


def decide(
    job: Job,
    bundle: Bundle,
    figures: Mapping[tuple[int, str], list[Figures]],
    broken_metrics: Mapping[int, Sequence[str]] = MappingProxyType({}),
) -> Ending:
    """Return the verdict of the limits of the case, `broken_metrics` being those of metrics by output. Pure."""
    tolerance = job.case.tolerance(job.target.precision)
    limits: dict[str, Limits] = {"fp32": tolerance.fp32, "quantized": tolerance.quantized}
    comparisons = []
    broken: list[tuple[Violation, str]] = []
    for (index, kind), rows in figures.items():
        figure = worst(rows)
        found = violations(figure, limits[kind])
        if kind == "fp32":
            found = (*found, *(Violation(text, 1.0) for text in broken_metrics.get(index, ())))
        comparisons.append(compared(index, kind, figure, (violation.text for violation in found)))
        broken += [(violation, f"output {index} against {kind}: {violation.text}") for violation in found]
    if broken:
        _, reason = max(broken, key=lambda item: item[0].excess)
        more = f" (and {len(broken) - 1} more)" if len(broken) > 1 else ""
        ending = _wrong(reason + more)
    else:
        ending = _unjudged(bundle, figures, limits, job) or Ending(Verdict.PASSED, Stage.DONE)
    return msgspec.structs.replace(ending, comparisons=tuple(comparisons))


def _unjudged(
    bundle: Bundle, figures: Mapping[tuple[int, str], list[Figures]], limits: Mapping[str, Limits], job: Job
) -> Ending | None:
    if not bundle.manifest.references:
        return Ending(Verdict.PASSED, Stage.DONE, notes=(UNJUDGED,))
    for index, spec in enumerate(bundle.manifest.outputs):
        if not any(is_decided(worst(figures[index, kind]), limits[kind]) for kind in bundle.manifest.references):
            return not_judged(
                f"no limit decides output {index} ({spec.dtype}): give the case a tolerance at {job.target.precision}",
            )
    return None


def _wrong(reason: str) -> Ending:
    return failed(Stage.NUMERICS, reason, Cause.NUMERICS)


def not_judged(reason: str) -> Ending:
    """Return the failure of a case that no device's outputs could pass, so that none other is asked."""
    return failed(Stage.NUMERICS, reason, Cause.NONE)


def _output(bundle: Bundle, raw: RawResult, sample: int, index: int) -> NDArray[np.generic]:
    return read_tensor(raw.output(sample, index), bundle.manifest.outputs[index])


def _reference(bundle: Bundle, kind: str, sample: int, index: int) -> NDArray[np.generic]:
    try:
        return bundle.reference(kind, sample, index)
    except (OSError, ValueError) as error:
        raise BundleError(
            f"bundle {bundle.manifest.key[:12]} is damaged: {error}: run 'farm cache prune --all --yes' and build again"
        ) from None
