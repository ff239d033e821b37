"""The outputs of an execution against both references, the limits of the case, and earlier executions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

import msgspec
import numpy as np
from numpy.typing import NDArray

from farm.base.errors import BundleError
from farm.builds.bundles.bundle import Bundle, Constant, Manifest, TensorSpec, read_tensor
from farm.devices.execution.raw import RESULT_FILE, RawResult
from farm.results import numerics
from farm.results.attempt import Cause, Comparison, Ending, Measurement, Stage, Verdict, failed, infra
from farm.results.measurements import measure
from farm.results.runner_report import Inference, RunnerReport, RunnerTensor
from farm.suites.figures import COLUMNS
from farm.suites.suite import Job, Limits

References = Mapping[str, Sequence[NDArray[np.generic]]]
"""Tensors of one output over all samples, by kind of reference."""
FiguresByOutput = dict[tuple[int, str], list[numerics.Figures]]
"""Figures of each sample in order, by output and reference."""

UNJUDGED = "it ran; there is no reference for its outputs"
"""Note of what ran without any reference."""


def outputs_problem(bundle: Bundle, raw: RawResult, report: RunnerReport) -> Ending | None:
    """Return why the outputs cannot be compared; None when every file is there and fits the references."""
    manifest = bundle.manifest
    if len(report.inferences) != manifest.samples:
        return infra(Stage.EXECUTE, f"the runner ran {len(report.inferences)} of {manifest.samples} inferences")
    if len(report.outputs) != len(manifest.outputs):
        return _wrong(f"the model gives {len(report.outputs)} outputs, the reference {len(manifest.outputs)}")
    for index, written in enumerate(report.outputs):
        if problem := _description_problem(manifest, index, written):
            return problem
        for sample in range(manifest.samples):
            path = raw.output(sample, index)
            try:
                size = path.stat().st_size
            except FileNotFoundError:
                return infra(Stage.PULL, f"{path.name} is not there although the runner reported success")
            if size != written.nbytes:
                return infra(Stage.PULL, f"{path.name} has {size} bytes, the runner wrote {written.nbytes}")
    return None


def _description_problem(manifest: Manifest, index: int, written: RunnerTensor) -> Ending | None:
    """Return why the runner's description of an output does not fit the manifest; None where it does."""
    expected, label = manifest.outputs[index], manifest.output_label(index)
    # Without a reference the program's own description is all there is, and that has the bounds of a dynamic shape.
    is_exact = bool(manifest.references or manifest.generation)
    if is_exact and (written.dtype, written.shape) != (expected.dtype, expected.shape):
        return _wrong(f"{label} is {written}, the reference is {expected}")
    if len(written.shape) != len(expected.shape) or written.nbytes != executed_spec(expected, written).nbytes:
        problem = f"{label} is {written} with {written.nbytes} bytes, by the program's file {expected}"
        return infra(Stage.PULL, f"{RESULT_FILE} is refused: {problem}")
    return None


def executed_spec(expected: TensorSpec, written: RunnerTensor) -> TensorSpec:
    """Return an output's description with the shape that the runner reports, which may be below dynamic bounds."""
    return msgspec.structs.replace(expected, shape=written.shape)


class OutputFindings(msgspec.Struct, frozen=True):
    """Outputs of an execution against their references; outputs by their index."""

    figures: FiguresByOutput
    """Figures of outputs with a signal in their references, and of constants."""
    without_signal: Mapping[int, str] = MappingProxyType({})
    """Outputs that a wrong program gives as well, and why."""
    equal: frozenset[int] = frozenset()
    """Constants that are equal to their reference."""
    unequal: Mapping[int, str] = MappingProxyType({})
    """Constants that differ, though no arithmetic of the backend is part of them: `max abs 0.1 in sample 2`."""


def compare_outputs(bundle: Bundle, raw: RawResult) -> OutputFindings:
    """Compare every output of every sample. Raises BundleError for a reference that cannot be read.

    An output that the graph makes constant is compared exactly, in the arithmetic of the program: with the quantized
    reference where there is one. Every other output needs a signal in its references, over all samples.
    """
    manifest = bundle.manifest
    if not manifest.references:
        return OutputFindings({})  # the shapes of its outputs are not known
    figures: FiguresByOutput = {}
    without_signal, unequal, equal = dict[int, str](), dict[int, str](), set[int]()
    for index, spec in enumerate(manifest.outputs):
        references = {
            kind: [reference_of(bundle, kind, sample, index) for sample in range(manifest.samples)]
            for kind in manifest.references
        }
        if not spec.constant and (problem := _signal_problem(manifest.output_label(index), references)):
            without_signal[index] = problem
            continue
        outputs = [output_of(bundle, raw, sample, index) for sample in range(manifest.samples)]
        if spec.constant:
            if (difference := _difference(manifest, outputs, references)) is None:
                equal.add(index)
            elif spec.constant is Constant.LITERAL:
                unequal[index] = difference
        for sample, actual in enumerate(outputs):
            given = {kind: of_samples[sample] for kind, of_samples in references.items()}
            for kind, found in _figures(manifest, actual, given, index).items():
                figures.setdefault((index, kind), []).append(found)
    return OutputFindings(figures, without_signal, frozenset(equal), unequal)


def _signal_problem(label: str, references: References) -> str:
    for kind, of_samples in references.items():
        if problem := numerics.signal_problem(of_samples):
            return (
                f"the {kind} reference of {label} {problem}, and depends on the inputs: "
                f"nothing can be judged by it; give the case other inputs or weights"
            )
    return ""


def _difference(manifest: Manifest, outputs: Sequence[NDArray[np.generic]], references: References) -> str | None:
    """Return the difference of a constant output from its reference, in the first sample with one; else None."""
    kind = "quantized" if "quantized" in references else "fp32"
    half = manifest.precision.startswith("fp16")
    for sample, (actual, reference) in enumerate(zip(outputs, references[kind], strict=True)):
        if not numerics.is_equal(actual, reference, half=half):
            found = numerics.compare(actual, reference)
            far = f"mismatch {found.mismatch:.4g}" if found.max_abs is None else f"max abs {found.max_abs:.4g}"
            return f"{far} from the {kind} reference in sample {sample}"
    return None


def _figures(
    manifest: Manifest, actual: NDArray[np.generic], references: Mapping[str, NDArray[np.generic]], index: int
) -> dict[str, numerics.Figures]:
    figures = {}
    for kind, reference in references.items():
        found = numerics.compare(
            actual, reference, manifest.outputs[index].step, logits=manifest.generation is not None
        )
        if manifest.generation is not None and manifest.generation.likelihoods is not None:
            # Logarithms of probabilities of single tokens form no distribution.
            found = msgspec.structs.replace(found, kl=None)
        if kind == "fp32" and "quantized" in references:
            found = numerics.with_loss(found, numerics.compare(references["quantized"], reference))
        figures[kind] = found
    return figures


def compared(output: int, reference: str, figures: numerics.Figures, broken: Iterable[str] = ()) -> Comparison:
    """Return one output against one reference as an attempt keeps it, with the limits that it breaks."""
    columns = {name: getattr(figures, name) for name in COLUMNS}
    return Comparison(output, reference, violations=tuple(broken), **columns)


def measure_outputs(job: Job, bundle: Bundle, raw: RawResult) -> tuple[tuple[Measurement, ...], dict[int, list[str]]]:
    """Return the metrics of the case, and by output which of their limits are broken."""
    measured, broken = [], dict[int, list[str]]()
    for metric in job.case.metrics if "fp32" in bundle.manifest.references else ():
        place = bundle.manifest.output_place(metric.output)
        if place is None:
            broken.setdefault(0, []).append(f"{metric.name} is wanted of output {metric.output}, which there is not")
            continue
        pairs = [
            (output_of(bundle, raw, sample, place), reference_of(bundle, "fp32", sample, place))
            for sample in range(bundle.manifest.samples)
        ]
        measurement, problem = measure(metric, pairs)
        measured.append(measurement)
        if problem:
            broken.setdefault(place, []).append(problem)
    return tuple(measured), broken


def decide(
    job: Job,
    bundle: Bundle,
    findings: OutputFindings,
    broken_metrics: Mapping[int, Sequence[str]] = MappingProxyType({}),
) -> Ending:
    """Return the verdict by the limits of the case; `broken_metrics` has the broken limits of metrics by output. Pure.

    An output without a signal fails the case after all others were judged, because a broken limit is the better reason.
    """
    manifest = bundle.manifest
    tolerance = job.case.tolerance(job.target.precision)
    limits: dict[str, Limits] = {"fp32": tolerance.fp32, "quantized": tolerance.quantized}
    comparisons = []
    broken: list[tuple[numerics.Violation, str]] = []
    for index, difference in findings.unequal.items():
        text = f"{manifest.output_label(index)} is constant by the graph: {difference}"
        broken.append((numerics.Violation(difference, math.inf), text))
    for (index, kind), rows in findings.figures.items():
        figure = numerics.worst(rows)
        found = numerics.violations(figure, limits[kind])
        if kind == "fp32":
            found = (*found, *(numerics.Violation(text, 1.0) for text in broken_metrics.get(index, ())))
        row = compared(manifest.output_number(index), kind, figure, (violation.text for violation in found))
        comparisons.append(msgspec.structs.replace(row, name=manifest.output_name(index)))
        label = manifest.output_label(index)
        broken += [(violation, f"{label} against {kind}: {violation.text}") for violation in found]
    if broken:
        _, reason = max(broken, key=lambda item: item[0].excess)
        others = len(broken) - 1 + len(findings.without_signal)
        ending = _wrong(reason + (f" (and {others} more)" if others else ""))
    else:
        ending = _unjudged(job, bundle, findings, limits) or Ending(Verdict.PASSED, Stage.DONE)
    exact = ", ".join(manifest.output_label(index) for index in sorted({*findings.equal, *findings.unequal}))
    notes = (*ending.notes, *([f"constant by the graph, compared exactly: {exact}"] if exact else ()))
    return msgspec.structs.replace(ending, comparisons=tuple(comparisons), notes=notes)


def _unjudged(job: Job, bundle: Bundle, findings: OutputFindings, limits: Mapping[str, Limits]) -> Ending | None:
    if not bundle.manifest.references:
        return Ending(Verdict.PASSED, Stage.DONE, notes=(UNJUDGED,))
    if findings.without_signal:
        first, *others = findings.without_signal.values()
        return _not_judged(first + (f" (and {len(others)} more)" if others else ""))
    for index, spec in enumerate(bundle.manifest.outputs):
        known = (numerics.worst(findings.figures[index, kind]) for kind in bundle.manifest.references)
        is_judged = any(map(numerics.is_decided, known, map(limits.__getitem__, bundle.manifest.references)))
        if index not in findings.equal and not is_judged:
            return _not_judged(
                f"no limit decides {bundle.manifest.output_label(index)} ({spec.dtype}): "
                f"give the case a tolerance at {job.target.precision}"
            )
    return None


def _wrong(reason: str) -> Ending:
    return failed(Stage.NUMERICS, reason, Cause.NUMERICS)


def _not_judged(reason: str) -> Ending:
    """Return the failure of a case that no device's outputs could pass, so that none other is asked."""
    return failed(Stage.NUMERICS, reason, Cause.NONE)


def output_of(bundle: Bundle, raw: RawResult, sample: int, index: int) -> NDArray[np.generic]:
    """Return an output of an execution."""
    return read_tensor(raw.output(sample, index), bundle.manifest.outputs[index])


def reference_of(bundle: Bundle, kind: str, sample: int, index: int) -> NDArray[np.generic]:
    """Return the reference of an output. Raises BundleError for an unreadable reference."""
    try:
        return bundle.reference(kind, sample, index)
    except (OSError, ValueError) as error:
        raise BundleError.damaged(bundle.manifest.key, error) from None


# The executions of one attempt against each other. All have the same inputs; only the last one's outputs are kept.


# Most differing executions that a reason names.
_SHOWN = 8


def describe_differing(report: RunnerReport) -> str:
    """Return which executions gave other outputs than the last, in one line; empty where all agree.

    Executions are counted from 1 there, warm-up first.
    """
    unsteady = [one for one in report.inferences if one.differing and one.differing.count]
    if not unsteady:
        return ""
    text = _describe(unsteady[0])
    if len(report.inferences) == 1:
        return text
    return f"sample {unsteady[0].line}: {text}; so in {len(unsteady)} of {len(report.inferences)} samples"


def require_comparison(report: RunnerReport) -> Ending | None:
    """Return why the report cannot be judged: its runner did not compare the executions. None where it did."""
    if all(inference.differing for inference in report.inferences):
        return None
    return infra(
        Stage.EXECUTE,
        "the runner is older than this farm and does not compare the outputs of all executions: "
        "build it again from native_runner/",
    )


def judge_iterations(job: Job, bundle: Bundle, report: RunnerReport, ending: Ending) -> Ending:
    """Return `ending`, failed where executions differ that have to agree; a note where they need not, or it had failed.

    Without a word in the manifest of the case they have to agree unless the module keeps a state of its own, or farm
    knows nothing of the outputs.
    """
    text = describe_differing(report)
    if not text:
        return ending
    why = _why_allowed(job, bundle)
    if ending.verdict is not Verdict.PASSED or why:
        return msgspec.structs.replace(ending, notes=(*ending.notes, f"{text}{why}"))
    return ending.ended_as(failed(Stage.NUMERICS, text, Cause.NUMERICS))


def _why_allowed(job: Job, bundle: Bundle) -> str:
    """Return why executions may differ, to be added to a note; empty where they may not."""
    deterministic = job.case.deterministic
    if deterministic is not None:
        return "" if deterministic else ": the case is declared as not deterministic"
    if bundle.manifest.stateful:
        return ": the module changes buffers of its own"
    return "" if bundle.manifest.references else ": there is no reference for them"


def _describe(inference: Inference) -> str:
    count, first = (inference.differing.count, inference.differing.executions) if inference.differing else (0, ())
    named = ", ".join(str(number + 1) for number in first[:_SHOWN])
    more = f" and {count - _SHOWN} more" if count > _SHOWN else ""
    warm_up = len(inference.warm_up_ns)
    counted = f" ({'the first is' if warm_up == 1 else f'the first {warm_up} are'} warm-up)" if warm_up else ""
    what = "execution" if count == 1 else "executions"
    return f"{what} {named}{more} of {inference.executions}{counted} gave other outputs than the last"
