"""Folders for users without farm: a bundle with inputs, references, and how to run it by hand."""

from __future__ import annotations

import shlex
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePosixPath

import numpy as np

from farm.base.backends.registry import find_backend
from farm.base.errors import UsageError
from farm.base.socs import find_soc
from farm.base.text import one_line
from farm.builds.bundles.bundle import INPUTS, MANIFEST, MODEL, OP_PACKAGES, OPTRACE, Bundle, Manifest, read_tensor
from farm.builds.bundles.key import HOST_CPU
from farm.builds.runtime.parts import RuntimePart, library
from farm.builds.runtime.qnn_sdk import ANDROID_FOLDER, QnnFiles
from farm.builds.runtime.runtime import BACKEND_IN_BUILD, RUNNER_IN_BUILD, Places, device_parts
from farm.devices.execution.content_store import INPUT_LIST, job_layout, program_flags, shape_flags
from farm.suites.options import runtime_flags
from farm.suites.suite import Target


def require_new(folder: Path, *, make: bool = False) -> None:
    """Raise UsageError unless `folder` is missing or empty, so that nothing is overwritten, and can be made."""
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UsageError(f"{folder} is there already: name another folder")
        if make:
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot write {folder}: {error.strerror}") from None


def publish_folder(folder: Path, fill: Callable[[Path], None]) -> None:
    """Make `folder`, which may exist and be empty, by `fill`; a failure leaves nothing.

    Raises UsageError for a folder that is not empty or cannot be written.
    """
    require_new(folder)
    place = folder.absolute()
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=place.parent) as scratch:
            partial = Path(scratch, "folder")
            partial.mkdir()
            fill(partial)
            partial.chmod(0o755)
            if place.exists():
                place.rmdir()
            partial.rename(place)
    except OSError as error:
        raise UsageError(f"cannot write {folder}: {error.strerror or error}") from None


# A bundle -> a folder to take elsewhere: the `.pte`, inputs, references, and how to run it by hand.


README = "README.md"
OUTPUTS = "outputs"
_LOG = "build.log"
_ARRAY_LIST = "array_list.txt"
_WIDTH = 200
_NAMED_VERSIONS = ("executorch", "qnn", "torch")


def write_bundle_folder(bundle: Bundle, job_id: str, target: Target, about: Sequence[str], folder: Path) -> None:
    """Fill `folder`, which is made, with `bundle` and a README.md; `about` has lines on the bundle's origin.

    Raises UsageError for a folder that is not empty or not writable.
    """
    publish_folder(folder, lambda partial: _fill(partial, bundle, job_id, target, about))


def _fill(folder: Path, bundle: Bundle, job_id: str, target: Target, about: Sequence[str]) -> None:
    for name in _names(bundle):
        source = bundle.folder / name
        if source.is_dir():
            shutil.copytree(source, folder / name)
        else:
            shutil.copyfile(source, folder / name)
    for path, content in job_layout(bundle, PurePosixPath(), "simulator").files.items():
        # The other entries of the layout are links and files, which are copied already.
        if isinstance(content, bytes) and path.name != INPUT_LIST:
            (folder / path.name).write_bytes(content)
    _write_list(folder / INPUT_LIST, bundle, ".raw")
    if _is_permuted(bundle.manifest):
        _write_arrays(folder, bundle)
    (folder / README).write_text(readme(bundle, job_id, target, about), encoding="utf-8")


def _is_permuted(manifest: Manifest) -> bool:
    """Tell whether raw files of inputs differ from C order, which `farm exec` takes."""
    return any(spec.order for spec in manifest.inputs)


def _write_arrays(folder: Path, bundle: Bundle) -> None:
    """Write the inputs as `.npy` files into `folder`, with a list of them."""
    _write_list(folder / _ARRAY_LIST, bundle, ".npy")
    for sample in range(bundle.manifest.samples):
        for path, spec in zip(bundle.input_files(sample), bundle.manifest.inputs, strict=True):
            np.save(folder / INPUTS / f"{path.stem}.npy", read_tensor(path, spec), allow_pickle=False)


def _write_list(file: Path, bundle: Bundle, suffix: str) -> None:
    """Write the list of input files with this suffix, a line for each sample."""
    samples = map(bundle.input_files, range(bundle.manifest.samples))
    lines = (" ".join(f"{INPUTS}/{path.stem}{suffix}" for path in paths) for paths in samples)
    file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def _names(bundle: Bundle) -> list[str]:
    """Return the names of a bundle's copied files and folders; files with paths of this machine are left out."""
    references = [f"reference_{kind}" for kind in bundle.manifest.references]
    return [MODEL, MANIFEST, INPUTS, *references, *_optional(bundle)]


def _optional(bundle: Bundle) -> list[str]:
    return [name for name in (OPTRACE, OP_PACKAGES, _LOG) if (bundle.folder / name).exists()]


def readme(bundle: Bundle, job_id: str, target: Target, about: Sequence[str]) -> str:
    """Return the text of the folder's README.md."""
    import jinja2

    manifest, soc = bundle.manifest, find_soc(target.soc)
    parts = _parts(target)
    flags = {
        "model_path": MODEL,
        "input_list_path": INPUT_LIST,
        "output_folder_path": OUTPUTS,
        # Direct mode's runner knows neither.
        **({} if target.direct else {"iteration": "1", "warm_up": "0"}),
        **runtime_flags(target),
        **shape_flags(manifest),
    }
    words = _words(flags | program_flags(manifest, "simulator"))
    on_device = _words(flags | program_flags(manifest, "android"))
    # ExecuTorch's runner hands nothing on from one inference to the next.
    on_device.pop("carry", None)
    if target.direct:
        # The DSP opens the outputs, which is in no folder.
        on_device["output_folder_path"] = f"--output_folder_path=$D/{OUTPUTS}"
    versions = [f"{name} {manifest.versions[name]}" for name in _NAMED_VERSIONS if name in manifest.versions]
    virtual = manifest.versions.get(HOST_CPU) == "x86"
    lines = [one_line(line, _WIDTH) for line in about]
    lines += [f"Compiled for {soc.name} ({soc.product}), backend {target.backend}, precision {target.precision}."]
    lines += ["For a VIRTUAL device on x86_64, never for a phone."] if virtual else []
    lines += [f"Bundle {manifest.key}, made with {', '.join(versions) or 'tools that it does not name'}."]
    template = Path(__file__).with_name("bundle_readme.md").read_text(encoding="utf-8")
    text: str = jinja2.Template(template, trim_blocks=True, keep_trailing_newline=True).render(
        job=one_line(job_id, _WIDTH),
        about=lines,
        manifest=manifest,
        target=target,
        backend=find_backend(target.backend),
        optional=_optional(bundle),
        has_packages=OP_PACKAGES in manifest.features,
        shape_files=shape_flags(manifest).values(),
        flags=" ".join(words.values()),
        device_flags=" ".join(on_device.values()),
        runner=parts[0].name,
        libraries=" ".join(f'"{part.path}"' for part in parts),
        outputs=[
            (f"output_{sample}_{index}.raw", spec.dtype)
            for sample in range(manifest.samples)
            for index, spec in enumerate(manifest.outputs)
        ],
        references=[f"reference_{kind}" for kind in manifest.references],
        exec_list=_ARRAY_LIST if _is_permuted(manifest) else INPUT_LIST,
    )
    return text


def _words(flags: Mapping[str, str]) -> dict[str, str]:
    return {name: shlex.quote(f"--{name}={value}") for name, value in flags.items()}


def _parts(target: Target) -> tuple[RuntimePart, ...]:
    """Return the files to push beside the program, the runner first, with paths as a shell takes them."""
    sdk, build = Path("$QNN_SDK_ROOT"), Path("$BUILD")
    places = Places(
        QnnFiles("", sdk, sdk / "lib" / ANDROID_FOLDER),
        library(Path(RUNNER_IN_BUILD).name, build / RUNNER_IN_BUILD, ""),
        library(Path(BACKEND_IN_BUILD).name, build / BACKEND_IN_BUILD, ""),
        build,
        direct_build=Path("$DIRECT_BUILD"),
        hexagon_tools=Path("$HEXAGON_TOOLS_ROOT"),
    )
    return device_parts(find_soc(target.soc), target.backend, places, target.mode)
