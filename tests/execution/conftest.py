from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from watched_transport import Watched

from farm.base.processes import Supervisor
from farm.builds.bundles.bundle import INPUTS, MANIFEST, MODEL, Bundle, Manifest, TensorSpec, load_bundle
from farm.builds.runtime.runtime import Runtime
from farm.devices.adb.server import start_adb_server
from farm.devices.virtual.boot import boot

STUB = Path(__file__).with_name("serve_stub.py")


@pytest.fixture(scope="session")
def device_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, int, Path]]:
    folder = tmp_path_factory.mktemp("device")
    with Supervisor() as supervisor:
        server = start_adb_server(supervisor, folder / "adb")
        [device] = boot(supervisor, server, ["SM8650"], folder / "devices")
        yield device.serial, device.address.port, folder / "devices" / device.serial


@pytest.fixture
def transport(device_port: tuple[str, int, Path]) -> Iterator[Watched]:
    serial, port, _ = device_port
    watched = Watched(serial, port)
    yield watched
    watched.close()


@pytest.fixture
def storage(device_port: tuple[str, int, Path]) -> Path:
    """Folder of this machine behind the device's folder of farm."""
    return device_port[2] / "data/local/tmp/farm"


@pytest.fixture
def make_bundle(tmp_path: Path) -> Callable[..., Bundle]:
    def make(model: bytes, inputs: list[bytes] | None = None) -> Bundle:
        samples = inputs or [b"12345678"]
        folder = tmp_path / f"bundle-{hashlib.sha256(model + b''.join(samples)).hexdigest()[:12]}"
        contents = {MODEL: model, **{f"{INPUTS}/input_{n}_0.raw": data for n, data in enumerate(samples)}}
        for name, data in contents.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(data)
        tensor = TensorSpec((len(samples[0]) // 4,), "float32")
        manifest = Manifest(
            key="k", job_id="s/c", soc="SM8650", backend="htp", precision="8a8w", samples=len(samples),
            inputs=(tensor,), outputs=(tensor,), pte_bytes=len(model), delegates={}, delegated_ops=0,
            fallback_ops={}, seconds={}, versions={},
            files={name: hashlib.sha256(data).hexdigest() for name, data in contents.items()},
        )  # fmt: skip
        (folder / MANIFEST).write_bytes(msgspec.json.encode(manifest))
        return load_bundle(folder)

    return make


@pytest.fixture
def runtime(tmp_path: Path) -> Runtime:
    """The stub runner, and a library that is new on the device for every test."""
    library = tmp_path / "libstub.so"
    library.write_bytes(str(tmp_path).encode() * 1000)
    files = {STUB.name: STUB, "real/libstub.so": library}
    hashes = {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.items()}
    return Runtime(files, "d" * 64, STUB.name, {}, "simulator", False, hashes)
