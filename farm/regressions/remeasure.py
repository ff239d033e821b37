"""One number of a run, measured again: is it worse, since when, and what is to blame?"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from farm.analysis.candidates import levelled
from farm.analysis.confirmation import P_CONFIRMED, Answer, Confirmation
from farm.analysis.factors import Factor
from farm.analysis.first_bad import Bracket
from farm.errors import FarmError, InfraError, NoDeviceError, UsageError
from farm.regressions.confirming import Claim, compare, first_bad
from farm.regressions.factor_swap import plan_swaps, swap_factors
from farm.replay.repro import differences
from farm.replay.stored_result import Results
from farm.store.records import AlertState
from farm.system.text import reason_line

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from farm.analysis.confirmation import Pair
    from farm.analysis.history import Point
    from farm.regressions.bench_pool import BenchFactory, BenchPool
    from farm.regressions.confirm_job import PairsRequest
    from farm.regressions.interleaved_ab import InterleavedBench
    from farm.regressions.look_back import Seen
    from farm.replay.stored_result import StoredResult
    from farm.store.records import AlertRecord
    from farm.store.store import Store

# Of one side in a pair: so long at least, or so many.
_TURN_NS = 50e6
_MOST_INFERENCES = 20


@dataclass
class Asked:
    """One number that was measured."""

    points: Sequence[Point]
    confirmation: Confirmation
    good: int
    """Index of the last run that is known to be good, and of the first that is known to be bad."""
    bad: int
    pairs: tuple[Pair, ...] = ()
    device: str = ""
    guilt: str = ""
    stands_out: bool = True
    """Whether its history spoke for it; otherwise its program changed."""
    alert: AlertRecord | None = None
    """As it was before."""
    state: AlertState = AlertState.CANDIDATE
    """As it is recorded."""


class Asking:
    """Asks pairs, on the devices of `benches`."""

    def __init__(
        self,
        store: Store,
        request: PairsRequest,
        factory: BenchFactory,
        benches: BenchPool,
        say: Callable[[str], None],
    ) -> None:
        self._request, self._factory, self._benches, self._say = request, factory, benches, say
        self._results = Results(store)

    def ask(
        self, seen: Seen, pairs: int, *, up: bool, attribute: bool = True, level: float = P_CONFIRMED
    ) -> Asked | None:
        """Return what so many pairs say of a number, and where its step is; None where no device can be had."""
        points = seen.points
        new, first = len(points) - 1, seen.first
        good = self.good(seen)
        asked = Asked(points, unknown("no bundle of the runs before is there any more"), good or first, new)
        if points[first].bundle and points[first].bundle == points[new].bundle:
            asked.confirmation = _refuted(f"the program is that of {points[first].run_id}: it was the night")
            return asked
        if good is None:
            return asked
        try:
            was, now = (self._results.of(seen.past.job_id, points[index].run_id) for index in (good, new))
            bench = self._benches.of(now)
            series = seen.series.series
            [compared] = compare(bench, [Claim(series, up)], was, now, pairs, self._inferences(seen), level=level)
            asked.confirmation, asked.pairs, asked.device = compared.confirmation, compared.pairs, bench.device.serial
        except UsageError as error:
            asked.confirmation = unknown(reason_line(str(error)))
            return asked
        except NoDeviceError:
            return None
        except InfraError as error:
            # The device, not the program: others of this kind would only fail as well.
            self._benches.give_up(now, reason_line(str(error)))
            return None
        if attribute and compared.confirmation.answer is Answer.CONFIRMED:
            try:
                self._attribute(seen, bench, asked)
            except FarmError as error:
                # What is confirmed is so, wherever it came from.
                self._say(f"{seen.past.job_id}: since when, and what is to blame, is not known: {error}")
                if isinstance(error, InfraError):
                    self._benches.give_up(now, reason_line(str(error)))
        return asked

    def good(self, seen: Seen) -> int | None:
        """Return the oldest run of the level with another program whose bundle is there; None where none is."""
        *before, new = seen.points
        if before[seen.first].bundle == new.bundle:
            return None
        for index in range(seen.first, len(before)):
            bundle = before[index].bundle
            if bundle and bundle != new.bundle and self._factory.has_bundle(bundle):
                return index
        return None

    def _inferences(self, seen: Seen) -> int:
        """Return how many inferences a side has in a pair: more of short ones, which a moment can disturb."""
        latencies = [one.values[-1] for one in seen.past.series if one.series.metric == "latency"]
        short = math.ceil(_TURN_NS / latencies[0]) if latencies and latencies[0] > 0 else 0
        return max(self._request.inferences, min(short, _MOST_INFERENCES))

    def _attribute(self, seen: Seen, bench: InterleavedBench, asked: Asked) -> None:
        """Name the first bad run, and what is to blame."""
        series, change = seen.series.series, asked.confirmation.change
        bracket = Bracket(asked.good, asked.bad)
        runs: list[StoredResult | None] = [None] * len(seen.points)
        for index in range(asked.good, asked.bad + 1):
            if index in (asked.good, asked.bad) or self._factory.has_bundle(seen.points[index].bundle):
                runs[index] = self._results.of(seen.past.job_id, seen.points[index].run_id)
        values = levelled(series.scale, seen.values, seen.steps)
        bracket = first_bad(bench, series, runs, values, bracket, change, self._request.pairs, self._inferences(seen))
        asked.good, asked.bad = bracket.good, bracket.bad
        good, bad = runs[bracket.good], runs[bracket.bad]
        if good is None or bad is None:
            return
        swaps = plan_swaps(bench, good, bad)
        told = differences(good.run.fingerprint, bad.run.fingerprint)
        facts = ", ".join(f"{name} {was or 'none'} -> {now or 'none'}" for name, (was, now) in told.items())
        asked.guilt = f"the program{f' ({facts})' if facts else ''}"
        if swaps.alone.keys() - {Factor.PROGRAM}:
            attribution = swap_factors(
                bench, series, good, bad, change > 0, self._request.pairs, self._inferences(seen), swaps=swaps
            )
            asked.guilt = attribution.explanation.reason


def unknown(reason: str) -> Confirmation:
    """Return the answer where nothing could be measured."""
    return Confirmation(Answer.UNKNOWN, reason, 0, math.nan, math.nan, math.nan, 1.0)


def _refuted(reason: str) -> Confirmation:
    return Confirmation(Answer.REFUTED, reason, 0, 0.0, 0.0, 0.0, 1.0)
