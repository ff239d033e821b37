"""The command line of the runner. None of this loads a model."""

from __future__ import annotations

import json
from typing import Any

import pytest

from farm.base.backends.registry import BACKENDS


def test_version_and_help_go_to_standard_output(bare: Any) -> None:
    version = bare.run("--version")
    assert version.code == 0
    assert version.stdout.startswith("farm_runner ")
    assert "executorch" in version.stdout
    help_text = bare.run("--help").stdout
    for flag in ("model_path", "input_list_path", "etdump_path", "htp_performance_mode", "result_path"):
        assert f"--{flag}\n" in help_text
    for backend in BACKENDS.values():
        for name in (name for name, option in backend.options.items() if option.when == "run"):
            assert f"--{name}\n" in help_text
    assert list(bare.folder.iterdir()) == [bare.folder / "outputs"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nosuch=1"], "unknown flag '--nosuch=1'"),
        (["--nomodel_path"], "unknown flag '--nomodel_path'"),
        (["stray"], "unexpected argument 'stray'"),
        (["--"], "unexpected argument '--'"),
        (["--model_path"], "--model_path needs a value"),
        (["--iteration=0"], "--iteration: '0' is not a whole number at least 1"),
        (["--iteration", "2x"], "--iteration: '2x' is not"),
        (["--iteration="], "--iteration: '' is not"),
        (["--warm_up=-1"], "--warm_up: '-1' is not"),
        (["--warm_up=99999999999999999999"], "--warm_up: '99999999999999999999' is not"),
        (["--profile_level=3"], "from 0 to 2"),
        (["--log_level=0"], "from 1 to 5"),
        (["--htp_performance_mode=9"], "from 0 to 8"),
        (["--keep_loaded=k.pte"], "--keep_loaded belongs to a session"),
        (["--help=perhaps"], "is not true or false"),
        (["--lpai_fps=0"], "at least 1"),
        (["--lpai_ftrt_ratio=0"], "at least 1"),
        (["--lpai_client_perf_type=3"], "from 1 to 2"),
        (["--lpai_affinity=0"], "from 1 to 2"),
        (["--lpai_core_selection=-1"], "at least 0"),
        (["--debug_buffer_size=0"], "at least 1"),
        (["--timeout_ms=-1"], "at least 0"),
        (["--generate=0"], "--generate: '0' is not a whole number at least 1"),
        (["--stop=2"], "--stop belongs to a text: --generate"),
        (["--generate=1", "--stop=2,x"], "--stop: 'x' is no token id"),
        (["--generate=1", "--iteration=2"], "--iteration: a text is generated again with --seconds"),
        (["--generate=1", "--method_index=1"], "--generate and --method_index exclude each other"),
        (["--likelihoods=true"], "--likelihoods belongs to a text: --generate"),
        (["--carry=1"], "--carry: '1' is not an output and an input"),
        (["--workspace_sharing_mode=3"], "--workspace_sharing_mode: '3' is not a whole number from 0 to 2"),
        (["--weight_cache_enabled=maybe"], "--weight_cache_enabled: 'maybe' is not true or false"),
    ],
)
def test_a_wrong_command_line_says_what_is_wrong(bare: Any, arguments: list[str], message: str) -> None:
    ran = bare.run(*arguments)
    ran.fails(2, "flags", message)
    assert message in ran.stderr


def test_an_error_is_written_where_a_later_flag_says(bare: Any) -> None:
    ran = bare.run("--nosuch", "--result_path=elsewhere.json", result="elsewhere.json")
    assert ran.error["stage"] == "flags"
    assert not (bare.folder / "result.json").exists()


def test_any_bytes_in_a_path_give_a_result_that_can_be_read(bare: Any) -> None:
    name = b'a"\\\n\t\x01\xff\xc3\xa9\xf0\x9f\x98\x80'
    bare.run("--model_path", name)
    message = json.loads((bare.folder / "result.json").read_text(encoding="ascii"))["error"]["message"]
    assert 'a"\\\n\t\x01\ufffd\u00e9\U0001f600' in message


@pytest.mark.parametrize("style", ["--model_path=none.pte", "-model_path=none.pte"])
def test_flags_are_written_as_gflags_writes_them(bare: Any, style: str) -> None:
    assert "none.pte" in bare.run(style).error["message"]
    assert "none.pte" in bare.run(*style.split("=")).error["message"]
    assert "none.pte" in bare.run("--help=false", "--noversion", style).error["message"]
