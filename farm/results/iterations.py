"""The executions of one attempt against each other. All have the same inputs; only the last one's outputs are kept."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from farm.results.attempt import Cause, Ending, Stage, Verdict, failed, infra

if TYPE_CHECKING:
    from farm.builds.bundles.bundle import Bundle
    from farm.results.runner_report import Inference, RunnerReport
    from farm.suites.suite import Job

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
