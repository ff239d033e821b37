"""A stub: stands in for torch in a builder process, and puts a compiler that compiles nothing in place of farm's.

On the path of builders alone (chaos_farm.py). The process of a builder is real: its start, requests,
replies and death. A compile takes the `seconds` of the case.
"""

from __future__ import annotations

import sys
import time
import types
from collections.abc import Mapping
from pathlib import Path

from farm.suites.suite import Job

sys.path.append(str(Path(__file__).parents[2]))


def set_num_threads(_count: int) -> None:
    """Nothing computes here."""


def _compile_job(job: Job, key: str, _versions: Mapping[str, str], folder: Path) -> None:
    from stub_farm import ELEMENTS, fill_bundle, words_of

    time.sleep(float(job.case.kwargs.get("seconds", 0.0)))
    elements = int(job.case.kwargs.get("elements", ELEMENTS))
    fill_bundle(folder, key, words_of(job.case), elements, job.target.soc)


_compiler = types.ModuleType("farm.builds.compile.flows.compiler")
vars(_compiler).update(compile_job=_compile_job, flow_of=lambda _backend: None)
sys.modules["farm.builds.compile.flows.compiler"] = _compiler
