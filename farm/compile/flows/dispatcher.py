"""torch's dispatcher, looked through less often. Imports torch."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch._export import utils
from torch.export import decomp_utils, exported_program

if TYPE_CHECKING:
    from collections.abc import Iterator

_LOOK, _LIST = "_materialize_cpp_cia_ops", "_collect_all_valid_cia_ops"


@contextmanager
def one_look_a_list() -> Iterator[None]:
    """Let torch look through its dispatcher once for a list of all composite operators, not once for each namespace.

    An export asks for five such lists, and each time all registrations were gone through for 41 namespaces: a third of
    what compiling an operator took. As every list still begins with a look, what has been registered since is in it. A
    torch that does this in another way is left alone.
    """
    kept: list[tuple[Any, str, Any]] = []
    look, make = getattr(utils, _LOOK, None), getattr(utils, _LIST, None)
    if callable(look) and callable(make):

        def make_after_one_look() -> Any:
            look()
            setattr(utils, _LOOK, _nothing)
            try:
                return make()
            finally:
                setattr(utils, _LOOK, look)

        # Both have it by name.
        for module in (decomp_utils, exported_program):
            if getattr(module, _LIST, None) is make:
                kept.append((module, _LIST, make))
                setattr(module, _LIST, make_after_one_look)
    try:
        yield
    finally:
        for module, name, original in kept:
            setattr(module, name, original)


def _nothing() -> None:
    pass
