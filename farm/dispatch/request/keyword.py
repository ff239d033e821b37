"""Selection of jobs by `-k`: pytest's own matcher decides, on items that are named like the jobs."""

from __future__ import annotations

import contextlib
import io
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from farm.base.errors import UsageError

_SETTINGS = ("PYTEST_ADDOPTS", "PYTEST_PLUGINS")


class _JobItem(pytest.Item):
    def runtest(self) -> None:
        """Do nothing: jobs run elsewhere."""


class _JobFile(pytest.File):
    job_ids: Sequence[str] = ()

    def collect(self) -> Iterator[pytest.Item]:
        for job_id in self.job_ids:
            yield _JobItem.from_parent(self, name=job_id, nodeid=job_id)


class _Collection:
    """pytest plugin: one file, whose items are the jobs."""

    def __init__(self, file: Path, job_ids: Sequence[str]) -> None:
        self._file, self._job_ids = file, job_ids
        self.selected: list[str] = []

    @pytest.hookimpl(trylast=True)
    def pytest_configure(self, config: pytest.Config) -> None:
        config.pluginmanager.unregister(name="terminalreporter")

    def pytest_collect_file(self, file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
        if file_path != self._file:
            return None
        collector = _JobFile.from_parent(parent, path=file_path)
        # An expression must not match the name of the file.
        collector.name = ""
        collector.job_ids = self._job_ids
        return collector

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.selected = [item.nodeid for item in session.items]


def matching(job_ids: Sequence[str], expression: str) -> list[str]:
    """Return the ids that `expression` selects. Raises UsageError for an expression that pytest does not accept."""
    with tempfile.TemporaryDirectory(prefix="farm-select-") as place:
        folder = Path(place)
        file, configuration = folder / "jobs", folder / "pytest.ini"
        file.touch()
        configuration.write_text("[pytest]\n")
        collection = _Collection(file, job_ids)
        arguments = ["-c", str(configuration), "--rootdir", place, "--noconftest", "-p", "no:cacheprovider"]
        # Both plugins cost a quarter of a second, and concern tests alone.
        arguments += ["-p", "no:unraisableexception", "-p", "no:faulthandler"]
        with pytest.MonkeyPatch.context() as environment, contextlib.redirect_stderr(io.StringIO()) as errors:
            # The user's pytest settings and plugins are kept away.
            for name in _SETTINGS:
                environment.delenv(name, raising=False)
            environment.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
            status = pytest.main([*arguments, "--collect-only", "-k", expression, str(file)], plugins=[collection])
    if status == pytest.ExitCode.USAGE_ERROR:
        *_, where = errors.getvalue().strip().rpartition(f"{expression}: ")
        raise UsageError(f"pytest does not understand -k {expression}: {where}")
    return collection.selected
