"""A store behind PgBouncer in transaction mode is refused at the first connection."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from waiting import Started, free_port, listens, until

from farm.base.errors import ExitCode, NoStoreError
from farm.store.store import open_store

PROGRAM = shutil.which("pgbouncer", path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin")
SETTINGS = {"plain": "", "options dropped": "ignore_startup_parameters = options,extra_float_digits\n"}

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="pgbouncer is not installed")


@pytest.fixture(params=SETTINGS)
def pooled(
    request: pytest.FixtureRequest, new_store: Callable[[str], str], postgresql_cluster: str, tmp_path: Path
) -> Iterator[str]:
    """Address of a store behind a pooler in transaction mode."""
    name = urlsplit(new_store("pooled")).path[1:]
    port = free_port()
    (tmp_path / "pgbouncer.ini").write_text(
        f"[databases]\n* = host={postgresql_cluster} user=farm\n[pgbouncer]\npool_mode = transaction\n"
        f"listen_addr = 127.0.0.1\nlisten_port = {port}\nunix_socket_dir =\nauth_type = any\n{SETTINGS[request.param]}"
    )
    for folder in (tmp_path, *tmp_path.parents[:3]):
        folder.chmod(folder.stat().st_mode | 0o055)
    # pgbouncer refuses to run as root.
    as_user = ["-u", "postgres"] if os.geteuid() == 0 else []
    assert PROGRAM is not None
    with Started(
        [PROGRAM, *as_user, str(tmp_path / "pgbouncer.ini")], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        until(lambda: process.poll() is not None or listens(port))
        assert process.poll() is None
        yield f"postgresql://farm@127.0.0.1:{port}/{name}"
        process.terminate()


def test_a_pooler_in_transaction_mode_is_refused_before_anything_is_written(pooled: str) -> None:
    for readonly in (False, True):
        with pytest.raises(NoStoreError, match="PgBouncer answers there.*name the address") as caught:
            open_store(pooled, readonly=readonly)
        assert caught.value.exit_code == ExitCode.NO_STORE
