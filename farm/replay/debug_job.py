"""Name of a job for `farm debug` -> a job of one method with distinguishable layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from farm.base.backends.descriptor import DIRECT_MODE
from farm.base.backends.registry import BACKENDS, DEFAULT_BACKEND, find_backend
from farm.base.errors import IllegalTargetError, UnknownNameError, UsageError
from farm.dispatch.request.named_job import named_job

if TYPE_CHECKING:
    from collections.abc import Sequence

    from farm.base.config.settings import Config
    from farm.suites.suite import Case, Job

# Features without an effect on the layers of one method.
_WITHOUT = ("shared_buffer", "use_weight_sharing")


def job_to_debug(
    config: Config,
    text: str,
    *,
    soc: str | None = None,
    precision: str | None = None,
    options: Sequence[str] = (),
    method: str | None = None,
) -> Job:
    """Return the job that `text` names: `suite/case[SM8650-htp-8a8w]`, or `suite/case` with an SoC and a precision.

    The precision may be omitted for a case with a single one. The job has one method of the program: `method`, or else
    the executed one. Raises UnknownNameError with the nearest name, IllegalTargetError, UsageError for a text with
    no job or several jobs.
    """
    return with_layers(named_job(config, text, "farm debug", soc=soc, precision=precision, options=options), method)


def with_layers(job: Job, method: str | None = None) -> Job:
    """Return `job` with one method with distinguishable layers. Raises as `job_to_debug`."""
    name, backend = f"{job.case.suite}/{job.case.name}", job.target.backend
    if not find_backend(backend).has_layers:
        able = " and ".join(one.name for one in BACKENDS.values() if one.has_layers)
        raise IllegalTargetError(
            f"farm debug reads what QNN writes of every layer and is for {able}, not for {backend}: "
            f"debug {name} as [{job.target.soc}-{DEFAULT_BACKEND}-PRECISION]"
        )
    if job.target.direct:
        raise IllegalTargetError(f"direct mode writes no layers (ExecuTorch 1.5): debug {name} without {DIRECT_MODE}")
    if job.case.pte:
        raise UsageError(f"{name} is a .pte that was compiled already: it has no layers that could be told apart")
    if any(spec.dynamic for spec in job.case.inputs):
        raise UsageError(f"{name} has dynamic sizes: layers are compared at fixed sizes only")
    if job.case.generate is not None:
        raise UsageError(f"{name} generates text: farm debug compares the layers of one inference, not of a sequence")
    if features := [feature for feature in job.case.features.named if feature not in _WITHOUT]:
        raise UsageError(
            f"farm debug compiles without features, and {name} has {', '.join(features)}: debug another case"
        )
    return msgspec.structs.replace(job, case=_of_method(job.case, name, method or job.case.method))


def _of_method(case: Case, name: str, method: str) -> Case:
    """Return `case` with this method alone. Raises UnknownNameError for a method that its program lacks.

    If the case names no methods, only the module knows them.
    """
    if case.methods and method not in case.methods:
        raise UnknownNameError("method", method, case.methods, f"of {name}")
    named = case.methods.get(method)
    inputs = named.inputs if named is not None and named.inputs else case.inputs
    features = msgspec.structs.replace(case.features, **dict.fromkeys(_WITHOUT, False))
    return msgspec.structs.replace(case, method=method, methods={}, inputs=inputs, features=features)
