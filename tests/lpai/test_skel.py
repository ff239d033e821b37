"""Skels on devices whose DSP checks them: its user, its own signature, another signature, and no signature at all."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest
from attached import Attached, attach
from farm_home import FarmHome
from forked_command import call
from hardware_stub import WITH_HARDWARE
from lpai_sdk_stub import make_stub_sdk
from skel_stub import AUDIO, allow_unsigned, build_skel_stub, make_skel, make_skel_sdk, trust

from farm.base.config.settings import load_config
from farm.base.socs import find_soc
from farm.builds.bundles.bundle import load_bundle
from farm.builds.bundles.cache import BundleCache
from farm.builds.runtime.runtime import virtual_runtime
from farm.builds.runtime.signing import adopt
from farm.devices.execution.raw import RunnerOptions
from farm.dispatch.device_run.artifacts import AttemptArtifacts
from farm.dispatch.device_run.device_run import DeviceRun
from farm.dispatch.request.request import Profile
from farm.results.attempt import Cause, Verdict
from farm.store.store import open_store
from farm.suites.manifests import load_suite
from farm.suites.suite import Job, Target

pytestmark = pytest.mark.whole

SUITE = Path(__file__).with_name("lpai_cases")
RUN = ("run", "--soc", "SM8850", "--suite", str(SUITE), "--backend", "lpai", "-k", "block", "--json")
SKEL = "libQnnLpaiSkel.so"
OURS, THEIRS = b"key of our devices", b"key of another company"


@pytest.fixture(scope="module")
def checking_sdk(farm_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SDK whose LPAI requires root and a skel with a signature that the device accepts."""
    sdk = make_stub_sdk(tmp_path_factory.mktemp("checking") / "stub-sdk", farm_cache)
    behind = sdk.root.with_name("liblpai_stub.so")
    sdk.library.rename(behind)
    build_skel_stub(sdk.library, behind, SKEL, AUDIO)
    return sdk.root


def sign(sdk: Path, key: bytes) -> None:
    """Put a skel with a signature of `key` into an SDK, and adopt it."""
    signed = sdk / "lib/lpai-v6/signed" / SKEL
    signed.write_bytes(make_skel(0x81, key))
    adopt(None, signed)


def run(attached: Attached, sdk: Path) -> tuple[subprocess.CompletedProcess[str], list[dict[str, Any]]]:
    """Run one job and return its attempts as well."""
    done = attached.home.farm(*RUN, env={**attached.env, "QNN_SDK_ROOT": str(sdk)}, timeout_s=300)
    assert done.stdout, done.stderr
    jobs = json.loads(done.stdout)["jobs"]
    return done, [attempt for job in jobs for attempt in job["attempts"]]


def boot_id(attached: Attached) -> str:
    return (attached.root(0) / "proc/sys/kernel/random/boot_id").read_text()


def health(home: FarmHome) -> dict[str, str]:
    with open_store(f"sqlite:///{home.state / 'farm.db'}") as store:
        return {one.serial: one.health for one in store.devices.all()}


def test_a_wrong_signature_counts_against_neither_code_nor_device_and_the_devices_own_runs(
    home: FarmHome, checking_sdk: Path, tmp_path: Path
) -> None:
    with attach(home, tmp_path, ["SM8850"]) as attached:
        trust(attached.root(0), OURS)
        sign(checking_sdk, THEIRS)
        started = boot_id(attached)
        done, attempts = run(attached, checking_sdk)
        assert (done.returncode, attempts) == (4, []), done.stderr
        assert (
            "by the device's logs the DSP does not accept the signature of the skel: have it signed for this device "
            "(farm setup sign; docs/guides/lpai_and_signing.md), or use another device"
        ) in done.stderr
        assert "libQnnHtpV" not in done.stderr, "LPAI has another skel"
        assert boot_id(attached) == started, "no restart of a device changes a signature"
        assert health(home) == {"virtual-SM8850-0": "suspect"}, "its next health check decides"
        sign(checking_sdk, OURS)
        done, [attempt] = run(attached, checking_sdk)
        assert (done.returncode, attempt["verdict"]) == (0, "passed"), done.stderr
        assert f"skel stub: {SKEL} loaded" in attempt["log"]
        assert health(home) == {"virtual-SM8850-0": "healthy"}


def test_a_job_runs_on_the_device_that_accepts_the_signature(
    home: FarmHome, checking_sdk: Path, tmp_path: Path
) -> None:
    sign(checking_sdk, OURS)
    with attach(home, tmp_path, ["SM8850", "SM8850"]) as attached:
        for number, key in enumerate((THEIRS, OURS)):
            trust(attached.root(number), key)
        done, [attempt] = run(attached, checking_sdk)
        assert (done.returncode, attempt["verdict"], attempt["device"]) == (0, "passed", "virtual-SM8850-1")
        assert health(home) == {"virtual-SM8850-0": "suspect", "virtual-SM8850-1": "healthy"}


def test_a_user_who_is_not_root_is_refused_by_the_dsp(
    home: FarmHome, checking_sdk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sign(checking_sdk, OURS)
    with attach(home, tmp_path / "debug", ["SM8850"]) as attached:
        trust(attached.root(0), OURS)
        done, [passed] = run(attached, checking_sdk)
        assert done.returncode == 0, done.stderr
    monkeypatch.setenv("QNN_SDK_ROOT", str(checking_sdk))
    monkeypatch.setenv("FARM_CACHE_DIR", str(home.cache))
    config = load_config()
    # Without it the device would be refused before anything runs.
    runtime = msgspec.structs.replace(virtual_runtime(config, find_soc("SM8850"), "lpai"), needs_root=False)
    bundle = load_bundle(BundleCache(config.cache_dir).folder(passed["bundle_key"]))
    case = next(case for case in load_suite(SUITE / "suite.toml").cases if case.name == "block")
    job = Job(case, Target("SM8850", "lpai", "8a8w"))
    artifacts = AttemptArtifacts(tmp_path / "artifacts", Profile.OFF)
    with attach(home, tmp_path / "production", ["SM8850"], build="user") as attached:
        trust(attached.root(0), OURS)
        with DeviceRun(attached.devices[0], runtime, "user", takeover=False, artifacts=artifacts) as device_run:
            raw = device_run.run(job.id, bundle, tmp_path / "raw", RunnerOptions(iterations=1, warm_up=0))
            refused, _ = device_run.keep_crash_logs(device_run.judge(job, bundle, raw), tmp_path / "logs")
    assert (refused.verdict, refused.cause) == (Verdict.INFRA, Cause.RUNTIME)
    assert "by the device's logs this user may not open a signed process domain of the DSP: run as root" in (
        refused.reason
    )


@pytest.fixture(scope="module")
def htp_sdk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_skel_sdk(tmp_path_factory.mktemp("htp") / "stub-sdk", 75)


@pytest.mark.parametrize("allowed", [True, False])
def test_an_unsigned_skel_runs_where_the_firmware_has_unsigned_process_domains(
    home: FarmHome, htp_sdk: Path, tmp_path: Path, *, allowed: bool
) -> None:
    with attach(home, tmp_path, ["SM8650"]) as attached:
        if allowed:
            allow_unsigned(attached.root(0))
        done = call(
            [*WITH_HARDWARE, "run", "--soc", "SM8650", "--suite", "smoke", "-k", "add", "--json"],
            env={**home.env, **attached.env, "QNN_SDK_ROOT": str(htp_sdk)}, cwd=home.cwd, timeout_s=300,
        )  # fmt: skip
        attempts = [attempt for job in json.loads(done.stdout)["jobs"] for attempt in job["attempts"]]
        if allowed:
            assert [one["verdict"] for one in attempts] == ["passed"], done.stderr
        else:
            assert (done.returncode, attempts) == (4, []), done.stderr
            assert "supports no unsigned process domain: use a device whose firmware does" in done.stderr
