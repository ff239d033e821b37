"""How the jobs of a submitted run are executed: what travels with its order, the same for every shard."""

from __future__ import annotations

import msgspec

from farm.builds.runtime.native.targets import Kind, Mode
from farm.dispatch.request.profiling import Profile
from farm.store.cluster.records import ShardJob


class RemoteRuntime(msgspec.Struct, frozen=True, kw_only=True):
    """A `farm.builds.runtime.runtime.Runtime` whose files are in the artifacts' store."""

    soc: str
    device_kind: str
    """Of the devices that it is for: `virtual` or `hardware`."""
    os: str
    files: dict[str, str]
    """SHA-256 by path on the device."""
    digest: str
    runner: str
    versions: dict[str, str]
    kind: Kind
    needs_root: bool
    one_shot: bool
    flags: dict[str, str]


class WorkTerms(msgspec.Struct, frozen=True, kw_only=True):
    """What `farm.dispatch.request.plan.RunPlan` says of a run, but for its jobs and devices."""

    protocol: int
    toolchain: str
    """Its id, by content."""
    backend: str
    mode: Mode
    iterations: int
    warm_up: int
    timeout_s: float
    reducible: bool
    profile: Profile
    heap: bool
    runtimes: tuple[RemoteRuntime, ...]
    canaries: tuple[ShardJob, ...]
    """What tells whether a device is fit, one a SoC."""
    budget_s: float | None = None
    seconds: int | None = None


def encode_terms(terms: WorkTerms) -> bytes:
    """Return the JSON that an order keeps."""
    return msgspec.json.encode(terms)


def decode_terms(text: bytes) -> WorkTerms:
    """Return the terms of an order. Raises msgspec.DecodeError for those of another version of farm."""
    return msgspec.json.decode(text, type=WorkTerms)
