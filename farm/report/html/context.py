"""Facts that a report shows beside the run itself; each of them may be missing."""

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
    """Facts from the store and its files beside the run."""

    status: RunStatus | None = None
    """Earlier results of each job; None: unknown, and no failure is called new."""
    alerts: tuple[AlertRecord, ...] | None = None
    """Suspected and confirmed regressions of this run; None: the numbers have not been compared yet."""
    background: Background = Background()
    links: dict[str, str] = {}
    """Links from the page to the artifacts on this machine, by hash."""
    heap: tuple[HeapRow, ...] = ()
    """DSP heap of the jobs of a run with --heap, and of their earlier runs."""
    graphs: dict[str, str] = {}
    """Graph of the layers as the address of an image, by job id."""
    places: dict[str, dict[str, LayerPlace]] = {}
    """Places of layers in the model and at run time by layer name, by job id."""


class File(msgspec.Struct, frozen=True):
    """Artifact of a job and its link."""

    artifact: JobFile
    link: str
    """Link relative to the page; empty when the file is not on this machine."""


def files_of(context: ReportContext, job_id: str) -> tuple[File, ...]:
    """Return the artifacts of a job."""
    records = context.background.artifacts.get(job_id, ())
    return tuple(File(record, context.links.get(record.sha256, "")) for record in records)


def artifact_links(background: Background, store: ArtifactStore, page: Path) -> dict[str, str]:
    """Return links from a page at `page` to artifacts on this machine; fetches artifacts from other hosts first."""
    found = {}
    everything = [record for records in background.artifacts.values() for record in records]
    store.bring(everything)
    for sha256 in {record.sha256 for record in everything}:
        if path := store.find(sha256):
            found[sha256] = quote(os.path.relpath(path.absolute(), page.parent.absolute()))
    return found
