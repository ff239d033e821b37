from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import made
import pytest
from attached import Rack, rack
from watched_transport import Watched

from farm.builds.bundles.bundle import INPUTS, MODEL, Bundle, TensorSpec
from farm.builds.runtime.runtime import Runtime
from farm.devices.execution.raw import RawResult, RunnerOptions
from farm.devices.execution.session import DeviceSession

STUB = Path(__file__).with_name("serve_stub.py")
OPTIONS = RunnerOptions(timeout_s=30)


@pytest.fixture(scope="session")
def attached(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rack]:
    with rack(tmp_path_factory.mktemp("device"), "SM8650") as one:
        yield one


@pytest.fixture
def transport(attached: Rack) -> Iterator[Watched]:
    with closing(Watched(attached.device.serial, attached.server.port)) as watched:
        yield watched


@pytest.fixture
def storage(attached: Rack) -> Path:
    """Folder of this machine behind the device's folder of farm."""
    return attached.files() / "farm"


@pytest.fixture
def make_bundle(tmp_path: Path) -> Callable[..., Bundle]:
    def make(model: bytes, inputs: list[bytes] | None = None) -> Bundle:
        samples = inputs or [b"12345678"]
        folder = tmp_path / f"bundle-{hashlib.sha256(model + b''.join(samples)).hexdigest()[:12]}"
        tensor = TensorSpec((len(samples[0]) // 4,), "float32")
        contents = {MODEL: model, **{f"{INPUTS}/input_{n}_0.raw": data for n, data in enumerate(samples)}}
        return made.write_bundle(folder, contents, samples=len(samples), inputs=(tensor,), outputs=(tensor,))

    return make


@pytest.fixture
def runtime(tmp_path: Path) -> Runtime:
    """The stub runner, and a library that is new on the device for every test."""
    library = tmp_path / "libstub.so"
    library.write_bytes(str(tmp_path).encode() * 1000)
    files = {STUB.name: STUB, "real/libstub.so": library}
    return made.runtime(files, STUB.name)


@pytest.fixture
def session(transport: Watched, runtime: Runtime) -> Iterator[DeviceSession]:
    """Session of the stub runner; other tests override it."""
    with closing(DeviceSession(transport, runtime, "r", transport.serial)) as session:
        yield session


@pytest.fixture
def run(session: DeviceSession, make_bundle: Callable[..., Bundle], tmp_path: Path) -> Callable[..., RawResult]:
    """Function that executes a program in the session, each time into another folder."""
    numbers = itertools.count()

    def run(
        model: bytes, options: RunnerOptions = OPTIONS, inputs: list[bytes] | None = None, *, alone: bool = False
    ) -> RawResult:
        execute = session.execute_alone if alone else session.execute
        return execute("s/c", session.stage(make_bundle(model, inputs)), tmp_path / f"out{next(numbers)}", options)

    return run
