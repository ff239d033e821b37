"""The toolchains of a build host: farm's own environment and those of farm.toml, looked at again from time to time."""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING

import msgspec

from farm.base.config.toolchains import DEFAULT
from farm.base.errors import FarmError
from farm.builds.bundles.key import recipe_digest, recipe_now
from farm.dispatch.cluster.toolchain_id import offered
from farm.dispatch.fork_server import SECRETS

if TYPE_CHECKING:
    from farm.base.config.settings import Config
    from farm.builds.toolchains.toolchain import Toolchain
    from farm.store.cluster.records import OfferedToolchain

logger = logging.getLogger(__name__)

# A look takes 0.2 s of the processor for each toolchain (2-core machine). Until the next one, whoever has just changed
# a checkout on a build host is told that no host has it.
_LOOK_EVERY_S = 30.0
_MISSING = "missing"


_OF_THE_AGENT = ("SSH_AUTH_SOCK", "FARM_SERVE_TOKEN")
"""Other environment variables of an agent that open something, and that no builder needs."""


class HostToolchains:
    """What this host compiles with. Any thread may ask; one at a time looks."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._looking = threading.Lock()
        self._tools: dict[str, Toolchain] = {}
        """By name."""
        self._by_id: dict[str, Toolchain] = {}
        self._offered: tuple[OfferedToolchain, ...] = ()
        self._problems: dict[str, str] = {}
        self._looked_s = float("-inf")

    @property
    def offered(self) -> tuple[OfferedToolchain, ...]:
        """What this host offers, as of the last look; none before the first."""
        return self._offered

    @property
    def ids(self) -> tuple[str, ...]:
        """The ids of these, sorted."""
        return tuple(sorted(self._by_id))

    def find(self, toolchain: str) -> Toolchain | None:
        """Return the toolchain of an id; None where this host has none, or has it no more."""
        return self._by_id.get(toolchain)

    def look(self, *, at_once: bool = False) -> None:
        """Look at what is there now, unless that was done within half a minute and not `at_once`.

        A toolchain that cannot be used is noted, once, and left out. Environments of releases are made here.
        """
        with self._looking:
            if not at_once and time.monotonic() < self._looked_s + _LOOK_EVERY_S:
                return
            found = {name: tools for name in (DEFAULT, *self._config.toolchains) if (tools := self._look_at(name))}
            if at_once or {name: one.versions for name, one in found.items()} != self._versions():
                # Builders of what is the same go on: another object is another toolchain to them.
                same = {} if at_once else self._tools
                self._tools = {
                    name: same[name] if name in same and same[name].versions == one.versions else one
                    for name, one in found.items()
                }
            self._publish()
            self._looked_s = time.monotonic()

    def _versions(self) -> dict[str, dict[str, str]]:
        return {name: one.versions for name, one in self._tools.items()}

    def _publish(self) -> None:
        by_id: dict[str, Toolchain] = {}
        told: list[OfferedToolchain] = []
        for name, tools in self._tools.items():
            for one in offered(name, tools.versions):
                if recipe_now(one.backend) != recipe_digest(one.backend):
                    # Builders that start now would compile by another recipe than the keys say.
                    self._say(one.backend, "farm was upgraded beneath this agent: restart it, until then it builds "
                                           f"nothing for {one.backend}")  # fmt: skip
                elif by_id.setdefault(one.id, tools) is tools:
                    told.append(one)
        self._by_id, self._offered = by_id, tuple(told)

    def _look_at(self, name: str) -> Toolchain | None:
        from farm.builds.toolchains.prepare import prepare
        from farm.builds.toolchains.select import use_toolchain

        try:
            tools = prepare(use_toolchain(self._config, name))
        except FarmError as error:
            self._say(name, f"toolchain {name} is not offered: {error}")
            return None
        lacking = [package for package in ("torch", "executorch") if tools.versions.get(package) == _MISSING]
        if lacking:
            self._say(name, f"toolchain {name} is not offered: it has no {' and no '.join(lacking)}")
            return None
        self._problems.pop(name, None)
        # A builder imports what developers wrote.
        env = tools.compiler.env | dict.fromkeys((*SECRETS, *_OF_THE_AGENT), "")
        return msgspec.structs.replace(tools, name=name, compiler=msgspec.structs.replace(tools.compiler, env=env))

    def _say(self, subject: str, problem: str) -> None:
        if self._problems.get(subject) != problem:
            self._problems[subject] = problem
            logger.warning(problem)
