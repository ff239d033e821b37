"""Commands that run one job of a run again, or show more of it. Pure."""

from __future__ import annotations

import itertools
import re
import shlex
from pathlib import PurePath
from typing import TYPE_CHECKING

from farm.base.backends.registry import BACKENDS, DEFAULT_BACKEND
from farm.results.attempt import Cause

if TYPE_CHECKING:
    from collections.abc import Sequence

    from farm.store.view import JobView

# Characters outside of an identifier of `-k`: pytest 8.2, _pytest/mark/expression.py.
_NOT_K_IDENTIFIER = re.compile(r"[^\w:+\-.\[\]\\/]+")

_ONE_JOB = (["debug"], ["exec"], ["repro"])


def ways_again(job: JobView, rerun: str, run_id: str) -> list[tuple[str, str]]:
    """Return further commands for a job of a run, each with a title, quoted for a shell; `rerun` comes first."""
    ways = [("Run it again", rerun)]
    attempt, backend = job.decisive, BACKENDS.get(job.backend)
    if attempt is None or not attempt.device:
        return ways
    if attempt.bundle_key:
        repro = shlex.join(["farm", "jobs", "rerun", job.id, "--run", run_id])
        ways += [("Its exact bundle", repro), ("With adb alone", f"{repro} --script repro")]
    if attempt.cause == Cause.NUMERICS and backend is not None and backend.has_layers:
        # The run's own virtual device has ended, and farm debug looks for an attached one.
        own = ["--virtual", "1"] if "--virtual" in _words(rerun) else []
        ways.append(("Layer by layer", shlex.join(["farm", "debug", job.id, *own])))
    return [*ways, ("Run by run", shlex.join(["farm", "history", job.id]))]


def fetch_command(job: JobView, run_id: str) -> str:
    """Return the command that writes the kept files of a job of a run into a folder, quoted for a shell."""
    return shlex.join(["farm", "show", job.id, "--run", run_id, "--files", "files"])


def rerun_command(job: JobView, *, virtual: bool, run_command: str = "", toolchain: str = "") -> str:
    """Return the command that runs `job` alone, quoted for a shell, with the same `toolchain`.

    Devices named in `run_command` are named again, and a virtual device is started if it started some; for other
    commands than `farm run`, `virtual` decides. A suite keeps its path. A command with a single job is repeated; `farm
    pytest` gets a -k for the test, which may match tests whose names begin alike.
    """
    given = _words(run_command)
    if given[:1] == ["farm"] and given[1:2] in _ONE_JOB:
        return shlex.join(given)
    if given[:2] == ["farm", "pytest"]:
        return shlex.join([*given, *([] if "--" in given else ["--"]), "-k", _test_expression(job.case)])
    if given[:2] == ["farm", "run"]:
        # `farm run` uses attached virtual devices and starts none without --virtual.
        virtual = virtual and any(word.partition("=")[0] == "--virtual" for word in given)
    words = [word for word in _NOT_K_IDENTIFIER.split(job.id) if word and word not in {"and", "or", "not"}]
    argv = ["farm", "run", "--soc", job.soc, "--suite", _suite_argument(job.suite, given)]
    if job.backend != DEFAULT_BACKEND:
        argv += ["--backend", job.backend]
    for option in options_of(job):
        argv += ["--profile", "optrace"] if option == "profile_level=optrace" else ["--option", option]
    if toolchain:
        argv += ["--toolchain", toolchain]
    if virtual:
        argv += ["--virtual", "1"]
    argv += [word for name in ("--device", "--label") for value in _values(given, name) for word in (name, value)]
    if "--heap" in given:
        argv.append("--heap")
    argv += [word for seconds in _values(given, "--seconds")[-1:] for word in ("--seconds", seconds)]
    profile = _values(given, "--profile")[-1:]
    if profile in (["basic"], ["detailed"]):
        argv += ["--profile", *profile]
    return shlex.join([*argv, "-k", " and ".join(words)])


def _test_expression(nodeid: str) -> str:
    """Return the `-k` expression for a test: its file, class and name."""
    parts = nodeid.rpartition("/")[2].split("::")
    words = [word for part in parts for word in _NOT_K_IDENTIFIER.split(part)]
    return " and ".join(word for word in words if word and word not in {"and", "or", "not"})


def options_of(job: JobView) -> list[str]:
    """Return the options of the job's target, `name=value`."""
    return [f"{name}={value}" for name, value in job.options.items()]


def _words(command: str) -> list[str]:
    try:
        return shlex.split(command)
    except ValueError:
        return []


def _values(words: Sequence[str], option: str) -> list[str]:
    """Return the values of an option, in the order of the command."""
    found = []
    for word, following in itertools.pairwise([*words, ""]):
        if word == option:
            found.append(following)
        elif word.startswith(f"{option}="):
            found.append(word.partition("=")[2])
    return found


def _suite_argument(suite: str, words: Sequence[str]) -> str:
    """Return the argument that named a suite in a command: its path if given, else its name."""
    nameless = []
    for value in _values(words, "--suite"):
        path = PurePath(value)
        name = (path.parent if path.suffix == ".toml" else path).name
        if suite == name:
            return value
        # "./", "../" and "suite.toml" do not contain the name of their folder.
        nameless += [value] if name in {"", ".."} else []
    return nameless[0] if len(nameless) == 1 else suite
