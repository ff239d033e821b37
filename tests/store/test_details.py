"""Profiles and layers of attempts: written and read back without loss, also in a store of an older farm."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec
import pytest
from alembic import command
from alembic.config import Config
from sqlalchemy import Engine, MetaData, create_engine, select

from farm.base.errors import StoreError, UnknownNameError, UsageError
from farm.builds.program.layers import LayerStep
from farm.results.attempt import LayerComparison, OperatorProfile
from farm.store import rows, schema, values
from farm.store.attempt_fields import ATTEMPT_FIELDS
from farm.store.records import ArtifactRecord, RunRecord
from farm.store.store import Store, open_store

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


@pytest.mark.parametrize("revision", ["0001", "0002"])
def test_a_store_of_an_older_revision_is_brought_up_to_date(
    empty_address: str, make: type[Make], revision: str
) -> None:
    config = Config()
    config.set_main_option("script_location", "farm.store:migrations")
    engine = engine_of(empty_address)
    job = make.job()
    attempt = make.attempt(job, measurements=(), notes=("old",))
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, revision)
        old = MetaData()
        old.reflect(connection)
        connection.execute(schema.fingerprint.insert(), {"hash": "f" * 64, "facts": {"executorch": "1.5.0"}})
        run = {"command": "farm run", "user_name": "u", "host": "h", "fingerprint_hash": "f" * 64}
        connection.execute(schema.run.insert(), {"id": "old", **run, "started_ms": 1, "finished_ms": 2, "exit_code": 0})
        job_ids, case_ids = rows.insert_jobs(connection, [job], {job.id: "v" * 64})
        planned = {"run_id": "old", "job_id": job_ids[job.id], "case_id": case_ids[job.id], "position": 0}
        connection.execute(schema.run_job.insert(), planned)
        facts = {name: getattr(attempt, name) for name in ATTEMPT_FIELDS if name in old.tables["attempt"].c}
        facts_of_device = {"serial": "virtual-1", "soc": "SM8650", "kind": "virtual", "build": "b"}
        connection.execute(old.tables["device"].insert(), facts_of_device)
        device_id = connection.execute(select(schema.device.c.id)).scalar_one()
        connection.execute(old.tables["run_device"].insert(), {"run_id": "old", "device_id": device_id})
        run_job_id = connection.execute(select(schema.run_job.c.id)).scalar_one()
        known: dict[str, object] = {"run_job_id": run_job_id, "device_id": device_id, "recorded_ms": 3}
        connection.execute(old.tables["attempt"].insert(), {**facts, **known})
        assert "lease" not in old.tables

    with pytest.raises(StoreError, match="older farm"):
        open_store(empty_address, readonly=True)
    with open_store(empty_address) as store:
        view = store.runs.view("old")
        assert view.jobs[0].attempts == (attempt,)
        assert (view.priority, view.jobs[0].options, store.leases.all()) == ("person", {}, [])
        again = store.begin_run(RunRecord("farm run", "u", "h", {}))
        store.plan_jobs(again, [job])
        later = msgspec.structs.replace(attempt, operators=OPERATORS, layers=LAYERS)
        store.record_attempt(again, later)
        assert store.runs.view(again).jobs[0].attempts == (later,)
        assert [profile.run_id for profile in store.profiles.newest(job.id)] == [again]
    with open_store(empty_address, readonly=True) as store, engine.connect() as connection:
        assert store.runs.latest_id() == again
        assert len(connection.execute(select(schema.layer)).all()) == len(LAYERS)
    engine.dispose()


def test_a_device_is_recorded_with_the_soc_that_it_reports(sqlite_store: Store, make: type[Make]) -> None:
    run = make.begin(sqlite_store, make.job(soc="QCM6490"))
    phone = msgspec.structs.replace(make.device("phone-1", "hardware"), soc="QCM6490", soc_reported="QCS6490")
    sqlite_store.record_device(run, phone, {"skel": "s1"})
    plain, named = sorted(sqlite_store.runs.view(run).devices, key=lambda one: one.serial != "virtual-1")
    assert (plain.runtime, named.soc) == ({}, "QCM6490")
    assert named.runtime == {"skel": "s1", "soc_reported": "QCS6490"}
