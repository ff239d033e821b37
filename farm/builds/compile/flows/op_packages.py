"""Op packages of the user: copies in the bundle, and their names in the program. Imports executorch.

QNN opens a package by the path in the program. The path is relative to the folder of the runner and ends with the hash
of the package: it is the same for the compiler and for every device, and two packages never share a path.
"""

from __future__ import annotations

import shutil
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from executorch.backends.qualcomm.custom_op.annotator import CustomOpsQuantAnnotator, IOQuantConfig
from executorch.backends.qualcomm.serialization.qc_schema import (
    QnnExecuTorchOpPackageInfo,
    QnnExecuTorchOpPackageOptions,
    QnnExecuTorchOpPackagePlatform,
    QnnExecuTorchOpPackageTarget,
)
from executorch.exir.lowered_backend_module import get_lowered_submodules
from torchao.quantization.pt2e.quantizer.quantizer import Q_ANNOTATION_KEY

from farm.base.errors import ConfigError
from farm.base.hashes import sha256_of
from farm.base.socs import find_soc
from farm.builds.bundles.bundle import OP_PACKAGES, PACKAGES_OF
from farm.builds.runtime.native.elf import AARCH64, HEXAGON, X86_64
from farm.builds.runtime.parts import RuntimePart, find_fault

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from executorch.backends.qualcomm.quantizer.qconfig import QuantizationConfig

    from farm.base.socs import Soc
    from farm.suites.features import OpPackage
    from farm.suites.suite import Case, Target

_DSP, _CPU = QnnExecuTorchOpPackageTarget.HTP, QnnExecuTorchOpPackageTarget.CPU
_ANDROID, _HOST = QnnExecuTorchOpPackagePlatform.AARCH64_ANDROID, QnnExecuTorchOpPackagePlatform.X86_64


class _Library(NamedTuple):
    """Library of a package for one machine."""

    file: str
    folder: str
    """Folder within the folder of all packages."""
    machine: int
    hexagon: int
    target: QnnExecuTorchOpPackageTarget
    platform: QnnExecuTorchOpPackagePlatform


@contextmanager
def packages_of(case: Case, target: Target, folder: Path) -> Iterator[QnnExecuTorchOpPackageOptions | None]:
    """Yield ExecuTorch's options for the packages of `case`, which are copied into `folder`; None without packages.

    During the body a link in the current folder leads to them by the paths in the program. Raises ConfigError for a
    library of another machine.
    """
    if not case.features.op_packages:
        yield None
        return
    soc = find_soc(target.soc)
    packages = case.features.op_packages
    # With an incomplete package a device would compute a part of the program and then fail.
    on_device = all(one.android and f"v{soc.htp_arch}" in one.hexagon for one in packages)
    infos = [
        QnnExecuTorchOpPackageInfo(
            op_package_name=package.name,
            op_package_path=_keep(case, library, soc, folder),
            interface_provider=package.interface_provider,
            target=library.target,
            custom_op_name=package.operator,
            qnn_op_type_name=package.qnn_operator,
            platform=library.platform,
        )
        for package in packages
        for library in _libraries(package, soc, on_device=on_device)
    ]
    here = Path.cwd() / OP_PACKAGES
    # A process that crashed in a package may have left the link.
    here.unlink(missing_ok=True)
    here.symlink_to(folder / OP_PACKAGES)
    try:
        yield QnnExecuTorchOpPackageOptions(infos)
    finally:
        here.unlink()


def _libraries(package: OpPackage, soc: Soc, *, on_device: bool) -> list[_Library]:
    """Return the libraries for a program of `soc`, in the order of ExecuTorch's example."""
    [host], (on_dsp, on_cpu) = PACKAGES_OF["simulator"], PACKAGES_OF["android"]
    found = [_Library(package.library, host, X86_64, 0, _CPU, _HOST)]
    if on_device:
        found = [
            _Library(package.hexagon[f"v{soc.htp_arch}"], on_dsp, HEXAGON, soc.htp_arch, _DSP, _ANDROID),
            _Library(package.android, on_cpu, AARCH64, 0, _CPU, _ANDROID),
            *found,
        ]
    return found


def _keep(case: Case, library: _Library, soc: Soc, folder: Path) -> str:
    """Copy a library into the bundle in `folder`, and return its path relative to `folder`."""
    get = "QNN's op package generator makes a Makefile, with a target for each machine"
    source = Path(case.folder, library.file)
    part = RuntimePart(library.file, source, library.machine, get, library.hexagon, exact=False, soc=soc.name)
    if fault := find_fault(part):
        key = f"case.{case.name}.features.op_packages"
        raise ConfigError(case.manifest, key, f"{library.file} {fault.problem}: {fault.repair}")
    place = folder / OP_PACKAGES / library.folder
    place.mkdir(parents=True, exist_ok=True)
    copy = Path(shutil.copyfile(source, place / "copied.so"))
    named = copy.rename(place / f"{sha256_of(copy)}.so")
    return str(named.relative_to(folder))


def annotation_of(case: Case, config: QuantizationConfig) -> Callable[[torch.fx.GraphModule], None]:
    """Return an annotation that quantizes inputs and outputs of the packages' operators by `config`.

    ExecuTorch has no rule for operators of packages and leaves them in floating point within a quantized graph. An
    operator with a rule of ExecuTorch, which a package may contain as well, keeps that rule.
    """
    names = {package.operator for package in case.features.op_packages}

    def annotate(graph: torch.fx.GraphModule) -> None:
        annotator = CustomOpsQuantAnnotator()
        for node in graph.graph.nodes:
            if str(node.target) not in names or Q_ANNOTATION_KEY in node.meta:
                continue
            tensors = [index for index, arg in enumerate(node.args) if isinstance(arg, torch.fx.Node)]
            outputs = range(len(node.meta["val"]) if isinstance(node.meta["val"], tuple) else 1)
            specs = IOQuantConfig(
                input_quant_specs=dict.fromkeys(tensors, config.input_activation),
                output_quant_specs=dict.fromkeys(outputs, config.output_activation),
            )
            annotator.register_annotation(node.target, specs)
        annotator.build_annotation_fn()(graph)

    return annotate


def require_packaged(graph_module: torch.fx.GraphModule, case: Case) -> None:
    """Raise ConfigError for an operator of a package that QNN refused: ExecuTorch 1.5 leaves it to the CPU."""
    lowered = [one.original_module.graph_module.graph for _, one, _ in get_lowered_submodules(graph_module)]
    taken = {getattr(node.target, "__name__", "") for graph in lowered for node in graph.nodes}
    for package in case.features.op_packages:
        if package.operator not in taken:
            problem = (
                f"{package.operator} of {package.library} is nothing that QNN computes in this program: either the "
                "module has no such operator, or QNN refused the package: its words are in the build log"
            )
            raise ConfigError(case.manifest, f"case.{case.name}.features.op_packages", problem)
