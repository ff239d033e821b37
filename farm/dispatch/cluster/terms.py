"""Terms of a submitted run: how its jobs are executed, stored with its order and equal for every shard."""

from __future__ import annotations

import msgspec

from farm.builds.runtime.native.targets import Mode
from farm.builds.runtime.runtime import Runtime
from farm.dispatch.request.profiling import Execution
from farm.store.cluster.records import PlannedJob


class RemoteRuntime(msgspec.Struct, frozen=True, kw_only=True):
    """Runtime of devices of other hosts, with its files in the artifact store."""

    soc: str
    device_kind: str
    """Kind of its devices: `virtual` or `hardware`."""
    os: str
    runtime: Runtime
    """The runtime, without local files: `hashes` has the SHA-256 by path on the device."""


class WorkTerms(Execution, frozen=True, kw_only=True):
    """Contents of a `farm.dispatch.request.plan.RunPlan` except for jobs and devices."""

    protocol: int
    toolchain: str
    """Id of the toolchain, by content."""
    backend: str
    mode: Mode
    runtimes: tuple[RemoteRuntime, ...]
    health_checks: tuple[PlannedJob, ...]
    """Health checks of devices, one for each SoC."""
    budget_s: float | None = None


def decode_terms(text: bytes) -> WorkTerms:
    """Return the terms of an order. Raises msgspec.DecodeError for terms of another version of farm."""
    return msgspec.json.decode(text, type=WorkTerms)
