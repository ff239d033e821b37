"""A folder like a Hexagon SDK whose elfsigner is the stub of the runtime tests."""

from __future__ import annotations

import shutil
from pathlib import Path

STUB = Path(__file__).parent / "runtime" / "elfsigner_stub.py"


def make_hexagon_sdk(root: Path, mode: str = "signs") -> Path:
    """Return it; `mode` is how the stub behaves."""
    folder = root / "tools" / "elfsigner"
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(STUB, folder / "elfsigner.py")
    (folder / "stub_mode").write_text(mode)
    return root


def processes(root: Path) -> list[str]:
    """Return the ids of the processes that were started with it and live."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if str(root).encode() in path.read_bytes():
                found.append(path.parent.name)
        except OSError:
            continue
    return found


def starts(root: Path) -> int:
    """Return how often the stub was started."""
    path = root / "tools" / "elfsigner" / "stub_starts"
    return len(path.read_text().splitlines()) if path.exists() else 0
