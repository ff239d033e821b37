"""End of every command with a run in the store: exit code and report."""

from __future__ import annotations

from typing import TYPE_CHECKING

from farm.base.exit_codes import ExitCode

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from farm.base.config.settings import Config
    from farm.report.html.page_of_run import ReportContext
    from farm.store.artifacts import ArtifactStore
    from farm.store.records import Background
    from farm.store.store import Store
    from farm.store.view import RunView


def write_report(view: RunView, path: Path, store: Store, config: Config) -> Path:
    """Write the HTML report of a run, with its history in the store, and return the file."""
    from farm.report.html.page_of_run import artifact_links, write_html
    from farm.report.html.templates import keep_templates
    from farm.store.artifacts import open_artifacts

    keep_templates(config.cache_dir)
    artifacts = open_artifacts(config)

    def links(known: Background) -> dict[str, str]:
        # On a shared farm only jobs of this machine left their files here.
        artifacts.share(record for records in known.artifacts.values() for record in records)
        return artifact_links(known, artifacts, path)

    write_html(view, path, report_context(store, view, artifacts, links))
    return path


def report_context(
    store: Store, view: RunView, artifacts: ArtifactStore, links: Callable[[Background], dict[str, str]]
) -> ReportContext:
    """Return the context of a run in the store; `links` has the links of a page to artifacts, by hash."""
    from farm.report.formats.layers_csv import shown_places
    from farm.report.html.layer_graph import shown_graphs
    from farm.report.html.page_of_run import ReportContext
    from farm.report.model.heap import heap_rows

    background = store.history.background(view.id)
    return ReportContext(
        status=store.status.of_run(view.id),
        # An empty list may mean that the run was not judged yet, so that the page leaves alerts out.
        alerts=tuple(store.alerts.of_run(view.id)) or None,
        background=background,
        links=links(background),
        heap=heap_rows(view, store.history.pasts_of_run(view.id)) if "heap" in view.fingerprint else (),
        graphs=shown_graphs(background.artifacts, artifacts),
        places=shown_places(background.artifacts, artifacts),
    )


def exit_code_of(view: RunView) -> int:
    """Return the exit code of `farm run` for a run: 0, 1 (a job failed), 4 (infrastructure), 5 (all skipped)."""
    from farm.report.model.summary import Outcome, count_outcomes

    counts = count_outcomes(view)
    if counts[Outcome.FAILED]:
        return 1
    if counts[Outcome.INFRA] or counts[Outcome.NOT_RUN]:
        return ExitCode.INFRA
    return ExitCode.NOTHING if counts[Outcome.SKIPPED] == len(view.jobs) > 0 else 0
