"""The pytest session that farm starts: its own root and configuration, nothing of the folder the user stands in."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from farm.config.settings import Config
    from farm.request.plan import RunPlan
    from farm.suites.suite import Job


# Ours before xdist, whose last hook asks for the terminal reporter that ours takes away.
_PLUGINS = ("-p", "farm.run.plugin", "-p", "xdist.plugin")


# How workers hear of the store: its URL may hold a password, which is not for the plan, a file that stays.
STORE_VARIABLE = "FARM_STORE"


class _Selection:
    """Collects the ids that pytest's own options select."""

    def __init__(self) -> None:
        self.ids: list[str] = []

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.ids = [item.nodeid for item in session.items]


def collected(config: Config, folder: Path, jobs: Sequence[Job], arguments: Sequence[str]) -> tuple[int, list[str]]:
    """Return pytest's exit status and the ids that `arguments` (-k, --deselect, ...) leave of `jobs`.

    `folder` is for what pytest needs of files.
    """
    from farm.request.plan import PlannedJob, RunPlan

    draft = RunPlan(
        run_id="",
        folder=folder,
        cache_root=config.cache_dir,
        jobs=tuple(PlannedJob(job, "", cached=True) for job in jobs),
        devices=(),
        runtimes={},
        iterations=1,
        warm_up=0,
        timeout_s=0.0,
        artifact_root=folder,
    )
    draft.write()
    selection = _Selection()
    with _own_environment():
        status = pytest.main(["--collect-only", *_arguments(draft, config.state_dir), *arguments], plugins=[selection])
    return int(status), selection.ids


def execute(plan: RunPlan, arguments: Sequence[str], config: Config, controller: object) -> int:
    """Run the plan, a worker for every device, and return pytest's exit status."""
    workers = ["-n", str(len(plan.devices)), "--dist", "load"]
    if not all(argument == "-x" or argument.startswith("--maxfail=") for argument in arguments):
        # They may be about every item, or load a plugin that looks at it.
        workers.append("--farm-sessions")
    with _own_environment(config.store_url):
        return int(pytest.main([*workers, *_arguments(plan, config.state_dir), *arguments], plugins=[controller]))


def _arguments(plan: RunPlan, state_dir: Path) -> list[str]:
    configuration = plan.folder / "pytest.ini"
    if not configuration.exists():
        configuration.write_text("[pytest]\n")
    return [
        "-c", str(configuration), "--rootdir", str(plan.folder), "--noconftest", "--import-mode", "importlib",
        "-o", f"cache_dir={state_dir / 'pytest_cache'}", *_PLUGINS,
        "-p", "no:faulthandler", "--farm-plan", str(plan.path), str(plan.path),
    ]  # fmt: skip


@contextlib.contextmanager
def _own_environment(store_url: str | None = None) -> Iterator[None]:
    """Keep the user's pytest settings away, from the workers as well, which inherit the environment."""
    ours = {"PYTEST_ADDOPTS": None, "PYTEST_PLUGINS": None, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    if store_url is not None:
        ours[STORE_VARIABLE] = store_url
    kept = {name: os.environ.get(name) for name in ours}
    _set_environment(ours)
    try:
        yield
    finally:
        _set_environment(kept)


def _set_environment(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
