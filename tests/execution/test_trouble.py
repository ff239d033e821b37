"""Devices that fail in the middle of an execution: the cause in the result, over a real adb server."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from attached import Rack, rack
from waiting import poll
from watched_transport import Watched

from farm.builds.bundles.bundle import Bundle
from farm.builds.runtime.runtime import Runtime
from farm.devices.execution.raw import RawResult, RunnerOptions
from farm.devices.execution.session import DeviceSession
from farm.devices.recovery import recover
from farm.devices.virtual.faults import Fault, FaultKind, clear, inject

OPTIONS = RunnerOptions(timeout_s=30)
Run = Callable[..., RawResult]
Damage = Callable[..., str]
Make = Callable[..., Bundle]


@pytest.fixture(scope="module")
def attached(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rack]:
    """Device of this module, which gets faults."""
    with rack(tmp_path_factory.mktemp("weak"), "SM8650") as one:
        yield one


@pytest.fixture
def weak(attached: Rack) -> Iterator[Rack]:
    yield attached
    clear(attached.folder())
    assert recover(attached.device).ok


@pytest.fixture
def transport(weak: Rack) -> Iterator[Watched]:
    with closing(Watched(weak.device.serial, weak.server.port)) as transport:
        yield transport


@pytest.fixture
def damage(session: DeviceSession, make_bundle: Make) -> Damage:
    """Say which files of an execution are damaged."""
    return lambda raw, model, inputs=None: session.find_damage(make_bundle(model, inputs), raw)


def during(run: Callable[[], RawResult], weak: Rack, fault: Fault) -> RawResult:
    """Let a fault strike once a job hangs on the device."""
    storage = weak.files() / "farm"
    for left in storage.glob("run-*/*/hangs"):
        left.unlink()

    def strike() -> None:
        poll(lambda: list(storage.glob("run-*/*/hangs")), 60)
        inject(weak.folder(), fault)

    striker = threading.Thread(target=strike)
    striker.start()
    try:
        return run()
    finally:
        striker.join()


def ending(raw: RawResult) -> tuple[str, str, bool, bool]:
    return raw.error_cause, raw.error_stage, raw.timed_out, raw.process_ended


def test_a_device_that_goes_away_during_a_job_is_gone_at_once(run: Run, weak: Rack) -> None:
    assert run(b"good").error == ""
    raw = during(lambda: run(b"hang"), weak, Fault(FaultKind.OFFLINE, seconds=30))
    assert ending(raw) == ("gone", "execute", False, False)
    # The lost connection ended the job, not its time limit.
    assert "the connection ended before the program did" in raw.error
    later = run(b"good")
    assert (later.error_cause, later.error_stage) == ("gone", "push")


def test_a_reboot_is_found_out(run: Run, session: DeviceSession, weak: Rack, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(b"good").error == ""
    demand = session._liveness.demand

    def demand_when_back() -> None:
        assert recover(weak.device).ok
        demand()

    monkeypatch.setattr(session._liveness, "demand", demand_when_back)
    raw = during(lambda: run(b"hang"), weak, Fault(FaultKind.REBOOT, seconds=0.2))
    assert ending(raw) == ("gone", "execute", False, False)
    assert raw.error.endswith("it was rebooted")
    # The staged files are still there, and the next job gets a runner.
    assert run(b"good").error == ""


def test_a_connection_that_breaks_while_the_device_stays_is_the_connection(run: Run, weak: Rack) -> None:
    assert run(b"good").error == ""
    inject(weak.folder(), Fault(FaultKind.PARTIAL_OUTPUT, match="--serve"))
    raw = run(b"good")
    assert ending(raw) == ("connection", "execute", False, False)
    assert run(b"good").error == ""


def test_a_hang_counts_only_when_the_device_answers(run: Run, weak: Rack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("farm.devices.execution.session._GRACE_SECONDS", 0.5)
    monkeypatch.setattr("farm.devices.adb.transport._END_SECONDS", 0.5)
    short = RunnerOptions(timeout_s=1)
    assert ending(run(b"hang", short)) == ("", "", True, True)
    assert run(b"good").error == ""
    monkeypatch.setattr("farm.devices.execution.liveness._ASK_SECONDS", 0.5)
    raw = during(lambda: run(b"hang", short), weak, Fault(FaultKind.STALL, seconds=60))
    assert ending(raw) == ("gone", "execute", False, False)
    assert "it does not answer any more (the runner did not end in its time)" in raw.error
    clear(weak.folder())


def test_a_silent_device_is_found_dead(run: Run, weak: Rack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("farm.devices.execution.runner_process.SILENCE_SECONDS", 0.5)
    monkeypatch.setattr("farm.devices.adb.transport._END_SECONDS", 0.5)
    assert run(b"good").error == ""
    monkeypatch.setattr("farm.devices.execution.liveness._ASK_SECONDS", 0.5)
    raw = during(lambda: run(b"hang", RunnerOptions(timeout_s=3000)), weak, Fault(FaultKind.STALL, seconds=60))
    assert ending(raw) == ("gone", "execute", False, False)
    assert "it does not answer any more" in raw.error
    clear(weak.folder())


def test_an_adb_server_that_died_is_not_the_device(runtime: Runtime, make_bundle: Make, tmp_path: Path) -> None:
    with rack(tmp_path, "SM8650") as one:
        serial = one.device.serial
        session = DeviceSession(Watched(serial, one.server.port), runtime, "r", serial)
        good = make_bundle(b"good")
        assert session.execute("s/c", session.stage(good), tmp_path / "a", OPTIONS).error == ""
        staged = session.stage(good)
        one.server.stop()
        raw = session.execute("s/c", staged, tmp_path / "b", OPTIONS)
        assert raw.error_cause == "adb_server"
        assert session.stage(good).cause == "adb_server"
        session.close()


def test_a_full_device_gives_up_unused_objects(run: Run, session: DeviceSession, weak: Rack, make_bundle: Make) -> None:
    assert run(b"good").error == ""
    session.prepare([make_bundle(b"good, and never used " * 50)])
    objects = weak.files() / "farm/objects"
    before = set(objects.iterdir())
    # df does not know of it, as where a quota is.
    inject(weak.folder(), Fault(FaultKind.DISK_FULL, after_bytes=10))
    (weak.folder() / "system/bin/df").unlink()
    raw = run(b"good and new")
    assert (raw.error_cause, raw.error_stage) == ("space", "push")
    assert "No space left" in raw.error
    assert before - set(objects.iterdir()), "what nobody links to made room"
    clear(weak.folder())
    assert run(b"good and new").error == ""


@pytest.mark.parametrize("inputs", [[b"12345678"], [b"large 89" * 10_000]])
def test_outputs_that_arrive_changed_are_found(run: Run, damage: Damage, weak: Rack, inputs: list[bytes]) -> None:
    raw = run(b"good", inputs=inputs)
    assert (raw.error, damage(raw, b"good", inputs)) == ("", "")
    inject(weak.folder(), Fault(FaultKind.CORRUPT_PULL, after_bytes=3))
    raw = run(b"good", inputs=inputs)
    assert raw.error == ""
    assert raw.output(0, 0).read_bytes() != inputs[0]
    assert damage(raw, b"good", inputs) == "output_0_0.raw did not arrive as the device has it"


def test_inputs_and_models_that_arrive_changed_are_found_or_pushed_again(run: Run, damage: Damage, weak: Rack) -> None:
    large = [b"another8" * 10_000]
    assert run(b"good").error == ""
    inject(weak.folder(), Fault(FaultKind.CORRUPT_PUSH, match="input_0_0"))
    raw = run(b"good")
    assert raw.output(0, 0).read_bytes() != b"12345678"
    assert damage(raw, b"good") == "files on the device differed from the pushed ones (input_0_0.raw)"
    inject(weak.folder(), Fault(FaultKind.CORRUPT_PUSH, match="incoming"))
    raw = run(b"good but new", inputs=large)
    assert (raw.error, raw.output(0, 0).read_bytes()) == ("", large[0])
    assert damage(raw, b"good but new", large) == ""
    # A list of inputs costs one more try.
    inject(weak.folder(), Fault(FaultKind.CORRUPT_PUSH, match="input_list"))
    raw = run(b"good")
    assert (raw.error, raw.exit_code) == ("", 0), raw.stderr
    assert "damaged" in raw.notes[0]
    # Files that cannot be looked at are not believed.
    inject(weak.folder(), Fault(FaultKind.EXIT_CODE, match="sha256sum", times=0, text="cannot"))
    assert "its files could not be checked for damage" in damage(raw, b"good")
