"""Preparation of the toolchain that a command works with."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from farm.base.errors import FarmError
from farm.base.hashes import let_the_clock_pass
from farm.builds.bundles.key import HOST_CPU, QNN_PRODUCT, forget_sources, stub_of
from farm.builds.runtime.native.build import build_native
from farm.builds.runtime.native.executorch import runner_executorch
from farm.builds.runtime.qnn_sdk import sdk_product
from farm.builds.runtime.simulator import LIBRARY, host_sdk
from farm.builds.toolchains.content.identity import identify
from farm.builds.toolchains.content.source_state import developed_roots, source_state
from farm.builds.toolchains.generations import NEWEST, newer_than_known, variables_of
from farm.builds.toolchains.handover import handover
from farm.builds.toolchains.interpreters import InterpreterFacts, own_facts
from farm.builds.toolchains.probe import PACKAGES
from farm.builds.toolchains.sdks import resolve_qnn
from farm.builds.toolchains.select import import_environment, look_into
from farm.builds.toolchains.toolchain import STUB_BRANCH, Compiler, Toolchain

if TYPE_CHECKING:
    from farm.base.config.settings import Config
    from farm.base.config.toolchains import ToolchainConfig

logger = logging.getLogger(__name__)


def prepare(config: Config, *, virtual: bool = False) -> Toolchain:
    """Return the toolchain that `config` has selected, after building its missing parts.

    `virtual`: for virtual devices, whose HOST_CPU is different. Raises MissingToolError, and UsageError for a file that
    cannot be read.
    """
    forget_sources()
    executorch = runner_executorch(config)
    native = build_native(config.cache_dir, executorch=executorch)
    sdk = host_sdk(config.cache_dir, sdk_root=config.sdk_root, native=native)
    selected = config.toolchain
    if selected.python is None:
        facts = own_facts()
        env = variables_of(facts)
    else:
        facts = look_into(config, selected)
        env = compiler_environment(config, selected, facts)
    packages = {name: facts.version_of(name) for name in PACKAGES}
    versions = {"qnn": sdk.qnn_version, HOST_CPU: "x86" if virtual else "arm", **packages}
    python, env = selected.python or Path(sys.executable), dict(sdk.env) | env
    # The bridge may just have been written.
    let_the_clock_pass([sdk.lib_dir / LIBRARY])
    as_of_ns = time.time_ns()
    found = identify(config.cache_dir, python, facts, env, qnn=sdk.lib_dir)
    source = source_state(config.cache_dir, found.trees)
    developed = developed_roots(config.cache_dir, found, config.trace)
    if newer_than_known(versions["executorch"]):
        logger.info("ExecuTorch %s is newer than %s, the newest that farm was run with", versions["executorch"], NEWEST)
    product = sdk_product(config.sdk_root)
    if stub_of({QNN_PRODUCT: product}):
        # Some commands print no table in which a stub could be marked.
        logger.info("STUB: QNN's libraries are a stub (%s); no number is a measurement of Qualcomm's products", product)
    return Toolchain(
        versions | found.content,
        Compiler(str(python), env, developed, as_of_ns),
        native.key,
        runner_of="" if executorch.own else f"executorch {executorch.version}",
        name=selected.name,
        branch=branch_of(config),
        private=is_private(selected) or source.dirty,
        source=source,
        qnn_product=product,
    )


def compiler_environment(config: Config, toolchain: ToolchainConfig, facts: InterpreterFacts) -> dict[str, str]:
    """Return the variables with which an interpreter imports farm's and the toolchain's code, without QNN's ones."""
    env = import_environment(config, toolchain)
    code = handover(config.cache_dir, toolchain.python or Path(sys.executable), facts)
    path = env.get("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    own = {"PYTHONPATH": os.pathsep.join(filter(None, [str(code), path]))}
    return env | own | variables_of(facts)


def branch_of(config: Config, toolchain: ToolchainConfig | None = None) -> str:
    """Return the branch of runs with a toolchain; a path on the command line has no branch of its own, "".

    Without `toolchain` it is the selected toolchain. Runs over a stub of QNN have their own branch.
    """
    selected, sdk_root = toolchain or config.toolchain, config.sdk_root
    if toolchain is not None and toolchain.qnn:
        with contextlib.suppress(FarmError):
            sdk_root = resolve_qnn(config, toolchain.qnn)
    branch = selected.name if selected.named or selected.version else ""
    return f"{branch} {STUB_BRANCH}".strip() if stub_of({QNN_PRODUCT: sdk_product(sdk_root)}) else branch


def is_private(toolchain: ToolchainConfig) -> bool:
    """Return whether runs with a toolchain are only compared with a branch and never belong to it, even unmodified."""
    return bool(toolchain.name) and not toolchain.named and not toolchain.version
