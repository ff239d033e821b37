"""Repair of a shared farm, by one agent every few seconds: rows and jobs that dead agents held."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from farm.store.leases.rows import always_stable

if TYPE_CHECKING:
    from collections.abc import Callable

    from farm.store.store import Store

logger = logging.getLogger(__name__)

_KEPT_HOURS = 1.0


def recover(store: Store, *, ttl_s: float, is_stable: Callable[[], bool] = always_stable) -> bool:
    """Put back the shards and builds of dead agents and workers, and defer jobs that are missing.

    Any number of agents may recover at once. Returns whether any run goes on. `ttl_s` and `is_stable` as in
    `AbandonedWork.recover`. Raises StoreError.
    """
    recovered = store.cluster.recover(ttl_s=ttl_s, is_stable=is_stable)
    store.messages.retry(ttl_s, is_stable)
    for line in recovered.lines:
        logger.info(line)
    return recovered.is_busy


def remove_ended(store: Store) -> None:
    """Remove ended messages that were kept because of their outcome, after an hour. Raises StoreError."""
    store.messages.remove_ended(_KEPT_HOURS)
