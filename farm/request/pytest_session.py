"""The pytest session that farm starts: its own root and configuration, nothing of the folder the user stands in."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any

import pytest

from farm.errors import UsageError

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


# pytest's own options that do something to a run, as its configuration calls them: which jobs, how many failures, which
# plugins. The others are about files with tests, or about what pytest prints, which is nothing.
_HEEDED = {"keyword", "markexpr", "deselect", "maxfail", "plugins", "override_ini"}


class _Selection:
    """Collects the ids that `arguments` select, unless one of them would be taken and ignored."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self._arguments = arguments
        self._parser: pytest.Parser | None = None
        self._own: dict[str, Any] = {}
        self.ids: list[str] = []
        self.ignored = ""
        """The argument that would be."""

    def pytest_addoption(self, parser: pytest.Parser) -> None:
        # Before those of plugins that the user names, which are for the plugins to heed.
        self._parser, self._own = parser, vars(parser.parse_known_args([]))

    @pytest.hookimpl(tryfirst=True)
    def pytest_cmdline_main(self) -> pytest.ExitCode | None:
        # An option is found where its value is, which may be the word after it.
        for count, word in enumerate(self._arguments, start=1):
            if self._ignores(self._arguments[:count]):
                self.ignored = word if word.startswith("-") or count == 1 else f"{self._arguments[count - 2]} {word}"
                return pytest.ExitCode.USAGE_ERROR
        return None

    def _ignores(self, arguments: Sequence[str]) -> bool:
        assert self._parser is not None  # noqa: S101 - pytest asks for options first
        try:
            given = vars(self._parser.parse_known_args(arguments))
        except pytest.UsageError:
            return False
        return any(given[name] != usual for name, usual in self._own.items() if name not in _HEEDED)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.ids = [item.nodeid for item in session.items]


def collected(config: Config, folder: Path, jobs: Sequence[Job], arguments: Sequence[str]) -> tuple[int, list[str]]:
    """Return pytest's exit status and the ids that `arguments` (-k, --deselect, ...) leave of `jobs`.

    `folder` is for what pytest needs of files. Raises UsageError for an argument that pytest would take and ignore.
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
    selection = _Selection(arguments)
    with _own_environment():
        status = pytest.main(["--collect-only", *_arguments(draft, config.state_dir), *arguments], plugins=[selection])
    if selection.ignored:
        raise UsageError(
            f"{selection.ignored} would have no effect: farm's own pytest heeds -k, -m, --deselect, -x, --maxfail, -o, "
            "and -p with the options of that plugin; 'farm show JOB' prints logs and tracebacks"
        )
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
    # The plugin unraisableexception collects garbage ten times, a quarter second, for warnings without a reader.
    return [
        "-c", str(configuration), "--rootdir", str(plan.folder), "--noconftest", "--import-mode", "importlib",
        "-o", f"cache_dir={state_dir / 'pytest_cache'}", *_PLUGINS,
        "-p", "no:faulthandler", "-p", "no:unraisableexception", "--farm-plan", str(plan.path), str(plan.path),
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
