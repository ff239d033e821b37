"""Complete record of runs as lines of JSON, written and read by `farm.store.transfer`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from farm.report.formats import export_format

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from farm.store.store import Store


@export_format("jsonl", suffix="jsonl", about="everything, for 'farm data import' and for programs", several_runs=True)
def lines(store: Store, run_ids: Sequence[str]) -> Iterable[bytes]:
    """Return the runs as lines of JSON."""
    return store.transfer.export(run_ids)
