"""Profiles and layers of attempts: written and read back without loss."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec
import pytest
from sqlalchemy import Engine, create_engine

from farm.base.errors import UnknownNameError, UsageError
from farm.builds.program.layers import LayerStep
from farm.results.attempt import LayerComparison, OperatorProfile
from farm.store import values
from farm.store.records import ArtifactRecord
from farm.store.store import Store

if TYPE_CHECKING:
    from conftest import Make

OPERATORS = (
    OperatorProfile("DELEGATE_CALL", "QnnBackend[0]", "ns", 6, 1_446_392.0, 1_244_463.0, 1_539_694.0, 1.0),
    OperatorProfile("aten_relu_default:OpId_80", "QnnBackend[0]", "cycles", 6, 0.0, 0.0, float(2**63), 0.25),
)
LAYERS = (
    LayerComparison("aten_conv_default", "aten.conv.default", LayerStep.QUANTIZATION, 0.5, 30.25, 0.999),
    LayerComparison("aten_conv_default", "aten.conv.default", LayerStep.COMPILER, 0.0, math.inf, None, diverges=True),
    LayerComparison("aten_relu_default", "aten.relu.default", LayerStep.DEVICE, None, -math.inf, None),
)
ETDUMP = ArtifactRecord("e" * 64, 5_688, "etdump")


def engine_of(address: str) -> Engine:
    url = address.replace("postgresql://", "postgresql+psycopg://") if "://" in address else f"sqlite:///{address}"
    return create_engine(url)


def test_profiles_and_layers_come_back_in_their_order(store: Store, make: type[Make]) -> None:
    job, plain = make.job(), make.job("plain")
    run_id = make.begin(store, job, plain)
    attempt = make.attempt(job, operators=OPERATORS, layers=LAYERS)
    store.record_attempt(run_id, attempt)
    store.record_attempt(run_id, make.attempt(plain))
    with_inside, without = store.runs.view(run_id).jobs
    assert with_inside.attempts == (attempt,)
    assert (without.attempts[0].operators, without.attempts[0].layers) == ((), ())


def test_figures_that_are_no_numbers_come_back(store: Store, make: type[Make]) -> None:
    nan, inf = math.nan, math.inf
    job = make.job()
    run_id = make.begin(store, job)
    attempt = make.attempt(
        job,
        operators=(OperatorProfile("x", "", "us", 1, nan, -inf, inf, nan),),
        layers=(
            LayerComparison("x", "y", LayerStep.COMPILER, nan, nan, None),
            LayerComparison("x", "y", LayerStep.DEVICE, inf, None, nan),
        ),
    )
    store.record_attempt(run_id, attempt)
    # NaN is not equal to itself; its text is.
    assert str(store.runs.view(run_id).jobs[0].attempts[0]) == str(attempt)


def test_hostile_names_and_numbers_of_rows_are_bounded(
    store: Store, make: type[Make], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The real limits would take a database some seconds.
    monkeypatch.setattr(values, "OPERATORS_LIMIT", 20)
    monkeypatch.setattr(values, "LAYERS_LIMIT", 30)
    evil = "a\0\udcff" + "x" * 100_000
    job = make.job()
    run_id = make.begin(store, job)
    operator = OperatorProfile(evil, evil, evil, 1, 1.0, 1.0, 1.0, 1.0)
    layer = LayerComparison(evil, evil, LayerStep.COMPILER, 1.0, 1.0, 1.0)
    store.record_attempt(run_id, make.attempt(job, operators=(operator,) * 25, layers=(layer,) * 35))
    (back,) = store.runs.view(run_id).jobs[0].attempts
    assert (len(back.operators), len(back.layers)) == (20, 30)
    assert back.operators[0].node.startswith("a␀\\udcffx")
    assert {len(back.operators[0].node), len(back.layers[0].layer), len(back.layers[0].operator)} == {256}


def test_the_newest_attempt_with_a_profile_is_found(store: Store, make: type[Make]) -> None:
    job, other = make.job(), make.job("conv2d")
    first = make.begin(store, job, other, started_ms=1_000_000_000_000)
    store.record_attempt(first, make.attempt(job, operators=OPERATORS[:1]), artifacts=[ETDUMP])
    second = make.begin(store, job, other, started_ms=1_000_000_100_000)
    store.record_attempt(second, make.attempt(job, operators=OPERATORS, started_ms=2))
    store.record_attempt(
        second, make.attempt(other, started_ms=3), artifacts=[ArtifactRecord("f" * 64, 1, "qhas:x.json")]
    )
    third = make.begin(store, job, started_ms=1_000_000_200_000)
    store.record_attempt(third, make.attempt(job, started_ms=4))

    qhas, newest = store.profiles.newest("quantized_ops")
    assert (newest.job_id, newest.run_id, newest.operators, newest.artifacts) == (job.id, second, OPERATORS, ())
    assert (newest.device, newest.device_kind, newest.verdict) == ("virtual-1", "virtual", "passed")
    assert (newest.facts, len(newest.case_version)) == ({"executorch": "1.5.1"}, 64)
    assert (qhas.job_id, qhas.operators, [file.kind for file in qhas.artifacts]) == (other.id, (), ["qhas:x.json"])
    (older,) = store.profiles.newest("quantized_ops/relu", first)
    assert (older.operators, older.artifacts) == (OPERATORS[:1], (ETDUMP,))
    with pytest.raises(UsageError, match=f"run {third} has no profile of quantized_ops/relu: a run with --profile"):
        store.profiles.newest("quantized_ops/relu", third)
    with pytest.raises(UnknownNameError, match="did you mean 'quantized_ops/relu'"):
        store.profiles.newest("quantized_ops/rellu")


def test_a_device_is_recorded_with_the_soc_that_it_reports(sqlite_store: Store, make: type[Make]) -> None:
    run = make.begin(sqlite_store, make.job(soc="QCM6490"))
    phone = msgspec.structs.replace(make.device("phone-1", "hardware"), soc="QCM6490", soc_reported="QCS6490")
    sqlite_store.record_device(run, phone, {"skel": "s1"})
    plain, named = sorted(sqlite_store.runs.view(run).devices, key=lambda one: one.serial != "virtual-1")
    assert (plain.runtime, named.soc) == ({}, "QCM6490")
    assert named.runtime == {"skel": "s1", "soc_reported": "QCS6490"}
