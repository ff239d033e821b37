"""Repair of a shared farm, by one agent every few seconds: rows and jobs that dead agents held."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from farm.store.leases.rows import always_settled

if TYPE_CHECKING:
    from collections.abc import Callable

    from farm.store.store import Store

logger = logging.getLogger(__name__)

_KEPT_HOURS = 1.0


def mend(store: Store, *, ttl_s: float, is_settled: Callable[[], bool] = always_settled) -> bool:
    """Put back the shards and builds of dead agents and workers, and defer jobs that are missing.

    Any number of agents may mend at once. Returns whether any run goes on. `ttl_s` and `is_settled` as in
    `Mending.mend`. Raises StoreError.
    """
    mended = store.cluster.mend(ttl_s=ttl_s, is_settled=is_settled)
    store.messages.retry(ttl_s, is_settled)
    for line in mended.lines:
        logger.info(line)
    return mended.is_busy


def tidy(store: Store) -> None:
    """Remove ended messages that were kept because of their outcome, after an hour. Raises StoreError."""
    store.messages.tidy(_KEPT_HOURS)
