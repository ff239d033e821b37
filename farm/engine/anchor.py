"""The program that a session keeps loaded, so that QNN is up for every job of it and its start is in no job's numbers.

QNN goes down with the last program that is loaded, and two loads of the same program share one handle in ExecuTorch 1.5
without counting: what stays loaded has to be a program that no suite has.
"""

from __future__ import annotations

from farm.suites import Case, InputSpec, Job, Target

# Whose programs delegate to QNN for HTP; the others have nothing to keep up, or cannot be tried here.
_BACKEND = "htp"
# Every HTP has it.
_PRECISION = "8a8w"
_SHAPE = (1, 3, 5, 7)


def anchor_jobs(jobs: tuple[Job, ...]) -> tuple[Job, ...]:
    """Return what to compile for sessions that run `jobs`: one job an SoC, of no suite."""
    case = Case(
        suite="farm", name="anchor", module="torch.nn:ReLU", inputs=(InputSpec(_SHAPE),), precisions=(_PRECISION,)
    )
    socs = dict.fromkeys(job.target.soc for job in jobs if job.target.backend == _BACKEND)
    return tuple(Job(case, Target(soc, _BACKEND, _PRECISION)) for soc in socs)
