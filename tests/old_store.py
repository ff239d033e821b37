"""A store as farm 0.2.0 made it: its schema, and rows in every table with the numbers that are easily lost."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import struct
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, MetaData, create_engine, text
from sqlalchemy.engine import make_url

from farm.store.schema import VERSION_TABLE

GOLDEN = Path(__file__).with_name("golden")
INF = float("inf")
# The greatest, the least, subnormal, the last bit, not to be had in decimal; NULL is a NaN.
FLOATS = (
    1 / 3, 0.1 + 0.2, 5e-324, 2.2250738585072009e-308, 1.7976931348623157e308, -1e-300, INF, -INF, None, 2**53 + 2.0,
    -0.1,
)  # fmt: skip
INTEGERS = (0, -1, 2**53 + 1, 2**63 - 1, -(2**63))
TEXTS = (
    "", "plain", "ä ✓ \U0001f600 e\u0301", "two\nlines\ttab", "quote ' \" ; -- %s :name \\", "\u2400 \\udcff",
    "x" * 5000,
)  # fmt: skip
SAMPLES = (-0.0, INF, -INF, float("nan"), 5e-324, 1 / 3)
RUNS = ("20250101-000000-aaaaaa", "20250601-000000-bbbbbb", "20251231-235959-cccccc")
JOBS = 24

Rows = dict[str, list[dict[str, Any]]]
Snapshot = dict[str, list[tuple[Any, ...]]]


def make_old_store(address: str) -> Snapshot:
    """Make a store of schema 0015 with `old_rows` at `address`, and return them as they are there."""
    with connected(address) as connection:
        driver: Any = connection.connection.driver_connection
        if connection.dialect.name == "postgresql":
            driver.execute((GOLDEN / "store_0015.postgresql.sql").read_text(encoding="utf-8"))
        else:
            with contextlib.closing(sqlite3.connect(":memory:")) as golden:
                golden.executescript((GOLDEN / "store.sql").read_text(encoding="utf-8"))
                made = "SELECT sql FROM sqlite_master WHERE sql IS NOT NULL AND name NOT LIKE 'sqlite_%' ORDER BY rowid"
                # In one line: SQLAlchemy finds no constraint whose words are in two.
                driver.executescript("".join(f"{' '.join(sql.split())};" for (sql,) in golden.execute(made)))
            connection.execute(text(f"INSERT INTO {VERSION_TABLE} VALUES ('0015')"))  # noqa: S608
        for table, rows in old_rows().items():
            names = list(rows[0])
            marks = ", ".join(f":{name}" for name in names)
            statement = f"INSERT INTO {table} ({', '.join(names)}) VALUES ({marks})"  # noqa: S608
            connection.execute(text(statement), rows)
        _count_on(connection)
    return snapshot(address, like={table: [tuple(rows[0])] for table, rows in old_rows().items()})


def snapshot(address: str, like: Snapshot | None = None) -> Snapshot:
    """Return all rows of all tables, numbers as their bits; of the tables and columns of `like` alone where given."""
    with connected(address) as connection:
        tables = MetaData()
        tables.reflect(connection)
        found: Snapshot = {}
        for name, table in tables.tables.items():
            if name == VERSION_TABLE or (like is not None and name not in like):
                continue
            columns = [column.name for column in table.columns] if like is None else list(like[name][0])
            quoted = ", ".join(f'"{column}"' for column in columns)
            rows = connection.execute(text(f"SELECT {quoted} FROM {name}"))  # noqa: S608
            found[name] = [tuple(columns), *sorted((tuple(map(_bits, row)) for row in rows), key=repr)]
        return found


def revision(address: str) -> str:
    """Return the revision of the schema."""
    with connected(address) as connection:
        return str(connection.scalar(text(f"SELECT version_num FROM {VERSION_TABLE}")))  # noqa: S608


def old_rows() -> Rows:
    """Return rows by table, those before others that they refer to."""
    number, integer, word = cycle(FLOATS), cycle(INTEGERS), cycle(TEXTS)
    day = 86_400_000
    facts = [{"executorch": "1.5.1", "qnn": "ü 2.51"}, {}]
    rows: Rows = {
        "device": [
            {"id": n, "serial": serial, "soc": "SM8650", "kind": kind, "build": "farm/✓"}
            for n, (serial, kind) in enumerate((("virtual-1", "virtual"), ("phone ü", "hardware")), 1)
        ],
        "fingerprint": [{"hash": f"{n:064x}", "facts": json.dumps(one)} for n, one in enumerate(facts)],
        "job": [
            {
                "id": n, "name": f"quantized_ops/case_{n}[SM8650-htp-8a8w]", "suite": "quantized_ops",
                "case_name": f"case_{n}", "soc": "SM8650", "backend": "htp", "precision": "8a8w",
                "options": json.dumps({"o": next(word)}),
            }
            for n in range(1, JOBS + 1)
        ],
        "suite_case": [
            {"id": n, "suite": "quantized_ops", "case_name": f"case_{n}", "version": f"{n:064x}", "module": next(word)}
            for n in range(1, JOBS + 1)
        ],
        "run": [
            {
                "id": run_id, "command": next(word), "user_name": "ada ü", "host": "bench",
                "fingerprint_hash": f"{n % 2:064x}", "started_ms": 1_735_689_600_000 + n * 180 * day,
                # The last one was killed.
                "finished_ms": None if n == 2 else 1_735_689_900_000 + n * 180 * day,
                "exit_code": None if n == 2 else n,
            }
            for n, run_id in enumerate(RUNS)
        ],
        "series": [],
        "run_device": [{"run_id": run_id, "device_id": device} for run_id in RUNS for device in (1, 2)],
    }  # fmt: skip
    tables = ("run_job", "attempt", "artifact", "comparison", "counter", "measurement")
    rows |= {table: [] for table in tables}
    metrics = (("latency", "ns", "lower", False), ("pte_size", "bytes", "lower", True), ("sqnr", "dB", "higher", False))
    for job in range(1, JOBS + 1):
        for n, (metric, unit, direction, exact) in enumerate(metrics):
            key = {"id": 3 * job + n, "job_id": job, "metric": metric, "unit": unit}
            rows["series"].append({**key, "direction": direction, "exact": exact})
    for run_id in RUNS:
        for job in range(1, JOBS + 1):
            planned = len(rows["run_job"]) + 1
            rows["run_job"].append({
                "id": planned, "run_id": run_id, "job_id": job, "case_id": job, "position": job,
                "build_seconds": None if job == 3 else 0.1 * job, "cached": None if job == 3 else job % 2 == 0,
                "bundle_key": "b" * 64, "fallback_ops": None if job % 4 else json.dumps({"aten.sin ✓": job}),
            })  # fmt: skip
            for again in range(0 if job == 1 else 1 + job % 2):
                attempt = len(rows["attempt"]) + 1
                failed = attempt % 5 == 0
                rows["attempt"].append({
                    "id": attempt, "run_job_id": planned, "digest": None if attempt % 3 else f"{attempt:064x}",
                    "device_id": None if attempt % 7 == 0 else 1 + attempt % 2,
                    "verdict": "infra" if again else ("failed" if failed else "passed"), "stage": "done",
                    "reason": next(word)[:4000], "started_ms": 1_735_689_600_000 + attempt,
                    "recorded_ms": 2**62 + attempt, "seconds": 0.1 * attempt, "bundle_key": "b" * 64,
                    "known_issue": "weak ✓" if failed else "", "notes": json.dumps(["note ✓", next(word)]),
                    "log": next(word),
                })  # fmt: skip
                rows["comparison"].append({
                    "attempt_id": attempt, "position": 0, "output": attempt, "reference": "fp32",
                    **{name: next(number) for name in ("sqnr_db", "cosine", "max_abs", "mismatch")},
                    "nan_figures": json.dumps(["cosine"] if failed else []), "violations": json.dumps([next(word)]),
                })  # fmt: skip
                figures = ("min", "p10", "p50", "p90", "p99", "mean", "mad")
                for position, series in ((0, 3 * job), (2, 3 * job + 2)):
                    samples = struct.pack(f"<{len(SAMPLES)}d", *SAMPLES)
                    key = {"attempt_id": attempt, "position": position, "series_id": series, "n": len(SAMPLES)}
                    rows["measurement"].append({**key, **{f: next(number) for f in figures}, "samples": samples})
                value, most = next(integer), next(integer)
                rows["counter"].append({
                    "attempt_id": attempt, "position": 1, "series_id": 3 * job + 1, "n": 2, "value": value, "max": most,
                    "samples": struct.pack("<2q", value, most),
                })  # fmt: skip
                if attempt % 4 == 0:
                    kept = {"attempt_id": attempt, "sha256": f"{attempt:064x}", "size": 2**40 + attempt}
                    rows["artifact"].append({"id": len(rows["artifact"]) + 1, **kept, "kind": "etdump"})
    return rows


def _bits(value: Any) -> Any:
    return struct.pack("<d", value) if isinstance(value, float) else value


def _count_on(connection: Connection) -> None:
    """Let PostgreSQL number rows from where the inserted ones end, as it would if it had numbered them."""
    if connection.dialect.name == "postgresql":
        for table in ("device", "job", "suite_case", "series", "run_job", "attempt", "artifact"):
            query = f"SELECT setval(pg_get_serial_sequence('{table}', 'id'), (SELECT max(id) FROM {table}))"  # noqa: S608
            connection.execute(text(query))


@contextlib.contextmanager
def connected(address: str) -> Iterator[Connection]:
    """Connect to a store without farm, in one transaction."""
    url = make_url(address if "://" in address else f"sqlite:///{address}")
    url = url.set(drivername="postgresql+psycopg") if url.get_backend_name() == "postgresql" else url
    engine = create_engine(url)
    try:
        with engine.begin() as connection:
            yield connection
    finally:
        engine.dispose()
