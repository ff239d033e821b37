"""Bundles, shards and terms as small as they can be, for tests of what travels between hosts."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path

import made
import msgspec
from made import write_bundle

from farm.base.config.settings import Config, load_config
from farm.base.ids import is_bundle_key
from farm.builds.bundles.bundle import Bundle
from farm.builds.bundles.cache import BundleCache
from farm.devices.device import Device
from farm.dispatch.cluster.terms import RemoteRuntime, WorkTerms
from farm.dispatch.request.profiling import Profile
from farm.policy.situation import Lease, Priority
from farm.store.cluster.records import Build, HeldShard, PlannedJob
from farm.store.protocol import PROTOCOL
from farm.suites.suite import Job

NO_STORE = "postgresql://farm@127.0.0.1:1/farm"
"""Address at which no database answers."""


def made_job(name: str, soc: str = "SM8650") -> Job:
    return made.job(name, soc, suite="made")


def made_key(job: Job) -> str:
    key = hashlib.sha256(job.id.encode()).hexdigest()
    assert is_bundle_key(key)
    return key


def made_bundle(cache: BundleCache, job: Job, pte: bytes = b"a program") -> Bundle:
    def fill(folder: Path) -> None:
        contents = {"model.pte": pte, "inputs/input_0_0.raw": bytes(16)}
        write_bundle(folder, contents, key=made_key(job), job_id=job.id, soc=job.target.soc)
        (folder / "build.log").write_text("compiled\n")

    return cache.build(made_key(job), fill)


def made_config(root: Path, machine: str, artifacts: str = "", store: str = NO_STORE) -> Config:
    """Return the configuration of a machine of a shared farm, with a cache and a state of its own below `root`."""
    folder = root / machine
    folder.mkdir(exist_ok=True)
    file = folder / "farm.toml"
    file.write_text(f'store = "{store}"\nartifacts = "{artifacts or f"file://{root}/place"}"\n')
    return msgspec.structs.replace(load_config(file), cache_dir=folder / "cache", state_dir=folder / "state")


def made_device(serial: str = "phone-1", soc: str = "SM8650") -> Device:
    return made.device(serial, soc, kind="virtual", host="attic")


def made_terms(
    runtimes: Iterable[RemoteRuntime],
    health_checks: Iterable[PlannedJob] = (),
    *,
    protocol: int = PROTOCOL,
    toolchain: str = "t",
    profile: Profile = Profile.AUTO,
) -> bytes:
    terms = WorkTerms(
        protocol=protocol, toolchain=toolchain, backend="htp", mode="traditional", iterations=1, warm_up=0,
        timeout_s=60.0, reducible=False, profile=profile, heap=False, runtimes=tuple(runtimes),
        health_checks=tuple(health_checks),
    )  # fmt: skip
    return msgspec.json.encode(terms)


def made_shard(jobs: Sequence[Job], terms: bytes, builds: Iterable[Build] = ()) -> HeldShard:
    lease = Lease("phone-1@attic", 7, "t", "ada", "attic", 1, "run", Priority.PERSON, 0, 10_000)
    planned = tuple(PlannedJob(job, made_key(job)) for job in jobs)
    by_key = {build.key: build for build in builds}
    return HeldShard(id=1, run_id="20261123-120000-abcdef", jobs=planned, lease=lease, terms=terms, builds=by_key)
