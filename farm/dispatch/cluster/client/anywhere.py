"""`farm run` on the hosts of a shared farm, if farm.toml names one, otherwise on this machine.

Virtual devices that a run starts are its own, on this machine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from farm.base.errors import FarmError, UsageError
from farm.dispatch.cluster.client.submit_options import SubmitOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from farm.base.config.settings import Config
    from farm.base.interrupts import InterruptHandler
    from farm.dispatch.dispatcher import ProgressListener
    from farm.dispatch.request.request import RunOutcome, RunRequest

_DEFAULT = SubmitOptions()


def run(
    config: Config,
    request: RunRequest,
    listener: ProgressListener,
    *,
    options: SubmitOptions = _DEFAULT,
    interrupts: InterruptHandler | None = None,
    begun: Callable[[str], None] = lambda _: None,
    only: Collection[str] | None = None,
) -> RunOutcome:
    """Run the jobs of `request`, here or by agents, and return the outcome, as `farm.dispatch.run.run.run`.

    Raises UsageError for a `options` that needs a shared farm if there is none, and as `farm.dispatch.run.run.run`.
    """
    if is_submitted(config, request):
        from farm.dispatch.cluster.client.submit import submit

        return submit(config, request, listener, options, interrupts=interrupts, begun=begun, only=only)
    refuse_options(config, options)
    from farm.dispatch.run.run import run as run_here

    return run_here(config, request, listener, interrupts=interrupts, begun=begun, only=only)


def resume(
    config: Config,
    ref: str,
    listener: ProgressListener,
    budget_s: float | None = None,
    *,
    options: SubmitOptions = _DEFAULT,
    interrupts: InterruptHandler | None = None,
) -> RunOutcome:
    """Run the missing jobs of a run, where it ran before. Raises as `farm.dispatch.run.run.resume`."""
    if config.is_shared and not _is_of_this_machine(config, ref):
        from farm.dispatch.cluster.client.submit import resume as resume_shared

        return resume_shared(config, ref, listener, options, budget_s, interrupts=interrupts)
    refuse_options(config, options)
    from farm.dispatch.run.run import resume as resume_here

    return resume_here(config, ref, listener, budget_s, interrupts=interrupts)


def is_submitted(config: Config, request: RunRequest) -> bool:
    """Return whether agents execute the jobs of `request`."""
    return config.is_shared and not request.virtual


def refuse_options(config: Config, options: SubmitOptions) -> None:
    """Raise UsageError for options of a shared farm in a run on this machine."""
    chosen = {"--detach": options.detach, "--build-on here": options.build_here, "--wait-for-hosts": options.wait}
    if given := [option for option, value in chosen.items() if value]:
        why = "with --virtual a run" if config.is_shared else "without artifacts in farm.toml a run"
        raise UsageError(f"{given[0]} is of a shared farm, and {why} is this machine's own: leave it out")


def _is_of_this_machine(config: Config, ref: str) -> bool:
    """Return whether a run had virtual devices of its own."""
    from farm.dispatch.request.records import read_intent
    from farm.store.store import open_store

    with open_store(config.store_url) as store:
        run_id = store.runs.resolve(ref, unbegun=True)
    try:
        return read_intent(config.run_folder(run_id))[0].virtual > 0
    except FarmError:
        # The caller's `resume` raises an error with the reason.
        return False
