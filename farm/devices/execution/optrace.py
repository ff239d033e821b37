"""Timeline of a program by the SDK: its tools run the compiled graph, and their files are kept unchanged.

ExecuTorch 1.5 does the same in backends/qualcomm/debugger/utils.py. `qnn-net-run` executes the graph instead of the
runner, because only its files suit `qnn-profile-viewer`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from farm.base.errors import DeviceError, InfraError, MissingToolError
from farm.base.processes import Supervisor
from farm.base.text import clean_text
from farm.builds.bundles.bundle import OPTRACE, Bundle
from farm.builds.runtime.qnn_sdk import TARGET as HOST_FOLDER

if TYPE_CHECKING:
    from farm.base.socs import Soc
    from farm.devices.execution.session import DeviceSession

_NET_RUN = "qnn-net-run"
_EXTENSIONS = "libQnnHtpNetRunExtensions.so"
_VIEWER = "qnn-profile-viewer"
_READER = "libQnnHtpOptraceProfilingReader.so"
_LOG = "qnn-profiling-data_0.log"
_LOG_BYTES = 1 << 30
_SCHEMATIC = "_schematic.bin"
_QHAS = "_qnn_htp_analysis_summary"
_SECONDS = 600.0


class OptraceTools(msgspec.Struct, frozen=True):
    """The parts of a QNN SDK that make a timeline."""

    net_run: Path
    extensions: Path
    """Extensions library; with the tool above it runs on the device."""
    viewer: Path
    reader: Path
    """Reader library; with the viewer above it runs on this machine."""


def find_optrace_tools(sdk_root: Path | None, target: str) -> OptraceTools:
    """Return the tools of an SDK for devices of `target`, a folder of its `bin`. Raises MissingToolError."""
    if sdk_root is None:
        raise MissingToolError(
            "--profile optrace needs the tools of a QNN SDK, which pip does not have: set QNN_SDK_ROOT to a QNN SDK "
            "from Qualcomm, or use --profile detailed"
        )
    tools = OptraceTools(
        sdk_root / "bin" / target / _NET_RUN,
        sdk_root / "lib" / target / _EXTENSIONS,
        sdk_root / "bin" / HOST_FOLDER / _VIEWER,
        sdk_root / "lib" / HOST_FOLDER / _READER,
    )
    missing = [path for path in msgspec.structs.astuple(tools) if not path.is_file()]
    if missing:
        raise MissingToolError(
            f"--profile optrace needs tools that this QNN SDK lacks: {', '.join(map(str, missing))}: set QNN_SDK_ROOT "
            "to a whole one, or use --profile detailed"
        )
    return tools


def collect_optrace(
    session: DeviceSession, bundle: Bundle, soc: Soc, tools: OptraceTools, folder: Path
) -> dict[str, Path]:
    """Run the graph of `bundle` with the SDK's tools; return the files by kind of artifact, left in `folder`.

    Raises DeviceError for a failure of the device, InfraError for a failing tool on this machine and for a bundle
    without optrace support or with several graphs.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files = sorted((bundle.folder / OPTRACE).glob("*.bin"))
    schematics = [path for path in files if path.name.endswith(_SCHEMATIC)]
    graphs = [path for path in files if path not in schematics]
    if not schematics or not graphs:
        raise InfraError("the compiler wrote no schematic, or no graph: there is nothing to make a timeline of")
    if len(graphs) > 1:
        raise InfraError(
            f"the program has {len(graphs)} partitions, and QNN keeps the schematic of the last one only: a timeline "
            "needs a program that is delegated in one piece"
        )
    [graph], schematic = graphs, schematics[0]
    log = folder / _LOG
    _run_graph(session, bundle, soc, tools, graph, log)
    kept = {f"optrace:{path.name}": path for path in (schematic, log)}
    for path in _view(tools, schematic, log, folder / "optrace_0.json"):
        kept[f"{'qhas' if _QHAS in path.name else 'optrace'}:{path.name}"] = path
    return kept


def _run_graph(session: DeviceSession, bundle: Bundle, soc: Soc, tools: OptraceTools, context: Path, log: Path) -> None:
    inputs = [path for sample in range(bundle.manifest.samples) for path in bundle.input_files(sample)]
    lines = [" ".join(path.name for path in bundle.input_files(n)) for n in range(bundle.manifest.samples)]
    extensions = {"shared_library_path": f"./{_EXTENSIONS}", "config_file_path": "config.json"}
    core = {"perf_profile": "burst", "rpc_control_latency": 100}
    device = {"profiling_level": "linting", "cores": [core], "soc_id": soc.soc_id}
    done = session.run_tool(
        {
            _NET_RUN: tools.net_run,
            _EXTENSIONS: tools.extensions,
            context.name: context,
            "input_list.txt": ("\n".join(lines) + "\n").encode(),
            "extensions.json": msgspec.json.encode({"backend_extensions": extensions}),
            "config.json": msgspec.json.encode({"devices": [device]}),
            **{path.name: path for path in inputs},
        },
        [
            f"./{_NET_RUN}", "--backend", "libQnnHtp.so", "--input_list", "input_list.txt",
            "--retrieve_context", context.name, "--use_native_input_files", "--use_native_output_files",
            "--config_file", "extensions.json", "--profiling_level", "detailed", "--profiling_option", "optrace",
        ],
        {f"output/{_LOG}": log},
        timeout_s=_SECONDS,
        max_bytes=_LOG_BYTES,
    )  # fmt: skip
    if done.code != 0:
        output = clean_text(done.stderr or done.stdout)
        raise DeviceError(session.serial, f"{_NET_RUN} failed", code=done.code, stderr=output)


def _view(tools: OptraceTools, schematic: Path, log: Path, output: Path) -> list[Path]:
    config = output.with_suffix(".config")
    config.write_bytes(msgspec.json.encode({"features": {"qhas_json": True}}))
    argv: list[str | Path] = [
        tools.viewer, "--config", config, "--schematic", schematic, "--reader", tools.reader,
        "--input_log", log, "--output", output,
    ]  # fmt: skip
    log_file = output.with_suffix(".log")
    with Supervisor() as supervisor:
        child = supervisor.spawn(argv, name=_VIEWER, cwd=output.parent, stderr=log_file)
        with child.limited(_SECONDS) as overdue:
            code = child.process.wait()
    made = sorted(path for path in output.parent.glob(f"{output.stem}*.json") if path.is_file())
    if overdue.is_set() or code != 0 or not made:
        ended = f"did not end in {_SECONDS:g} s" if overdue.is_set() else f"ended with exit code {code}"
        raise InfraError(f"{tools.viewer} {ended}: {clean_text(child.log_tail())}")
    return made
