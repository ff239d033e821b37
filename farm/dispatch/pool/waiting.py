"""Waiting for devices, but not for ever: until every SoC has one, or the time is over."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from farm.base.errors import NoDeviceError
from farm.report.model.format import duration

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from farm.dispatch.pool.device_pool import DevicePool
    from farm.dispatch.pool.fleet import Fleet

logger = logging.getLogger(__name__)

# Reading the identity of every device disturbs measurements of other users.
_RESCAN_SECONDS = 15.0
# A request without waiting has this grace: the leases of free devices take a moment.
_GRACE_SECONDS = 5.0


class Wait:
    """How long a run waits for devices; begins when it is made."""

    def __init__(self, seconds: float | None) -> None:
        """`seconds` is None for a run that waits for busy devices as long as it may, and for absent ones not at all."""
        self._seconds = seconds
        self._end_s = float("inf") if seconds is None else time.monotonic() + seconds

    def fleet(self, first: Callable[[], Fleet], again: Callable[[bool], Fleet]) -> Fleet:
        """Return the devices as soon as every SoC has an attached device, or all devices at the end of the wait.

        `first` and `again` find them; `again` takes whether some SoCs may be without. Raises NoDeviceError when none
        has any.
        """
        try:
            return first()
        except NoDeviceError as error:
            if self._seconds is None:
                raise
            logger.info("waiting up to %s: %s", duration(self._seconds), error)
        while (left := self._end_s - time.monotonic()) > 0:
            time.sleep(min(_RESCAN_SECONDS, left))
            try:
                return again(False)
            except NoDeviceError:
                continue
        return again(True)

    def acquire(self, pool: DevicePool, socs: Collection[str], until_s: float) -> frozenset[str]:
        """Wait for a lease of a device of every SoC; return the SoCs that are given up as none became free.

        `until_s` is when the run's time is over, on the clock of `time.monotonic`. Raises NoDeviceError when no SoC
        has any.
        """
        if self._seconds is None:
            pool.acquire(until_s)
            return frozenset()
        pool.acquire(min(until_s, max(self._end_s, time.monotonic() + _GRACE_SECONDS)), partly=True)
        lacking = frozenset(socs) - {device.soc for device in pool.held()}
        if lacking:
            names = " and no ".join(sorted(lacking))
            reason = f"no {names} became free within {duration(self._seconds)}: {pool.leases.holders(lacking)}"
            if lacking == frozenset(socs):
                raise NoDeviceError(reason)
            pool.give_up(lacking, reason)
        return lacking
