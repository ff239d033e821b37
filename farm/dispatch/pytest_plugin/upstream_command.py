"""Command line of upstream's `test_qnn_delegate.py`, as its users type it -> options of `farm pytest`.

Flags: executorch 1.5.1, `setup_common_args_and_variables` and `setup_environment` of test_qnn_delegate.py; letters of
earlier releases, such as `-b`, `-s` and `-m`, keep their meaning.
"""

from __future__ import annotations

import argparse
import importlib.util
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from farm.base.errors import UsageError
from farm.builds.runtime.qnn_sdk import ANDROID_FOLDER

SCRIPT = "test_qnn_delegate.py"
"""Name of upstream's script."""

MODULE = "executorch.backends.qualcomm.tests.test_qnn_delegate"
_PLACE = ("backends", "qualcomm", "tests", SCRIPT)
# Flags with a value, and switches, that the tests read as attributes of TestQNN.
_VALUES = {
    "executorch_root": ("-r",), "artifact_dir": ("-a",), "image_dataset": ("-i",), "qa_dataset": (),
    "sentence_dataset": (), "pretrained_weight": ("-p",), "model_name": ("-n",), "oss_repo": (),
    "op_package_dir": ("-d",), "llama_artifacts": (), "static_llm_eval_method": (), "pre_gen_pte": (),
}  # fmt: skip
_NUMBERS = {"profile_level": (), "seed": ()}
_SWITCHES = {"online_prepare": ("-o",), "shared_buffer": ("-z",), "error_only": ("-e",), "use_fp16": ("-F",)}
_FOLDERS = ("executorch_root", "artifact_dir", "image_dataset", "op_package_dir", "llama_artifacts", "oss_repo")
_REFUSED = {
    "host": 'name the adb server in a [[host]] of farm.toml, adb = "HOST:5037" (docs/reference/configuration.md)',
    "compile_only": "farm pytest runs tests on devices: 'farm run --compile-only' compiles suites",
    "direct_build_folder": "farm pytest has the ordinary runner: 'farm exec --option direct_mode=true' has the other",
    "config_file": "name its options one by one",
}


class UpstreamCommand(msgspec.Struct, frozen=True):
    """Command of upstream by options of farm."""

    soc: str
    device: str
    backend: str
    simulated: bool
    """True for `--enable_x86_64`: a virtual device."""
    arguments: tuple[str, ...]
    """Arguments of pytest."""
    attributes: dict[str, Any]
    """Values for upstream's TestQNN."""
    left_out: tuple[str, ...]
    """Flags that farm has no use for."""

    def shown(self) -> list[str]:
        """Return the command in farm's options, and what happens with the other flags."""
        words = ["farm", "pytest"]
        for option, value in (("--soc", self.soc), ("--device", self.device), ("--backend", self.backend)):
            words += [option, value] if value else []
        words += ["--virtual", "1"] if self.simulated else []
        lines = [f"in farm's options: {shlex.join([*words, '--', *self.arguments])}"]
        if self.attributes:
            lines.append(f"set for upstream's tests: {', '.join(self.attributes)}")
        if self.left_out:
            lines.append(f"left out, as farm brings its runner and libraries: {', '.join(self.left_out)}")
        return lines


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{SCRIPT}: {message}")


def read_upstream(arguments: Sequence[str], folder: Path) -> UpstreamCommand | None:
    """Return upstream's command in `arguments`, which may begin with `python`; None for arguments of pytest.

    Raises UsageError for flags that cannot be followed.
    """
    words = list(arguments)
    if words and Path(words[0]).name.startswith("python"):
        words = words[1:]
    if words[:1] == ["-m"] and words[1:2] == [MODULE]:
        words = [SCRIPT, *words[2:]]
    elif not words or Path(words[0]).name != SCRIPT:
        return None
    given = vars(_parser().parse_args(words[1:]))
    for name, instead in _REFUSED.items():
        if given[name]:
            raise UsageError(f"--{name} is not for farm pytest: {instead}")
    if given["target"] not in (None, ANDROID_FOLDER):
        raise UsageError(f"--target {given['target']}: upstream's tests run on {ANDROID_FOLDER} devices alone")
    attributes = {name: given[name] for name in (*_VALUES, *_NUMBERS, *_SWITCHES) if given[name] not in (None, False)}
    for name in _FOLDERS:
        if name in attributes:
            # The tests run in a folder of their worker.
            attributes[name] = str(folder / attributes[name])
    return UpstreamCommand(
        soc=given["soc_model"] or "",
        device=given["device"] or "",
        backend=given["backend"] or "",
        simulated=given["enable_x86_64"],
        arguments=(*_tests(words[0], folder, given["tests"]), *_pytest_options(given)),
        attributes=attributes,
        left_out=tuple(f"--{name}" for name in ("build_folder", "skip_push", "ip", "port") if given[name]),
    )


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog=SCRIPT, add_help=False, allow_abbrev=False)
    parser.add_argument("-m", "--model", "--soc_model", dest="soc_model")
    parser.add_argument("-s", "--device")
    parser.add_argument("-H", "--host")
    parser.add_argument("-b", "--build_folder")
    parser.add_argument("-t", "--target")
    for name in ("backend", "config_file", "direct_build_folder", "ip", "port"):
        parser.add_argument(f"--{name}")
    for name, letters in _VALUES.items():
        parser.add_argument(*letters, f"--{name}")
    for name in _NUMBERS:
        parser.add_argument(f"--{name}", type=int)
    for name, letters in {**_SWITCHES, "enable_x86_64": ("-x",), "compile_only": ("-c",), "skip_push": ()}.items():
        parser.add_argument(*letters, f"--{name}", action="store_true")
    # Python's unittest.
    parser.add_argument("tests", nargs="*")
    parser.add_argument("-k", action="append", default=[])
    parser.add_argument("-v", "--verbose", action="store_true")
    parser.add_argument("-q", "--quiet", action="store_true")
    parser.add_argument("-f", "--failfast", action="store_true")
    return parser


def _tests(script: str, folder: Path, names: Sequence[str]) -> list[str]:
    """Return pytest's names of unittest's `CLASS` and `CLASS.test`, in the script's own place."""
    path = folder / script
    spec = importlib.util.find_spec("executorch")
    installed = [Path(one).joinpath(*_PLACE) for one in (spec.submodule_search_locations or ())] if spec else []
    if script == SCRIPT and not path.is_file():
        place = ["--pyargs", MODULE]
    elif not path.is_file():
        raise UsageError(f"{script} does not exist")
    else:
        place = ["--pyargs", MODULE] if any(map(path.samefile, filter(Path.is_file, installed))) else [str(path)]
    *options, module = place
    return [*options, *(f"{module}::{name.replace('.', '::')}" for name in names)] if names else place


def _pytest_options(given: dict[str, Any]) -> list[str]:
    # unittest takes a pattern with `*` as a whole name, and pytest knows names and `or`.
    patterns = [word.strip("*").rpartition(".")[2] for word in given["k"]]
    if odd := next((word for word in patterns if not word or "*" in word), None):
        raise UsageError(f"-k {odd!r}: name a part of the tests' names, without '*' inside")
    options = ["-k", " or ".join(patterns)] if patterns else []
    switches = {"verbose": "-v", "quiet": "-q", "failfast": "-x"}
    return [*options, *(option for name, option in switches.items() if given[name])]
