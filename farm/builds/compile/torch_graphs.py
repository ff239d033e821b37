"""Release of programs that torch and ExecuTorch keep in a process after their compile. Torch-free."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from operator import attrgetter

from farm.base.machine import resident_bytes

# Caches with whole programs in their keys: module, and function of it that empties the cache. torch keeps results of
# operations on fake tensors, and the call of a delegate has its lowered module as an argument; ExecuTorch keeps its
# last 128 comparisons of two nodes. torch 2.13, ExecuTorch 1.5.1.
_CACHES = (
    ("torch._subclasses.fake_tensor", "FakeTensorMode.cache_clear"),
    ("executorch.exir.backend.utils", "is_same_node.cache_clear"),
)
# A collection takes up to a second with the objects of some models.
_GROWTH_BYTES = 256 << 20


class TorchGraphs:
    """Graphs that this process has compiled."""

    def __init__(self) -> None:
        self._settled_bytes = resident_bytes(os.getpid())

    def release(self) -> None:
        """Free the graphs of earlier compiles, if the process has grown by 256 MiB since the last time."""
        if resident_bytes(os.getpid()) <= self._settled_bytes + _GROWTH_BYTES:
            return
        for name, function in _CACHES:
            # Another release may lack the cache.
            with contextlib.suppress(AttributeError):
                attrgetter(function)(sys.modules.get(name))()
        # Python counts objects, and a large model in cycles is few of them.
        gc.collect()
        self._settled_bytes = resident_bytes(os.getpid())
