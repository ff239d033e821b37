"""Record of the licences that a user has accepted, so that each is asked for once."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import msgspec

from farm.base.atomic import replacing
from farm.base.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from farm.base.config.settings import Config


class Consent(msgspec.Struct, frozen=True):
    """Consent of a user to a licence."""

    accepted_ms: int
    for_files: str
    """Address of the files that the user was shown."""


def is_accepted(config: Config, licence: str) -> bool:
    """Return whether the user has accepted a licence before."""
    return licence in _read(_file(config))


def record_consent(config: Config, licence: str, url: str) -> None:
    """Record the user's consent. Raises UsageError for an unwritable state folder."""
    path = _file(config)
    consents = {**_read(path), licence: Consent(int(time.time() * 1000), url)}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            file.write(msgspec.json.format(msgspec.json.encode(consents)))
    except OSError as error:
        raise UsageError(f"cannot record the consent in {path}: {error.strerror}: make it writable for you") from None


def _file(config: Config) -> Path:
    return config.state_dir / "licences.json"


def _read(path: Path) -> dict[str, Consent]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Consent])
    except (OSError, msgspec.DecodeError):
        return {}
