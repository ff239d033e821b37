"""Files of a run between hosts: code of suites and runtimes by hash, and preparation of shards on their host."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from farm.base.errors import ArtifactLostError, InfraError, NoDeviceError, UnreadableRowError, UsageError
from farm.base.files import end_of_log, make_folders, published, write_atomically
from farm.base.paths import data_folder, relative
from farm.builds.bundles.bundle import MANIFEST
from farm.builds.bundles.cache import BundleCache
from farm.builds.bundles.key import source_place, suite_files
from farm.builds.compile.protocol import BuildReply
from farm.devices.files import local_errors
from farm.dispatch.cluster.terms import RemoteRuntime, decode_terms
from farm.dispatch.dispatcher import Prepared
from farm.dispatch.request.request import RunPlan
from farm.store.artifacts import ArtifactStore
from farm.store.cluster.records import Build, PlannedJob
from farm.store.objects.archive import fetch_bundle, unpack, upload_bundle, write_archive
from farm.store.objects.objects import SUITES, Objects, require_sha256
from farm.store.records import PROTOCOL

if TYPE_CHECKING:
    from collections.abc import Iterable

    from farm.builds.bundles.bundle import Bundle
    from farm.builds.runtime.runtime import Runtime
    from farm.suites.suite import Case, Job


# Files that hosts of a shared farm exchange by the hash of their content: code of suites, bundles, runtimes.
#
# An archive with the code of a user's suite, from which build hosts compute the same bundle keys:
#
#     suites/NAME/...       folder of the suite, as far as `farm.builds.bundles.key` reads it for a case
#     suites/SIBLING/...    folder beside it with the module of a case
#
# Packages that a suite imports are not in it: a build host has them as wheels of the same versions, or refuses.


_SUITES, _ARCHIVE = "suites", ".archive"
_MOST_BYTES = 16 << 30
_LOG_BYTES = 16 * 1024
# As many requests under way as an SFTP server takes.
_AT_ONCE = 4


def upload_sources(objects: Objects, jobs: Iterable[Job]) -> dict[str, str]:
    """Upload the code of each job, and return the SHA-256 of its archive, by job id; empty for suites of farm.

    Raises UsageError for a case with files outside of its suites, ArtifactsError for an artifact store that stays away,
    LocalError.
    """
    shipped = data_folder("test_suites").resolve()
    found: dict[tuple[str, ...], str] = {}
    sources = {}
    for job in jobs:
        case, place = job.case, source_place(job.case)
        if place not in found:
            is_ours = not case.folder or Path(case.folder).resolve().parent == shipped
            found[place] = "" if is_ours else _upload(objects, case)
        sources[job.id] = found[place]
    return sources


def unpack_source(objects: Objects, cache_dir: Path, sha256: str, job: Job) -> Job:
    """Return the job with its code from an archive, in the cache of this machine; fetched once.

    Raises ArtifactLostError for an archive that is missing or has another suite, ArtifactsError, InfraError.
    """

    def fill(folder: Path) -> None:
        path = folder / _ARCHIVE
        objects.fetch(sha256, path, _MOST_BYTES)
        unpack(path, folder)
        path.unlink()

    root = published(cache_dir / SUITES / sha256[:2] / require_sha256(sha256), fill)
    # Note the time of use, for pruning; a folder of root refuses that and is readable all the same.
    with contextlib.suppress(OSError):
        os.utime(root)
    folder = root / _SUITES / Path(job.case.folder).name
    if not Path(job.case.folder).name or not folder.is_dir():
        raise ArtifactLostError(f"the archive {sha256[:12]} does not hold the suite of {job.id}")
    return replace(job, case=replace(job.case, folder=str(folder)))


def suite_members(case: Case) -> dict[str, Path]:
    """Return the files of a case by their names in the archive. Raises UsageError for one outside of its suites."""
    root = Path(case.folder).parent
    files = {}
    for path in suite_files(case):
        name = relative(path, root)
        if not name:
            raise UsageError(
                f"{case.suite}/{case.name}: {path} is in no folder that other hosts get: move it below {case.folder}, "
                "or compile here (--build-on here)"
            )
        files[f"{_SUITES}/{name}"] = path
    # A case from an installed package has a folder without a manifest.
    if case.manifest.is_file():
        files.setdefault(f"{_SUITES}/{Path(case.folder).name}/{case.manifest.name}", case.manifest)
    return files


def _upload(objects: Objects, case: Case) -> str:
    files = suite_members(case)
    with objects.scratch() as folder:
        target = folder / _ARCHIVE
        write_archive(files, target)
        return objects.put(target)


def sent_build(objects: Objects, bundle: Bundle, reply: BuildReply) -> Build:
    """Upload the archive of a bundle to the artifact store, and return its row. Raises ArtifactsError."""
    archive, nbytes = upload_bundle(objects, bundle)
    return Build(bundle.manifest.key, "built", archive, nbytes, reply)


def failed_build(reply: BuildReply, log: Path) -> Build:
    """Return the row of a failed build, with the end of the compiler's log."""
    return Build(reply.key, "failed", reply=reply, log=end_of_log(log, _LOG_BYTES).replace("\0", ""))


def upload_runtime(objects: Objects, runtime: Runtime, *, soc: str, device_kind: str, os: str) -> RemoteRuntime:
    """Upload the files of a runtime, and return it for other hosts; `device_kind` and `os` describe its devices.

    Raises ArtifactsError for an artifact store that stays away, LocalError for an unreadable file, UsageError for a
    file that has changed since the runtime was put together.
    """
    with ThreadPoolExecutor(_AT_ONCE, "upload") as threads:
        hashes = dict(zip(runtime.files, threads.map(objects.put, runtime.files.values()), strict=True))
    for name, sha256 in hashes.items():
        if runtime.hashes.get(name, sha256) != sha256:
            raise UsageError(f"{runtime.files[name]} was changed since this command began: begin anew")
    return RemoteRuntime(soc=soc, device_kind=device_kind, os=os, runtime=replace(runtime, files={}, hashes=hashes))


def fetch_runtime(objects: Objects, remote: RemoteRuntime) -> Runtime:
    """Return a runtime with its files in the cache of this machine, each fetched once and verified.

    Raises ArtifactLostError for a missing file, or for names that farm never puts into a runtime, ArtifactsError for an
    artifact store that stays away, InfraError for a cache that cannot be written.
    """
    hashes = remote.runtime.hashes
    if remote.runtime.runner not in hashes or not all(map(_is_plain, hashes)):
        raise ArtifactLostError("a runtime has names that lead out of its folder, or no runner: it is not used")
    with ThreadPoolExecutor(_AT_ONCE, "fetch") as threads:
        files = dict(zip(hashes, threads.map(objects.get, hashes.values()), strict=True))
    return replace(remote.runtime, files=files)


def _is_plain(name: str) -> bool:
    """Return whether a path on a device stays in the folder of the runtime."""
    return bool(name) and "\0" not in name and not any(part in ("", ".", "..") for part in name.split("/"))


# Preparation of a shard on its host, before a device begins: plan folder, bundles, runtime, failed builds.


if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from concurrent.futures import Future
    from pathlib import Path

    from farm.base.config.settings import Config
    from farm.builds.runtime.runtime import Runtime
    from farm.devices.device import Device
    from farm.dispatch.cluster.terms import WorkTerms
    from farm.store.cluster.records import Build, HeldShard, PlannedJob
    from farm.store.objects.objects import Objects
    from farm.store.records import ArtifactRecord

    BuildsOf = Callable[[Sequence[str]], Mapping[str, Build]]
    LoseBundle = Callable[[str, str, str], None]


class Preparer:
    """Fetching of the files of shards that are not on this host yet; for any number of threads."""

    def __init__(
        self,
        config: Config,
        objects: Objects,
        build_of: BuildsOf,
        folder: Path,
        lose: LoseBundle,
    ) -> None:
        """`build_of` (of the store) finds builds that a shard lacks; `lose` has lost bundles made again.

        `folder` holds the plans of this agent alone; files of the agent's former life are removed from it.
        """
        self._config, self._objects, self._build_of = config, objects, build_of
        self._folder, self._lose = folder, lose
        self._cache = BundleCache(config.cache_dir)
        self._artifacts = ArtifactStore(config.state_dir / "artifacts")
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(_AT_ONCE, "fetch")
        self._bundles: dict[str, Future[Bundle]] = {}
        """Bundles that are being fetched, by key: several shards wait for the same future."""
        self._runtimes: dict[str, Runtime] = {}
        self._plans: dict[tuple[str, str], RunPlan] = {}
        shutil.rmtree(self._folder, ignore_errors=True)

    def prepare(self, held: HeldShard, device: Device) -> Prepared:
        """Return the shard with its run's plan on `device`; waits until all of its files are here.

        A job whose build failed, or whose bundle is lost, gets a reply in the plan's folder: it ends with that reply,
        and the other jobs of the shard run. Raises ArtifactsError for an artifact store that stays away, InfraError for
        a run that this version of farm does not execute, LocalError and InfraError for failed writes on this host: in
        every case no device and no code is at fault, and the caller puts the shard back.
        """
        terms = _terms_of(held)
        health_checks = [one for one in terms.health_checks if one.job.target.soc == device.soc]
        builds = self._builds(held, health_checks)
        lost = self._fetch(builds)
        plan = self._plan_of(held, terms, device, health_checks, builds, lost)
        return Prepared(plan, [self._planned(plan, one, builds.get(one.key), lost) for one in held.jobs])

    def upload(self, records: Iterable[ArtifactRecord]) -> None:
        """Upload the files of an attempt to the artifact store, before the attempt is recorded.

        A file that only the artifact store has is fine. Raises ArtifactsError, LocalError, and ArtifactLostError for a
        file that is in neither place.
        """
        for record in records:
            path = self._artifacts.find(record.sha256)
            if path is not None:
                self._objects.put(path)
            elif not self._objects.has(record.sha256):
                raise ArtifactLostError(f"{record.kind} of an attempt ({record.sha256[:12]}) is neither here nor there")

    def discard(self, records: Iterable[ArtifactRecord]) -> None:
        """Remove this host's copies of uploaded files, after their attempt was recorded or refused."""
        for record in records:
            self._artifacts.discard(record.sha256, grace_s=-1.0)

    def forget(self, run_id: str) -> None:
        """Remove the plans of a run that is over, or has no further work for this host."""
        with self._lock:
            for key in [key for key in self._plans if key[0] == run_id]:
                shutil.rmtree(self._plans.pop(key).folder, ignore_errors=True)

    def close(self) -> None:
        """Stop fetching, and wait for the fetches under way."""
        self._threads.shutdown(cancel_futures=True)

    def _builds(self, held: HeldShard, health_checks: Sequence[PlannedJob]) -> dict[str, Build]:
        builds = dict(held.builds)
        wanted = (one.key for one in (*held.jobs, *health_checks))
        lacking = [key for key in dict.fromkeys(wanted) if key not in builds and not self._is_here(key)]
        if lacking:
            builds |= self._build_of(lacking)
        return builds

    def _fetch(self, builds: Mapping[str, Build]) -> dict[str, str]:
        """Fetch the missing bundles; return the reasons of lost ones, by key. Raises as `prepare`."""
        waiting = {
            key: self._begin(build)
            for key, build in builds.items()
            if build.state == "built" and not self._is_here(key)
        }
        lost = {}
        for key, future in waiting.items():
            try:
                future.result()
            except ArtifactLostError as error:
                lost[key] = str(error)
                self._lose(key, builds[key].archive, str(error))
            finally:
                with self._lock:
                    self._bundles.pop(key, None)
        return lost

    def _begin(self, build: Build) -> Future[Bundle]:
        with self._lock:
            future = self._bundles.get(build.key)
            if future is None or future.done():
                future = self._bundles[build.key] = self._threads.submit(
                    fetch_bundle, self._objects, self._cache, build.key, build.archive
                )
            return future

    def _is_here(self, key: str) -> bool:
        return (self._cache.folder(key) / MANIFEST).is_file()

    def _plan_of(
        self,
        held: HeldShard,
        terms: WorkTerms,
        device: Device,
        health_checks: Sequence[PlannedJob],
        builds: Mapping[str, Build],
        lost: Mapping[str, str],
    ) -> RunPlan:
        with self._lock:
            plan = self._plans.get((held.run_id, device.id))
        if plan is not None and plan.devices == (device,):
            return plan
        runtime = self._runtime(held.run_id, terms, device)
        folder = self._folder / held.run_id / hashlib.sha256(device.id.encode()).hexdigest()[:16]
        draft = RunPlan(
            run_id=held.run_id,
            folder=folder,
            cache_root=self._config.cache_dir,
            jobs=(),
            devices=(device,),
            runtimes={device.serial: runtime},
            artifact_root=self._config.state_dir / "artifacts",
            leased=True,
            health=self._config.health,
            failures=self._config.failures,
            **terms.execution,
        )
        with local_errors(folder):
            make_folders(folder)
            draft.prepare_folder()
            # Do not wait for a health check without a bundle: the next shard of the run will have it.
            ended = [
                one
                for one in health_checks
                if self._is_here(one.key) or (one.key in builds and builds[one.key].state != "waiting")
            ]
            planned = tuple(self._planned(draft, one, builds.get(one.key), lost) for one in ended)
            plan = msgspec.structs.replace(draft, health_checks=planned)
            plan.write()
        if len(ended) == len(health_checks):
            with self._lock:
                self._plans[held.run_id, device.id] = plan
        return plan

    def _planned(self, plan: RunPlan, one: PlannedJob, build: Build | None, lost: Mapping[str, str]) -> PlannedJob:
        """Return a job for the executor; a job without a bundle gets the reply of its build, with `plan`."""
        if self._is_here(one.key) and one.key not in lost:
            return msgspec.structs.replace(one, cached=True)
        reply = build.reply if build is not None and build.state == "failed" else None
        if reply is None or reply.ok:
            why = lost.get(one.key) or "its bundle is not built, or was pruned while the run went on"
            reply = BuildReply(one.key, ok=False, seconds=0.0, reason=f"the bundle is lost: {why}", infra=True)
        with local_errors(plan.folder):
            if build is not None and build.log:
                write_atomically(plan.build_log(one.key), build.log)
            plan.leave_reply(msgspec.structs.replace(reply, key=one.key))
        return msgspec.structs.replace(one, cached=False)

    def _runtime(self, run_id: str, terms: WorkTerms, device: Device) -> Runtime:
        facts = (device.soc, device.kind, device.os)
        remote = next((one for one in terms.runtimes if (one.soc, one.device_kind, one.os) == facts), None)
        if remote is None:
            raise NoDeviceError(
                f"run {run_id} brings no runtime for {device.called}, a {device.kind} {device.soc} with {device.os}"
            )
        with self._lock:
            runtime = self._runtimes.get(remote.runtime.digest)
        if runtime is None or not all(path.is_file() for path in runtime.files.values()):
            runtime = fetch_runtime(self._objects, remote)
            with self._lock:
                self._runtimes[remote.runtime.digest] = runtime
        return runtime


def _terms_of(held: HeldShard) -> WorkTerms:
    try:
        terms = decode_terms(held.terms)
    except msgspec.MsgspecError as error:
        why = f"its terms are of another version of farm ({error}): install the same one on all hosts"
        raise UnreadableRowError("run_order", held.run_id, why) from None
    if terms.protocol != PROTOCOL:
        raise InfraError(
            f"run {held.run_id} was submitted by another version of farm (protocol {terms.protocol}, expected "
            f"{PROTOCOL}): install the same one on all hosts"
        )
    return terms
