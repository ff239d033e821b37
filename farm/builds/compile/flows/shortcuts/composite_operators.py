"""Fewer scans of torch's dispatcher. Imports torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

from torch._C import DispatchKey, _dispatch_get_registrations_for_dispatch_key
from torch._export import utils
from torch._ops import OperatorBase
from torch._subclasses import fake_impls
from torch.export import decomp_utils, exported_program

from farm.builds.compile.flows.shortcuts.tried import replaced

_COMPOSITE = "CompositeImplicitAutograd"
_LOOK, _LIST = "_materialize_cpp_cia_ops", "_collect_all_valid_cia_ops"
_OVERRIDE, _RULES = "_override_composite_implicit_decomp", "op_implementations_dict"


@contextmanager
def single_scan_per_list() -> Iterator[None]:
    """Let torch list all composite operators once a compilation, with one scan of its dispatcher.

    A compilation makes six such lists. Scans of all registrations for each of 41 namespaces took a third of the time of
    compiling an operator, and a list still takes 1 %. A list is made again after a registration in C++ or in Python. A
    torch with other functions stays unchanged.
    """
    look: Any = getattr(utils, _LOOK, None)
    implement = OperatorBase.py_impl
    made: list[tuple[Any, Any]] = []

    def implement_and_forget(operator: Any, key: Any) -> Any:
        made.clear()
        return implement(operator, key)

    def after_scan(make: Callable[[], Any]) -> Callable[[], Any]:
        def make_after_scan() -> Any:
            registered = _dispatch_get_registrations_for_dispatch_key(_COMPOSITE)
            if not made or made[0][0] != registered:
                look()
                with patch.object(utils, _LOOK, lambda: None):
                    made[:] = [(registered, make())]
            return made[0][1]

        return make_after_scan

    # Both modules import the function by name.
    with (
        patch.object(OperatorBase, "py_impl", implement_and_forget),
        replaced(look and decomp_utils, _LIST, after_scan),
        replaced(look and exported_program, _LIST, after_scan),
    ):
        yield


class _Kernels(NamedTuple):
    """Kernels of an operator around an override."""

    before: dict[Any, Any]
    during: dict[Any, Any]
    rule: Any
    """Implementation for fake tensors, which torch removes afterwards."""


_kernels: dict[Any, _Kernels] = {}
"""Kernels by operator, of all overrides of this process. The key CompositeImplicitAutograd is the override itself."""


def cached_kernels() -> AbstractContextManager[None]:
    """Let torch make the kernels of overridden composite operators once a process, not three times a compilation.

    An override sets 25 kernels of each of 250 operators, a fifth of the time of compiling an operator. torch overrides
    operators with changed kernels itself. A torch with other functions stays unchanged.
    """
    rules: Any = getattr(fake_impls, _RULES, None)

    def with_cache(override: Callable[..., AbstractContextManager[Any]]) -> Callable[..., AbstractContextManager[None]]:
        @contextmanager
        def override_cached(composites: Mapping[Any, Any]) -> Iterator[None]:
            known = {name: _kernels[name] for name in composites if _is_known(name, rules)}
            new = {name: implementation for name, implementation in composites.items() if name not in known}
            before = {name: (dict(name.py_kernels), name in rules) for name in new}
            with override(new):
                for name, (kernels, has_rule) in before.items():
                    if not has_rule and name in rules:
                        _kernels[name] = _Kernels(kernels, dict(name.py_kernels), rules[name])
                try:
                    for name, one in known.items():
                        _set_kernels(name, {**one.during, DispatchKey.CompositeImplicitAutograd: composites[name]})
                        rules[name] = one.rule
                    yield
                finally:
                    for name, one in known.items():
                        _set_kernels(name, one.before)
                        rules.pop(name, None)

        return override_cached

    return replaced(exported_program if isinstance(rules, dict) else None, _OVERRIDE, with_cache)


def _is_known(operator: Any, rules: Mapping[Any, Callable[..., Any]]) -> bool:
    kept = _kernels.get(operator)
    return kept is not None and operator not in rules and operator.py_kernels == kept.before


def _set_kernels(operator: Any, kernels: Mapping[Any, Any]) -> None:
    operator.py_kernels.clear()
    operator.py_kernels.update(kernels)
    operator._dispatch_cache.clear()  # noqa: SLF001 - as torch does in the same place
