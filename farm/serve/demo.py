"""Demo store of `farm serve --demo`: made by a seed, without any measurement, and labelled so in each run."""

from __future__ import annotations

import hashlib
import math
import random
import struct
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from sqlalchemy import Connection, Table, text

from farm.base.config.settings import Config
from farm.builds.program.layers import LayerStep
from farm.devices.device import AdbAddress, Device, HealthEvent
from farm.devices.facts import DeviceStatus
from farm.policy.situation import Priority
from farm.results.attempt import (
    Attempt,
    Cause,
    Comparison,
    Direction,
    LayerComparison,
    Measurement,
    OperatorProfile,
    Stage,
    Verdict,
)
from farm.store import rows, schema, values
from farm.store.artifacts import ArtifactStore
from farm.store.attempt_fields import columns_of
from farm.store.database import Database
from farm.store.leases.registry import Seen
from farm.store.records import (
    ArtifactRecord,
    BuildRecord,
    NewAlert,
    Remark,
    RunCommit,
    RunRecord,
    RunToolchain,
    SkipReason,
)
from farm.store.store import Store
from farm.store.values import toolchain_columns
from farm.suites.suite import Case, InputSpec, Job, Target

DAY_MS = 86_400_000
FACT = "demo data, made by a seed and not measured"
"""Value of the fact `demo` in the fingerprint of each run."""
USER, HOST = "demo", "demo"

_SOCS = ("SM8550", "SM8650", "SM8750", "SM8850")
_OPERATORS = (
    "add", "argmax", "avg_pool2d", "batch_norm", "cat", "clamp", "conv1d", "conv2d", "conv2d_depthwise",
    "conv_transpose", "div", "elu", "embedding", "exp", "gather", "gelu", "group_norm", "hardswish", "index_select",
    "layer_norm", "linear", "log_softmax", "matmul", "max_pool2d", "mean", "mul", "pad", "permute", "pixel_shuffle",
    "relu", "reshape", "rms_norm", "scaled_dot_product", "sigmoid", "slice", "softmax", "split", "sum", "tanh",
    "upsample_bilinear",
)  # fmt: skip
_MODELS = ("mobilenet_v3", "resnet50", "vit_b16", "whisper_tiny", "yolo_nano", "edsr", "bert_base", "deeplab_v3")
_PRECISIONS = ("8a8w", "16a8w", "16a4w", "fp16")
_METRICS = ("latency", "sqnr_fp32[0]")
# Samples of an attempt relative to their median.
_SHAPE = (0.986, 0.994, 1.0, 1.007, 1.021)
_STATISTICS = {name: value or 0.0 for name, value in values.statistics_of(_SHAPE).items()}
_SUBJECTS = ("Fold constants earlier", "Share quantization parameters", "Update pins", "Refuse empty graphs")


class Size(msgspec.Struct, frozen=True):
    """Size of a demo store."""

    nights: int = 60
    cases: int = 400
    socs: tuple[str, ...] = _SOCS
    metrics: tuple[str, ...] = _METRICS
    devices: int = 3
    """Devices of each SoC."""
    seed: int = 39


# Tables of runs, in the order of their references.
_TABLES_OF_RUNS = (schema.run, schema.run_device, schema.run_job, schema.attempt, schema.measurement)
# Serial of the device that breaks in the last nights.
_BROKEN = "DEMO87502"


def _end(verdict: str, stage: str, cause: str = "", reason: str = "") -> dict[str, Any]:
    return {"verdict": verdict, "stage": stage, "cause": cause, "reason": reason}


_PASSED = _end("passed", "done")
_WRONG = _end("failed", "numerics", "numerics", "output 0: sqnr_fp32 11.8 dB < 20 dB")
_GONE = _end("infra", "push", "gone", f"device {_BROKEN} is gone: check cable and power")
_REFUSED = _end("failed", "build", "compile", "QNN refuses the graph: rank 5 is unsupported")
_CRASH = _end("failed", "execute", "crash", "the runner ended by signal 11 (SIGSEGV)")
_BROKE = _end("infra", "pull", "connection", "the connection broke during a pull")


class _Part(NamedTuple):
    """A job with its row ids and its usual numbers."""

    id: int
    job: Job
    case_row: int
    latency_ns: float
    sqnr_db: float
    first_series: int
    key: str
    """Key of its bundle."""


def fill(store: Store, database: Database, artifacts: ArtifactStore, size: Size | None = None) -> None:
    """Fill an empty store; `database` is the database of `store`."""
    demo = _Demo(store, database, size or Size(), rows.now_ms())
    database.write(demo.insert)
    demo.record(artifacts)


@contextmanager
def demo_config(config: Config) -> Iterator[Config]:
    """Yield a configuration with a filled demo store in a temporary folder, which is removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="farm-demo-") as folder:
        path = Path(folder, "farm.db")
        artifacts = ArtifactStore(Path(folder, "artifacts"))
        database = Database(path)
        with Store(database) as store:
            fill(store, database, artifacts)
        yield msgspec.structs.replace(config, state_dir=Path(folder), store_url=f"sqlite:///{path}", artifacts=None)


class _Demo:
    def __init__(self, store: Store, database: Database, size: Size, now_ms: int) -> None:
        self._store, self._database, self._size = store, database, size
        self._draw = random.Random(size.seed)  # noqa: S311 - equal data for an equal seed, no secret
        # Nightly runs begin at one o'clock.
        self._last_ms = (now_ms - 3 * 3_600_000) // DAY_MS * DAY_MS + 3_600_000
        self._parts: list[_Part] = []
        self._devices: dict[str, list[tuple[int, Device]]] = {}
        self._runs: list[dict[str, str]] = []
        """Run ids of each night, oldest first, by SoC."""
        self._ids = {"run_job": 0, "attempt": 0}

    def insert(self, connection: Connection) -> None:
        """Insert nightly runs with their jobs, attempts and measurements."""
        self._insert_jobs(connection)
        self._insert_devices(connection)
        for night in range(self._size.nights):
            self._insert_night(connection, night)
        if connection.dialect.name == "postgresql":
            for table in ("job", "suite_case", "series", "device", "run_job", "attempt"):
                newest = f"SELECT setval(pg_get_serial_sequence('{table}', 'id'), max(id)) FROM {table}"  # noqa: S608
                connection.execute(text(newest))

    def _insert_jobs(self, connection: Connection) -> None:
        jobs: list[dict[str, Any]] = []
        cases: list[dict[str, Any]] = []
        series: list[dict[str, Any]] = []
        for number, case in enumerate(self._cases()):
            case_row = number + 1
            version = hashlib.sha256(case.name.encode()).hexdigest()
            names = {"suite": case.suite, "case_name": case.name}
            cases.append({"id": case_row, **names, "version": version, "module": case.module})
            latency_ns = math.exp(self._draw.uniform(10.5, 15.5)) * (8 if case.suite == "demo_models" else 1)
            sqnr_db = self._draw.uniform(28, 62)
            for place, soc in enumerate(self._size.socs):
                job = Job(case, Target(soc, "gpu" if number % 17 == 3 else "htp", case.precisions[0]))
                key = hashlib.sha256(job.id.encode()).hexdigest()
                part = _Part(len(jobs) + 1, job, case_row, latency_ns / 1.22**place, sqnr_db, len(series) + 1, key)
                self._parts.append(part)
                jobs.append({
                    "id": part.id, "name": job.id, **names, "soc": soc,
                    "backend": job.target.backend, "precision": job.target.precision, "options": {},
                })  # fmt: skip
                for metric in self._size.metrics:
                    series.append({"id": len(series) + 1, "job_id": part.id, **_series(metric)})
        for table, found in ((schema.suite_case, cases), (schema.job, jobs), (schema.series, series)):
            _insert(connection, table, found)

    def _cases(self) -> Iterator[Case]:
        for number in range(self._size.cases):
            precision = _PRECISIONS[(number // 7) % 4]
            if number % 20 == 12:
                model = _MODELS[number // 20 % len(_MODELS)]
                suite, name, module = "demo_models", f"{model}_{number // 160 + 1}", "demo.models:Model"
            else:
                operator = _OPERATORS[number % len(_OPERATORS)]
                suite, name = "demo_operators", f"{operator}_{number // len(_OPERATORS) * 16 + 16}"
                module = f"demo.operators:{operator.title().replace('_', '')}"
            yield Case(suite, name, module=module, inputs=(InputSpec(shape=(1, 3, 16, 16)),), precisions=(precision,))

    def _insert_devices(self, connection: Connection) -> None:
        found: list[dict[str, Any]] = []
        for soc in self._size.socs:
            for number in range(1, self._size.devices + 1):
                for build in (1, 2):
                    device = Device(
                        serial=f"DEMO{soc[2:]}{number}", soc=soc, kind="hardware", build=f"demo/{soc}/14.{build}",
                        address=AdbAddress(5037), product=f"demo phone {soc[2:]}", name=f"demo-{soc[2:]}-{number}",
                    )  # fmt: skip
                    facts = {name: getattr(device, name) for name in ("serial", "soc", "kind", "build")}
                    found.append({"id": len(found) + 1, **facts})
                    self._devices.setdefault(f"{soc} {build}", []).append((len(found), device))
        _insert(connection, schema.device, found)

    def _insert_night(self, connection: Connection, night: int) -> None:
        began_ms = self._last_ms - (self._size.nights - 1 - night) * DAY_MS
        toolchain, facts = self._toolchain(night, began_ms), self._facts(night)
        key = values.fingerprint_hash(facts)
        rows.insert_missing(connection, schema.fingerprint, [{"hash": key, "facts": facts}])
        name = values.run_id_time(began_ms) + "demo"
        ids: dict[str, str] = {}
        new: dict[Table, list[dict[str, Any]]] = {table: [] for table in _TABLES_OF_RUNS}
        for place, soc in enumerate(self._size.socs):
            started_ms = began_ms + place * 1000
            run_id = values.run_id_time(started_ms) + f"{self._draw.getrandbits(24):06x}"
            ids[soc] = run_id
            failed = self._add_results(new, night, soc, run_id, started_ms)
            new[schema.run].append({
                "id": run_id, "command": f"farm run --soc {soc} --suite demo_operators --suite demo_models",
                "user_name": USER, "host": HOST, "fingerprint_hash": key, "started_ms": started_ms,
                "finished_ms": started_ms + 5_400_000, "exit_code": int(failed), "priority": "nightly",
                "run_kind": "suite", "run_device_kind": "hardware", "run_name": f"demo nightly/{soc}",
                "run_nightly": name, "run_began": True, **toolchain_columns(toolchain),
            })  # fmt: skip
            new[schema.run_device] += [{"run_id": run_id, "device_id": row} for row, _ in self._usable(night, soc)]
        for table, found in new.items():
            _insert(connection, table, found)
        self._runs.append(ids)

    def _usable(self, night: int, soc: str) -> list[tuple[int, Device]]:
        updated = soc == self._size.socs[0] and night >= self._size.nights // 2
        return self._devices[f"{soc} {2 if updated else 1}"]

    def _add_results(
        self, new: dict[Table, list[dict[str, Any]]], night: int, soc: str, run_id: str, started_ms: int
    ) -> bool:
        """Add the rows of a run's jobs to `new`; return True if a job failed that is no known issue."""
        devices, failed = self._usable(night, soc), False
        noise = self._draw.gauss(0, 0.004)
        for place, part in enumerate(self._parts[self._size.socs.index(soc) :: len(self._size.socs)]):
            device_row, device = devices[place % len(devices)]
            run_job = self._next("run_job")
            is_skipped = place % 97 == 11 and night % 9 == 4
            why = SkipReason("no time was left: --budget 90m", started_ms - DAY_MS, "passed")
            new[schema.run_job].append({
                "id": run_job, "run_id": run_id, "job_id": part.id, "case_id": part.case_row, "position": place,
                "build_seconds": 2.5, "cached": night % 7 != 0, "bundle_key": part.key, "judged_by": "demo",
                "skipped": msgspec.to_builtins(why) if is_skipped else None,
            })  # fmt: skip
            began_ms = started_ms + 40_000 + place * 2_000
            for changes in [] if is_skipped else self._endings(night, place, part, device.serial):
                attempt = self._next("attempt")
                passed = changes["verdict"] == "passed"
                failed |= changes["verdict"] == "failed" and "known_issue" not in changes
                new[schema.attempt].append({
                    **_ATTEMPT, "id": attempt, "run_job_id": run_job, "device_id": device_row,
                    "recorded_ms": began_ms + 20_000, "started_ms": began_ms, "seconds": 1.4,
                    "bundle_key": part.key, **changes,
                })  # fmt: skip
                if passed or changes["stage"] == "numerics":
                    latency_ns = self._latency(night, part) * (1 + noise + self._draw.gauss(0, 0.006))
                    sqnr_db = part.sqnr_db - (0 if passed else 24)
                    new[schema.measurement] += [
                        _measured(attempt, at, part.first_series + at, sqnr_db if at == 1 else latency_ns)
                        for at in range(len(self._size.metrics))
                    ]
        return failed

    def _endings(self, night: int, place: int, part: _Part, serial: str) -> list[dict[str, Any]]:
        """Return the attempts of a job in a night."""
        last, name, target = self._size.nights - 1, part.job.case.name, part.job.target
        ends: list[dict[str, Any]] = [_PASSED]
        if serial == _BROKEN and night >= last - 8:
            ends = [_GONE, _PASSED] if place % 2 else [_GONE]
        elif name.startswith("group_norm") and target.precision == "16a4w":
            ends = [{**_WRONG, "known_issue": "group_norm loses its scale at 4 bits, see #1234"}]
        elif name.startswith("layer_norm") and target.soc == self._size.socs[-1] and night >= last:
            ends = [_WRONG]
        elif name in ("gather_32", "pad_112") and night >= last - 19:
            ends = [_REFUSED]
        elif name in ("upsample_bilinear_16", "cat_48") and self._draw.random() < 0.35:
            ends = [_CRASH, _PASSED] if self._draw.random() < 0.5 else [_CRASH]
        elif self._draw.random() < 0.0004:
            ends = [_BROKE, _PASSED]
        return ends

    def _latency(self, night: int, part: _Part) -> float:
        factor, nights = 1.0, self._size.nights
        if part.job.case.name.startswith("conv") and night >= nights * 3 // 4:
            factor *= 1.18
        if part.job.target.soc == self._size.socs[0] and night >= nights // 2:
            factor *= 0.93
        if night >= nights // 3 and part.job.target.precision == "fp16":
            factor *= 0.9
        return part.latency_ns * factor

    def _facts(self, night: int) -> dict[str, str]:
        qnn = "2.50" if night < self._size.nights // 3 else "2.51"
        return {"demo": FACT, "executorch": "1.5.1", "qnn": qnn, "device_kind": "hardware", "commit": _commit(night)}

    def _toolchain(self, night: int, began_ms: int) -> RunToolchain:
        subject = _SUBJECTS[night % len(_SUBJECTS)]
        if night == self._size.nights * 3 // 4:
            subject = "Tile convolutions by height"
        return RunToolchain(
            name="demo", branch="main", commit=_commit(night), git_branch="main", subject=subject,
            committed_ms=began_ms - 7_200_000, before=_commit(night - 1) if night else "",
            since=(RunCommit(_commit(night), subject),),
        )  # fmt: skip

    def _next(self, table: str) -> int:
        self._ids[table] += 1
        return self._ids[table]

    def record(self, artifacts: ArtifactStore) -> None:
        """Record alerts, devices with their health, an unfinished run with details, and a waiting user."""
        self._record_alerts()
        self._record_devices()
        self._record_run_of_today(artifacts)

    def _record_alerts(self) -> None:
        worse = [
            one for one in self._parts if one.job.case.name.startswith("conv2d") and one.job.target.soc in _SOCS[1:3]
        ]
        at = self._size.nights * 3 // 4
        for number, part in enumerate(worse[:9]):
            soc = part.job.target.soc
            good, bad = self._runs[at - 1][soc], self._runs[at][soc]
            change = math.log(1.18) + number * 0.003
            state = "suspected" if number == 7 else "confirmed"
            new = NewAlert(
                series_id=part.first_series, device_kind="hardware", finding="regression", state=state, last_good=good,
                first_bad=bad, change=change, low=change - 0.02, high=change + 0.02, p_value=0.0004,
                reason="the median of 5 samples is beyond the level of the runs before",
                likely_cause="the program, from commit " + _commit(at)[:10],
            )  # fmt: skip
            if soc in self._runs[at]:
                self._store.alerts.add(bad, new)
        if len(worse) > 2:
            self._store.alerts.remark("alert:2", Remark("acknowledged", USER, "demo-grace", "tiling, see #4711"))
            self._store.alerts.remark(
                "alert:3", Remark("accepted", USER, "", "the new tiling is needed for correctness")
            )

    def _record_devices(self) -> None:
        seen = []
        for key, found in self._devices.items():
            if key.endswith("1") != key.startswith(self._size.socs[0]):
                for number, (_, device) in enumerate(found):
                    status = DeviceStatus(False, 91 - 7 * number, 29.5 + 2.5 * number, 40 * 10**9, device.build, 1e5, 0)
                    seen.append((device, status))
        self._store.devices.see([Seen(device, "device", status) for device, status in seen])
        for device, _ in seen:
            slow = 1.0 + 0.08 * (device.serial.endswith("86501"))
            for number in range(20):
                health_check_ns = 1.9e6 * self._draw.gauss(1, 0.01) * (slow if number > 12 else 1)
                when_ms = self._last_ms - (19 - number) * DAY_MS
                self._store.devices.record_health(
                    HealthEvent(device.id, "check_passed", "healthy", "", {}, (health_check_ns,) * 3, when_ms)
                )
        broken = next((device for device, _ in seen if device.serial == _BROKEN), None)
        if broken is None:
            return
        for event, state, reason, hours in (
            ("infra", "suspect", "gone: the device left the bus during a push", 9),
            ("recovery", "suspect", "adb reconnect: no answer", 8),
            ("recovery", "suspect", "power cycle of its port: answered for 40 s", 7),
            ("gave_up", "quarantined", "gone 8 times in a row: check its cable, then 'farm devices release'", 6),
        ):
            when_ms = self._last_ms + 3_600_000 - hours * 60_000
            self._store.devices.record_health(HealthEvent(broken.id, event, state, reason, {}, (), when_ms))
        idle = seen[-1][0]
        self._store.devices.set_service(idle.id, in_service=False, note="lent to the camera team", user="demo-ada")

    def _record_run_of_today(self, artifacts: ArtifactStore) -> None:
        """Record an unfinished run with profile, layers, log and files, and a user who waits for its device."""
        soc = self._size.socs[1 % len(self._size.socs)]
        parts = [one for one in self._parts if one.job.target.soc == soc][:24]
        device = self._devices[f"{soc} 1"][0][1]
        facts = {**self._facts(self._size.nights - 1), "profile": "detailed"}
        began_ms = rows.now_ms() - 900_000
        toolchain = self._toolchain(self._size.nights - 1, began_ms)
        command = f"farm run --soc {soc} --suite demo_operators --profile detailed"
        run_id = self._store.begin_run(RunRecord(command, "demo-ada", HOST, facts, began_ms, toolchain=toolchain))
        versions = {one.job.id: hashlib.sha256(one.job.case.name.encode()).hexdigest() for one in parts}
        self._database.write(
            lambda connection: rows.plan_rows(connection, run_id, [one.job for one in parts], versions)
        )
        self._store.record_device(run_id, device)
        for place, usual in enumerate(parts[:15]):
            self._store.record_builds(
                run_id, [BuildRecord(usual.job.id, seconds=3.1, cached=False, bundle_key="d" * 64)]
            )
            part = usual._replace(latency_ns=self._latency(self._size.nights - 1, usual))
            attempt = _detailed(part, device, began_ms + place * 20_000, wrong=place in (1, 4))
            self._store.record_attempt(run_id, attempt, device, artifacts=_files(artifacts) if place < 5 else ())
        for user, purpose in (("demo-ada", "farm run"), ("demo-grace", "farm lease")):
            token = self._store.leases.request(
                [device.id], count=1, user=user, host=HOST, pid=1, purpose=purpose, priority=Priority.PERSON,
                ttl_s=86_400,
            )  # fmt: skip
            self._store.leases.poll(token, ttl_s=86_400)


_ATTEMPT = msgspec.to_builtins(columns_of(Attempt("", Verdict.PASSED, Stage.DONE, "")))


def _insert(connection: Connection, table: Table, found: Sequence[dict[str, Any]]) -> None:
    if found:
        connection.execute(table.insert(), found)


def _series(metric: str) -> dict[str, Any]:
    unit, direction = ("dB", "higher") if metric.startswith("sqnr") else ("ns", "lower")
    return {"metric": metric, "unit": unit, "direction": direction, "exact": False}


def _measured(attempt: int, position: int, series: int, level: float) -> dict[str, Any]:
    row = {"attempt_id": attempt, "position": position, "series_id": series, "n": len(_SHAPE)}
    samples = struct.pack("<5d", *(level * one for one in _SHAPE))
    return {**row, **{name: value * level for name, value in _STATISTICS.items()}, "samples": samples}


def _commit(night: int) -> str:
    return hashlib.sha1(f"demo {night}".encode(), usedforsecurity=False).hexdigest()


def _detailed(part: _Part, device: Device, started_ms: int, *, wrong: bool) -> Attempt:
    """Return an attempt with a profile, a comparison, layers and a log."""
    nodes = (("conv2d", 0.52), ("relu", 0.08), ("requantize", 0.11), ("softmax", 0.24), ("output", 0.05))
    operators, layers = [], []
    for at, (name, share) in enumerate(nodes):
        node, cycles = f"aten_{name}_default", 1e5 * share
        times = {"unit": "cycles", "n": 5, "p50": cycles, "least": 0.9 * cycles, "greatest": 1.2 * cycles}
        places = {"module": f"body.{name}", "source": f"demo.py:{20 + at}"}
        call = f"{node}:OpId_{at}"
        operators.append(OperatorProfile(node=call, delegate="QnnBackend[0]", share=share, **times, **places))  # type: ignore[arg-type]
        bad = wrong and at >= 2
        sqnr_db, operator = (9.5 if bad else 48.0), f"aten.{name}.default"
        layers.append(LayerComparison(node, operator, LayerStep.DEVICE, 1e-6, sqnr_db, 0.999, diverges=bad and at == 2))
    sqnr_db = 11.8 if wrong else part.sqnr_db
    violations = (f"sqnr {sqnr_db} dB < 20 dB",) if wrong else ()
    ending = _WRONG if wrong else _PASSED
    return Attempt(
        job_id=part.job.id,
        verdict=Verdict(ending["verdict"]),
        stage=Stage(ending["stage"]),
        reason=ending["reason"],
        device=device.serial,
        started_ms=started_ms,
        seconds=2.2,
        bundle_key="d" * 64,
        comparisons=(Comparison(0, "fp32", sqnr_db, 0.9991, 0.012, None, violations),),
        measurements=(
            Measurement("latency", "ns", Direction.LOWER, tuple(part.latency_ns * one for one in _SHAPE)),
            Measurement("sqnr_fp32[0]", "dB", Direction.HIGHER, (sqnr_db,)),
        ),
        log="demo: loaded the program\ndemo: output 0 differs from element 1536 on" if wrong else "",
        operators=tuple(operators),
        layers=tuple(layers),
        cause=Cause(ending["cause"]),
    )


def _files(artifacts: ArtifactStore) -> list[ArtifactRecord]:
    log = b"demo: loaded the program in 3.1 ms\ndemo: <b>text is shown as text</b>\n"
    contents = (("log", log), ("output", bytes(range(256)) * 8))
    return [ArtifactRecord(artifacts.put(content), len(content), kind) for kind, content in contents]
