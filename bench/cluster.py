"""Shared farm of 3 hosts with 8 devices each: utilization of the devices, waiting times of users, cost of faults.

    python bench/cluster.py [--jobs 3000] [--rounds 3] [--only PART ...] [--quick]

Agents are separate processes with a real PostgreSQL, real messages, leases, bundles and result logs. **The devices are
stubs** whose slots sleep 200 ms a job (tests/stub_agent.py). Executed jobs and their times are read from files that are
independent of the farm (tests/stub_farm.py). The last line is JSON:

`efficiency`              time of an ideal schedule over the time from submission to the last job's end
`efficiency_with_faults`  the same with an agent killed for good and a restart of the database midway: after that moment
                          the ideal schedule has the devices of the other hosts alone
`second_user_start_s`     from B's submission of a job to its start, behind A's 2,000 of the same priority; the worst
`person_behind_nightly_s` the same for a person's job on a farm filled by a nightly run, with the rest of the running
                          job; the worst
`cancel_s`                from the call that cancels to the end of the last job on any device; the worst
`builds_s`                1,000 builds on four build hosts with stub compilers (50 ms), one host killed midway
`built_twice`             bundles among these compiled twice, without the bundles in work on the killed host
`lost`, `duplicated`      jobs without an accepted verdict; jobs with several, two on a device at once, or run twice
                          without a fault
`idle_queries_per_s`      queries of all idle agents together, as counted by PostgreSQL, BEGIN and COMMIT included
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from collections.abc import Callable, Sequence

from build_farm import made_job
from chaos_store import Cluster, postgres_cluster
from stub_build_host import TOOLCHAIN, VERSIONS
from stub_farm import Ran, now_s, overlaps
from stub_hosts import StubHosts, accepted, stub_hosts

from farm.builds.bundles.key import bundle_key
from farm.policy.situation import Priority
from farm.store.cluster.records import NewBuild, NewOrder, NewShard, PlannedJob
from farm.store.records import PROTOCOL, RunRecord
from farm.store.store import Store, open_store

HOSTS, DEVICES = 3, 8
LATENCY_MS = 200
SHARD = 25
BEHIND = 2000
PARTS = ("idle", "efficiency", "second_user", "person_behind_nightly", "cancel", "builds", "faults")
BUILD_HOST = Path(__file__).parents[1] / "tests/stub_build_host.py"
BUILD_HOSTS, BUILDERS = 4, 2
SETTINGS = ("shared_preload_libraries=pg_stat_statements", "max_connections=200")
_SETTLES_S = 2.0
_WAITS_S = 300.0


@dataclass
class Bench:
    """Shared farm under measurement, and the measured values."""

    cluster: Cluster
    hosts: StubHosts
    store: Store
    jobs: int
    rounds: int
    idle_s: float
    behind: int
    bundles: int
    found: dict[str, float] = field(default_factory=dict)
    lost: int = 0
    duplicated: int = 0

    def efficiency(self) -> None:
        """Run all jobs of one user on all devices."""
        before = self._statements()
        began_s, run_id = self._submit("ada", self.jobs)
        self._await_end(run_id)
        seen = self._statements() - before
        ran = self.hosts.ran(run_id)
        self.found["efficiency"] = self._share(ran, began_s)
        say(f"    {seen.total() / self.jobs:.2f} statements a job, submitting and waiting for the end included")
        self._judge(run_id, ran, once=True)

    def second_user(self) -> None:
        """Submit a job of bob behind ada's jobs."""
        self.found["second_user_start_s"] = max(self._come_behind("bob", Priority.PERSON) for _ in range(self.rounds))

    def person_behind_nightly(self) -> None:
        """Submit a person's job to a farm that a nightly run fills."""
        waits = [self._come_behind("eve", Priority.NIGHTLY) for _ in range(self.rounds)]
        self.found["person_behind_nightly_s"] = max(waits)

    def cancel(self) -> None:
        """Cancel a run that fills the farm."""
        self.found["cancel_s"] = max(self._cancel_once() for _ in range(self.rounds))

    def idle(self) -> None:
        """Count the statements of agents without work."""
        self._until(lambda: not self.store.cluster.queue().orders, "runs that are finished")
        time.sleep(_SETTLES_S)
        before, began_s = self._statements(), now_s()
        time.sleep(self.idle_s)
        seen = self._statements() - before
        seconds = now_s() - began_s
        for text, count in seen.most_common(12):
            say(f"    {count / seconds:5.2f}/s  {' '.join(text.split())[:100]}")
        self.found["idle_queries_per_s"] = seen.total() / seconds

    def faults(self) -> None:
        """Kill one agent for good and restart the database while half of the jobs are done."""
        began_s, run_id = self._submit("ada", self.jobs)
        self._await_ran(run_id, self.jobs // 2)
        self.hosts.die("host-2")
        died_s = now_s() - began_s
        say("    one host is dead; the database stops")
        self.cluster.stop()
        self.cluster.start()
        self._await_end(run_id)
        ran = self.hosts.ran(run_id)
        self.found["efficiency_with_faults"] = self._share(ran, began_s, died_s)
        self._judge(run_id, ran, once=False)

    def builds(self) -> None:
        """Let build hosts make bundles, and kill a host after a quarter of them."""
        evidence = self.hosts.folder / "built"
        evidence.touch()
        names = [f"build-{number}" for number in range(BUILD_HOSTS)]
        for name in names:
            words = [sys.executable, str(BUILD_HOST), name, str(evidence), str(BUILDERS), str(self.hosts.ttl_s)]
            folder = self.hosts.home(name)
            log = folder / "agent.log"
            self.hosts.processes[name] = self.hosts.starting(words, env=self.hosts.env_of(name), cwd=folder, log=log)
        for name in names:
            self._until(lambda name=name: "ready" in self.hosts.log(name), name)
        began_s, run_id = now_s(), submit_builds(self.store, self.bundles)
        self._until(lambda: len(made(evidence)) >= self.bundles // 4, "a quarter of the bundles")
        self.hosts.die(names[0])
        self._until(lambda: not self._is_lacking(run_id), "all bundles")
        self.found["builds_s"] = now_s() - began_s
        twice = [key for key, hosts in made(evidence).items() if len(hosts) > 1]
        hurt = sum(names[0] in made(evidence)[key] for key in twice)
        say(f"    {len(made(evidence))} bundles; {len(twice)} compiled again, {hurt} of them of the killed host")
        self.found["built_twice"] = len(twice) - min(hurt, BUILDERS)
        self.lost += self.bundles - len(made(evidence))
        self.store.cluster.cancel(run_id, "ada")
        self._await_end(run_id)
        for name in names[1:]:
            self.hosts.die(name)

    def _is_lacking(self, run_id: str) -> bool:
        order = self.store.cluster.order(run_id)
        return order is None or order.lacking > 0

    def _submit(self, user: str, jobs: int, priority: Priority = Priority.PERSON) -> tuple[float, str]:
        run_id = self.hosts.submit(self.store, user, jobs, latency_ms=LATENCY_MS, priority=priority, shard=SHARD)
        return now_s(), run_id

    def _share(self, ran: Sequence[Ran], began_s: float, died_s: float | None = None) -> float:
        """Return the ideal time over the measured time; after `died_s` seconds the devices of one host are lost."""
        work_s = self.jobs * LATENCY_MS / 1000
        ideal_s = work_s / (HOSTS * DEVICES)
        if died_s is not None:
            ideal_s = died_s + (work_s - died_s * HOSTS * DEVICES) / ((HOSTS - 1) * DEVICES)
        took_s = max(one.ended_s or 0.0 for one in ran) - began_s
        first_s = min(one.began_s for one in ran) - began_s
        say(f"    {took_s:.2f} s instead of {ideal_s:.2f}; the first job began after {first_s:.3f} s")
        return ideal_s / took_s

    def _come_behind(self, user: str, priority: Priority) -> float:
        _, filling = self._submit("ada", self.behind, priority)
        self._await_ran(filling, HOSTS * DEVICES * 3)
        began_s, run_id = self._submit(user, 1)
        self._await_ran(run_id, 1)
        [ran] = self.hosts.ran(run_id)
        self._await_end(run_id)
        self._judge(run_id, [ran], once=True)
        self._cancel(filling)
        say(f"    {user}'s job began after {ran.began_s - began_s:.3f} s")
        return ran.began_s - began_s

    def _cancel_once(self) -> float:
        _, run_id = self._submit("ada", self.behind)
        self._await_ran(run_id, HOSTS * DEVICES * 3)
        return self._cancel(run_id)

    def _cancel(self, run_id: str) -> float:
        began_s = now_s()
        self.store.cluster.cancel(run_id, "ada", may_others=False)
        self._await_end(run_id)
        time.sleep(LATENCY_MS / 1000 * 2)
        ended_s = max(one.ended_s or one.began_s for one in self.hosts.ran(run_id)) - began_s
        say(f"    cancelled: the last job ended {ended_s:.3f} s later")
        return ended_s

    def _await_end(self, run_id: str) -> None:
        def is_over() -> bool:
            order = self.store.cluster.order(run_id)
            return order is not None and order.state != "open"

        self._until(is_over, "the end of the run")

    def _await_ran(self, run_id: str, count: int) -> None:
        self._until(lambda: len(self.hosts.ran(run_id)) >= count, f"{count} jobs that begin")

    def _until(self, condition: Callable[[], bool], what: str) -> None:
        self.hosts.until(condition, what, _WAITS_S)

    def _judge(self, run_id: str, ran: Sequence[Ran], *, once: bool) -> None:
        verdicts = accepted(self.store, run_id)
        lost = [job for job, found in verdicts.items() if not found]
        several = [job for job, found in verdicts.items() if len(found) > 1]
        both = overlaps(ran)
        again = [job for job, count in Counter(one.job for one in ran).items() if count > 1]
        self.lost += len(lost)
        self.duplicated += len(several) + len(both) + (len(again) if once else 0)
        for what, ones in (("lost", lost), ("several verdicts", several), ("two at once", both)):
            if ones:
                say(f"    {what}: {len(ones)}: {ones[:3]}")
        if again:
            say(f"    {len(again)} jobs were executed again")

    def _statements(self) -> Counter[str]:
        """Return the number of executions of each statement by the server, without this process's own statements."""
        import psycopg

        address = self.hosts.url
        with psycopg.connect(address, autocommit=True) as connection:
            rows = connection.execute(
                "SELECT query, sum(calls) FROM pg_stat_statements WHERE query NOT LIKE '%%pg_stat_statements%%'"
                " GROUP BY query"
            ).fetchall()
        return Counter({str(query): int(calls) for query, calls in rows})


def submit_builds(store: Store, count: int) -> str:
    """Submit a run of `count` jobs without bundles, for an SoC without a device; return the run's id."""
    jobs = [made_job() for _ in range(count)]
    keys = [bundle_key(job, VERSIONS) for job in jobs]
    run_id = store.begin_run(RunRecord("bench", "ada", "bench", {}))
    order = NewOrder(
        run_id=run_id, user="ada", priority=Priority.PERSON, purpose="bench", terms=b"{}", protocol=PROTOCOL
    )
    wanted = tuple(PlannedJob(job, key) for job, key in zip(jobs, keys, strict=True))
    builds = [
        NewBuild(key, TOOLCHAIN, job, VERSIONS, position=number)
        for number, (job, key) in enumerate(zip(jobs, keys, strict=True))
    ]
    store.cluster.submit(order, [NewShard("SM8750", wanted, 1.0, 0)], builds, jobs=jobs)
    return run_id


def made(evidence: Path) -> dict[str, list[str]]:
    """Return by key the hosts whose compiler made a bundle."""
    found: dict[str, list[str]] = {}
    for line in evidence.read_text().splitlines():
        key, host = line.split()
        found.setdefault(key, []).append(host)
    return found


def say(text: str) -> None:
    print(text, flush=True)


def run(options: argparse.Namespace, folder: Path, cluster: Cluster) -> dict[str, float]:
    """Start the farm, measure the parts, and return the last line."""
    with stub_hosts(cluster, folder, ttl_s=options.ttl_s) as hosts, open_store(hosts.url) as store:
        _begin_statistics(hosts.url)
        for number in range(HOSTS):
            hosts.start(f"host-{number}", DEVICES)
        hosts.await_devices(store, HOSTS * DEVICES)
        say(f"{HOSTS} agents with {DEVICES} devices each")
        time.sleep(_SETTLES_S)
        bench = Bench(
            cluster, hosts, store, options.jobs, options.rounds, options.idle_s, options.behind, options.bundles
        )
        for part in PARTS:
            if part in options.only:
                say(part)
                getattr(bench, part)()
        for name in list(hosts.processes):
            began_s = now_s()
            code = hosts.stop(name)
            say(f"{name} ended with {code} within {now_s() - began_s:.1f} s")
    found = {name: round(value, 3) for name, value in bench.found.items()}
    return {**found, "lost": bench.lost, "duplicated": bench.duplicated}


def _begin_statistics(url: str) -> None:
    import psycopg

    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("CREATE EXTENSION IF NOT EXISTS pg_stat_statements")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=3000)
    parser.add_argument("--rounds", type=int, default=3, help="of what is told by its worst")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--quick", action="store_true", help="120 jobs, one round, 1 s idle, 100 bundles")
    options = parser.parse_args()
    options.ttl_s, options.idle_s, options.behind, options.bundles = 10.0, 20.0, BEHIND, 1000
    if options.quick:
        options.jobs, options.rounds, options.ttl_s, options.idle_s, options.behind = 120, 1, 3.0, 1.0, 150
        options.bundles = 100
    with postgres_cluster(*SETTINGS) as cluster:
        if isinstance(cluster, str):
            sys.stderr.write(f"bench/cluster.py needs a PostgreSQL server: {cluster}\n")
            return 2
        say("THE DEVICES ARE STUBS that sleep; database, messages, agents, leases and result logs are the real thing")
        with tempfile.TemporaryDirectory(prefix="farm-cluster-", dir="/tmp") as name:
            print(json.dumps(run(options, Path(name), cluster)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
