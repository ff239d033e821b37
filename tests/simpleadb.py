"""Time of ExecuTorch's own way to a device, `SimpleADB`: seconds to push, execute and pull every job.

    from simpleadb import job_of, lay_out, run_jobs

The class comes unchanged from the installed executorch wheel, with `adb` of the command line underneath. It needs
the folders of an SDK and of an Android build; `lay_out` makes such folders of links to the files that a virtual device
runs on. There an `aarch64-android` folder holds libraries of *this* machine, as its virtual devices are this machine.
"""

from __future__ import annotations

import itertools
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

from numpy.typing import NDArray

from farm.builds.bundles.bundle import Bundle
from farm.builds.runtime.runtime import Runtime

WORKSPACE = "/data/local/tmp/qnn_executorch_test"
RUNNER = Path("examples/qualcomm/executor_runner/qnn_executor_runner")

_BACKEND = Path("backends/qualcomm/libqnn_executorch_backend.so")
_EXECUTORCH_BACKEND = "libexecutorch_backend_qnn.so"
# SimpleADB refuses to start without them. The simulator has no DSP to load a stub, a skel or the preparation for.
_NO_USE_HERE = "stub: the HTP simulator has no such library\n"


class Layout(NamedTuple):
    """Arguments of `SimpleADB`: an SDK, a build folder, and the device's further files for its `files` argument."""

    sdk: Path
    build: Path
    more: list[Path]


class Job(NamedTuple):
    """A program and its samples, each a sequence of inputs."""

    pte: Path
    samples: Sequence[Sequence[NDArray]]


class Seconds(NamedTuple):
    """Wall time of one job, by step."""

    push: float
    execute: float
    pull: float


class Measured(NamedTuple):
    """Wall times: of the libraries, once, and of every job."""

    libraries: float
    jobs: list[Seconds]


def job_of(bundle: Bundle) -> Job:
    """Return a bundle of farm as a job, all its samples with it."""
    from farm.builds.bundles.bundle import read_tensor

    specs = bundle.manifest.inputs
    samples = [bundle.input_files(sample) for sample in range(bundle.manifest.samples)]
    return Job(bundle.model, [[read_tensor(*pair) for pair in zip(files, specs, strict=True)] for files in samples])


def lay_out(folder: Path, runtime: Runtime, htp_arch: int) -> Layout:
    """Fill `folder` with links to `runtime`, the runtime of a virtual device, in the layout of SimpleADB."""
    sdk, build, more = folder / "sdk", folder / "build", folder / "more"
    target = sdk / "lib" / "aarch64-android"
    skels = sdk / "lib" / f"hexagon-v{htp_arch}" / "unsigned"
    for needed in (target, skels, (build / RUNNER).parent, (build / _BACKEND).parent, more):
        needed.mkdir(parents=True)
    (build / RUNNER).symlink_to(runtime.files[runtime.runner])
    (build / _BACKEND).symlink_to(runtime.files[_EXECUTORCH_BACKEND])
    for unused in (
        target / "libQnnHtpPrepare.so",
        target / f"libQnnHtpV{htp_arch}Stub.so",
        skels / f"libQnnHtpV{htp_arch}Skel.so",
    ):
        unused.write_text(_NO_USE_HERE)
    for name, path in runtime.files.items():
        if name in {"libQnnSystem.so", "libQnnHtp.so"}:
            (target / name).symlink_to(path)
        elif "/" in name:
            # `adb push` of a folder leaves out the links in it.
            (more / name).parent.mkdir(exist_ok=True)
            shutil.copy(path, more / name)
        elif name != runtime.runner:
            (more / name).symlink_to(path)
    return Layout(sdk, build, sorted(more.iterdir()))


def run_jobs(
    jobs: Sequence[Job],
    into: Path,
    *,
    device: str,
    soc: str,
    layout: Layout,
    adb: Path,
    environment: Mapping[str, str],
    iterations: int = 1,
) -> Measured:
    """Run `jobs` one after the other, as upstream's tests do, and return how long each step took.

    `device` is its name for `adb -s`, `environment` leads `adb` to its server; every sample is executed
    `iterations` times. The outputs of the n-th job are `into/n/outputs/output_{sample}_{index}.raw`. Changes the
    environment of this process while it runs.
    """
    import torch

    path = f"{adb.parent}:{os.environ.get('PATH', os.defpath)}"
    with patch.dict(os.environ, {**environment, "PATH": path, "QNN_SDK_ROOT": str(layout.sdk)}):
        from executorch.backends.qualcomm.export_utils import QnnConfig, SimpleADB
        from executorch.backends.qualcomm.serialization.qc_schema import QnnExecuTorchBackendType

        config = QnnConfig(soc_model=soc, build_folder=str(layout.build), device=device)

        def upstream(*pte: Path) -> SimpleADB:
            return SimpleADB(config, [str(path) for path in pte], WORKSPACE, error_only=True)

        started = time.perf_counter()
        upstream().push(
            backends={QnnExecuTorchBackendType.kHtpBackend}, files=[str(path) for path in layout.more], init_env=True
        )
        libraries = time.perf_counter() - started
        seconds = []
        for number, job in enumerate(jobs):
            folder = into / str(number)
            folder.mkdir(parents=True)
            samples = [[torch.from_numpy(array) for array in sample] for sample in job.samples]
            simple_adb = upstream(job.pte)
            # As in upstream's verify_output: outputs of the previous job must not remain. This step is not timed.
            simple_adb.execute(custom_runner_cmd=f"rm -rf {simple_adb.output_folder}")
            times = [time.perf_counter()]
            simple_adb.push(inputs=samples, init_env=False)
            times.append(time.perf_counter())
            simple_adb.execute(iteration=iterations)
            times.append(time.perf_counter())
            simple_adb.pull(host_output_path=str(folder))
            times.append(time.perf_counter())
            seconds.append(Seconds(*(end - start for start, end in itertools.pairwise(times))))
    return Measured(libraries, seconds)
