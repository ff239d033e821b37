"""Request of `farm exec` and `farm jobs rerun`: one job, and where and how it runs."""

from __future__ import annotations

import msgspec

from farm.dispatch.pool.fleet import Choice
from farm.dispatch.request.profiling import Profile
from farm.replay.llama_program import LlamaProgram
from farm.store.view import Purpose, RunToolchain
from farm.suites.suite import Job


class OneOffRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Job of a command, with its device and its executions."""

    job: Job
    virtual: bool
    """True for a new virtual device in place of an attached one."""
    choice: Choice = Choice()
    iterations: int = 3
    warm_up: int = 1
    reducible: bool = False
    """As of `farm.dispatch.request.request.RunRequest`."""
    timeout_s: float = 300.0
    seconds: int | None = None
    """How long a program that generates goes on, beside `timeout_s`; None: every prompt once."""
    profile: Profile = Profile.AUTO
    heap: bool = False
    """Measure the DSP's heap alone: in one process, or in as many as there are iterations that the command names."""
    command: str = ""
    facts: dict[str, str] = {}
    """Further facts that numbers depend on."""
    toolchain: RunToolchain | None = None
    """Toolchain of the run whose program runs again; None for the toolchain of this command."""
    name: str = ""
    """Name of the run."""
    purpose: Purpose = Purpose.LOCAL
    program: LlamaProgram | None = None
    """Program that generates in place of farm's runner."""
    failed_before: bool = False
    """Wrong numbers and refusals are no news, which a second device would confirm."""
