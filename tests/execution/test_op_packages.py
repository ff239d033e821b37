"""Op packages on a device: staged with the job, found by QNN and by the DSP, in a process of their own."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import made
import msgspec
import pytest
from watched_transport import Watched

from farm.base.errors import MissingPackageError
from farm.builds.bundles.bundle import Bundle
from farm.devices.execution.raw import RawResult, RunnerOptions
from farm.devices.execution.session import DeviceSession
from farm.dispatch.device_run.device_run import Staged, require_device
from farm.dispatch.device_run.device_worker import DeviceWorker, Executor
from farm.dispatch.request.request import RunPlan
from farm.results.attempt import Stage, Verdict
from farm.store.cluster.records import PlannedJob

PLACES = ("x86_64", "android", "hexagon")
OPTIONS = RunnerOptions(iterations=1, warm_up=0, timeout_s=30)
ANCHOR = b"good anchor"
Make = Callable[..., Bundle]


def packaged(bundle: Bundle, *places: str) -> Bundle:
    """`bundle` with a library for each of `places`."""
    files = dict(bundle.manifest.files)
    for place in places:
        content = f"{place} {bundle.model.read_bytes().decode()}".encode()
        sha256 = hashlib.sha256(content).hexdigest()
        files[f"op_packages/{place}/{sha256}.so"] = sha256
        path = bundle.folder / f"op_packages/{place}/{sha256}.so"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    manifest = msgspec.structs.replace(bundle.manifest, files=files, features=("op_packages",))
    return msgspec.structs.replace(bundle, manifest=manifest)


@pytest.fixture
def run(session: DeviceSession, make_bundle: Make, tmp_path: Path) -> Callable[[bytes, tuple[str, ...]], RawResult]:
    session.keep_loaded(make_bundle(ANCHOR))

    def run(what: bytes, places: tuple[str, ...]) -> RawResult:
        bundle = make_bundle(what)
        staged = session.stage(packaged(bundle, *places) if places else bundle)
        return session.execute("s/c", staged, tmp_path / what.decode(), OPTIONS)

    return run


def started(raw: RawResult) -> tuple[str, bool]:
    """The id of the runner's process, where that began with this job, and whether it keeps a program loaded."""
    found = re.search(r"^started (\d+) (.*)$", raw.stderr, re.MULTILINE)
    return (found[1], "--keep_loaded" in found[2]) if found else ("", False)


def test_each_job_with_packages_has_a_process_of_its_own(run: Callable[..., RawResult], transport: Watched) -> None:
    before, first, second, after = (
        run(b"good before", ()), run(b"good one", PLACES), run(b"good two", PLACES), run(b"good after", ()),
    )  # fmt: skip
    assert [raw.error for raw in (before, first, second, after)] == [""] * 4
    # QNN opens packages when it starts, which a program that is kept loaded would have it do before.
    processes = [started(raw) for raw in (before, first, second, after)]
    assert [keeps for _, keeps in processes] == [True, False, False, True]
    assert len({number for number, _ in processes}) == 4
    for raw, what in ((first, b"good one"), (second, b"good two")):
        # Packages for another machine are not pushed.
        assert transport.listed(raw.workspace / "op_packages") == {"x86_64"}
        content = b"x86_64 " + what
        name = f"op_packages/x86_64/{hashlib.sha256(content).hexdigest()}.so"
        assert transport.run(["cat", str(raw.workspace / name)], timeout_s=10).stdout == content


def test_the_dsp_finds_them_and_a_damaged_one_is_seen(
    session: DeviceSession, run: Callable[..., RawResult], make_bundle: Make, transport: Watched
) -> None:
    raw = run(b"good", PLACES)
    environment = re.search(r"^environment (.*)$", raw.stderr, re.MULTILINE)
    assert environment is not None
    runtime, job = environment[1].split(";")
    assert runtime.endswith("/runtime")
    assert job.endswith(str(raw.workspace))
    bundle = packaged(make_bundle(b"good"), *PLACES)
    assert session.find_damage(bundle, raw) == ""
    [name] = bundle.manifest.packages_for("simulator")
    path = str(raw.workspace / name)
    transport.run(["sh", "-c", 'rm "$1" && echo other >"$1"', "sh", path], timeout_s=10)
    assert f"files on the device differed from the pushed ones ({name})" in session.find_damage(bundle, raw)


@pytest.mark.parametrize(
    ("kind", "os", "places", "says"),
    [
        ("virtual", "android", ("x86_64",), ""),
        ("hardware", "android", PLACES, ""),
        ("hardware", "android", ("x86_64",), "name android and hexagon.v75 in suite.toml"),
        ("hardware", "linux", PLACES, "QNN opens op packages on Android and on x86_64 alone"),
    ],
)
def test_a_device_that_they_are_not_made_for_is_refused(
    make_bundle: Make, kind: str, os: str, places: tuple[str, ...], says: str
) -> None:
    device = made.device("one", kind=kind, os=os)
    require_device(make_bundle(b"without"), device)
    bundle = packaged(make_bundle(b"with"), *places)
    if not says:
        require_device(bundle, device)
        return
    with pytest.raises(MissingPackageError, match=f"one cannot run it: .*{says}"):
        require_device(bundle, device)


def test_on_such_a_device_the_job_fails(make_bundle: Make, tmp_path: Path) -> None:
    phone = made.device("one", os="android")

    def stage_ahead(_: object) -> Future[Staged]:
        staging: Future[Staged] = Future()
        try:
            require_device(packaged(make_bundle(b"with"), "x86_64"), phone)
        except MissingPackageError as error:
            staging.set_exception(error)
        return staging

    run = SimpleNamespace(device=phone, stage_ahead=stage_ahead, flags=lambda *_: {}, abort=lambda: None)
    plan = SimpleNamespace(
        folder=tmp_path, cache_root=tmp_path, heap=False, iterations=1, warm_up=0, timeout_s=30.0, reducible=False,
        profile=SimpleNamespace(kept=False),
    )  # fmt: skip
    executor = Executor(cast("RunPlan", plan), cast("DeviceWorker", SimpleNamespace(run=run)))
    try:
        [attempt], _ = executor._run(cast("PlannedJob", SimpleNamespace(job=made.job(), key="k")), None, lambda: False)
    finally:
        executor.close()
    assert (attempt.verdict, attempt.stage) == (Verdict.FAILED, Stage.BUILD)
    assert "name android and hexagon.v75 in suite.toml" in attempt.reason
