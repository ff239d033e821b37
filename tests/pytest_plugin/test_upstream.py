"""Upstream's tests in miniature: newer tests, tests of every backend, and the command of test_qnn_delegate.py."""

from __future__ import annotations

import re
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from enum import IntEnum
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from executorch_checkout import installed
from farm_home import FarmHome
from pytest_sessions import ALONE, jobs_of, latest, pytest_words

from farm.base.errors import UsageError
from farm.builds.toolchains.toolchain import Compiler
from farm.dispatch.pytest_plugin.backend_suite import BackendSuite, is_of_backend, result_of
from farm.dispatch.pytest_plugin.launch import require_tree, rooted_arguments
from farm.dispatch.pytest_plugin.upstream import MODULE, SCRIPT, count_report, follow_workspaces, read_upstream
from farm.results.attempt import Cause, Stage

# A miniature of upstream's newer tests, with their mechanisms and none of their code, on two virtual devices.


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


# Upstream's tests of every backend, with stubs of upstream's classes; tests/conformance has the real ones.


class StubFlow:
    """Flow with upstream's attributes."""

    __module__ = "executorch.backends.test.suite.flow"

    def __init__(self, backend: str) -> None:
        self.backend = backend


class StubResult(IntEnum):
    """Kinds of results with upstream's names."""

    SUCCESS = 0
    SUCCESS_UNDELEGATED = 1
    LOWER_FAIL = 4
    OUTPUT_MISMATCH_FAIL = 7

    def display_name(self) -> str:
        return f"kind {self.value}"


def item_of(flow: object, records: Sequence[object] = ()) -> Any:
    fixture = SimpleNamespace(_results=list(records))
    return SimpleNamespace(callspec=SimpleNamespace(params={"test_runner": flow}), funcargs={"test_runner": fixture})


def record(kind: StubResult, error: Exception | None = None, sqnr: float | None = None) -> object:
    stats = [] if sqnr is None else [SimpleNamespace(sqnr=sqnr)]
    left = Counter({"aten::median": 1})
    return SimpleNamespace(result=kind, error=error, undelegated_op_counts=left, tensor_error_statistics=stats)


def test_flows_of_other_backends_are_told_from_ours() -> None:
    assert is_of_backend(item_of(StubFlow("qualcomm")), "htp")
    assert is_of_backend(item_of(StubFlow("xnnpack")), "xnnpack")
    assert not is_of_backend(item_of(StubFlow("xnnpack")), "htp")
    assert not is_of_backend(item_of(StubFlow("qualcomm")), "gpu"), "upstream's flows compile for HTP alone"
    assert is_of_backend(item_of("a parameter of another suite"), "htp")
    assert is_of_backend(SimpleNamespace(), "htp")  # type: ignore[arg-type]


def test_results_of_upstream_become_answers_with_their_kind_and_error() -> None:
    flow = StubFlow("qualcomm")

    def answer(*records: object, flow: object = flow) -> Any:
        return result_of(item_of(flow, records))

    failed = answer(record(StubResult.LOWER_FAIL, RuntimeError("\n  op is not supported\nmore")))
    assert failed.reason == "kind 4: RuntimeError: op is not supported"
    assert (failed.stage, failed.cause, failed.notes) == (Stage.BUILD, Cause.COMPILE, ("on the CPU: aten::median 1",))
    wrong = answer(record(StubResult.OUTPUT_MISMATCH_FAIL, sqnr=3.25))
    assert (wrong.stage, wrong.cause, wrong.notes[-1]) == (Stage.NUMERICS, Cause.NUMERICS, "output 0: SQNR 3.2 dB")
    assert not wrong.unexecuted
    alone = answer(record(StubResult.SUCCESS_UNDELEGATED))
    assert alone.unexecuted == "nothing was delegated: the program was not executed"
    assert answer(record(StubResult.SUCCESS), flow="another suite") is None
    assert answer() is None, "a test that failed in its set-up has no record"


@pytest.mark.parametrize("named", ["operators/test_add.py", "operators", "."])
def test_the_suite_is_collected_from_its_own_root(tmp_path: Path, named: str) -> None:
    suite = tmp_path / "executorch/backends/test/suite"
    (suite / "operators").mkdir(parents=True)
    (suite / "conftest.py").touch()
    (suite / "operators/test_add.py").touch()
    answer = rooted_arguments([str(suite / named)], tmp_path)
    assert answer[answer.index("--rootdir") + 1] == str(suite.parent)
    assert "python_files" not in " ".join(answer)
    assert rooted_arguments([str(suite), "--device", "x"], tmp_path), "the suite has no option of that name"


def test_outputs_of_the_device_keep_their_shape_scalars_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Arrays in the place of tensors: this process has no torch.
    stub: Any = ModuleType("torch")
    stub.from_numpy = lambda array: array
    stub.utils = SimpleNamespace(_pytree=SimpleNamespace(tree_flatten=lambda tree: (list(tree), None)))
    monkeypatch.setitem(sys.modules, "torch", stub)
    scalar, image = np.array(3.5, np.float32), np.ones((1, 2, 3), np.float32)
    suite = BackendSuite.__new__(BackendSuite)
    suite._worker, suite._count = SimpleNamespace(scratch=tmp_path), 0  # type: ignore[assignment]
    suite._bundles = SimpleNamespace(pte=lambda path, _inputs: path.read_bytes())  # type: ignore[assignment]
    suite._runner = lambda program, **_: SimpleNamespace(outputs=((scalar, image),), program=program)  # type: ignore[assignment]
    made = suite._execute(b"program", ())
    assert [array.shape for array in made] == [(), (1, 2, 3)]
    assert not list(tmp_path.iterdir()), "the program is removed after its execution"


# Commands of upstream's test_qnn_delegate.py behind `farm pytest --`.


TEST = "TestQNNQuantizedOperator.test_qnn_backend_relu"
PLACE = f"{MODULE}::TestQNNQuantizedOperator::test_qnn_backend_relu"


def test_the_documented_command_becomes_options_of_farm(tmp_path: Path) -> None:
    words = ["python3", SCRIPT, TEST, "-b", "build-android", "-s", "1a2b", "-m", "SM8650", "-a", "out", "--seed", "7"]
    found = read_upstream(words, tmp_path)
    assert found is not None
    assert (found.soc, found.device, found.backend, found.simulated) == ("SM8650", "1a2b", "", False)
    assert found.arguments == ("--pyargs", PLACE)
    assert found.attributes == {"artifact_dir": str(tmp_path / "out"), "seed": 7}
    assert found.shown() == [
        f"in farm's options: farm pytest --soc SM8650 --device 1a2b -- --pyargs {PLACE}",
        "set for upstream's tests: artifact_dir, seed",
        "left out, as farm brings its runner and libraries: --build_folder",
    ]


def test_long_names_the_module_and_patterns_of_unittest_mean_the_same(tmp_path: Path) -> None:
    found = read_upstream(
        ["python", "-m", MODULE, "-k", "relu", "-k", "*TestQNNQuantizedUtils*", "-f", "--soc_model=SM8750", "-x"],
        tmp_path,
    )
    assert found is not None
    assert found.arguments == ("--pyargs", MODULE, "-k", "relu or TestQNNQuantizedUtils", "-x")
    assert (found.soc, found.simulated) == ("SM8750", True)
    assert "--virtual 1" in found.shown()[0]


def test_a_script_in_a_source_tree_stays_there(tmp_path: Path) -> None:
    script = tmp_path / "backends/qualcomm/tests" / SCRIPT
    script.parent.mkdir(parents=True)
    script.touch()
    found = read_upstream([f"backends/qualcomm/tests/{SCRIPT}", "TestQNNQuantizedUtils"], tmp_path)
    assert found is not None
    assert found.arguments == (f"{script}::TestQNNQuantizedUtils",)
    with pytest.raises(UsageError, match=f"gone/{SCRIPT} does not exist"):
        read_upstream([f"gone/{SCRIPT}"], tmp_path)


@pytest.mark.parametrize(
    "words", [["tests", "-k", "relu"], ["--pyargs", MODULE, "-m", "slow"], [f"x/{SCRIPT}::TestQNN", "-s"], []]
)
def test_arguments_of_pytest_stay_pytests(tmp_path: Path, words: list[str]) -> None:
    assert read_upstream(words, tmp_path) is None


@pytest.mark.parametrize(
    ("flag", "instead"),
    [
        (["-H", "lab1"], "--host is not for farm pytest: name the adb server in a [[host]] of farm.toml"),
        (["--compile_only"], "'farm run --compile-only' compiles suites"),
        (["--direct_build_folder", "x"], "direct_mode=true"),
        (["-t", "aarch64-oe-linux-gcc11.2"], "run on aarch64-android devices alone"),
        (["--no_such_flag"], "unrecognized arguments: --no_such_flag"),
        (["-k", "a*b"], "without '*' inside"),
    ],
)
def test_flags_that_cannot_be_followed_are_refused(tmp_path: Path, flag: list[str], instead: str) -> None:
    with pytest.raises(UsageError, match=re.escape(instead)):
        read_upstream([SCRIPT, *flag], tmp_path)


def test_a_contradiction_with_farms_own_option_is_one_line(home: FarmHome) -> None:
    done = home.farm("pytest", "--soc", "SM8550", "--", SCRIPT, TEST, "-m", "SM8650")
    assert (done.returncode, "--soc SM8550 and upstream's SM8650: name one SoC" in done.stderr) == (2, True)


def test_every_flag_of_the_installed_release_is_known(tmp_path: Path) -> None:
    backend = installed() / "backends/qualcomm"
    common = (backend / "export_utils.py").read_text().partition("def setup_common_args_and_variables")[2]
    own = (backend / "tests" / SCRIPT).read_text().partition("def setup_environment")[2]
    calls = [call.partition(")")[0] for text in (common, own) for call in text.split("add_argument(")[1:]]
    flags = {flag: 'action="store_true"' in call for call in calls for flag in re.findall(r'"(--?\w+)"', call)}
    assert len(flags) > 40
    # Flags of example scripts, which no test reads.
    for name in ("skip_delegate_node_ids", "skip_delegate_node_ops", "dump_intermediate_outputs", "ci"):
        del flags[f"--{name}"]
    del flags["--htp_performance_mode"]
    for flag, is_switch in flags.items():
        try:
            known = read_upstream([SCRIPT, flag, *([] if is_switch else ["1"])], tmp_path) is not None
        except UsageError as error:
            known = "unrecognized" not in str(error)
        assert known, flag
