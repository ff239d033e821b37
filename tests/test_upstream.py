"""Each part of the installed ExecuTorch for Qualcomm has a row in docs/evidence/upstream.md: additions fail here.

The tests read the wheel's files and import none of them.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from executorch_checkout import installed

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs/evidence/upstream.md"
WHEEL = installed()
QUALCOMM = WHEEL / "backends/qualcomm"


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_bytes(), str(path))


def classes(path: Path) -> dict[str, list[str]]:
    """Return the attributes that each class of a module declares."""
    found: dict[str, list[str]] = {}
    for node in tree(path).body:
        if isinstance(node, ast.ClassDef):
            single = [one.target for one in node.body if isinstance(one, ast.AnnAssign)]
            targets = [*single, *(target for one in node.body if isinstance(one, ast.Assign) for target in one.targets)]
            found[node.name] = [target.id for target in targets if isinstance(target, ast.Name)]
    return found


def schema(*names: str) -> set[str]:
    return {one for name in names for one in classes(QUALCOMM / "serialization/qc_schema.py")[name]}


def values() -> set[str]:
    """Return the classes of values: all of the schema that belong to no other section."""
    plain = {"BinaryInfo", "HtpInfo", "LpaiInfo", "SocInfo", "QcomChipset", "HtpArch", "LpaiHardwareVersion"}
    other = {"QnnExecuTorchBackendType", "QnnExecuTorchOpPackageInfo"}
    found = classes(QUALCOMM / "serialization/qc_schema.py").keys() - plain - other
    return {name for name in found if not name.endswith("Options")}


def options() -> set[str]:
    """Return the settings of a compile: parameters of the functions, and fields of their results."""
    found = set()
    for node in tree(QUALCOMM / "utils/utils.py").body:
        if isinstance(node, ast.FunctionDef) and (match := re.fullmatch(r"generate_(\w+)_compiler_spec", node.name)):
            owner = match[1].removesuffix("_executorch")
            found |= {f"{owner}.{one.arg}" for one in node.args.args}
    for name, fields in classes(QUALCOMM / "serialization/qc_schema.py").items():
        if match := re.fullmatch(r"QnnExecuTorch(\w*?)(?:Backend)?Options", name):
            found |= {f"{match[1].lower() or 'qnn'}.{field}" for field in fields}
        elif name == "QnnExecuTorchOpPackageInfo":
            found |= {f"oppackage.{field}" for field in fields}
    return found


def runner_flags() -> set[str]:
    module = tree(QUALCOMM / "export_utils.py")
    cls = next(node for node in module.body if isinstance(node, ast.ClassDef) and node.name == "SimpleADB")
    return set(re.findall(r"--[a-z][a-z0-9_]+", ast.unparse(cls)))


def harness() -> set[str]:
    """Return the settings of upstream's tests and scripts: fields of QnnConfig, and arguments."""
    module = QUALCOMM / "export_utils.py"
    declared = {
        str(node.args[0].value)
        for node in ast.walk(tree(module))
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument"
        if node.args and isinstance(node.args[0], ast.Constant)
    }
    return {f"--{field}" for field in classes(module)["QnnConfig"]} | declared


def runtime_options() -> set[str]:
    library = (WHEEL / "lib/libexecutorch_backend_qnn.so").read_bytes()
    return {key.decode() for key in re.findall(rb"qnn_runtime_[a-z_]+", library)}


def rework() -> set[str]:
    """Return the files of the newer tests that have one, and the tested parts, by class."""
    folder = QUALCOMM / "tests/rework"
    tests = {
        str(path.relative_to(folder))
        for path in folder.rglob("test.py")
        if any(isinstance(node, ast.FunctionDef) for node in tree(path).body)
    }
    bodies = {
        f"{name}.{node.name}"
        for name in ("feature", "utils")
        for node in tree(folder / f"src/{name}.py").body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    }
    return tests | bodies


def example_tests() -> set[str]:
    """Return the tests of example scripts: each where it is about language models or tools, else their class."""
    found = set()
    for node in tree(QUALCOMM / "tests/test_qnn_delegate.py").body:
        if not isinstance(node, ast.ClassDef) or not (match := re.fullmatch(r"Test(?:Example)?(\w*Script)", node.name)):
            continue
        if match[1] in {"OssScript", "Script", "QaihubScript"}:
            found.add(match[1])
        else:
            tests = (one.name for one in node.body if isinstance(one, ast.FunctionDef))
            found |= {f"{match[1]}.{name}" for name in tests if name.startswith("test_")}
    return found


SECTIONS: dict[str, Callable[[], set[str]]] = {
    "Backends": lambda: schema("QnnExecuTorchBackendType"),
    "Precisions": lambda: set(classes(QUALCOMM / "quantizer/quantizer.py")["QuantDtype"]),
    "SoCs": lambda: schema("QcomChipset", "HtpArch", "LpaiHardwareVersion"),
    "Options of the compiler": options,
    "Values of options": lambda: schema(*values()),
    "Options at run time": runtime_options,
    "Flags of the runner": runner_flags,
    "Settings of the harness": harness,
    "The newer tests": rework,
    "Tests of example scripts": example_tests,
    "Modules": lambda: {
        path.name
        for path in QUALCOMM.iterdir()
        if (path.is_dir() or path.suffix == ".py") and not path.name.startswith("__")
    },
}


def section(title: str) -> str:
    found = re.search(rf"^### {re.escape(title)}\n(.*?)(?=^##|\Z)", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert found, f"docs/evidence/upstream.md has no section '{title}'"
    return found[1]


def rows(text: str) -> list[str]:
    """Return the names in the first column of a section's table."""
    first = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    return [name for cell in first for name in re.findall(r"`([^`]+)`", cell)]


@pytest.mark.parametrize("title", SECTIONS)
def test_everything_the_wheel_has_is_a_row(title: str) -> None:
    answer, has = rows(section(title)), SECTIONS[title]()
    assert len(answer) == len(set(answer)), f"{title}: a name has two rows"
    assert not has - set(answer), f"ExecuTorch has news, docs/evidence/upstream.md '{title}' has no row for them"
    assert not set(answer) - has, f"docs/evidence/upstream.md '{title}' has rows that ExecuTorch has not any more"


# Texts of rows without anything of farm's to test.
_NOTHING = re.compile(
    r"not here|not used|not needed|no\b|upstream's|ExecuTorch's defaults?\b|"
    r".*(?:not tried|not compiled here|not to be had|not supported|not the decoders)"
)


def test_a_row_names_a_test_unless_farm_has_nothing_of_it() -> None:
    table = [re.split(r"(?<!\\)\|", line)[1:-1] for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    answer = [[cell.strip() for cell in row] for row in table if len(row) == 3 and row[2].strip() != "test"]
    assert len(answer) > 100
    assert [row[0] for row in answer if "tests/" not in row[2] and not _NOTHING.match(row[1])] == []


def test_places_and_tests_that_the_page_names_are_there() -> None:
    text = PAGE.read_text()
    places = set(re.findall(r"`((?:farm|tests|docs|native_runner|test_suites|bench)/[\w./*-]*)", text))
    assert not [place for place in places if not list(ROOT.glob(place))]
    for path, name in set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text)):
        assert re.search(rf"^(?:async )?def {name}\(", (ROOT / path).read_text(), re.MULTILINE), f"{path}::{name}"
