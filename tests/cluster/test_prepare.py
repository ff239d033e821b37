"""Preparation of a shard's files on its host before a device begins; lost or unreachable files give verdict infra."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import made
import msgspec
import pytest
from shared_rows import (
    NO_STORE,
    execute,
    made_bundle,
    made_config,
    made_device,
    made_job,
    made_key,
    made_shard,
    made_terms,
    submit,
)
from shared_rows import key as row_key
from shared_rows import shards as row_shards

from farm.base.config.settings import Config
from farm.base.errors import ArtifactLostError, ArtifactsError, InfraError, NoDeviceError, UsageError
from farm.builds.bundles.cache import BundleCache
from farm.builds.compile.protocol import BuildReply
from farm.dispatch.cluster.files import Preparer, fetch_runtime, upload_runtime
from farm.dispatch.cluster.terms import RemoteRuntime
from farm.dispatch.request.pruning import Remains, require_removable
from farm.dispatch.request.request import read_plan
from farm.replay.stored_result import find_made_bundle
from farm.store.artifacts import ArtifactStore, open_artifacts
from farm.store.cluster.records import Build, NewBuild, PlannedJob
from farm.store.objects.archive import upload_bundle
from farm.store.objects.objects import GRACE_S, Objects, open_objects
from farm.store.objects.places import path_of
from farm.store.records import ArtifactRecord
from farm.store.store import Store
from farm.suites.suite import Job

RUN = "20261123-120000-abcdef"


class Farm:
    """Two hosts with nothing in common except a folder with a client's files."""

    def __init__(self, root: Path, store_url: str = NO_STORE) -> None:
        self.root, self._store_url = root, store_url
        (root / "place").mkdir()
        self.client = self.objects("client")
        self.asked: list[str] = []
        self.builds: dict[str, Build] = {}
        self.lost: list[str] = []

    def config(self, host: str) -> Config:
        return made_config(self.root, host, store=self._store_url)

    def objects(self, host: str) -> Objects:
        return open_objects(self.config(host), patience_s=0.0)

    def preparer(self, host: str = "attic") -> Preparer:
        def build_of(keys: Sequence[str]) -> dict[str, Build]:
            self.asked += keys
            return {key: self.builds[key] for key in keys if key in self.builds}

        def lose(key: str, archive: str, why: str) -> None:
            assert self.builds[key].archive == archive
            assert why
            self.lost.append(key)

        config = self.config(host)
        return Preparer(config, self.objects(host), build_of, config.state_dir / "agent" / "runs", lose)

    def built(self, job: Job) -> Build:
        bundle = made_bundle(BundleCache(self.root / "client/cache"), job, pte=job.id.encode())
        build = Build(made_key(job), "built", *upload_bundle(self.client, bundle))
        self.builds[build.key] = build
        return build

    def runtime(self, soc: str = "SM8650") -> RemoteRuntime:
        folder = self.root / "sdk"
        (folder / "real").mkdir(parents=True, exist_ok=True)
        files = {"farm_runner": folder / "farm_runner", "real/libQnn.so": folder / "real/libQnn.so"}
        for name, path in files.items():
            path.write_bytes(f"{name} of {soc}".encode())
        runtime = made.runtime(files, "farm_runner", versions={"qnn": "2.49"}, needs_root=True)
        return upload_runtime(self.client, runtime, soc=soc, device_kind="virtual", os="android")


@pytest.fixture
def farm(tmp_path: Path) -> Farm:
    return Farm(tmp_path)


def test_a_shard_finds_its_bundles_runtime_and_failed_builds_on_the_host(farm: Farm) -> None:
    good, bad, health_check = made_job("good"), made_job("bad"), made_job("health_check")
    health_check_build = farm.built(health_check)
    reply = BuildReply(made_key(bad), False, 1.0, "no such operator")
    failed = Build(made_key(bad), "failed", reply=reply, log="Traceback ...\n")
    terms = made_terms([farm.runtime("SM8750"), farm.runtime()], [PlannedJob(health_check, health_check_build.key)])
    device = made_device()
    plan, planned, _ = farm.preparer().prepare(made_shard([good, bad], terms, [farm.built(good), failed]), device)
    assert [(one.job, one.cached) for one in planned] == [(good, True), (bad, False)]
    assert plan.read_reply(made_key(bad)).reason == "no such operator"
    assert not (plan.folder / "builds" / f"{made_key(good)}.json").exists()
    assert (plan.folder / "builds" / f"{made_key(bad)}.log").read_text() == "Traceback ...\n"
    for job in (good, health_check):
        bundle = BundleCache(plan.cache_root).lookup(made_key(job))
        assert bundle is not None
        assert bundle.model.read_text() == job.id
    assert read_plan(plan.path) == plan
    assert (plan.devices, plan.leased, [one.job for one in plan.health_checks]) == ((device,), True, [health_check])
    runtime = plan.runtimes[device.serial]
    assert {name: path.read_text() for name, path in runtime.files.items()} == {
        "farm_runner": "farm_runner of SM8650",
        "real/libQnn.so": "real/libQnn.so of SM8650",
    }
    assert (runtime.needs_root, runtime.versions, runtime.digest) == (True, {"qnn": "2.49"}, "d" * 64)
    assert str(farm.root / "client") not in (plan.path.read_text())


def read_from(preparer: Preparer, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of the files that a host will read, each of which takes a moment."""
    read, place = list[str](), preparer._objects._place
    original = place.read

    def slow(name: str) -> Iterator[bytes]:
        read.append(name)
        time.sleep(0.05)
        return original(name)

    monkeypatch.setattr(place, "read", slow)
    return read


def test_a_device_of_a_run_has_one_folder(farm: Farm, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = [made_job(str(number)) for number in range(6)]
    builds, terms = [farm.built(job) for job in jobs], made_terms([farm.runtime()])
    preparer = farm.preparer()
    first = preparer.prepare(made_shard(jobs, terms, builds), made_device())
    read = read_from(preparer, monkeypatch)
    farm.asked.clear()
    second = preparer.prepare(made_shard(jobs[3:], terms, builds[3:]), made_device())
    other = preparer.prepare(made_shard(jobs, terms), made_device("phone-2"))
    assert (read, farm.asked) == ([], [])
    assert first.plan is second.plan
    assert other.plan.folder != first.plan.folder
    assert [one.job for one in second.planned] == jobs[3:]
    preparer.forget(RUN)
    assert not first.plan.folder.exists()
    again = farm.preparer()
    assert again.prepare(made_shard(jobs, terms, builds), made_device()).plan.folder.is_dir()


def test_many_devices_that_need_one_bundle_fetch_it_once(farm: Farm, monkeypatch: pytest.MonkeyPatch) -> None:
    job = made_job("one")
    held = made_shard([job], made_terms([farm.runtime()]), [farm.built(job)])
    preparer = farm.preparer()
    read = read_from(preparer, monkeypatch)
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(lambda number: preparer.prepare(held, made_device(f"phone-{number}")), range(6)))
    assert len(read) == len(set(read)) == 3


def test_a_bundle_that_is_lost_ends_its_job_alone_and_is_made_anew(farm: Farm) -> None:
    jobs = [made_job(name) for name in ("good", "gone", "damaged", "pruned")]
    builds = [farm.built(job) for job in jobs[:3]]
    (farm.root / "place" / path_of(builds[1].archive)).unlink()
    damaged = farm.root / "place" / path_of(builds[2].archive)
    damaged.chmod(0o600)
    damaged.write_bytes(b"rm -rf /")
    plan, planned, _ = farm.preparer().prepare(made_shard(jobs, made_terms([farm.runtime()]), builds), made_device())
    assert [one.cached for one in planned] == [True, False, False, False]
    replies = [plan.read_reply(one.key) for one in planned[1:]]
    assert [(one.ok, one.infra) for one in replies] == [(False, True)] * 3
    says = [one.reason for one in replies]
    assert "it may have been pruned" in says[0]
    assert "is damaged" in says[1]
    assert "not built, or was pruned" in says[2]
    assert sorted(farm.lost) == sorted(build.key for build in builds[1:])


def test_a_place_that_is_away_and_a_run_of_another_version_are_troubles_of_the_farm(farm: Farm) -> None:
    job = made_job("one")
    build, runtime = farm.built(job), farm.runtime()
    preparer, held = farm.preparer(), made_shard([job], made_terms([runtime]), [build])
    away = farm.root / "away"
    (farm.root / "place").rename(away)
    with pytest.raises(ArtifactsError, match="no device and no code is at fault"):
        preparer.prepare(held, made_device())
    away.rename(farm.root / "place")
    assert preparer.prepare(held, made_device()).planned[0].cached
    for terms in (made_terms([runtime], protocol=99), b'{"protocol": 1}', b"\xff"):
        with pytest.raises(InfraError, match="install the same one on all hosts"):
            farm.preparer("other").prepare(made_shard([job], terms, [build]), made_device())
    with pytest.raises(NoDeviceError, match="brings no runtime for phone-1, a virtual SM8750 with android"):
        preparer.prepare(held, made_device(soc="SM8750"))


def test_a_runtime_that_leads_out_of_its_folder_or_was_changed_is_not_used(farm: Farm, tmp_path: Path) -> None:
    remote = farm.runtime()
    hashes = remote.runtime.hashes

    def fetch(**changes: object) -> None:
        runtime = msgspec.structs.replace(remote.runtime, **changes)
        fetch_runtime(farm.client, msgspec.structs.replace(remote, runtime=runtime))

    for name in ("../evil", "/etc/passwd", "a//b", "", "a/../../b", "."):
        with pytest.raises(ArtifactLostError, match="not used"):
            fetch(hashes={**hashes, name: hashes["farm_runner"]})
    with pytest.raises(ArtifactLostError):
        fetch(runner="other")
    # A library that was replaced meanwhile is not sent as another.
    path = tmp_path / "runner"
    path.write_bytes(b"old")
    runtime = made.runtime({"r": path}, "r")
    path.write_bytes(b"new")
    with pytest.raises(UsageError, match="was changed since"):
        upload_runtime(farm.client, runtime, soc="SM8650", device_kind="virtual", os="android")


def test_files_of_an_attempt_go_from_the_host_that_ran_it_to_whoever_reads(farm: Farm) -> None:
    def recorded(store: ArtifactStore, content: bytes) -> ArtifactRecord:
        return ArtifactRecord(store.put(content), len(content), "etdump")

    preparer, here = farm.preparer(), ArtifactStore(farm.config("attic").state_dir / "artifacts")
    records = [recorded(here, content) for content in (b"one", b"two")]
    preparer.upload(records)
    preparer.discard(records)
    assert [here.find(one.sha256) for one in records] == [None, None]
    preparer.upload(records)
    with pytest.raises(ArtifactLostError, match="neither here nor there"):
        preparer.upload([ArtifactRecord("0" * 64, 1, "etdump")])
    reader = open_artifacts(farm.config("desk"))
    assert reader.may_find(records[0].sha256)
    with reader.open(records[0].sha256) as file:
        assert file.read() == b"one"
    found = reader.find(records[1].sha256)
    assert found is not None
    assert found.read_bytes() == b"two"
    assert reader.find("0" * 64) is None
    # A run on this machine alone shares its artifacts with its report.
    alone = ArtifactStore(farm.config("desk").state_dir / "artifacts")
    third = recorded(alone, b"three")
    reader.share([third, *records])
    shared = open_artifacts(farm.config("elsewhere")).find(third.sha256)
    assert shared is not None
    assert shared.read_bytes() == b"three"
    (farm.root / "place").rename(farm.root / "away")
    reader.share([recorded(alone, b"four")])
    # A file read once stays in the cache.
    assert open_artifacts(farm.config("desk")).find(records[1].sha256) == found


def test_only_what_no_row_names_leaves_the_place(tmp_path: Path, address: str, store: Store) -> None:
    farm = Farm(tmp_path, address)
    names = {
        what: made.put_bytes(farm.client, what.encode())
        for what in ("bundle", "unused bundle", "runtime", "orphan", "young")
    }
    parts = row_shards(1, jobs=1)
    terms = b'{"runtimes": [{"files": {"runner": "%s"}}]}' % names["runtime"].encode()
    wanted = NewBuild(row_key(0), "t", parts[0].jobs[0].job, {})
    run = submit(store, parts, terms=terms, builds=[wanted])
    manifest = made_bundle(BundleCache(farm.root / "cache"), made_job("any")).manifest
    for number, what in ((0, "bundle"), (77, "unused bundle")):
        reply = BuildReply(row_key(number), ok=True, seconds=1.0)
        store.cluster.add_built(Build(row_key(number), "built", names[what], 6, reply), manifest)
    execute(store, "UPDATE build SET asked_ms = asked_ms - 90000000")
    long_ago = time.time() - GRACE_S - 60
    for what, name in names.items():
        if what != "young":
            os.utime(farm.root / "place" / path_of(name), (long_ago, long_ago))
    would, remains = Remains(farm.config("desk"), store), Remains(farm.config("desk"), store)
    would.measure_shared(())
    remains.remove_shared()
    assert (would.freed.shared, remains.freed.shared) == (2, 2)
    assert would.freed == remains.freed
    there = {one.name for one in farm.client.all()}
    assert there == {names[what] for what in ("bundle", "runtime", "young")}
    assert store.cluster.build_of([row_key(0), row_key(77)]).keys() == {row_key(0)}
    with pytest.raises(UsageError, match=f"farm runs cancel {run}"):
        require_removable(farm.config("desk"), store, store.runs.view(run))
    assert store.pruning.remove(run) is None
    store.cluster.cancel(run, "ada", may_others=True)
    store.cluster.recover(ttl_s=10)
    remains.remove(run, named=True)
    assert remains.freed.runs == 1
    assert store.cluster.order(run) is None
    remains.remove_shared()
    assert {one.name for one in farm.client.all()} == {names["young"]}


def test_a_bundle_of_any_host_can_be_run_again(tmp_path: Path, address: str, store: Store) -> None:
    farm = Farm(tmp_path, address)
    job = made_job("somewhere")
    build = farm.built(job)
    assert find_made_bundle(farm.config("desk"), build.key) is None
    store.cluster.add_built(build)
    bundle = find_made_bundle(farm.config("desk"), build.key)
    assert bundle is not None
    assert bundle.folder.is_relative_to(farm.root / "desk")
    store.files.lose_bundle(build.key, "0" * 64, "another archive")
    assert store.cluster.build_of([build.key])[build.key].state == "built"
    store.files.lose_bundle(build.key, build.archive, "it is damaged")
    lost = store.cluster.build_of([build.key])[build.key]
    assert lost.reply is not None
    assert (lost.state, lost.reply.infra, lost.reply.reason) == ("failed", True, "the bundle is lost: it is damaged")
    store.cluster.add_built(build)
    assert store.cluster.build_of([build.key])[build.key].state == "built"
