"""Files on a device under their SHA-256, workspaces of links to them, and the flags of a runner in a workspace."""

from __future__ import annotations

import hashlib
import re
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from farm.base.errors import DeviceSpaceError
from farm.base.hashes import sha256_of
from farm.base.text import clean_text, count_of
from farm.builds.bundles.bundle import INPUTS, MODEL, OP_PACKAGES, Bundle, Generation, Manifest
from farm.devices.execution.liveness import DamagedError, staging_error
from farm.devices.execution.raw import DEBUG_BYTES, DEBUG_FILE, ETDUMP_FILE, TOKENS_FILE, ErrorCause, RunnerOptions
from farm.devices.execution.shell import shell_script
from farm.devices.files import TELL_ROOM, free_bytes
from farm.devices.process import Link
from farm.devices.transport import Completed, Transport

if TYPE_CHECKING:
    from farm.builds.runtime.native import Kind
    from farm.builds.runtime.runtime import Runtime


# Files on a device under their SHA-256: nothing is pushed twice, nothing half pushed or damaged is used.
#
#     STORAGE, `Transport.storage`/
#         objects/<sha256>        whole files; their modification time is their last use by a session
#         run-<run>-<process>/    one session: arriving files (`incoming`), its runtime, workspaces with links
#
# An object is pushed into `incoming`, checked on the device and moved, so that no half object exists; every session
# hashes an object before its first use. adb's protocol checks no content: `differing` does.


OBJECTS = "objects"
SESSION_PREFIX = "run-"

# Larger files are measured when they arrive and hashed when a later session finds them, or when their job fails:
# hashing takes as long as pushing where a processor has no instructions for it.
_HASHED_BYTES = 64 << 20

# Outputs and logs need room as well, and Android gets slow on a full disk.
RESERVE_BYTES = 64 << 20

_SHELL_SECONDS = 30.0
# Slow flash reads 200 MB/s and a slow core hashes as fast; a whole runtime and large models are a few GB.
_HASH_SECONDS = 300.0
_LISTING_BYTES = 64 << 20
# Age at which the folder of a killed session is removed.
_LEFTOVER_MINUTES = 24 * 60

_HASH = re.compile(r"[0-9a-f]{64}")

# Names go through standard input: devices bound how long a command may be, dropbear by 9,000 bytes, adb by 65,535.
_REMOVE = "names=$(cat); rm -f -- $names"

# In the root: every object that a link of a session leads to.
_LINKED = "find run-* -type l -exec readlink {} + 2>/dev/null; true"


class _Object(msgspec.Struct):
    size: int
    used: int
    """Epoch of the device's clock, seconds."""


class ContentStore:
    """The objects of one device, as one session sees them. Several threads may use it."""

    def __init__(self, transport: Transport, folder: PurePosixPath, release: Callable[[], None] = lambda: None) -> None:
        """`folder` is the session's own on the device; `release` lets go of objects when room is short."""
        self._release = release
        self._transport, self._incoming = transport, folder / "incoming"
        self._root = folder.parent
        self._objects = self._root / OBJECTS
        self._lock = threading.RLock()
        self._known: dict[str, _Object] = {}
        self._verified: set[str] = set()
        self._free = 0
        self._surveyed = False
        self.pushed_bytes = 0
        """Content that this session has pushed so far."""

    def path(self, sha256: str) -> PurePosixPath:
        """Return where an object is on the device, there or not."""
        return self._objects / sha256

    def survey(self, wanted: Iterable[str] = ()) -> None:
        """List the device's objects in one round trip; remove damaged objects of `wanted`.

        Objects that this session verified or pushed are not hashed again.
        """
        with self._lock:
            wanted = [name for name in dict.fromkeys(wanted) if name not in self._verified]
            done = self._shell(
                shell_script("survey"),
                [str(self._root), self._incoming.parent.name, str(_LEFTOVER_MINUTES), TELL_ROOM],
                stdin="".join(f"{name}\n" for name in wanted).encode(),
                timeout_s=_HASH_SECONDS,
                cwd=None,
            )
            lines = done.stdout.decode(errors="replace").splitlines()
            if done.code != 0 or "objects" not in lines or "hashes" not in lines:
                raise staging_error(self._transport.serial, "cannot look at its storage", done)
            first, second = lines.index("objects"), lines.index("hashes")
            self._free = free_bytes(lines[:first]) or 0
            self._known = _listed(lines[first + 1 : second])
            self._surveyed = True
            found = _content_by_name(lines[second + 1 :])
            damaged = [name for name in wanted if name in found and found[name] != name]
            # An unreadable object has no hash and counts as damaged.
            self._verified |= {name for name in wanted if found.get(name) == name}
            self._remove(damaged)

    def look_for(self, wanted: Iterable[str]) -> None:
        """Survey, unless all of `wanted` are known to be whole on the device, or not to be there."""
        with self._lock:
            unsure = [name for name in wanted if name not in self._verified]
            if not self._surveyed or any(name in self._known for name in unsure):
                self.survey(unsure)

    def ensure(self, files: Mapping[str, Path]) -> int:
        """Push the `files` that the device lacks, local files by their SHA-256, and return the bytes pushed.

        Raises DeviceError; DeviceSpaceError for a device without room for them.
        """
        with self._lock:
            if self._verified.issuperset(files):
                return 0
            self.look_for(files)
            missing = {name: files[name] for name in files if name not in self._verified}
            if not missing:
                return 0
            sizes = {name: path.stat().st_size for name, path in missing.items()}
            self._make_room(sum(sizes.values()), keep=files)
            try:
                self._push(missing)
            except DeviceSpaceError:
                # Other programs write to this storage, and reserved blocks count as free.
                if not self.free(keep=files):
                    raise
                self._push(missing)
            for name, size in sizes.items():
                self._known[name] = _Object(size, time.time_ns() // 10**9)
                self._free -= size
            self._verified |= missing.keys()
            pushed = sum(sizes.values())
            self.pushed_bytes += pushed
            return pushed

    def verify(self, names: Collection[str]) -> bool:
        """Hash these objects again and return whether all are whole; damaged ones are removed."""
        with self._lock:
            self._verified -= set(names)
            self.survey(names)
            return self._verified.issuperset(names)

    def free(self, *, keep: Collection[str]) -> bool:
        """Remove objects without a link, except `keep`, and partial files; return whether space was freed.

        Raises DeviceError.
        """
        with self._lock:
            self._release()
            self._shell('rm -rf -- "$1"', [str(self._incoming)], cwd=None, timeout_s=_SHELL_SECONDS)
            before = self._free
            self.survey()
            victims = self._unused(keep)
            self._remove(victims)
            self.survey()
            return bool(victims) or self._free > before

    def _push(self, missing: Mapping[str, Path]) -> None:
        left = dict(missing)
        for _ in range(2):
            before = {name: _state(path) for name, path in left.items()}
            self._transport.push({self._incoming / name: path for name, path in left.items()})
            sizes = {name: state[0] for name, state in before.items() if _state(left[name]) == state}
            lines = [f"{'-' if size <= _HASHED_BYTES else size} {name}\n" for name, size in sizes.items()]
            done = self._shell(
                shell_script("admit"),
                [str(self._objects)],
                stdin="".join(lines).encode(),
                cwd=self._incoming,
                timeout_s=_HASH_SECONDS,
            )
            admitted = set(done.stdout.decode(errors="replace").split())
            left = {name: path for name, path in left.items() if name not in admitted}
            if not left:
                return
        path = next(iter(left.values()))
        raise DamagedError(
            self._transport.serial,
            f"{path.name} arrives damaged, twice ({len(left)} of {len(missing)} files): check cable and storage, "
            "and that nothing changes the file here",
            code=done.code,
            stderr=clean_text(done.stderr),
        )

    def _make_room(self, size: int, *, keep: Collection[str]) -> None:
        if self._free >= size + RESERVE_BYTES:
            return
        # Asked again: it may be long ago.
        self.survey()
        short = size + RESERVE_BYTES - self._free
        if short <= 0:
            return
        self._release()
        victims = []
        for name in self._unused(keep):
            if short > 0:
                victims.append(name)
                short -= self._known[name].size
        if short > 0:
            mib = (size + RESERVE_BYTES - self._free) / 2**20
            raise DeviceSpaceError(
                self._transport.serial,
                f"has no room: {size / 2**20:.0f} MiB and a reserve of {RESERVE_BYTES >> 20} MiB are needed, "
                f"{mib:.0f} MiB are lacking even without the farm's old files: remove files there",
            )
        self._remove(victims)
        self.survey()

    def _unused(self, keep: Collection[str]) -> list[str]:
        """Return the objects without a link, except `keep`: the oldest first, and what this session has used last."""
        done = self._shell(_LINKED, [], cwd=self._root, timeout_s=_SHELL_SECONDS)
        linked = {PurePosixPath(line).name for line in done.stdout.decode(errors="replace").splitlines()}
        unused = self._known.keys() - linked - set(keep)
        return sorted(unused, key=lambda name: (name in self._verified, self._known[name].used))

    def _remove(self, names: Sequence[str]) -> None:
        if names:
            stdin = "".join(f"{name}\n" for name in names).encode()
            done = self._shell(_REMOVE, [], stdin=stdin, cwd=self._objects, timeout_s=_SHELL_SECONDS)
            if done.code != 0:
                raise staging_error(self._transport.serial, "cannot remove old files", done)
            for name in names:
                self._known.pop(name, None)
                self._verified.discard(name)

    def _shell(
        self, script: str, words: Sequence[str], *, cwd: PurePosixPath | None, timeout_s: float, stdin: bytes = b""
    ) -> Completed:
        return self._transport.run(
            ["sh", "-c", script, "sh", *words], cwd=cwd, stdin=stdin, timeout_s=timeout_s, max_output=_LISTING_BYTES
        )


def _state(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns


def _listed(lines: Iterable[str]) -> dict[str, _Object]:
    found = {}
    for line in lines:
        first, _, rest = line.partition(" ")
        second, _, name = rest.partition(" ")
        name, size, used = name.removeprefix("./"), count_of(first), count_of(second)
        if size is not None and used is not None and _HASH.fullmatch(name):
            found[name] = _Object(size, used)
    return found


def expected_content(files: Mapping[PurePosixPath, Path | bytes | Link], folder: PurePosixPath) -> dict[str, str]:
    """Return the SHA-256 of every pushed file, and the target of every pushed link, by name in `folder`."""
    return {str(path.relative_to(folder)): _digest(source) for path, source in files.items()}


def hashes_of(paths: Iterable[Path]) -> dict[str, str]:
    """Return the SHA-256 of local files, by name."""
    return {path.name: _digest(path) for path in paths}


def differing(transport: Transport, folder: PurePosixPath, expected: Mapping[str, str]) -> list[str]:
    """Return the names of files in `folder` on the device that are not as `expected`, or not there.

    Raises DeviceError.
    """
    done = transport.run(
        ["sh", "-c", shell_script("hash_files")],
        cwd=folder,
        stdin="".join(f"{name}\n" for name in expected).encode(),
        timeout_s=_HASH_SECONDS,
        max_output=_LISTING_BYTES,
    )
    if done.code != 0:
        raise staging_error(transport.serial, f"cannot look at {folder}", done)
    found = _content_by_name(done.stdout.decode(errors="replace").splitlines())
    return [name for name, content in expected.items() if found.get(name) != content]


def _content_by_name(lines: Iterable[str]) -> dict[str, str]:
    """Return hash or link target by name, from the lines of a script."""
    return dict(line.split(maxsplit=1)[::-1] for line in lines if len(line.split()) == 2)


def _digest(source: Path | bytes | Link) -> str:
    if isinstance(source, Link):
        return str(source.target)
    return hashlib.sha256(source).hexdigest() if isinstance(source, bytes) else sha256_of(source)


# Workspace of a job or a runtime on a device: links to objects, and small files beside them.


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


_DUMPS, _PROFILE_LEVEL = "dump_intermediate_outputs", "profile_level"
_DEBUG_FLAGS = {
    _DUMPS: "true",
    "debug_output_path": DEBUG_FILE,
    "debug_buffer_size": str(DEBUG_BYTES),
}


class Layout(NamedTuple):
    """Files of one folder of a session, as `Transport.push` takes them, and the objects that its links lead to."""

    files: dict[PurePosixPath, Path | bytes | Link]
    objects: dict[str, Path]
    """Local files by SHA-256."""

    def link(self, folder: PurePosixPath, name: str, sha256: str, source: Path) -> None:
        """Add a link `name` in `folder`, one level below the session's, to the object of `source`."""
        # Relative, as a device's /data may be mounted elsewhere for another user; from the folder that holds the link.
        up = len(PurePosixPath(name).parts) + 1
        self.files[folder / name] = Link(PurePosixPath(*[".."] * up, OBJECTS, sha256))
        self.objects[sha256] = source


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
    layout = Layout({}, {})
    for name, sha256 in runtime.hashes.items():
        layout.link(folder, name, sha256, runtime.files[name])
    if mask := runtime.dsp_logs:
        # FastRPC reads it from ADSP_LIBRARY_PATH for the program of that name.
        layout.files[folder / f"{PurePosixPath(runtime.runner).name}.farf"] = f"{mask}\n".encode()
    if anchor is not None:
        layout.link(folder, ANCHOR, anchor.manifest.files[MODEL], anchor.model)
    return layout


def job_layout(bundle: Bundle, folder: PurePosixPath, kind: Kind) -> Layout:
    """Return the workspace of one execution of `bundle` in `folder`, one level below the session's folder.

    `kind` is the runtime's kind.
    """
    hashes, layout = bundle.manifest.files, Layout({}, {})
    files = layout.files
    layout.link(folder, MODEL, hashes[MODEL], bundle.model)
    lines = []
    for sample in range(bundle.manifest.samples):
        paths = bundle.input_files(sample)
        for path in paths:
            if path.stat().st_size <= SMALL_BYTES:
                files[folder / path.name] = path
            else:
                layout.link(folder, path.name, hashes[f"{INPUTS}/{path.name}"], path)
        lines.append(" ".join(path.name for path in paths))
    files[folder / INPUT_LIST] = ("\n".join(lines) + "\n").encode()
    if bundle.manifest.generation is not None:
        files[folder / PROMPT_LIST] = "".join(f"{line.partition(' ')[0]}\n" for line in lines).encode()
    for name in bundle.manifest.packages_for(kind):
        layout.link(folder, name, hashes[name], bundle.folder / name)
    tensors = {INPUT_SHAPES: bundle.manifest.inputs, OUTPUT_SHAPES: bundle.manifest.outputs}
    for name in shape_flags(bundle.manifest).values():
        shapes = (", ".join(map(str, tensor.shape)) for tensor in tensors[name])
        files[folder / name] = "".join(f"{shape}\n" for shape in shapes).encode()
    return layout


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
