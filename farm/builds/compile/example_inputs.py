"""Program of the compiler's Python: writes the example inputs of a user's module as `.npy` files.

    python -m farm.builds.compile.example_inputs FOLDER MODULE CLASS OUTPUT

The class, or else its module, has `example_inputs` or `get_example_inputs` (as ExecuTorch's EagerModelBase): tensors, a
method without arguments, or a function. A problem is one line on standard error, with exit code 2.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from farm.builds.compile.flows.factory import import_name

if TYPE_CHECKING:
    from collections.abc import Sequence

NAMES = ("example_inputs", "get_example_inputs")


def main(words: Sequence[str]) -> int:
    """Write `0.npy`, `1.npy` and so on, and return the exit code."""
    folder, module, name, output = words
    try:
        tensors = _tensors(folder, module, name)
    except Exception as error:  # noqa: BLE001 - the user's code may raise any exception
        sys.stderr.write(f"{module}.py: {type(error).__name__}: {error}\n")
        return 2
    for index, tensor in enumerate(tensors):
        np.save(Path(output, f"{index}.npy"), tensor.detach().cpu().contiguous().numpy(), allow_pickle=False)
    return 0


def _tensors(folder: str, module: str, name: str) -> Sequence[torch.Tensor]:
    loaded = importlib.import_module(import_name(f".{module}", folder))
    cls = getattr(loaded, name, None)
    if cls is None:
        raise ValueError(f"has no {name}")
    found = next(
        (getattr(place, one) for place in (cls, loaded) for one in NAMES if getattr(place, one, None) is not None), None
    )
    if found is None:
        raise ValueError(f"neither {name} nor {module}.py has {NAMES[0]}: add it, or name files with --inputs")
    return _checked(_called(found, cls))


def _called(found: Any, cls: Any) -> Any:
    if not callable(found):
        return found
    try:
        return found()
    except TypeError:
        # A method of an instance.
        return found(cls())


def _checked(found: Any) -> Sequence[torch.Tensor]:
    tensors = (found,) if isinstance(found, torch.Tensor) else tuple(found)
    if not tensors or not all(isinstance(one, torch.Tensor) for one in tensors):
        raise ValueError(f"{NAMES[0]} holds {type(found).__name__}, expected a tensor or a tuple of tensors")
    return tensors


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
