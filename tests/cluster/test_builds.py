"""Build hosts with real builders and a real PostgreSQL, and the ids of their toolchains."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import msgspec
import pytest
from build_farm import BuildFarm, RunningHost, build_farm, made_job
from log_lines import LogLines
from made_environments import make_environment
from shared_rows import execute, shards_of, submit
from stores import drop_database
from waiting import all_the_time, until

from farm.base.backends.registry import BACKENDS
from farm.base.config.settings import load_config
from farm.base.errors import NoDeviceError
from farm.base.files import weakness
from farm.builds.bundles.cache import BundleCache
from farm.dispatch.cluster.agent.builds import HostToolchains, RefusedBuildError, job_here, require_inside
from farm.dispatch.cluster.files import upload_sources
from farm.dispatch.cluster.terms import offered, require_offered, toolchain_id
from farm.policy.situation import Priority
from farm.store.cluster.records import Agent, AgentFacts, NewBuild, NewShard, PlannedJob
from farm.store.objects.archive import fetch_bundle
from farm.suites.generate import Generate
from farm.suites.suite import Job

# Build hosts with real builders and a real PostgreSQL: bundles made, refused, failed and stopped.


@pytest.fixture(scope="module")
def farm(
    farm_cache: Path, tmp_path_factory: pytest.TempPathFactory, new_store: Callable[[str], str]
) -> Iterator[BuildFarm]:
    address = new_store("builds")
    with build_farm(address, tmp_path_factory.mktemp("farm"), farm_cache) as made:
        yield made
    drop_database(address)


@pytest.fixture
def idle_farm(farm_cache: Path, tmp_path: Path, address: str) -> Iterator[BuildFarm]:
    """Farm without a build host: nothing is taken while an order is read."""
    with build_farm(address, tmp_path, farm_cache) as made:
        yield made


@pytest.fixture(scope="module")
def host(farm: BuildFarm) -> Iterator[RunningHost]:
    """A build host with one builder, for all tests that do nothing to it: torch is loaded once."""
    with pytest.MonkeyPatch.context() as patch, farm.host("build-1") as running:
        patch.setenv("PGPASSWORD", "of the agent")
        yield running


def test_a_bundle_is_made_once_and_found_by_everybody(farm: BuildFarm, host: RunningHost, tmp_path: Path) -> None:
    job = made_job()
    first, second = farm.submit([job]), farm.submit([job], user="bob")
    assert first.keys == second.keys
    [key] = first.keys
    host.host.wake()
    build = farm.await_builds([key])[key]
    assert build.reply is not None
    assert (build.state, build.reply.seconds > 0) == ("built", True)
    bundle = fetch_bundle(farm.objects, BundleCache(tmp_path / "device-host"), key, build.archive)
    bundle.verify()
    assert bundle.manifest.job_id == job.id
    for run in (first, second):
        [recorded] = farm.store.runs.view(run.run_id).jobs
        assert recorded.program == bundle.manifest.program != ""
        [shard] = shards_of(farm.store, run.run_id)
        assert shard.lacking == 0
    # Without its row, the bundle in the cache of the host is sent and not compiled.
    execute(farm.store, "DELETE FROM build WHERE key = %s", key)
    farm.submit([job])
    host.host.wake()
    build = farm.await_builds([key])[key]
    assert build.reply is not None
    assert (build.state, build.reply.seconds) == ("built", 0.0)


def test_a_user_s_suite_is_compiled_and_fails_its_own_job(farm: BuildFarm, host: RunningHost) -> None:
    suite = farm.suite("refusing")
    bad = made_job(".ops:Refuses", folder=suite)
    run = farm.submit([bad, made_job("torch.nn:ReLU", folder=suite)])
    host.host.wake()
    builds = farm.await_builds(run.keys)
    failed, built = (builds[key] for key in run.keys)
    assert (failed.state, built.state) == ("failed", "built")
    assert failed.reply is not None
    assert not failed.reply.infra
    assert "ValueError" in failed.reply.reason
    assert "about to refuse" in failed.log
    assert "of the agent" not in failed.log, "what developers wrote does not get what lets the agent into the store"
    [unpacked] = (host.config.cache_dir / "suites").rglob("refusing/ops.py")
    assert unpacked.read_text() == (suite / "ops.py").read_text()
    assert unpacked.stat().st_uid == os.geteuid()
    assert weakness(unpacked) == "", "nobody else can change what is executed"


def test_a_key_that_this_host_does_not_come_to_is_refused(farm: BuildFarm, host: RunningHost) -> None:
    # Other code under the same key: the case of a client with a package that this host lacks.
    job, key = made_job(".ops:Slow", ("mark", 0.0), farm.suite("edited")), "f" * 64
    run = farm.submit([job])
    source, versions = upload_sources(farm.objects, [job])[job.id], dict(farm.tools.versions)
    task = NewBuild(key, toolchain_id(versions, "xnnpack"), job, versions, source)
    submit(farm.store, [NewShard("SM8650", (PlannedJob(job, key),), 1.0, 0)], builds=[task])
    host.host.wake()
    build = farm.await_builds([key])[key]
    assert build.reply is not None
    assert (build.state, build.reply.infra) == ("failed", True)
    for words in ("build-1: ", "has another key here", "--build-on here"):
        assert words in build.reply.reason
    assert BundleCache(host.config.cache_dir).lookup(key) is None
    farm.await_builds(run.keys)


@pytest.mark.whole
def test_what_nobody_wants_any_more_is_stopped(farm: BuildFarm, host: RunningHost, tmp_path: Path) -> None:
    mark = tmp_path / "began"
    job = made_job(".ops:Slow", (str(mark), 60.0), folder=farm.suite())
    run = farm.submit([job], user="bob")
    host.host.wake()
    until(mark.exists)
    assert host.host.making == tuple(run.keys)
    farm.store.cluster.cancel(run.run_id, "bob")
    host.host.send_heartbeat()
    until(lambda: not host.host.making, timeout_s=20)
    assert all_the_time(lambda: host.host.making == (), 0.5), "it is not claimed again"
    assert all(build.state in ("waiting", "failed") for build in farm.store.cluster.build_of(run.keys).values())
    # The host goes on with builds of other runs.
    other = farm.submit([made_job()])
    host.host.wake()
    farm.await_builds(other.keys)


def test_a_person_goes_before_a_nightly_run_and_users_take_turns(idle_farm: BuildFarm) -> None:
    farm = idle_farm
    night = farm.submit([made_job() for _ in range(3)], user="night", priority=Priority.NIGHTLY)
    ada = farm.submit([made_job() for _ in range(4)])
    bob = farm.submit([made_job() for _ in range(2)], user="bob")
    shared = farm.submit([night.jobs[2]], user="eve")
    order = _order_of_builds(farm, [*night.keys, *ada.keys, *bob.keys])
    people = [ada.keys[0], bob.keys[0], *shared.keys, ada.keys[1], bob.keys[1], *ada.keys[2:]]
    assert order == [*people, *night.keys[:2]]
    for run, user in ((night, "night"), (ada, "ada"), (bob, "bob"), (shared, "eve")):
        farm.store.cluster.cancel(run.run_id, user)
        farm.store.cluster.end_if_over(run.run_id)
    assert _order_of_builds(farm, order) == []


def test_a_case_that_leads_out_of_its_suite_is_read_by_nobody(tmp_path: Path) -> None:
    suite, outside = tmp_path / "suites" / "mine", tmp_path / "weights"
    (suite / "hf").mkdir(parents=True)
    outside.mkdir()
    (outside / "model.safetensors").touch()
    case = made_job(folder=suite).case
    text = msgspec.structs.replace(case, generate=Generate(hugging_face="hf"))
    for good in (case, text):
        require_inside(good)
    (suite / "hf" / "model.safetensors").symlink_to(outside / "model.safetensors")
    for bad in (
        text,
        msgspec.structs.replace(case, generate=Generate(hugging_face=str(outside))),
        msgspec.structs.replace(case, pte="/etc/passwd"),
        msgspec.structs.replace(case, checkpoint="../../../../etc/passwd"),
        msgspec.structs.replace(case, module="..//etc.passwd:X"),
        msgspec.structs.replace(case, pte="missing.pte"),
    ):
        with pytest.raises(RefusedBuildError):
            require_inside(bad)


def test_a_suite_that_farm_ships_is_that_of_the_host(tmp_path: Path) -> None:
    def here(name: str) -> Job:
        task = NewBuild("0" * 64, "t", made_job(folder=tmp_path / name), {})
        return job_here(task, lambda _, job: job)

    assert here("quantized_ops").case.folder.endswith("test_suites/quantized_ops")
    with pytest.raises(RefusedBuildError, match="no suite no_such_suite"):
        here("no_such_suite")


def _order_of_builds(farm: BuildFarm, keys: list[str]) -> list[str]:
    """Return keys in the order in which they are taken."""
    asked = """
        SELECT substr(queueing_lock, 7) FROM procrastinate_jobs WHERE queueing_lock = ANY(%s)
        ORDER BY priority DESC, id
    """
    return [row[0] for row in execute(farm.store, asked, [f"build:{key}" for key in keys])]


# Ids of toolchains: build hosts with the same toolchain by content, at any path, make the bundles of a run.


VERSIONS = {
    "executorch": "1.5.1", "torch": "2.13.0", "torchao": "0.18.0", "qnn": "2.51", "host_cpu": "arm",
    "executorch_content": "e" * 64, "torch_content": "f" * 64, "qnn_content": "a" * 64,
}  # fmt: skip


def build_host(name: str, versions: Mapping[str, str], *, alive: bool = True) -> Agent:
    answer = offered("default", versions)
    facts = AgentFacts(
        host=name, pid=1, version="1.2", protocol=1, toolchains=tuple({one.id for one in answer}), offered=answer
    )
    return Agent(name, "farm", 0, 0, alive, facts)


@pytest.mark.parametrize("backend", sorted(BACKENDS))
def test_what_decides_about_a_bundle_decides_about_the_id(backend: str) -> None:
    first = toolchain_id(VERSIONS, backend)
    assert toolchain_id(dict(reversed(VERSIONS.items())), backend) == first
    for name in ("executorch", "torch_content", "executorch_content"):
        assert toolchain_id(VERSIONS | {name: "another"}, backend) != first
    assert (toolchain_id(VERSIONS | {"qnn_content": "b" * 64}, backend) == first) == (backend == "xnnpack")
    if backend == "lpai":
        assert toolchain_id(VERSIONS | {"host_cpu": "x86"}, backend) == first


def test_a_run_has_the_living_hosts_of_its_toolchain_or_hears_what_is_different_there() -> None:
    other = build_host("other", VERSIONS | {"executorch": "1.5.0", "executorch_content": "d" * 64})
    dead = build_host("dead", VERSIONS, alive=False)
    agents = [build_host("build-2", VERSIONS), build_host("build-1", VERSIONS), dead, other]
    assert require_offered(agents, VERSIONS, "htp") == ["build-1", "build-2"]
    with pytest.raises(NoDeviceError, match=r"other \(default: executorch: 1\.5\.0 -> 1\.5\.1\).*--build-on here"):
        require_offered([other], VERSIONS, "htp")
    with pytest.raises(NoDeviceError, match="no build host lives"):
        require_offered([dead], VERSIONS, "htp")


def test_another_farm_on_a_build_host_is_named_as_such() -> None:
    host = build_host("build-1", VERSIONS)
    answer = [
        msgspec.structs.replace(one, id="0" * 64, facts=one.facts | {"recipe": "0" * 16}) for one in host.facts.offered
    ]
    facts = msgspec.structs.replace(host.facts, toolchains=("0" * 64,), offered=tuple(answer))
    with pytest.raises(NoDeviceError, match=r"farm's recipe is another: farm 1\.2"):
        require_offered([msgspec.structs.replace(host, facts=facts)], VERSIONS, "xnnpack")


def test_a_host_offers_what_is_there_now_and_says_once_what_cannot_be(tmp_path: Path) -> None:
    broken = make_environment(tmp_path / "broken")
    file = tmp_path / "farm.toml"
    file.write_text(f'[toolchain.broken]\npython = "{broken}"\n')
    notes = LogLines()
    toolchains = HostToolchains(load_config(file))
    assert toolchains.offered == ()
    toolchains.look()
    toolchains.look(at_once=True)
    assert {one.name for one in toolchains.offered} == {"default"}
    assert [note for note in notes if "broken" in note] == [
        f"toolchain broken is not offered: toolchain broken: {broken} has no torch: {broken} -m pip install torch"
    ]
    assert toolchains.find(toolchains.ids[0]) is not None
    assert toolchains.find("0" * 64) is None
