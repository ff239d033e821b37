"""Commands of upstream's test_qnn_delegate.py behind `farm pytest --`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from executorch_checkout import installed
from farm_home import FarmHome

from farm.base.errors import UsageError
from farm.dispatch.pytest_plugin.upstream_command import MODULE, SCRIPT, read_upstream

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
