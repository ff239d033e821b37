"""Export of artifacts as files in a folder."""

from __future__ import annotations

import re
import shutil
from typing import TYPE_CHECKING

from farm.base.atomic import replacing
from farm.base.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from farm.store.artifacts import ArtifactStore
    from farm.store.records import ArtifactRecord

_NAMES = {"etdump": "etdump.etdp"}
_NAME_LIMIT = 120


def file_names(artifacts: Iterable[ArtifactRecord]) -> dict[str, ArtifactRecord]:
    """Return artifacts by unique file names: NAME of a kind `optrace:NAME`, without characters that lead elsewhere."""
    found: dict[str, ArtifactRecord] = {}
    for artifact in artifacts:
        prefix, _, named = artifact.kind.partition(":")
        wanted = re.sub(r"[^\w.+=-]", "_", named or _NAMES.get(prefix, prefix), flags=re.ASCII)
        wanted = wanted.lstrip(".")[:_NAME_LIMIT] or "file"
        name, number = wanted, 1
        while name in found:
            number += 1
            name = f"{number}-{wanted}"
        found[name] = artifact
    return found


def export(store: ArtifactStore, artifacts: Iterable[ArtifactRecord], folder: Path) -> list[Path]:
    """Write artifacts into `folder`, made if missing, and return their paths; a file is there whole or not at all.

    Raises UsageError for an existing file or a folder without write access; StoreError for an artifact that is not in
    the store.
    """
    wanted = {folder / name: artifact for name, artifact in file_names(artifacts).items()}
    for path in wanted:
        if path.exists() or path.is_symlink():
            raise UsageError(f"{path} is there already: name another folder")
    written = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, artifact in wanted.items():
            with store.open(artifact.sha256) as source, replacing(path, durable=True) as target:
                shutil.copyfileobj(source, target)
            written.append(path)
    except OSError as error:
        raise UsageError(f"{error.filename or folder}: cannot be written: {error.strerror}") from None
    return written
