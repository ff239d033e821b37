"""Workspace of a job or a runtime on a device: links to objects, and small files beside them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, NamedTuple

from farm.builds.bundles.bundle import INPUTS, MODEL, OP_PACKAGES, Bundle, Generation, Manifest, TensorSpec
from farm.devices.execution.content_store import OBJECTS
from farm.devices.process import Link

if TYPE_CHECKING:
    from collections.abc import Iterable

    from farm.builds.runtime.native.targets import Kind
    from farm.builds.runtime.runtime import Runtime
    from farm.devices.execution.raw import ErrorCause

INPUT_LIST = "input_list.txt"
INPUT_SHAPES = "input_shapes.txt"
PROMPT_LIST = "prompt_list.txt"
"""Input list of text generation without scored sequences, for runs of times alone."""
OUTPUT_SHAPES = "output_shapes.txt"
"""Files of dynamic shapes, for bundles whose manifest has them; of outputs, if a reference has them."""

# Folder of outputs: the workspace itself, because the runner needs an existing folder and a push makes no empty one.
OUTPUTS = "."
ANCHOR = "anchor.pte"
"""In the folder of the runtime."""

# Smaller inputs travel inside of the workspace: to look for them on the device would cost more than they do.
SMALL_BYTES = 64 * 1024


class Layout(NamedTuple):
    """Files of one folder of a session, as `Transport.push` takes them, and the objects that its links lead to."""

    files: dict[PurePosixPath, Path | bytes | Link]
    objects: dict[str, Path]
    """Local files by SHA-256."""


@dataclass(frozen=True)
class Workspace:
    """A bundle that is ready on the device, for one execution; or why it is not."""

    bundle: Bundle
    folder: PurePosixPath
    seconds: float
    error: str = ""
    cause: ErrorCause = ""
    """Cause of `error`."""


def packages_folder(bundle: Bundle, folder: PurePosixPath) -> tuple[PurePosixPath, ...]:
    """Return where the DSP looks for the op packages of a bundle whose workspace is `folder`; nothing without any."""
    # A program names them relative to its workspace, which is where QNN looks on the processor.
    return (folder,) if OP_PACKAGES in bundle.manifest.features else ()


def library_paths(*folders: PurePosixPath) -> dict[str, str]:
    """Return the environment variables that name `folders` to the program's loader and to the DSP's."""
    names = [str(folder) for folder in folders]
    # Each has a separator of its own: FastRPC takes a list with colons for one folder.
    return {"LD_LIBRARY_PATH": ":".join(names), "ADSP_LIBRARY_PATH": ";".join(names)}


def runtime_layout(runtime: Runtime, folder: PurePosixPath, anchor: Bundle | None) -> Layout:
    """Return `runtime` as it lies in `folder`, which is one level below the session's, and the model of `anchor`."""
    files: dict[PurePosixPath, Path | bytes | Link] = {
        folder / name: _link(name, sha256) for name, sha256 in runtime.hashes.items()
    }
    objects = {sha256: runtime.files[name] for name, sha256 in runtime.hashes.items()}
    if mask := runtime.dsp_logs:
        # FastRPC reads it from ADSP_LIBRARY_PATH for the program of that name.
        files[folder / f"{PurePosixPath(runtime.runner).name}.farf"] = f"{mask}\n".encode()
    if anchor is not None:
        sha256 = anchor.manifest.files[MODEL]
        files[folder / ANCHOR] = _link(ANCHOR, sha256)
        objects[sha256] = anchor.model
    return Layout(files, objects)


def job_layout(bundle: Bundle, folder: PurePosixPath, kind: Kind) -> Layout:
    """Return the workspace of one execution of `bundle` in `folder`, one level below the session's folder.

    `kind` is the runtime's kind.
    """
    hashes = bundle.manifest.files
    files: dict[PurePosixPath, Path | bytes | Link] = {folder / MODEL: _link(MODEL, hashes[MODEL])}
    objects = {hashes[MODEL]: bundle.model}
    lines = []
    for sample in range(bundle.manifest.samples):
        paths = bundle.input_files(sample)
        for path in paths:
            if path.stat().st_size <= SMALL_BYTES:
                files[folder / path.name] = path
            else:
                sha256 = hashes[f"{INPUTS}/{path.name}"]
                files[folder / path.name] = _link(path.name, sha256)
                objects[sha256] = path
        lines.append(" ".join(path.name for path in paths))
    files[folder / INPUT_LIST] = ("\n".join(lines) + "\n").encode()
    if bundle.manifest.generation is not None:
        files[folder / PROMPT_LIST] = "".join(f"{line.partition(' ')[0]}\n" for line in lines).encode()
    for name in bundle.manifest.packages_for(kind):
        files[folder / name] = _link(name, hashes[name])
        objects[hashes[name]] = bundle.folder / name
    tensors = {INPUT_SHAPES: bundle.manifest.inputs, OUTPUT_SHAPES: bundle.manifest.outputs}
    for name in shape_flags(bundle.manifest).values():
        files[folder / name] = _shapes(tensors[name])
    return Layout(files, objects)


def program_flags(manifest: Manifest, kind: Kind) -> dict[str, str]:
    """Return the runner's flags that the program of a bundle wants on a runtime of `kind`, beside its shapes."""
    flags = {"method_index": str(manifest.method_index)} if manifest.method_index else {}
    # A simulator has no memory that a DSP shares, and reads any other.
    shared = "shared_buffer" in manifest.features and kind != "simulator"
    carried = ",".join(f"{one.output}:{one.input}" for one in manifest.state)
    flags |= ({"shared_buffer": "true"} if shared else {}) | ({"carry": carried} if carried else {})
    return flags | _generation_flags(manifest.generation)


def _generation_flags(generation: Generation | None) -> dict[str, str]:
    if generation is None:
        return {}
    stop = ",".join(map(str, generation.stop))
    likelihoods = {"likelihoods": "true"} if generation.likelihoods is not None else {}
    return {"generate": str(generation.new), **({"stop": stop} if stop else {}), **likelihoods}


def shape_flags(manifest: Manifest) -> dict[str, str]:
    """Return the runner's flags for the files of executed shapes."""
    if not manifest.dynamic:
        return {}
    outputs = {"output_shape_path": OUTPUT_SHAPES} if manifest.references else {}
    return {"input_shape_path": INPUT_SHAPES, **outputs}


def _shapes(tensors: Iterable[TensorSpec]) -> bytes:
    return "".join(", ".join(map(str, tensor.shape)) + "\n" for tensor in tensors).encode()


def _link(name: str, sha256: str) -> Link:
    # Relative, as a device's /data may be mounted elsewhere for another user; from the folder that holds the link.
    up = len(PurePosixPath(name).parts) + 1
    return Link(PurePosixPath(*[".."] * up, OBJECTS, sha256))
