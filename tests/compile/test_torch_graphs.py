"""Memory of a process that compiles one program after another."""

from __future__ import annotations

import gc
import sys
import weakref
from types import SimpleNamespace

import pytest

from farm.builds.compile import torch_graphs
from farm.builds.compile.torch_graphs import TorchGraphs

MIB = 1 << 20


class StubProgram:
    """Program that refers to itself, as graphs do."""

    def __init__(self) -> None:
        self.own = self


@pytest.fixture
def size(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the resident memory of this process, for the test to set."""
    found = [400 * MIB]
    monkeypatch.setattr(torch_graphs, "resident_bytes", lambda _: found[0])
    return found


def test_programs_are_freed_whenever_the_process_has_grown(size: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    fakes: dict[int, StubProgram] = {}
    nodes: dict[int, StubProgram] = {}
    fake_tensors = SimpleNamespace(FakeTensorMode=SimpleNamespace(cache_clear=fakes.clear))
    monkeypatch.setitem(sys.modules, "torch._subclasses.fake_tensor", fake_tensors)
    utilities = SimpleNamespace(is_same_node=SimpleNamespace(cache_clear=nodes.clear))
    monkeypatch.setitem(sys.modules, "executorch.exir.backend.utils", utilities)
    graphs = TorchGraphs()
    freed = []
    for now in (500, 700, 800, 1000):
        program = StubProgram()
        fakes[now] = nodes[now] = program
        kept = weakref.ref(program)
        del program
        gc.disable()
        size[0] = now * MIB
        graphs.release()
        gc.enable()
        freed.append(kept() is None)
    assert freed == [False, True, False, True]


def test_another_release_may_lack_the_caches(size: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch._subclasses.fake_tensor", SimpleNamespace())
    monkeypatch.delitem(sys.modules, "executorch.exir.backend.utils", raising=False)
    graphs, program = TorchGraphs(), StubProgram()
    kept = weakref.ref(program)
    del program
    size[0] = 2000 * MIB
    graphs.release()
    assert kept() is None
