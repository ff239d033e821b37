"""Toolchains of a build host: farm's own environment and the ones in farm.toml, read again every half minute."""

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
from farm.dispatch.device_forks import SECRETS

if TYPE_CHECKING:
    from farm.base.config.settings import Config
    from farm.builds.toolchains.toolchain import Toolchain
    from farm.store.cluster.records import OfferedToolchain

logger = logging.getLogger(__name__)

# A look takes 0.2 s of the processor for each toolchain (2-core machine). Until the next look, runs of a checkout that
# has just changed on a build host are refused, as no host has that toolchain.
_LOOK_EVERY_S = 30.0
_MISSING = "missing"


_OF_THE_AGENT = ("SSH_AUTH_SOCK",)
"""Environment variables of an agent, beside SECRETS, that give access and that no builder needs."""


class HostToolchains:
    """Toolchains of this host. Any thread may call the methods; one thread at a time looks."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._looking = threading.Lock()
        self._tools: dict[str, Toolchain] = {}
        """Toolchains by name."""
        self._by_id: dict[str, Toolchain] = {}
        self._offered: tuple[OfferedToolchain, ...] = ()
        self._problems: dict[str, str] = {}
        self._looked_s = float("-inf")

    @property
    def offered(self) -> tuple[OfferedToolchain, ...]:
        """Offered toolchains of this host as of the last look; none before the first."""
        return self._offered

    @property
    def ids(self) -> tuple[str, ...]:
        """Ids of the offered toolchains, sorted."""
        return tuple(sorted(self._by_id))

    def find(self, toolchain: str) -> Toolchain | None:
        """Return the toolchain of an id; None if this host does not have it, or no longer has it."""
        return self._by_id.get(toolchain)

    def look(self, *, at_once: bool = False) -> None:
        """Read the toolchains anew if the last look is half a minute old, or always with `at_once`.

        An unusable toolchain is logged once and left out. Environments of releases are created here.
        """
        with self._looking:
            if not at_once and time.monotonic() < self._looked_s + _LOOK_EVERY_S:
                return
            found = {name: tools for name in (DEFAULT, *self._config.toolchains) if (tools := self._look_at(name))}
            if at_once or {name: one.versions for name, one in found.items()} != self._versions():
                # Keep the objects of unchanged toolchains: a builder takes another object for another toolchain.
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
        known: list[OfferedToolchain] = []
        for name, tools in self._tools.items():
            for one in offered(name, tools.versions):
                if recipe_now(one.backend) != recipe_digest(one.backend):
                    # Builders that start now would compile by another recipe than the one in the keys.
                    problem = (
                        f"farm was upgraded: restart this agent, which builds nothing for {one.backend} until then"
                    )
                    self._warn_once(one.backend, problem)
                elif by_id.setdefault(one.id, tools) is tools:
                    known.append(one)
        self._by_id, self._offered = by_id, tuple(known)

    def _look_at(self, name: str) -> Toolchain | None:
        from farm.builds.toolchains.prepare import prepare
        from farm.builds.toolchains.select import use_toolchain

        try:
            tools = prepare(use_toolchain(self._config, name))
        except FarmError as error:
            self._warn_once(name, f"toolchain {name} is not offered: {error}")
            return None
        lacking = [package for package in ("torch", "executorch") if tools.versions.get(package) == _MISSING]
        if lacking:
            self._warn_once(name, f"toolchain {name} is not offered: it has no {' and no '.join(lacking)}")
            return None
        self._problems.pop(name, None)
        # A builder imports developers' code, which must not read the agent's secrets.
        env = tools.compiler.env | dict.fromkeys((*SECRETS, *_OF_THE_AGENT), "")
        return msgspec.structs.replace(tools, name=name, compiler=msgspec.structs.replace(tools.compiler, env=env))

    def _warn_once(self, subject: str, problem: str) -> None:
        if self._problems.get(subject) != problem:
            self._problems[subject] = problem
            logger.warning(problem)
