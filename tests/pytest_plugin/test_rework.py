"""A miniature of upstream's newer tests, with their mechanisms and none of their code, on two virtual devices."""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from farm_home import FarmHome
from pytest_sessions import ALONE, jobs_of, latest, pytest_words

from farm.base.errors import UsageError
from farm.builds.toolchains.toolchain import Compiler
from farm.dispatch.pytest_plugin.launch import require_tree, rooted_arguments
from farm.dispatch.pytest_plugin.upstream import count_report, follow_workspaces

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


@pytest.fixture
def framework(tmp_path: Path) -> Path:
    """Folder of the miniature in a source tree, where upstream has its own."""
    folder = tmp_path / "executorch/backends/qualcomm/tests/rework"
    specs = 'import pytest\n@pytest.fixture\ndef specs(): return ["compile_time_option", "runtime_option"]\n'
    files = {
        "conftest.py": CONFTEST, "htp/conftest.py": specs, "htp/op/v68/test.py": ON_THE_DEVICE,
        "htp/feature/v68/test.py": FEATURES,
    }  # fmt: skip
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def test_tests_rooted_in_a_tree_are_sharded_over_devices(home: FarmHome, framework: Path, tmp_path: Path) -> None:
    # Settings of a project around the tree do not apply to the tree's tests.
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --no-such-option\n")
    done = home.farm(*pytest_words(str(framework), devices=2), env=ALONE, timeout_s=600, code=1)
    last = {name: job.attempts[-1] for name, job in jobs_of(home).items()}
    failed = "AssertionError: assert 'runtime_option' == 'compile_time_option' (and 1 more)"
    assert {name: (one.verdict, one.reason) for name, one in last.items()} == {
        "test_both_ways": ("failed", failed), "test_runner[8a]": ("passed", ""), "test_runner[16a]": ("passed", ""),
    }  # fmt: skip
    assert latest(home).jobs[0].id.startswith("pytest/rework/htp/")
    assert {one.device for one in last.values()} == {"virtual-SM8650-0", "virtual-SM8650-1"}
    # Two tests, and a test with two subtests, which pytest reports as a whole as well.
    assert "MINIATURE [1, 1, 3] failed: ['runtime_option']" in done.stdout


@pytest.mark.parametrize("named", ["--soc_model=SM8550", "--device"])
def test_what_farm_fills_in_is_not_for_the_user_to_say(framework: Path, tmp_path: Path, named: str) -> None:
    with pytest.raises(UsageError, match=f"{named.partition('=')[0]} is filled in for each device"):
        rooted_arguments([str(framework / "htp/op/v68/test.py"), named, "x"], tmp_path)
    assert rooted_arguments([named, "x"], tmp_path) == [], "of tests that are not upstream's, nothing is known"


def test_what_the_user_roots_stays_so(framework: Path, tmp_path: Path) -> None:
    relative = "executorch/backends/qualcomm/tests/rework/htp/op/v68/test.py::test_runner"
    answer = rooted_arguments([relative, "--rootdir", "/x", "--import-mode=append"], tmp_path)
    assert "--rootdir" not in answer
    assert "--import-mode" not in answer
    assert answer[answer.index("--confcutdir") + 1] == str(framework)


def test_tests_of_one_tree_are_not_run_with_the_code_of_another(framework: Path, tmp_path: Path) -> None:
    compiler = Compiler(sys.executable, {})
    require_tree([str(framework)], tmp_path, compiler)
    (framework / "htp/op/v68/test.py").write_text("from executorch.backends.qualcomm.tests.rework.src.op import *\n")
    with pytest.raises(UsageError, match="which is another tree: give --toolchain"):
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
