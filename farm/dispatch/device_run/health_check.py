"""Program of the health check, which a session also keeps loaded.

Each SoC and backend has one program outside of all suites that never changes, so that its time on a device shows the
drift of that device over years. For HTP it is also the anchor that a session keeps loaded: QNN shuts down with the last
loaded program, and two loads of a program share one handle in ExecuTorch 1.5 without a count, so that the anchor must
not be a program of a suite.
"""

from __future__ import annotations

from farm.base.backends.descriptor import DIRECT_MODE
from farm.base.backends.registry import find_backend
from farm.suites.suite import Case, InputSpec, Job, Limits, Target, Tolerance

_SHAPE = (1, 3, 5, 7)
# 8 bits give 40 dB and more; a device that is not well gives none.
_TOLERANCE = Tolerance(fp32=Limits(sqnr_db=25.0))


def health_check_jobs(jobs: tuple[Job, ...]) -> tuple[Job, ...]:
    """Return what to compile for devices that run `jobs`: one job a SoC, backend and mode, of no suite."""
    wanted = dict.fromkeys((job.target.soc, job.target.backend, job.target.direct) for job in jobs)
    return tuple(health_check_job(soc, backend, direct=direct) for soc, backend, direct in wanted)


def health_check_job(soc: str, backend: str, *, direct: bool = False) -> Job:
    """Return the job whose bundle is the health check of an SoC and backend, in `direct` mode or not."""
    precision = find_backend(backend).health_check_precision
    case = Case(
        "farm",
        "health_check",
        module="torch.nn:ReLU",
        inputs=(InputSpec(_SHAPE),),
        precisions=(precision,),
        tolerances={precision: _TOLERANCE},
    )
    return Job(case, Target(soc, backend, precision, ((DIRECT_MODE, "true"),) if direct else ()))
