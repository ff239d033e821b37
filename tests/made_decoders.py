"""Programs that tests and bench/generate.py compile once a cache."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec
from warm_torch import run_script

from farm.base.config.settings import load_config
from farm.base.files import published
from farm.base.processes import Supervisor
from farm.builds.bundles.bundle import Bundle
from farm.builds.bundles.cache import BundleCache
from farm.builds.bundles.reuse import find_bundle_for
from farm.builds.runtime.packages import package_version
from farm.builds.toolchains.selection import prepare
from farm.replay.stored_result import build_bundle
from farm.suites.manifests import find_suites, load_suite
from farm.suites.suite import Job, Target


def compiled(cache: Path, name: str) -> Path:
    """Return the folder that a script of native_runner/ fills; the first line of the script names the content."""
    script = Path(__file__).with_name("native_runner") / name
    versions = "".join(package_version(name) for name in ("executorch", "torch", "onnxruntime-qnn"))
    key = hashlib.sha256(script.read_bytes() + versions.encode()).hexdigest()[:16]

    def fill(folder: Path) -> None:
        run_script(script, str(folder), cache=cache, folder=folder)

    return published(cache / "runner-test-models" / key, fill)


def tiny_decoder(cache: Path) -> Bundle:
    """Return the bundle of llm_tiny's `llama` with a method for prompts, for a virtual SM8650.

    Compiling it takes a minute.
    """
    suite = load_suite(find_suites()["llm_tiny"])
    [job] = [Job(case, Target("SM8650", "htp", "16a8w")) for case in suite.cases if case.name == "llama"]
    config = msgspec.structs.replace(load_config(), cache_dir=cache)
    tools = prepare(config, virtual=True)
    bundles = BundleCache(cache)
    found = find_bundle_for(job, tools, bundles)
    if not found.cached:
        with Supervisor() as supervisor:
            build_bundle(config, job, found.key, tools, supervisor)
    bundle = bundles.lookup(found.key)
    assert bundle is not None
    return bundle
