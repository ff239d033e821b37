"""`bundle.pte`: the file of a ready program decides the executed method and its features."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from farm.builds.bundles import ready
from farm.builds.program.pte import Program, read_pte
from farm.devices.execution.workspace import program_flags
from farm.dispatch.pytest_plugin.runner import Bundles


@pytest.fixture
def bundle(models: Path, tmp_path: Path) -> Bundles:
    plan = SimpleNamespace(suite_folders=(), backend="htp", soc="SM8650", cache_root=tmp_path)
    worker: Any = SimpleNamespace(plan=plan, scratch=tmp_path / "scratch", test_folder=models)
    return Bundles(worker)


def test_forward_is_executed_also_where_it_is_not_the_first_method(
    bundle: Bundles, monkeypatch: pytest.MonkeyPatch
) -> None:
    def with_encode(path: Path) -> Program:
        program = read_pte(path)
        [forward] = program.methods
        encode = msgspec.structs.replace(forward, name="encode")
        return msgspec.structs.replace(program, methods=(encode, msgspec.structs.replace(forward, index=1)))

    monkeypatch.setattr(ready, "read_pte", with_encode)
    manifest = bundle.pte("conv.pte").bundle.manifest
    assert manifest.method == "forward"
    assert program_flags(manifest, "simulator") == {"method_index": "1"}


def test_it_is_executed_with_the_features_that_it_was_compiled_with(bundle: Bundles) -> None:
    shared, dump = (bundle.pte(f"conv_{name}.pte").bundle.manifest for name in ("shared", "dump"))
    assert program_flags(shared, "android") == {"shared_buffer": "true"}
    assert program_flags(shared, "simulator") == {}, "ordinary memory stands in for what a DSP shares"
    assert dump.features == ("dump_intermediate_outputs",)
