"""What a bundle keeps for the SDK's timeline tools: the schematic of each graph, and the graph. Imports executorch."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from executorch.backends.qualcomm.utils.utils import dump_context_from_pte

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def schematics_in(folder: Path) -> Iterator[None]:
    """Let QNN, which writes a schematic into the current folder, write it into `folder`, which is made."""
    folder.mkdir()
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def keep_graphs(model: Path, folder: Path) -> None:
    """Leave the context binaries of a `.pte` in `folder`, as QNN's own tools take them."""
    for name in dump_context_from_pte(str(model)):
        # It leaves them beside the model.
        shutil.move(name, folder / Path(name).name)
