"""Device processes as forks of one process with all their imports, which take 0.2 s.

This module as a program is the server of the forks (farm.base.fork_server).
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from farm.base.fork_server import ForkServer, serve_forks, take_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    from farm.base.processes import Supervisor

SERVER_NAME, PROCESS_NAME = "farm-forks", "farm-device"
"""Names in `ps -o comm`."""

SECRETS = frozenset(
    {
        "FARM_STORE", "PGPASSWORD", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN",
        "FARM_TOKEN", "GITHUB_TOKEN", "GITLAB_TOKEN",
        "OTEL_EXPORTER_OTLP_HEADERS", "OTEL_EXPORTER_OTLP_TRACES_HEADERS",
    }
)  # fmt: skip
"""Environment variables that open the store, its files or a server: code of developers gets none of them."""


def device_forks(supervisor: Supervisor) -> ForkServer:
    """Start and return the server of device processes. Raises InfraError."""
    env = {name: value for name, value in os.environ.items() if name not in SECRETS}
    # Dozens of device processes share the processors, and no matrix here is worth threads.
    env["OPENBLAS_NUM_THREADS"] = "1"
    argv = [sys.executable, "-P", "-m", "farm.dispatch.device_forks"]
    return ForkServer(supervisor, argv, name=SERVER_NAME, env=env)


def _prepare() -> None:
    from farm.base.toml_tables import prepare_decoders
    from farm.devices.adb import transport  # noqa: F401 - imported once for all forks
    from farm.dispatch import device_process  # noqa: F401

    take_name(SERVER_NAME)
    prepare_decoders()


def _run(_words: Sequence[str]) -> int:
    from farm.dispatch.device_process import serve

    take_name(PROCESS_NAME)
    stdin, stdout = os.dup(0), os.dup(1)
    # Programs that read by mistake get no message, and output that anything prints is none.
    nowhere = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nowhere, 0)
    os.close(nowhere)
    os.dup2(2, 1)
    serve(stdin, stdout)
    return 0


if __name__ == "__main__":
    serve_forks(_prepare, _run)
