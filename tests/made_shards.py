"""Bundles, shards and terms as small as they can be, for tests of what travels between hosts."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from farm.base.ids import is_bundle_key
from farm.builds.bundles.bundle import MANIFEST, Bundle, Manifest, TensorSpec
from farm.builds.bundles.cache import BundleCache
from farm.devices.device import AdbAddress, Device
from farm.dispatch.cluster.terms import RemoteRuntime, WorkTerms
from farm.dispatch.request.profiling import Profile
from farm.policy.situation import Lease, Priority
from farm.store.cluster.records import Build, HeldShard, PlannedJob
from farm.store.protocol import PROTOCOL
from farm.suites.suite import Case, InputSpec, Job, Target


def made_job(name: str, soc: str = "SM8650") -> Job:
    case = Case(suite="made", name=name, module="torch.nn:ReLU", inputs=(InputSpec((1, 4)),))
    return Job(case, Target(soc, "htp", "8a8w"))


def made_key(job: Job) -> str:
    key = hashlib.sha256(job.id.encode()).hexdigest()
    assert is_bundle_key(key)
    return key


def made_bundle(cache: BundleCache, job: Job, pte: bytes = b"a program") -> Bundle:
    key = made_key(job)

    def fill(folder: Path) -> None:
        (folder / "inputs").mkdir()
        (folder / "model.pte").write_bytes(pte)
        (folder / "inputs/input_0_0.raw").write_bytes(bytes(16))
        (folder / "build.log").write_text("compiled\n")
        names = ("model.pte", "inputs/input_0_0.raw")
        manifest = Manifest(
            key=key,
            job_id=job.id,
            soc=job.target.soc,
            backend="htp",
            precision="8a8w",
            samples=1,
            inputs=(TensorSpec((1, 4), "float32"),),
            outputs=(TensorSpec((1, 4), "float32"),),
            pte_bytes=len(pte),
            delegates={},
            delegated_ops=0,
            fallback_ops={},
            seconds={},
            versions={},
            files={name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in names},
        )
        (folder / MANIFEST).write_bytes(msgspec.json.encode(manifest))

    return cache.build(key, fill)


def made_device(serial: str = "phone-1", soc: str = "SM8650") -> Device:
    return Device(serial, soc, "virtual", "build", AdbAddress(5037), "made up", host="attic")


def made_terms(
    runtimes: Iterable[RemoteRuntime],
    health_checks: Iterable[PlannedJob] = (),
    *,
    protocol: int = PROTOCOL,
    toolchain: str = "t",
    profile: Profile = Profile.AUTO,
) -> bytes:
    return msgspec.json.encode(
        WorkTerms(
            protocol=protocol,
            toolchain=toolchain,
            backend="htp",
            mode="traditional",
            iterations=1,
            warm_up=0,
            timeout_s=60.0,
            reducible=False,
            profile=profile,
            heap=False,
            runtimes=tuple(runtimes),
            health_checks=tuple(health_checks),
        )
    )


def made_shard(
    jobs: Sequence[Job], terms: bytes, builds: Iterable[Build] = (), run_id: str = "20261123-120000-abcdef"
) -> HeldShard:
    lease = Lease("phone-1@attic", 7, "t", "ada", "attic", 1, "run", Priority.PERSON, 0, 10_000)
    return HeldShard(
        id=1,
        run_id=run_id,
        jobs=tuple(PlannedJob(job, made_key(job)) for job in jobs),
        lease=lease,
        terms=terms,
        builds={build.key: build for build in builds},
    )
