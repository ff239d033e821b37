"""Builds after failures: killed hosts as processes, killed builders, a database that is away."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import psycopg
import pytest
from build_farm import BuildFarm, Submitted, build_farm, made_job
from chaos_store import Cluster
from farm_home import FarmHome, wait_for_no_process
from forked_command import Program, start
from stores import create_store, drop_database
from waiting import until

from farm.base.config.settings import load_config
from farm.builds.bundles.cache import leftovers
from farm.builds.compile.protocol import BuildReply
from farm.dispatch.cluster.client.submit import build_here, new_builds
from farm.dispatch.cluster.delivery import MessageDelivery, recover
from farm.dispatch.cluster.files import upload_sources
from farm.store.cluster.records import PlannedJob
from farm.store.store import open_store

pytestmark = pytest.mark.whole


@pytest.fixture
def farm(server: Cluster, farm_cache: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[BuildFarm]:
    """A farm whose build hosts sign in with the role of build hosts."""
    address = create_store(str(server.folder), f"t{abs(hash(request.node.nodeid))}")
    with open_store(address) as store:
        store.messages.require()
        store.roles.apply()
    with psycopg.connect(f"host={server.folder} user=farm dbname=postgres", autocommit=True) as connection:
        if connection.execute("SELECT 1 FROM pg_roles WHERE rolname = 'maker'").fetchone() is None:
            connection.execute("CREATE ROLE maker LOGIN IN ROLE farm_builder")
    with build_farm(address, tmp_path, farm_cache, address.replace("//farm@", "//maker@")) as made:
        yield made
    drop_database(address)


@contextmanager
def repair(farm: BuildFarm) -> Iterator[None]:
    """Repair the farm inside the block, as the agent of a host with devices does."""
    ttl_s = load_config(farm.file).leases.ttl_s
    recovery = partial(recover, farm.store, ttl_s=ttl_s)
    delivery = MessageDelivery(farm.store, recover=recovery, ttl_s=ttl_s)
    delivery.start()
    try:
        yield
    finally:
        delivery.stop(2.0)


@contextmanager
def agent(farm: BuildFarm, name: str) -> Iterator[Program]:
    """Run `farm lab agent --build` of a host that has no devices, with a cache and a state of its own."""
    config = farm.config(name)
    env = {
        **os.environ, "FARM_CONFIG": str(farm.file), "FARM_CACHE_DIR": str(config.cache_dir),
        "FARM_STATE_DIR": str(config.state_dir), "FARM_STORE": farm.hosts_url,
    }  # fmt: skip
    words = [sys.executable, "-m", "farm.cli.main", "lab", "agent", "--build", "--no-devices", "--name", name]
    log = farm.file.parent / f"{name}.log"
    process = start(words, env=env, cwd=farm.file.parent, log=log)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def may_go_on(mark: Path) -> None:
    """Let the build that has left a mark come to its end."""
    mark.with_name(f"{mark.name}-go").touch()


def test_a_host_that_is_killed_while_it_builds_leaves_the_build_to_another(farm: BuildFarm, tmp_path: Path) -> None:
    mark = tmp_path / "began"
    with farm.file.open("a") as file:
        file.write("[leases]\nttl_s = 9\nheartbeat_s = 2\n")
    run = farm.submit([made_job(".ops:Slow", (str(mark), 300.0), folder=farm.suite())])
    with repair(farm), agent(farm, "build-1") as first:
        until(mark.exists, lambda: (tmp_path / "build-1.log").read_text(), 300)
        with agent(farm, "build-2"):
            mark.unlink()
            first.kill()
            first.wait()
            cache = farm.config("build-1").cache_dir
            assert wait_for_no_process(FarmHome(cache, cache, cache)) == {}
            may_go_on(mark)
            build = farm.await_builds(run.keys, timeout_s=180.0)[run.keys[0]]
            assert build.state == "built", build.reply and build.reply.reason
            assert mark.exists(), "it was made anew"
        # The restarted host removes the unfinished files of its killed process.
        with agent(farm, "build-1"):
            until(lambda: not leftovers(cache), timeout_s=60)
    for name in ("build-1", "build-2"):
        assert "permission denied" not in (tmp_path / f"{name}.log").read_text()


def test_a_host_whose_builders_are_killed_leaves_the_build_to_another(farm: BuildFarm, tmp_path: Path) -> None:
    def submit() -> Submitted:
        # A builder is tried twice, as the kernel may have wanted its memory.
        for number in range(2):
            (tmp_path / f"die-{number}").touch()
        return farm.submit([made_job(".ops:DiesOnce", (str(tmp_path),), folder=farm.suite())])

    with farm.host("build-1") as host:
        # The only host fails the build as the machine's; asked for again, it is tried again.
        run = submit()
        host.host.wake()
        build = farm.await_builds(run.keys)[run.keys[0]]
        assert build.reply is not None
        assert (build.state, build.reply.infra) == ("failed", True)
        assert build.reply.reason.startswith("build-1: ")
        again = farm.submit(run.jobs)
        host.host.wake()
        until(lambda: farm.store.cluster.build_of(again.keys)[again.keys[0]].state == "built", timeout_s=300)
        with farm.host("build-2") as other:
            host.notes.clear()
            run = submit()
            host.host.wake()
            until(lambda: host.notes, timeout_s=300)
            until(lambda: not host.host.making)
            assert "was killed (signal 9)" in host.notes[0]
            host.host.wake()
            other.host.wake()
            assert farm.await_builds(run.keys)[run.keys[0]].state == "built"


def test_a_drained_host_finishes_its_build_and_a_stopped_one_gives_it_back(farm: BuildFarm, tmp_path: Path) -> None:
    mark = tmp_path / "began"
    run = farm.submit([made_job(".ops:Slow", (str(mark), 300.0), folder=farm.suite()), made_job()])
    with farm.host("build-1") as host:
        host.host.wake()
        until(mark.exists, timeout_s=300)
        drain = threading.Thread(target=host.host.drain)
        drain.start()
        until(lambda: host.host._draining)
        assert drain.is_alive()
        may_go_on(mark)
        drain.join()
        states = [farm.store.cluster.build_of(run.keys)[key].state for key in run.keys]
        assert sorted(states) == ["built", "waiting"]
    mark = tmp_path / "began-again"
    run = farm.submit([made_job(".ops:Slow", (str(mark), 600.0), folder=farm.suite())])
    with farm.host("build-2") as host:
        host.host.wake()
        until(mark.exists, timeout_s=300)
        began_s = time.monotonic()
        host.host.stop()
        assert time.monotonic() - began_s < 20
        assert farm.store.cluster.build_of(run.keys)[run.keys[0]].state == "waiting"


def test_what_is_made_while_the_database_is_away_is_told_when_it_is_back(
    farm: BuildFarm, server: Cluster, tmp_path: Path
) -> None:
    mark = tmp_path / "began"
    run = farm.submit([made_job(".ops:Slow", (str(mark), 300.0), folder=farm.suite())])
    with farm.host("build-1") as host:
        host.host.wake()
        until(mark.exists, timeout_s=300)
        server.stop()
        try:
            may_go_on(mark)
            until(lambda: host.notes, timeout_s=300)
            host.host.wake()
        finally:
            server.start()
        build = farm.await_builds(run.keys, timeout_s=60.0)[run.keys[0]]
        assert build.state == "built"


def test_a_user_s_machine_builds_what_no_host_can(farm: BuildFarm) -> None:
    jobs = [made_job(".ops:Refuses", folder=farm.suite()), made_job(), made_job()]
    run = farm.submit(jobs)
    planned = [PlannedJob(job, key, cached=False) for job, key in zip(jobs, run.keys, strict=True)]
    builds = new_builds(planned, farm.tools, "xnnpack", upload_sources(farm.objects, jobs))
    # A build host has made the third bundle meanwhile.
    with farm.host("build-1") as host:
        other = farm.submit([jobs[2]])
        host.host.wake()
        farm.await_builds(other.keys)
        host.host.drain()
    done: list[BuildReply] = []
    laptop = farm.config("laptop")
    with build_here(laptop, run.run_id, builds, farm.tools, farm.objects, farm.store, done.append):
        made = farm.await_builds(run.keys)
    assert [made[key].state for key in run.keys] == ["failed", "built", "built"]
    assert {reply.key for reply in done} <= set(run.keys[:2])
    assert "about to refuse" in made[run.keys[0]].log
