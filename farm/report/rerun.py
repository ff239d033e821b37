"""The command that runs one job of a run again. Pure."""

from __future__ import annotations

import itertools
import re
import shlex
from pathlib import PurePath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from farm.store.view import JobView

# pytest 8.2, _pytest/mark/expression.py: what an identifier of `-k` is made of.
_NOT_K_IDENTIFIER = re.compile(r"[^\w:+\-.\[\]\\/]+")


def rerun_command(job: JobView, *, virtual: bool, run_command: str = "") -> str:
    """Return the command that runs `job` alone, quoted for a shell.

    A suite that `run_command` named by its path is named so again.
    """
    words = [word for word in _NOT_K_IDENTIFIER.split(job.id) if word and word not in {"and", "or", "not"}]
    argv = ["farm", "run", "--soc", job.soc, "--suite", _suite_argument(job.suite, run_command)]
    if job.backend != "htp":
        argv += ["--backend", job.backend]
    if virtual:
        argv += ["--virtual", "1"]
    return shlex.join([*argv, "-k", " and ".join(words)])


def _suite_argument(suite: str, run_command: str) -> str:
    try:
        words = shlex.split(run_command)
    except ValueError:
        return suite
    values = [word.removeprefix("--suite=") for word in words if word.startswith("--suite=")]
    values += [value for option, value in itertools.pairwise(words) if option == "--suite"]
    for value in values:
        path = PurePath(value)
        if suite == (path.parent if path.suffix == ".toml" else path).name:
            return value
    return suite
