"""ExecuTorch's own Qualcomm tests, unchanged: their environment on the device of a worker, and their command line."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from farm.base.backends.registry import BACKENDS
from farm.base.errors import DeviceError, UsageError
from farm.builds.runtime.qnn_sdk import ANDROID_FOLDER, android_files
from farm.builds.runtime.runtime import Runtime, dsp_file, soc_name

if TYPE_CHECKING:
    import pytest

    from farm.base.socs import Soc
    from farm.devices.execution.session import DeviceSession
    from farm.dispatch.device_run.device_run import DeviceRun
    from farm.dispatch.pytest_plugin.plan import SuitePlan


# Environment of ExecuTorch's own Qualcomm tests, with which they run unchanged on the device of a worker.
#
# Their `SimpleADB` needs the folders of a QNN SDK and of an Android build, pushes a runner and seven libraries for
# every class of tests, and works in one folder of the device. Its runner here is a script that executes farm's
# runner, which is on the device with its libraries, by hash; the other pushed files are small and unused.
#
# The newer tests, below `backends/qualcomm/tests/rework`, have the options of their conftest. They import a class of
# pytest-subtests, which pytest 9 has itself. They create a folder on the device once a process, although the device
# may reboot.


RUNNER = "qnn_executor_runner"
"""Name of the runner: under this name farm's runner always writes an ETDump, which upstream's tests require."""

_TESTS = "executorch.backends.qualcomm.tests.utils"
# executorch 1.5.1: tests/utils.py and tests/rework/conftest.py create their working folders in this folder.
_WORKSPACES = PurePosixPath("/data/local/tmp")
_UNUSED = "stub: the runner that is pushed beside this brings its own libraries\n"
_CLEAN_SECONDS = 30.0
# SimpleADB starts the runner as adbd's user: the script elevates it, which needs every word quoted once more.
_AS_ROOT = r"""#!/bin/sh
words=
for word; do
    words="$words '$(printf %s "$word" | sed "s/'/'\\\\''/g")'"
done
exec {elevation} "umask 0; exec {command}$words"
"""


def lay_out_sdk(folder: Path, sdk: Path, soc: Soc) -> Path:
    """Return an SDK in the new `folder`: all files of `sdk`, and stubs for further files that SimpleADB requires."""
    qnn, wanted = android_files(sdk), set[Path | None]()
    for backend in BACKENDS.values():
        if backend.on_cpu:
            continue
        wanted.update(qnn.library(soc_name(name, soc)) for name in backend.libraries)
        if backend.skel and getattr(soc, backend.hardware):
            wanted.add(dsp_file(soc, backend, qnn).path)
    for path in filter(None, wanted):
        if not path.is_file():
            stub = folder / path.relative_to(sdk)
            stub.parent.mkdir(parents=True, exist_ok=True)
            stub.write_text(_UNUSED)
    folder.mkdir(exist_ok=True)
    _link_all(folder, sdk)
    return folder


def _link_all(folder: Path, source: Path) -> None:
    """Link all entries of `source` into `folder`, beside existing entries, at every depth."""
    for entry in source.iterdir():
        place = folder / entry.name
        if not place.exists():
            place.symlink_to(entry)
        elif place.is_dir() and entry.is_dir():
            _link_all(place, entry)


class Upstream:
    """Environment of upstream's tests in one worker."""

    def __init__(self, plan: SuitePlan, scratch: Path) -> None:
        """`scratch` is a folder of the worker alone."""
        self._plan = plan
        self._run: DeviceRun | None = None
        self._build, self._folder = scratch / "build-android", scratch / "upstream"
        self._session: DeviceSession | None = None
        """Session whose runner the script executes."""
        self._workspaces: dict[PurePosixPath, DeviceSession | None] = {}
        """Folders of SimpleADB on the device, and the session in which each was created."""

    def use(self, run: DeviceRun) -> None:
        """Run tests on the device of `run` from now on."""
        self._run, self._session = run, None
        self._workspaces.clear()

    def set_options(self, config: pytest.Config | None) -> None:
        """Set the pytest options of upstream's newer tests."""
        if config is not None and is_framework(config):
            for name, value in self._options().items():
                setattr(config.option, name, value)

    def owns(self, item: pytest.Item) -> bool:
        """Return whether a test belongs to upstream, derives from upstream's TestQNN, or needs the same options."""
        return self._base(item) is not None or is_framework(item.config)

    @contextlib.contextmanager
    def around(self, item: pytest.Item) -> Iterator[None]:
        """Run a test of upstream in a folder of its worker, as it writes into the working directory."""
        if not self.owns(item):
            yield
            return
        self._folder.mkdir(exist_ok=True)
        before = Path.cwd()
        os.chdir(self._folder)
        try:
            yield
        finally:
            os.chdir(before)

    def prepare(self, item: pytest.Item) -> None:
        """Prepare the device's runner and the test's options, before the test's own set-up. Raises DeviceError."""
        if not self.owns(item):
            return
        if self._run is None or not self._options()["device"]:
            raise UsageError("upstream's tests need adb, and the device of this worker has no adb server")
        session = self._run.session
        if session is not self._session:
            session.prepare([])
            self._write_runner(session.runtime_folder, self._run.transport.elevation)
            self._session = session
        follow_workspaces(self._meet)
        base = self._base(item)
        if base is None:
            return
        # Set the options of upstream's setup_environment; its others keep the values of the class.
        for name, value in self._options().items():
            setattr(base, name, value)
        base.enable_x86_64 = base.compile_only = False
        base.error_only = True
        base.direct_build_folder = None
        base.executorch_root = base.executorch_root or str(self._folder)
        base.artifact_dir = str(self._folder)
        for name, asked in self._plan.upstream.items():
            setattr(base, name, asked)

    def clean(self) -> None:
        """Remove the folders of SimpleADB from the device."""
        if self._workspaces and self._run is not None:
            with contextlib.suppress(DeviceError):
                self._run.transport.run(["rm", "-rf", "--", *map(str, self._workspaces)], timeout_s=_CLEAN_SECONDS)

    def _meet(self, adb: Any) -> None:
        """Point a SimpleADB to the current device, and create its folder: the newer tests do both once a process."""
        options, workspace = self._options(), PurePosixPath(adb.workspace)
        adb.device_id, adb.host_id = options["device"], options["host"]
        if self._run is None:
            return
        if workspace.parent == _WORKSPACES and self._workspaces.get(workspace) is not self._session:
            self._run.transport.run(["mkdir", "-p", "--", str(workspace)], timeout_s=_CLEAN_SECONDS)
            self._workspaces[workspace] = self._session

    def _base(self, item: pytest.Item) -> Any:
        """Return upstream's TestQNN if a test derives from it."""
        module = sys.modules.get(_TESTS)
        base, cls = getattr(module, "TestQNN", None), getattr(item, "cls", None)
        return base if base is not None and cls is not None and issubclass(cls, base) else None

    def _options(self) -> dict[str, str | None]:
        environment = self._run.transport.tool_environment() if self._run is not None else {}
        return {
            "device": environment.get("ANDROID_SERIAL", ""),
            "host": environment.get("ANDROID_ADB_SERVER_ADDRESS"),
            "soc_model": self._plan.soc,
            "backend": self._plan.backend,
            "build_folder": str(self._build),
            "target": ANDROID_FOLDER,
        }

    def _write_runner(self, runtime: PurePosixPath, elevation: Sequence[str]) -> None:
        """Create the build folder. Relative paths have the same meaning on every device, virtual devices included."""
        to = os.path.relpath(runtime, _WORKSPACES / "any")
        script = self._build / "examples/qualcomm/executor_runner" / RUNNER
        script.parent.mkdir(parents=True, exist_ok=True)
        command = f"env LD_LIBRARY_PATH={to} ADSP_LIBRARY_PATH={to} {to}/{RUNNER}"
        script.write_text(runner_script(command, elevation))
        script.chmod(0o755)
        library = self._build / "backends/qualcomm/libqnn_executorch_backend.so"
        library.parent.mkdir(parents=True, exist_ok=True)
        library.write_text(_UNUSED)


def runner_script(command: str, elevation: Sequence[str]) -> str:
    """Return a script that executes `command` with its own arguments, by `elevation` as root."""
    if elevation:
        return _AS_ROOT.format(elevation=shlex.join(elevation), command=command)
    return f'#!/bin/sh\nexec {command} "$@"\n'


def with_name(runtime: Runtime, name: str) -> Runtime:
    """Return a runtime with its runner under a further name."""
    files = {**runtime.files, name: runtime.files[runtime.runner]}
    return msgspec.structs.replace(
        runtime, files=files, hashes={**runtime.hashes, name: runtime.hashes[runtime.runner]}
    )


_UTILITIES = "executorch.backends.qualcomm.export_utils"
# executorch 1.5.1, tests/rework/conftest.py: the key in pytest's stash of reports by node id.
_COUNTS: Any = "total_test_count"


def is_framework(config: pytest.Config) -> bool:
    """Return whether upstream's conftest has declared its options."""
    return hasattr(config.option, "direct_build_folder")


def provide_subtests() -> None:
    """Provide pytest's report of a subtest under the name in pytest-subtests, unless that package is installed."""
    import pytest

    report = getattr(pytest, "SubtestReport", None)
    if report is None or "pytest_subtests" in sys.modules or importlib.util.find_spec("pytest_subtests") is not None:
        return
    package, plugin = ModuleType("pytest_subtests"), ModuleType("pytest_subtests.plugin")
    plugin.SubTestReport = report  # type: ignore[attr-defined]
    package.plugin = plugin  # type: ignore[attr-defined]
    sys.modules.update({package.__name__: package, plugin.__name__: plugin})


def count_report(config: pytest.Config, report: pytest.TestReport) -> None:
    """Count a worker's report for upstream's summary, which counts only tests of its own process."""
    counts = config.stash.get(_COUNTS, None)
    if counts is not None and report.when == "call":
        counts[report.nodeid] += 1


def follow_workspaces(notify: Callable[[Any], None]) -> None:
    """Call `notify` with every new SimpleADB, before its first use of a device."""
    cls = getattr(sys.modules.get(_UTILITIES), "SimpleADB", None)
    if cls is None or hasattr(cls, "farm_follows"):
        return
    initialize = cls.__init__

    def followed(self: Any, *arguments: Any, **named: Any) -> None:
        initialize(self, *arguments, **named)
        notify(self)

    cls.__init__, cls.farm_follows = followed, True


# Command line of upstream's `test_qnn_delegate.py`, as its users type it -> options of `farm pytest`.
#
# Flags: executorch 1.5.1, `setup_common_args_and_variables` and `setup_environment` of test_qnn_delegate.py; letters
# of earlier releases, such as `-b`, `-s` and `-m`, keep their meaning.


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
