"""Plain data of one run, which HTML, JSON, JUnit and the web page all render."""

from __future__ import annotations

import msgspec

from farm.results.attempt import Attempt


class DeviceView(msgspec.Struct, frozen=True):
    """One device that took part."""

    serial: str
    soc: str
    kind: str
    """`virtual` or `hardware`."""
    build: str
    """Fingerprint of the device's system."""
    jobs: int = 0
    busy_seconds: float = 0.0


class JobView(msgspec.Struct, frozen=True):
    """One job of the run and all its attempts, oldest first; no attempt yet is an empty tuple."""

    id: str
    suite: str
    case: str
    soc: str
    backend: str
    precision: str
    attempts: tuple[Attempt, ...]
    build_seconds: float = 0.0
    cached: bool = False
    """The bundle was there already."""
    fallback_ops: dict[str, int] = {}
    case_module: str = ""
    options: dict[str, str] = {}
    """Options of the backend, name to value."""


class RunView(msgspec.Struct, frozen=True):
    """One run."""

    id: str
    command: str
    started_ms: int
    finished_ms: int | None
    """None while it runs, or when it was killed."""
    exit_code: int | None
    user: str
    host: str
    fingerprint: dict[str, str]
    """Everything the numbers depend on, name to value: executorch, qnn, runner hash, device kind, ..."""
    devices: tuple[DeviceView, ...]
    jobs: tuple[JobView, ...]
    schema: int = 1
    """Version of this layout, for readers of the JSON."""
    priority: str = "person"
    """How urgent it was: `person` or `nightly`."""
