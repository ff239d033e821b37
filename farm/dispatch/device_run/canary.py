"""The program that says whether a device is fit, and that a session keeps loaded.

One a SoC and backend, of no suite and always the same, so that what it takes on one device, year by year, is the drift
of that device. For HTP a session keeps it loaded as well, its anchor: QNN goes down with the last program that is
loaded, and two loads of the same program share one handle in ExecuTorch 1.5 without counting, so that what stays loaded
has to be a program that no suite has.
"""

from __future__ import annotations

from farm.base.backends.descriptor import DIRECT_MODE
from farm.base.backends.registry import find_backend
from farm.suites.suite import Case, InputSpec, Job, Limits, Target, Tolerance

_SHAPE = (1, 3, 5, 7)
# 8 bits give 40 dB and more; a device that is not well gives none.
_TOLERANCE = Tolerance(fp32=Limits(sqnr_db=25.0))


def canary_jobs(jobs: tuple[Job, ...]) -> tuple[Job, ...]:
    """Return what to compile for devices that run `jobs`: one job a SoC, backend and mode, of no suite."""
    wanted = dict.fromkeys((job.target.soc, job.target.backend, job.target.direct) for job in jobs)
    return tuple(canary_job(soc, backend, direct=direct) for soc, backend, direct in wanted)


def canary_job(soc: str, backend: str, *, direct: bool = False) -> Job:
    """Return the job whose bundle is the canary of an SoC and backend, in `direct` mode or not."""
    precision = find_backend(backend).canary_precision
    case = Case(
        "farm",
        "canary",
        module="torch.nn:ReLU",
        inputs=(InputSpec(_SHAPE),),
        precisions=(precision,),
        tolerances={precision: _TOLERANCE},
    )
    return Job(case, Target(soc, backend, precision, ((DIRECT_MODE, "true"),) if direct else ()))
