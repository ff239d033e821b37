"""Nightly runs of jobs with known true times, in a real store, and a stub of the device that measures pairs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import made
import msgspec
import numpy as np

from farm.base.config.settings import load_config
from farm.numbers.regressions.confirm_run import RunFindings, confirm_run
from farm.numbers.regressions.remeasure import BenchPool
from farm.numbers.regressions.stored_pairs import PairsRequest
from farm.replay.stored_result import StoredResult
from farm.results.analysis.confirmation import Pair
from farm.results.attempt import Attempt, Direction, Measurement, Stage, Verdict
from farm.results.measurements import tail_measurements
from farm.store.records import RunRecord
from farm.store.rows import now_ms
from farm.store.store import Store
from farm.suites.figures import LATENCY_TAIL

DAY = 86_400_000
PHONE = made.device("phone")
FACTS = {"executorch": "1.5.1", "qnn": "2.51", "device_kind": "hardware"}
BETWEEN_NIGHTS, WITHIN_RUN, DRIFT = 0.02, 0.03, 0.05


class BundleStub(msgspec.Struct, frozen=True):
    """Bundle whose program takes `level` nanoseconds."""

    key: str
    level: float


class SideStub(msgspec.Struct, frozen=True):
    """Stub of `farm.numbers.regressions.interleaved_ab.Side`."""

    job: str
    bundle: BundleStub
    runtime: str | None = None
    """Name of its runner; None for the newest one."""
    is_whole: bool = True
    heap: bool = False

    @property
    def key(self) -> tuple[str, ...]:
        return self.job, self.bundle.key, self.place

    @property
    def place(self) -> str:
        return self.runtime or ""


class World:
    """Jobs with the true time of their bundles; each nightly run has its own bundles by default."""

    def __init__(self, store: Store, jobs: int, seed: int = 1) -> None:
        self.store, self.random = store, np.random.default_rng(seed)
        self.config = load_config()
        self.jobs = [made.job(f"case_{n}") for n in range(jobs)]
        self.bundles: dict[str, BundleStub] = {}
        self.gone: set[str] = set()
        """Keys of bundles that are not in the cache."""
        self.nights: list[str] = []
        self.pairs = 0
        self.before_pairs: Callable[[int], None] = lambda _: None
        """Function called with the number of the call; its exception becomes the device's error."""
        self.require_job: Callable[[StoredResult], None] = lambda _: None
        """Replaces `BenchPool.require_job`; by default every job exists."""
        self.tailed: set[str] = set()
        """Keys of bundles of which 12 % of the inferences take 80 % longer."""
        self.inferences = 9
        """Inferences of a job in a run."""
        self.calls = 0
        self.turns: list[object] = []
        self.device = PHONE
        self.runners: dict[str, float] = {"r1": 1.0}
        """Factor of all times by runner, the newest last."""
        self.kept = True
        """False if the cache has no old runner."""

    def night(
        self,
        levels: Mapping[int, float] | None = None,
        *,
        keys: Mapping[int, str] | None = None,
        noise: float = BETWEEN_NIGHTS,
        all_by: float = 1.0,
        sizes: Mapping[int, int] | None = None,
        sqnr: float | None = None,
        facts: Mapping[str, str] = FACTS,
        jobs: Sequence[int] | None = None,
        phone: str = "phone",
        build: str = "b",
        device_by: float = 1.0,
        odd: Mapping[int, float] | None = None,
    ) -> str:
        """Record a nightly run and return its id; `levels` multiplies the times of jobs by their numbers."""
        device = msgspec.structs.replace(self.device, serial=phone, build=build)
        all_by *= device_by * self.runners[[*self.runners][-1]]
        started_ms = now_ms() - (100 - len(self.nights)) * DAY
        run_id = self.store.begin_run(RunRecord("farm run", "ada", "bench", facts, started_ms, "nightly"))
        done = [job for n, job in enumerate(self.jobs) if jobs is None or n in jobs]
        self.store.plan_jobs(run_id, done)
        self.store.record_device(run_id, device, {"runner": [*self.runners][-1]})
        for n, job in enumerate(self.jobs):
            if job not in done:
                continue
            key = (keys or {}).get(n, f"{n}-{run_id}")
            bundle = self.bundles.setdefault(key, BundleStub(key, 1e6 * (levels or {}).get(n, 1.0)))
            luck = all_by * (1.0 + noise * self.random.standard_normal())
            time_ns = bundle.level * luck * (odd or {}).get(n, 1.0) * self.luck_of(bundle)
            samples = self.draw(time_ns, self.inferences, tailed=key in self.tailed)
            measured = [Measurement("latency", "ns", Direction.LOWER, tuple(samples)), *tail_measurements(samples)]
            if sizes and n in sizes:
                measured.append(Measurement("pte_size", "bytes", Direction.LOWER, (float(sizes[n]),), exact=True))
            if sqnr is not None:
                measured.append(Measurement("sqnr_fp32[0]", "dB", Direction.HIGHER, (sqnr,)))
            attempt = Attempt(
                job.id, Verdict.PASSED, Stage.DONE, "", phone, started_ms, 0.2, bundle_key=key,
                measurements=tuple(measured),
            )  # fmt: skip
            self.store.record_attempt(run_id, attempt)
        self.store.finish_run(run_id, 0)
        self.nights.append(run_id)
        return run_id

    def confirm(self, run_id: str, **more: Any) -> RunFindings:
        request = PairsRequest()
        return confirm_run(self.config, self.store, run_id, request, benches=_StubPool(self, request), **more)

    def side(self, past: StoredResult) -> SideStub:
        [*_, newest] = self.runners
        runner = past.runtime["runner"]
        is_whole = self.kept or runner == newest
        own = runner if is_whole and runner != newest else None
        return SideStub(past.view.id, self.bundles[past.attempt.bundle_key], own, is_whole)

    def mixed(self, base: SideStub, runner: SideStub) -> str:
        del base
        return runner.place or [*self.runners][-1]

    def measure(
        self, good: SideStub, new: SideStub, pairs: int, inferences: int, *, numerics: bool, **_: object
    ) -> dict[str, list[Pair]]:
        del numerics
        self.calls += 1
        self.before_pairs(self.calls)
        self.pairs += pairs
        found = [self._pair(good, new, inferences) for _ in range(pairs)]
        tails = [tuple([one.samples[0] for one in tail_measurements(side)] for side in pair) for pair in found]
        return {"latency": found} | ({LATENCY_TAIL: [(was, now) for was, now in tails]} if all(tails[0]) else {})

    def problems(self, good: SideStub, new: SideStub, *, since: int) -> tuple[str, ...]:
        del good, new, since
        return ()

    def _pair(self, good: SideStub, new: SideStub, inferences: int) -> Pair:
        tonight = 1.0 + DRIFT * self.random.standard_normal()
        runners = [self.runners[side.runtime or [*self.runners][-1]] for side in (good, new)]
        was, now = (
            self.draw(level * tonight * self.luck_of(side.bundle), inferences, tailed=side.bundle.key in self.tailed)
            for side, level in (
                (side, side.bundle.level * runner) for side, runner in zip((good, new), runners, strict=True)
            )
        )
        return was, now

    def draw(self, time_ns: float, count: int, *, tailed: bool) -> list[float]:
        """Return the times of some inferences in a row."""
        times = time_ns * (1.0 + WITHIN_RUN * self.random.standard_normal(count))
        if tailed:
            times = np.where(self.random.random(count) < 0.12, 1.8 * times, times)
        return [float(one) for one in times]

    def luck_of(self, bundle: BundleStub) -> float:
        """Return the factor that a bundle has in this night alone."""
        del bundle
        return 1.0


class _StubPool(BenchPool):
    """Pool that opens a `World` instead of a device: its jobs are in no suite, its bundles in no cache."""

    def __init__(self, world: World, request: PairsRequest) -> None:
        super().__init__(world.config, world.store, request)
        self._world = world

    def has_bundle(self, key: str) -> bool:
        return key in self._world.bundles and key not in self._world.gone

    def require_job(self, past: StoredResult) -> None:
        self._world.require_job(past)

    @contextmanager
    def open(self, *_: object) -> Iterator[Any]:
        yield self._world
