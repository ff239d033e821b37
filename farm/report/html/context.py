"""What a report shows beside the run itself; all of it may be missing."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING
from urllib.parse import quote

import msgspec

from farm.report.formats.layers_csv import LayerPlace
from farm.report.model.heap import HeapRow
from farm.store.records import AlertRecord, Background, JobFile, RunStatus

if TYPE_CHECKING:
    from pathlib import Path

    from farm.store.artifacts import ArtifactStore


class ReportContext(msgspec.Struct, frozen=True):
    """What the store knows beyond the run."""

    status: RunStatus | None = None
    """How each job did before; None: not known, and no failure is called new."""
    alerts: tuple[AlertRecord, ...] | None = None
    """Candidates and regressions of this run; None: nobody has looked."""
    background: Background = Background()
    links: dict[str, str] = {}
    """Where the artifacts that are here lie, as the page links to them, by hash."""
    heap: tuple[HeapRow, ...] = ()
    """DSP heap of the jobs of a run with --heap, and of their earlier runs."""
    graphs: dict[str, str] = {}
    """Addresses of images, by job id: its layers as a graph."""
    places: dict[str, dict[str, LayerPlace]] = {}
    """Layers in the model and at run time by name, by job id."""


class File(msgspec.Struct, frozen=True):
    """One artifact of a job."""

    artifact: JobFile
    link: str
    """Relative to the page; empty where the file is not here."""


def files_of(context: ReportContext, job_id: str) -> tuple[File, ...]:
    """Return the artifacts of a job."""
    records = context.background.artifacts.get(job_id, ())
    return tuple(File(record, context.links.get(record.sha256, "")) for record in records)


def artifact_links(background: Background, store: ArtifactStore, page: Path) -> dict[str, str]:
    """Return how a page at `page` links to the artifacts that are on this machine, or come here from others."""
    found = {}
    everything = [record for records in background.artifacts.values() for record in records]
    store.bring(everything)
    for sha256 in {record.sha256 for record in everything}:
        if path := store.find(sha256):
            found[sha256] = quote(os.path.relpath(path.absolute(), page.parent.absolute()))
    return found
