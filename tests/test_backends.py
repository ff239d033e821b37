"""A backend is one descriptor and one line: the recipe of docs/developers/recipes.md, followed literally."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest
from recipe import ROOT, FarmCopy, recipe_code

from farm.base.backends.registry import BACKENDS
from farm.suites.options import parse_options

# Modules that name one backend, by their file's name, and the reason.
NAMES_ONE = {
    "templates.py": "an example of a night for a template",
    "simulator.py": "the simulator of this machine is HTP's",
    "maven.py": "files that every archive of QNN has",
    "backend_suite.py": "ExecuTorch's names of its backends",
    "program_fit.py": "VTCM is memory of HTP",
    "demo.py": "targets of demo data",
    "targets.py": "native_runner/ builds the bridge to HTP's simulator",
    "optrace.py": "QNN's tool for optrace is HTP's",
    "known_troubles.py": "lines that QNN writes",
}
_TITLES = "|".join(name.title() for name in BACKENDS)
# Files of QNN and names of ExecuTorch that belong to one backend.
OF_ONE = re.compile(rf"libQnn({_TITLES})|^k?({_TITLES})Backend$|^generate_({'|'.join(BACKENDS)})_compiler_spec$")


def names(tree: ast.AST) -> set[str]:
    """Return strings other than docstrings, attributes and imported names."""
    output = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in output:
            found.add(node.value)
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module or "", *(alias.name for alias in node.names)}
    return found


def test_descriptors_alone_name_a_backend() -> None:
    own = {*BACKENDS, *(f"farm.base.backends.{name}" for name in BACKENDS)}
    named = {}
    for path in sorted((ROOT / "farm").rglob("*.py")):
        if path.parent.name != "backends" and path.name not in NAMES_ONE:
            found = names(ast.parse(path.read_text()))
            if backends := sorted(name for name in found if name in own or OF_ONE.search(name)):
                named[str(path.relative_to(ROOT))] = backends
    assert named == {}


def test_a_descriptor_is_complete() -> None:
    for name, backend in BACKENDS.items():
        assert backend.name == name
        assert backend.health_check_precision in backend.precisions
        assert backend.on_cpu == (backend.qnn_type is None)
        assert parse_options([], name) == ((),)


@pytest.fixture(scope="module")
def farm(tmp_path_factory: pytest.TempPathFactory, farm_cache: Path) -> FarmCopy:
    copy = FarmCopy.make(tmp_path_factory.mktemp("recipe"), farm_cache)
    (code,) = recipe_code("developers/recipes.md", "Adding a backend")
    (copy.folder / "farm" / "base" / "backends" / "cpu_stub.py").write_text(code, encoding="utf-8")
    copy.insert("farm/base/backends/registry.py", '    "xnnpack",\n', '    "cpu_stub",\n')
    return copy


@pytest.mark.whole
def test_a_new_backend_is_compiled_and_run(farm: FarmCopy) -> None:
    ran = farm.farm(
        *("run", "--soc", "SM8650", "--suite", "smoke", "--backend", "cpu_stub", "--virtual", "1"),
        *("-k", "conv2d", "--option", "effort=low,high", "--json"),
    )
    assert ran.returncode == 0, ran.stderr
    attempts = {job["id"]: job["attempts"] for job in json.loads(ran.stdout)["jobs"]}
    names = [f"smoke/conv2d[SM8650-cpu_stub-fp32-effort={effort}]" for effort in ("high", "low")]
    assert sorted(attempts) == names
    assert all(one["verdict"] == "passed" for found in attempts.values() for one in found)
    keys = {one["bundle_key"] for found in attempts.values() for one in found}
    assert len(keys) == 2


@pytest.mark.whole
def test_it_is_known_wherever_backends_are(farm: FarmCopy) -> None:
    assert "cpu_stub" in farm.farm("devices", "socs", "--json").stdout
    assert "cpu_stub" in farm.farm("run", "--help").stdout
    offers = json.loads(farm.farm("setup", "runtime", "list", "--backend", "cpu_stub", "--json").stdout)["runtimes"]
    assert {offer["target"] for offer in offers} == {"linux-x86_64", "linux-aarch64", "android-arm64"}
    refused = farm.farm(
        "run", "--soc", "SM8650", "--suite", "smoke", "--backend", "cpu_stub", "--option", "use_dlbc=true"
    )
    assert refused.returncode == 2
    assert "option use_dlbc is for htp, not for the cpu_stub backend" in refused.stderr
