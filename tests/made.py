"""Devices, jobs, bundles and runtimes with defaults: a test names the facts that matter to it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from farm.base.config.settings import Config, load_config
from farm.builds.bundles.bundle import MANIFEST, MODEL, Bundle, Manifest, TensorSpec
from farm.builds.runtime.runtime import Runtime
from farm.devices.device import AdbAddress, Device
from farm.suites.suite import Case, InputSpec, Job, Target

if TYPE_CHECKING:
    from farm.store.objects.objects import Objects


def device(serial: str = "phone-1", soc: str = "SM8650", **changes: Any) -> Device:
    """Return a phone."""
    usual = {"kind": "hardware", "build": "b", "address": AdbAddress(5037), "product": "phone"}
    return Device(serial=serial, soc=soc, **{**usual, **changes})


def config(folder: Path, text: str) -> Config:
    """Return the configuration of a farm.toml in `folder`, which is written."""
    (folder / "farm.toml").write_text(text)
    return load_config(folder / "farm.toml")


def job(name: str = "c", soc: str = "SM8650", backend: str = "htp", precision: str = "8a8w", **case: Any) -> Job:
    """Return a job of a case with these fields."""
    fields = {"suite": "s", "module": "torch.nn:ReLU", "inputs": (InputSpec((1, 4)),), **case}
    return Job(Case(name=name, **fields), Target(soc, backend, precision))


def manifest(**changes: Any) -> Manifest:
    """Return the manifest of a bundle that was not compiled."""
    spec = TensorSpec((1, 4), "float32")
    usual = {
        "key": "k", "job_id": "s/c[SM8650-htp-8a8w]", "soc": "SM8650", "backend": "htp", "precision": "8a8w",
        "samples": 1, "inputs": (spec,), "outputs": (spec,), "pte_bytes": 7, "delegates": {"QnnBackend": 1},
        "delegated_ops": 1, "fallback_ops": {}, "seconds": {}, "versions": {}, "files": {},
    }  # fmt: skip
    return Manifest(**{**usual, **changes})


def write_bundle(folder: Path, contents: Mapping[str, bytes], **changes: Any) -> Bundle:
    """Write the files of a bundle and its manifest, which has `changes` and the hashes of the files."""
    for name, data in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    files = {name: hashlib.sha256(data).hexdigest() for name, data in contents.items()}
    made = manifest(**{"pte_bytes": len(contents.get(MODEL, b"")), "files": files, **changes})
    (folder / MANIFEST).write_bytes(msgspec.json.encode(made))
    return Bundle(folder, made)


def put_bytes(objects: Objects, content: bytes) -> str:
    """Upload a file with this content for other hosts, and return its SHA-256."""
    with objects.scratch() as folder:
        (folder / "content").write_bytes(content)
        return objects.put(folder / "content")


def runtime(files: Mapping[str, Path], runner: str, kind: str = "simulator", **changes: Any) -> Runtime:
    """Return the runtime of these files."""
    hashes = {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.items()}
    return Runtime(dict(files), "d" * 64, runner, kind=kind, hashes=hashes, **{"versions": {}, **changes})
