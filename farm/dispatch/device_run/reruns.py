"""Second execution of a job on the same device: in a new session, which no other job and no dead DSP session spoils."""

from __future__ import annotations

from typing import TYPE_CHECKING

from farm.policy.retries import after_rerun, needs_new_session

if TYPE_CHECKING:
    from collections.abc import Callable

    from farm.devices.execution.raw import RawResult
    from farm.results.attempt import Attempt


def was_refused(raw: RawResult | None) -> bool:
    """Return whether the runner answered a job with an error and did not end."""
    return raw is not None and raw.refused and not raw.process_ended


def with_rerun(
    attempt: Attempt, raw: RawResult | None, again: Callable[[], tuple[Attempt, RawResult | None]]
) -> tuple[Attempt, ...]:
    """Return the attempts of a job on one device, as they are recorded; the last decides.

    `again` executes the job in a process of its own, and is called where the job ended the runner or was refused by it.
    """
    refused = was_refused(raw) and needs_new_session(attempt)
    if not (refused or (raw is not None and raw.process_ended)):
        return (attempt,)
    second, raw_alone = again()
    ended_again = (raw_alone is not None and raw_alone.process_ended) or (refused and was_refused(raw_alone))
    return after_rerun(attempt, second, ended_again=ended_again, refused=refused)
