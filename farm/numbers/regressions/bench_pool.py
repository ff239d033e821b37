"""The devices that a run's numbers are measured again on."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

from farm.base.errors import FarmError, NoDeviceError
from farm.base.text import reason_line
from farm.numbers.regressions.confirm_job import PairsRequest, bench_for
from farm.replay.made_bundle import find_made_bundle
from farm.replay.stored_result import StoredResult, find_job

if TYPE_CHECKING:
    from contextlib import AbstractContextManager, ExitStack

    from farm.base.config.settings import Config
    from farm.numbers.regressions.interleaved_ab import InterleavedBench
    from farm.store.store import Store


class BenchFactory:
    """Opens benches on the devices that `request` allows."""

    def __init__(self, config: Config, store: Store, request: PairsRequest) -> None:
        self._config, self._store, self._request = config, store, request

    def has_bundle(self, key: str) -> bool:
        """Return whether the bundle of a past result can be run again as it is."""
        return find_made_bundle(self._config, key) is not None

    def require_job(self, past: StoredResult) -> None:
        """Raise UsageError for a result whose job is gone."""
        find_job(self._config, past)

    def open(self, past: StoredResult, until_s: float) -> AbstractContextManager[InterleavedBench]:
        """Return the bench for a result; a device is waited for until `until_s` on the clock of `time.monotonic`."""
        return bench_for(self._config, self._store, past, self._request, until_s)


class BenchPool:
    """A device for each SoC, backend and kind, kept warm."""

    def __init__(self, factory: BenchFactory, stack: ExitStack, end_s: float) -> None:
        """Take `end_s`, the end of waits for a busy device on the clock of `time.monotonic`."""
        self._factory, self._stack, self._end_s = factory, stack, end_s
        self._open: dict[tuple[str, str, str], InterleavedBench] = {}
        self.broken: dict[tuple[str, str, str], str] = {}
        self.wait_s = math.inf
        """Longest that one device is waited for, in seconds."""

    def of(self, past: StoredResult) -> InterleavedBench:
        """Return the bench that a result is measured on.

        Raises NoDeviceError, also where there was none before, and UsageError for a result whose job is gone.
        """
        key = self.key(past)
        if key in self.broken:
            raise NoDeviceError(self.broken[key])
        if key not in self._open:
            # Not a reason to do without the device.
            self._factory.require_job(past)
            try:
                until_s = min(self._end_s, time.monotonic() + self.wait_s)
                self._open[key] = self._stack.enter_context(self._factory.open(past, until_s))
            except FarmError as error:
                self.broken[key] = reason_line(str(error))
                raise NoDeviceError(self.broken[key]) from None
        return self._open[key]

    def give_up(self, past: StoredResult, why: str) -> None:
        """Exclude the bench of `past` from further measurements."""
        self.broken[self.key(past)] = why

    @staticmethod
    def key(past: StoredResult) -> tuple[str, str, str]:
        """Return the required properties of a device."""
        return past.view.soc, past.view.backend, past.kind
