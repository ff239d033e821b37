"""A build host whose compiler is a stub: jobs, heartbeats, uploads and rows are the real thing.

    python stub_build_host.py NAME EVIDENCE BUILDERS TTL_S

Reads farm.toml of the working folder. A build sleeps and writes a small bundle; each bundle that was made is a line of
the file EVIDENCE, which knows nothing of the farm: `KEY NAME`.
"""

from __future__ import annotations

import contextlib
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
from stub_farm import FINE, fill_bundle

from farm.base.config.settings import load_config
from farm.builds.bundles.cache import BundleCache
from farm.builds.compile.protocol import BuildReply, BuildRequest
from farm.builds.toolchains.toolchain import Compiler, Toolchain
from farm.dispatch.cluster.agent import builds
from farm.dispatch.cluster.hints import Hints
from farm.store.cluster.records import AgentFacts
from farm.store.objects.objects import open_objects
from farm.store.records import PROTOCOL
from farm.store.store import open_store

TOOLCHAIN = "stub"
VERSIONS = {"executorch": "stub", "torch": "stub", "torchao": "stub", "qnn": "stub"}
BUILD_S = 0.05


class StubToolchains:
    """The one toolchain of the host."""

    ids = (TOOLCHAIN,)
    offered = ()

    def find(self, _: str) -> Toolchain:
        return Toolchain(VERSIONS, Compiler(sys.executable, {}), "stub")

    def look(self, **_: Any) -> None: ...


class StubBuilder:
    """A builder that compiles nothing."""

    def __init__(self, name: str, evidence: Path, cache: BundleCache) -> None:
        self._name, self._evidence, self._cache = name, evidence, cache

    def build(self, request: BuildRequest, _: Compiler) -> BuildReply:
        time.sleep(BUILD_S)
        self._cache.build(request.key, lambda folder: fill_bundle(folder, request.key, f"{FINE} 1"))
        with self._evidence.open("a") as file:
            file.write(f"{request.key} {self._name}\n")
        return BuildReply(request.key, ok=True, seconds=BUILD_S)

    def clean_up(self, key: str) -> None: ...

    def abandon(self, key: str) -> None: ...

    def interrupt(self) -> None: ...

    def end(self) -> None: ...

    def rest(self) -> None: ...


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> None:
    name, evidence, builders, ttl_s = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
    config = load_config()
    leases = msgspec.structs.replace(config.leases, ttl_s=ttl_s, heartbeat_s=ttl_s / 4)
    config = msgspec.structs.replace(config, builders=builders, leases=leases)
    builds.HostToolchains = lambda *_: StubToolchains()  # type: ignore[assignment, misc]
    builds.BuilderSlot = lambda *_, **__: StubBuilder(name, evidence, BundleCache(config.cache_dir))  # type: ignore[assignment, misc]
    with open_store(config.store_url, connections=4) as store:
        host = builds.BuildHost(config, store, open_objects(config))
        facts = AgentFacts(host=name, pid=1, version="1", protocol=PROTOCOL, toolchains=host.toolchains.ids)
        host.begin(store.cluster.register(name, facts, 3600.0, user="farm"))
        say("ready")
        with contextlib.closing(Hints(store)) as hints:
            while True:
                if any(hint.startswith("build") for hint in hints.wait(1.0)):
                    host.wake()


if __name__ == "__main__":
    main()
