"""Throw-away PostgreSQL clusters, where the server is installed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import chaos_store
import pytest

# No test has a machine that fails: databases are made with half the writes, and the server does nothing by itself.
_LIGHT = ["full_page_writes=off", "wal_level=minimal", "max_wal_senders=0", "autovacuum=off", "checkpoint_timeout=1h"]


def server_binaries() -> Path:
    """Return the folder of initdb and pg_ctl; skips the test where they, or the driver, are not installed."""
    binaries = chaos_store.server_binaries()
    if isinstance(binaries, str):
        pytest.skip(f"no PostgreSQL server here: {binaries}")
    return binaries


@contextmanager
def running_cluster(*settings: str, hba: str = "", files: Sequence[Path] = ()) -> Iterator[str]:
    """Yield the folder of the socket of a running cluster, whose superuser `farm` needs no password there.

    `settings`, `hba` and `files` are passed to `chaos_store.Cluster`.
    """
    server_binaries()
    with chaos_store.postgres_cluster(*_LIGHT, *settings, hba=hba, files=files) as cluster:
        assert isinstance(cluster, chaos_store.Cluster)
        yield str(cluster.folder)
