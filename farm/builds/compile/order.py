"""Order in which builders take requests. Pure, torch-free."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Collection

    from farm.builds.compile.protocol import BuildRequest

_AHEAD = 16
"""Requests at the front from which a builder chooses: the order keeps devices of all SoCs busy."""


def case_of(request: BuildRequest) -> tuple[str, str]:
    """Return the identity of the case of `request`, whose export its precisions share."""
    return request.job.case.folder, request.job.case.name


def take_next(
    queue: deque[BuildRequest], own: tuple[str, str] | None, others: Collection[tuple[str, str]]
) -> BuildRequest:
    """Remove and return the next request for a builder of the case `own` beside builders of the cases `others`.

    The builder stays with its case, then takes a case without another builder, then the first request. Raises
    IndexError for an empty queue.
    """
    front = list(islice(queue, _AHEAD))
    chosen = next((one for one in front if case_of(one) == own), None)
    chosen = chosen or next((one for one in front if case_of(one) not in others), None) or queue[0]
    queue.remove(chosen)
    return chosen
