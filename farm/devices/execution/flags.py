"""The runner's flags for one execution of a bundle, and which options a kind of program allows. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from farm.builds.bundles.bundle import MODEL, Manifest
from farm.devices.execution.raw import DEBUG_FILE, ETDUMP_FILE, TOKENS_FILE, RunnerOptions
from farm.devices.execution.result import DEBUG_BYTES
from farm.devices.execution.workspace import INPUT_LIST, OUTPUTS, PROMPT_LIST, Workspace, program_flags, shape_flags

if TYPE_CHECKING:
    from farm.builds.runtime.native.targets import Kind

_DEBUG_FLAGS = {
    "dump_intermediate_outputs": "true",
    "debug_output_path": DEBUG_FILE,
    "debug_buffer_size": str(DEBUG_BYTES),
}
_DUMPS = "dump_intermediate_outputs"
_PROFILE_LEVEL = "profile_level"


def options_for(manifest: Manifest, options: RunnerOptions) -> RunnerOptions:
    """Return `options` as the program of a bundle allows them."""
    if manifest.generation is not None:
        # Thousands of steps would be in an ETDump, and each prompt is generated after once.
        flags = {name: value for name, value in options.flags.items() if name != _PROFILE_LEVEL}
        return replace(options, iterations=1, etdump=False, debug=False, flags=flags)
    if manifest.stateful and options.outputs and not options.repeats:
        # Executions of a stateful program continue from the state before; the reference has one execution per sample.
        options = replace(options, iterations=1, warm_up=0)
    if _DUMPS in manifest.features:
        # ExecuTorch 1.5 aborts where such a program finds no room for its layers.
        return replace(options, debug=True)
    return options


def seconds_of(options: RunnerOptions) -> float:
    """Return the seconds that an execution may take: its limit plus the time that it is asked to fill."""
    return options.timeout_s + (options.seconds or 0)


def program_and_profile(manifest: Manifest, options: RunnerOptions, kind: Kind) -> dict[str, str]:
    """Return the flags of an execution that every runner of a runtime of `kind` takes."""
    return {
        "model_path": MODEL,
        **program_flags(manifest, kind),
        **shape_flags(manifest),
        **({"etdump_path": ETDUMP_FILE} if options.profiles else {}),
        **(_DEBUG_FLAGS if options.debug else {}),
    }


def session_flags(workspace: Workspace, options: RunnerOptions) -> dict[str, str]:
    """Return the flags of a session's runner besides the flags of `program_and_profile`."""
    generates = workspace.bundle.manifest.generation is not None
    # A run for times alone scores no sequence.
    lines = PROMPT_LIST if generates and not options.outputs else INPUT_LIST
    flags = {
        "working_folder": workspace.folder.name,
        "input_list_path": lines,
        "output_folder_path": OUTPUTS,
        "iteration": str(options.iterations),
        "warm_up": str(options.warm_up),
        "timeout_ms": str(round(seconds_of(options) * 1000)),
    }
    if generates:
        flags["tokens_path"] = TOKENS_FILE
        if options.seconds:
            flags["seconds"] = str(options.seconds)
    return flags
