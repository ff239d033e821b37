"""A miniature of upstream's newer tests, with their mechanisms and none of their code, on two virtual devices."""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from farm_home import FarmHome

from farm.base.errors import UsageError
from farm.builds.toolchains.toolchain import Compiler
from farm.dispatch.pytest_plugin.launch import require_tree, rooted_arguments
from farm.dispatch.pytest_plugin.rework import count_report, follow_workspaces

# Other plugins of this environment take pytest longer to import than it takes to run these tests.
ALONE = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}

CONFTEST = """
from collections import defaultdict

import pytest


def pytest_addoption(parser):
    for name in ("--device", "--host", "--soc_model", "--build_folder", "--direct_build_folder", "--test_report"):
        parser.addoption(name)
    parser.addoption("--backend", default="htp")
    parser.addoption("--target", default="somewhere")


def pytest_configure(config):
    config.stash["total_test_count"] = defaultdict(int)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.when == "call":
        item.session.config.stash["total_test_count"][report.nodeid] += 1
    return report


def pytest_terminal_summary(terminalreporter, config):
    from pytest_subtests.plugin import SubTestReport

    failed = terminalreporter.stats.get("failed", []) + terminalreporter.stats.get("subtests failed", [])
    messages = [report.context.msg for report in failed if isinstance(report, SubTestReport)]
    terminalreporter.write_line(f"MINIATURE {sorted(config.stash['total_test_count'].values())} failed: {messages}")


@pytest.fixture(scope="session")
def qnn_config(request):
    return request.config.option
"""

ON_THE_DEVICE = """
import subprocess

import pytest


@pytest.mark.parametrize("kwargs", [pytest.param({"act": 8}, id="8a"), pytest.param({"act": 16}, id="16a")])
def test_runner(request, kwargs):
    config = request.getfixturevalue("qnn_config")
    assert (config.soc_model, config.backend, config.target) == ("SM8650", "htp", "aarch64-android")
    workspace = f"/data/local/tmp/miniature_{kwargs['act']}"

    def adb(*words):
        return subprocess.run(["adb", "-s", config.device, *words], capture_output=True, text=True, check=True).stdout

    adb("shell", f"mkdir -p {workspace}")
    adb("push", f"{config.build_folder}/examples/qualcomm/executor_runner/qnn_executor_runner", workspace)
    assert "executorch" in adb("shell", f"cd {workspace} && ./qnn_executor_runner --version")
"""

FEATURES = """
def test_both_ways(subtests, specs):
    for way in specs:
        with subtests.test(msg=way):
            assert way == "compile_time_option"
"""


def lay_out(folder: Path) -> Path:
    """Write the miniature into a source tree, as upstream has its own, and return its folder."""
    framework = folder / "executorch/backends/qualcomm/tests/rework"
    files = {
        "conftest.py": CONFTEST,
        "htp/conftest.py": 'import pytest\n\n\n@pytest.fixture(scope="session")\ndef specs():\n'
        '    return ["compile_time_option", "runtime_option"]\n',
        "htp/op/v68/test.py": ON_THE_DEVICE,
        "htp/feature/v68/test.py": FEATURES,
    }
    for name, text in files.items():
        (framework / name).parent.mkdir(parents=True, exist_ok=True)
        (framework / name).write_text(text)
    return framework


def test_tests_rooted_in_a_tree_are_sharded_over_devices(home: FarmHome, tmp_path: Path) -> None:
    framework = lay_out(tmp_path)
    # Settings of a project around the tree do not apply to the tree's tests.
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --no-such-option\n")

    done = home.farm(
        *("pytest", "--soc", "SM8650", "--virtual", "2", "--json", "--"),
        *("-p", "no:cacheprovider", str(framework)),
        env=ALONE,
        timeout_s=600,
    )

    assert done.returncode == 1, done.stderr[-4000:]
    attempts = {job["id"]: job["attempts"][-1] for job in json.loads(done.stdout)["jobs"]}
    assert {name: (one["verdict"], one["reason"]) for name, one in attempts.items()} == {
        "pytest/rework/htp/feature/v68/test.py::test_both_ways[SM8650-htp]": (
            "failed",
            "AssertionError: assert 'runtime_option' == 'compile_time_option' (and 1 more)",
        ),
        "pytest/rework/htp/op/v68/test.py::test_runner[8a][SM8650-htp]": ("passed", ""),
        "pytest/rework/htp/op/v68/test.py::test_runner[16a][SM8650-htp]": ("passed", ""),
    }
    assert {one["device"] for one in attempts.values()} == {"virtual-SM8650-0", "virtual-SM8650-1"}
    # Two tests, and a test with two subtests, which pytest reports as a whole as well.
    assert "MINIATURE [1, 1, 3] failed: ['runtime_option']" in done.stderr


@pytest.mark.parametrize("named", ["--soc_model=SM8550", "--device"])
def test_what_farm_fills_in_is_not_for_the_user_to_say(tmp_path: Path, named: str) -> None:
    framework = lay_out(tmp_path)
    with pytest.raises(UsageError, match=f"{named.partition('=')[0]} is filled in for each device"):
        rooted_arguments([str(framework / "htp/op/v68/test.py"), named, "x"], tmp_path)
    assert rooted_arguments([named, "x"], tmp_path) == [], "of tests that are not upstream's, nothing is known"


def test_what_the_user_roots_stays_so(tmp_path: Path) -> None:
    framework = lay_out(tmp_path)
    relative = "executorch/backends/qualcomm/tests/rework/htp/op/v68/test.py::test_runner"
    answer = rooted_arguments([relative, "--rootdir", "/x", "--import-mode=append"], tmp_path)
    assert "--rootdir" not in answer
    assert "--import-mode" not in answer
    assert answer[answer.index("--confcutdir") + 1] == str(framework)


def test_tests_of_one_tree_are_not_run_with_the_code_of_another(tmp_path: Path) -> None:
    framework = lay_out(tmp_path)
    compiler = Compiler(sys.executable, {})
    require_tree([str(framework)], tmp_path, compiler)
    (framework / "htp/op/v68/test.py").write_text("from executorch.backends.qualcomm.tests.rework.src.op import *\n")
    with pytest.raises(UsageError, match="which is another tree: say --toolchain"):
        require_tree([str(framework)], tmp_path, compiler)


def test_folders_of_simpleadb_are_made_sure_of(monkeypatch: pytest.MonkeyPatch) -> None:
    class SimpleADB:
        def __init__(self, *, workspace: str) -> None:
            self.workspace = workspace

    module: Any = ModuleType("executorch.backends.qualcomm.export_utils")
    module.SimpleADB = SimpleADB
    monkeypatch.setitem(sys.modules, module.__name__, module)
    met: list[str] = []
    for _ in range(2):
        follow_workspaces(lambda adb: met.append(adb.workspace))
    SimpleADB(workspace="/data/local/tmp/one")
    assert met == ["/data/local/tmp/one"]


def test_reports_of_workers_are_counted_where_upstream_counts() -> None:
    counts: defaultdict[str, int] = defaultdict(int)
    for when in ("setup", "call", "teardown"):
        count_report(SimpleNamespace(stash={"total_test_count": counts}), SimpleNamespace(nodeid="a", when=when))  # type: ignore[arg-type]
    assert counts == {"a": 1}
    assert count_report(SimpleNamespace(stash={}), SimpleNamespace(nodeid="a", when="call")) is None  # type: ignore[arg-type,func-returns-value]
