"""All shortcuts of jobs. Imports torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from farm.builds.compile.flows.shortcuts.bn_patterns import bn_patterns
from farm.builds.compile.flows.shortcuts.composite_operators import cached_kernels, single_scan_per_list
from farm.builds.compile.flows.shortcuts.executorch_reads import options_read_once, vendor_from_kernel
from farm.builds.compile.flows.shortcuts.flat_graphs import flat_graphs
from farm.builds.compile.flows.shortcuts.graph_code import late_code, shared_origins
from farm.builds.compile.flows.shortcuts.settled_programs import settled_programs
from farm.builds.compile.flows.shortcuts.shared_exports import shared_exports

SHORTCUTS: tuple[Callable[[], AbstractContextManager[Any]], ...] = (
    single_scan_per_list,
    cached_kernels,
    shared_origins,
    late_code,
    options_read_once,
    vendor_from_kernel,
    settled_programs,
    flat_graphs,
    bn_patterns,
    shared_exports,
)
"""Context managers in the order of their entry."""


@contextmanager
def less_work() -> Iterator[None]:
    """Take all shortcuts while the body exports and lowers."""
    with ExitStack() as stack:
        for shortcut in SHORTCUTS:
            stack.enter_context(shortcut())
        yield
