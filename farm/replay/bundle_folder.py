"""Folders for users without farm: a bundle with inputs, references, and how to run it by hand."""

from __future__ import annotations

import re
import shlex
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePosixPath

import numpy as np

from farm.base.backends.descriptor import DIRECT_MODE
from farm.base.backends.registry import find_backend
from farm.base.errors import UsageError
from farm.base.socs import find_soc
from farm.base.text import one_line
from farm.builds.bundles.bundle import (
    INPUTS,
    MANIFEST,
    MODEL,
    OP_PACKAGES,
    OPTRACE,
    Bundle,
    Manifest,
    TensorSpec,
    read_tensor,
)
from farm.builds.bundles.key import HOST_CPU
from farm.builds.runtime.parts import RuntimePart, library
from farm.builds.runtime.qnn_sdk import ANDROID_FOLDER, QnnFiles
from farm.builds.runtime.runtime import BACKEND_IN_BUILD, RUNNER_IN_BUILD, Places, device_parts, domain_flag
from farm.devices.execution.content_store import INPUT_LIST, job_layout, program_flags, shape_flags
from farm.suites.options import runtime_flags
from farm.suites.suite import Target

# Folders for users without farm: texts with filled in values, written completely or not at all.


def _filled(name: str, **values: str) -> str:
    """Return the text `name` beside this module with a value in place of each `@name@`."""
    text = Path(__file__).with_name(name).read_text(encoding="utf-8")
    return re.sub(r"@(\w+)@", lambda found: values[found[1]], text)


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
_ON_CPU = """
The program has no QNN parts: upstream's runner runs it only where XNNPACK was linked into it. The one that
`farm setup runtime build --target android-arm64` makes has it, takes the same flags and those of XNNPACK's options,
which upstream's has not, and needs no QNN SDK.
"""
_DIRECT = """
The program is for direct mode: `$DIRECT_BUILD` is the folder of the build for the Hexagon, `$HEXAGON_TOOLS_ROOT` the
Hexagon tools.
"""
_STATE = """
An inference of the program takes outputs of the inference before it: `--carry=OUTPUT:INPUT`, which upstream's
runner lacks. There each inference takes the inputs in `inputs/`, which are outputs of the FP32 module.
"""


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
    optional = [name for name in (OPTRACE, OP_PACKAGES, _LOG) if (bundle.folder / name).exists()]
    return [MODEL, MANIFEST, INPUTS, *references, *optional]


def readme(bundle: Bundle, job_id: str, target: Target, about: Sequence[str]) -> str:
    """Return the text of the folder's README.md."""
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
    virtual = manifest.versions.get(HOST_CPU) == "x86"
    lines = [one_line(line, _WIDTH) for line in about]
    lines += [f"Compiled for {soc.name} ({soc.product}), backend {target.backend}, precision {target.precision}."]
    lines += ["For a VIRTUAL device on x86_64, never for a phone."] if virtual else []
    lines += [f"Bundle {manifest.key}, made with {_versions(manifest)}."]
    return _filled(
        "bundle_readme.md",
        job=one_line(job_id, _WIDTH),
        about="  \n".join(lines),
        packages=f" {OP_PACKAGES}" if _has_packages(bundle) else "",
        program=f"{manifest.pte_bytes:,} bytes, {_delegation(manifest)}",
        more_files="\n".join(_more_files(bundle)),
        tensors=_tensors(manifest),
        soc=soc.name,
        backend=target.backend,
        flags=" ".join(words.values()),
        device_flags=" ".join(on_device.values()),
        runner=parts[0].name,
        runner_flags=domain_flag(target.backend, target.mode),
        direct=(_DIRECT if target.direct else "") + (_STATE if manifest.state else ""),
        direct_flag=" --direct" if target.direct else "",
        direct_option=f" --option {DIRECT_MODE}=true" if target.direct else "",
        qnn=f" of QNN {manifest.versions['qnn']}" if "qnn" in manifest.versions else "",
        place=f"bundle-{manifest.key[:12]}",
        root=" && adb root" if find_backend(target.backend).needs_root else "",
        libraries=" ".join(f'"{part.path}"' for part in parts),
        on_cpu=_ON_CPU if find_backend(target.backend).on_cpu else "",
        compare=_compare(manifest),
        exec_list=_ARRAY_LIST if _is_permuted(manifest) else INPUT_LIST,
    )


def _words(flags: Mapping[str, str]) -> dict[str, str]:
    return {name: shlex.quote(f"--{name}={value}") for name, value in flags.items()}


def _versions(manifest: Manifest) -> str:
    named = [name for name in ("executorch", "qnn", "torch") if name in manifest.versions]
    return ", ".join(f"{name} {manifest.versions[name]}" for name in named) or "tools that it does not name"


def _delegation(manifest: Manifest) -> str:
    left = ", ".join(f"{name} x{count}" for name, count in sorted(manifest.fallback_ops.items()))
    delegates = ", ".join(f"{count} of {name}" for name, count in sorted(manifest.delegates.items())) or "none"
    return f"delegated partitions: {delegates}; operators left to the CPU: {left or 'none'}"


def _more_files(bundle: Bundle) -> list[str]:
    texts = {"fp32": "outputs of the FP32 module", "quantized": "outputs of the quantized module, on the CPU"}
    rows = [
        f"| `reference_{kind}/` | `output_{{sample}}_{{index}}.raw`: {texts.get(kind, kind)} |"
        for kind in bundle.manifest.references
    ]
    rows += [f"| `{name}` | the shapes that are executed |" for name in shape_flags(bundle.manifest).values()]
    if (bundle.folder / _LOG).exists():
        rows.append(f"| `{_LOG}` | output of the compiler |")
    if (bundle.folder / OPTRACE).exists():
        rows.append(f"| `{OPTRACE}/` | graphs for the SDK's timeline |")
    if _has_packages(bundle):
        rows.append(f"| `{OP_PACKAGES}/` | op packages: the program looks for them there, `farm exec` brings none |")
    return rows


def _has_packages(bundle: Bundle) -> bool:
    return OP_PACKAGES in bundle.manifest.features


def _tensors(manifest: Manifest) -> str:
    rows = ["| tensor | dtype and shape | dimensions in raw files | quantization step |", "|---|---|---|---|"]
    rows += [f"| input {index} | {spec} | {_order(spec)} | |" for index, spec in enumerate(manifest.inputs)]
    rows += [
        f"| output {index} | {spec} | {_order(spec)} | {'' if spec.step is None else f'{spec.step:.8g}'} |"
        for index, spec in enumerate(manifest.outputs)
    ]
    return "\n".join(rows)


def _order(spec: TensorSpec) -> str:
    return ", ".join(map(str, spec.order)) or "C order"


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


def _compare(manifest: Manifest) -> str:
    if not manifest.references:
        return "There is no reference for its outputs.\n"
    outputs = [
        (f"output_{sample}_{index}.raw", spec.dtype)
        for sample in range(manifest.samples)
        for index, spec in enumerate(manifest.outputs)
    ]
    return _filled(
        "bundle_compare.md", outputs=repr(outputs), references=repr([f"reference_{k}" for k in manifest.references])
    )
