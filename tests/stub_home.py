"""`farm` as a user calls it where nothing is compiled and nothing computes: for tests of how a run meets trouble.

The runner of virtual devices and the compiler of builders are stubs; all other parts are real (chaos/chaos_farm.py).
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from farm_home import FarmHome
from forked_command import call
from stub_farm import FINE, stub_runtime

_PROGRAM = Path(__file__).with_name("chaos") / "chaos_farm.py"
_SUITE = """\
[suite]
name = "{name}"
description = "jobs of a stub"
[suite.tolerance.8a8w.fp32]
sqnr_db = 60.0
"""
_CASE = """
[case.{name}]
module = "stub:Stub"
kwargs = {{ words = "{words}", seconds = {seconds}, elements = 256 }}
inputs = [{{ shape = [256] }}]
"""


@dataclass(frozen=True)
class StubHome(FarmHome):
    """Home whose `farm` has a stub in place of runner and compiler."""

    runner: Path = Path()
    """Compiled stub."""

    @property
    def program(self) -> list[str]:
        """Words of a shell that start `farm`."""
        return [self.interpreter, str(_PROGRAM)]

    @property
    def env(self) -> dict[str, str]:
        """Environment of `farm`."""
        return {**super().env, "CHAOS_RUNNER": str(self.runner)}

    def answer(
        self, arguments: Sequence[str], env: Mapping[str, str], options: Mapping[str, Any], *, forked: bool
    ) -> subprocess.CompletedProcess[str]:
        """Run `farm` in a fork that has imported it."""
        assert forked, "no command with stubs starts by itself"
        return call([*self.program, *arguments], env=env, **options)


def make_stub_home(folder: Path) -> StubHome:
    """Return a home below `folder` with a cache of its own."""
    (folder / "cwd").mkdir(parents=True)
    stub_runtime(folder / "runner")
    return StubHome(
        folder / "cache", folder / "state", folder / "cwd", owns_cache=True, runner=folder / "runner" / "stub_runner"
    )


def next_stub_home(home: StubHome, folder: Path) -> StubHome:
    """Return a home below `folder` with the stub of another home and a copy of its bundles."""
    (folder / "cwd").mkdir(parents=True)
    (folder / "cache").mkdir()
    # Not virtual devices: leftover processes are found by the folder.
    shutil.copytree(home.cache / "bundles", folder / "cache" / "bundles", symlinks=True)
    return StubHome(folder / "cache", folder / "state", folder / "cwd", owns_cache=True, runner=home.runner)


def write_stub_suite(
    home: FarmHome, name: str, cases: Mapping[str, int], seconds: Mapping[str, float] | None = None
) -> None:
    """Write a suite of cases that pass and keep the device for so many ms; `seconds` is how long some compile."""
    folder = home.cwd / name
    folder.mkdir(exist_ok=True)
    made = [
        _CASE.format(name=case, words=f"{FINE} {latency_ms}", seconds=(seconds or {}).get(case, 0.0))
        for case, latency_ms in cases.items()
    ]
    (folder / "suite.toml").write_text(_SUITE.format(name=name) + "".join(made))
