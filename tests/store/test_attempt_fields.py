"""Fields of an attempt are columns of its row and members of its line in an export, each declared once."""

from __future__ import annotations

import json
import math
import sqlite3
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec
import pytest
from recipe import FarmCopy, recipe_code
from sqlalchemy import MetaData, Table, create_engine, select
from store_template import place_store

from farm.results.attempt import Attempt
from farm.store.attempt_fields import fields_of
from farm.store.schema import REVISION
from farm.store.transfer.lines import AttemptLine

_OF_THE_ROW = {"recorded_ms", "digest"}


def test_every_field_is_a_column_and_every_column_a_field(tmp_path: Path) -> None:
    place_store(tmp_path / "farm.db")
    connection = sqlite3.connect(tmp_path / "farm.db")
    columns = {name for _, name, *_ in connection.execute("PRAGMA table_info(attempt)")}
    connection.close()
    fields, line = set(Attempt.__struct_fields__), set(AttemptLine.__struct_fields__)
    details = {"comparisons", "measurements", "operators", "layers"}
    assert columns - {"id", "run_job_id", "device_id"} - _OF_THE_ROW == fields - {"job_id", "device"} - details
    assert line - _OF_THE_ROW - {"job", "artifacts"} == fields - {"job_id"}


_RECORDED_AND_CARRIED = """
from pathlib import Path
from farm.results.attempt import Attempt, Stage, Verdict
from farm.store.records import RunRecord
from farm.store.store import open_store
from farm.store.transfer.line_files import LineFile, import_runs, runs_in
from farm.suites.suite import Case, Job, Target
job = Job(Case("ops", "relu", "torch.nn:ReLU", ()), Target("SM8650", "htp", "8a8w"))
with open_store("other.db") as store:
    run_id = store.begin_run(RunRecord("farm run", "ada", "bench", {}))
    store.plan_jobs(run_id, [job])
    store.record_attempt(run_id, Attempt(job.id, Verdict.PASSED, Stage.DONE, "", log_chars=7))
    Path("runs.jsonl").write_bytes(b"".join(store.transfer.export([run_id])))
with open_store("state/farm.db") as store, LineFile("runs.jsonl") as lines:
    import_runs(store.transfer, runs_in([lines]))
"""


def test_the_recipe_of_a_column_records_carries_and_shows_it(tmp_path: Path, farm_cache: Path) -> None:
    field, revision = recipe_code("developers/recipes.md", "Adding a column to attempts")
    copy = FarmCopy.make(tmp_path, farm_cache)
    copy.insert("farm/results/attempt.py", "\n\nclass Ending(", field)
    number = f"{int(REVISION) + 1:04}"
    revision = revision.replace('down_revision = "0015"', f'down_revision = "{REVISION}"')
    revision = revision.replace('revision = "0016"', f'revision = "{number}"', 1)
    (tmp_path / f"farm/store/migrations/versions/rev_{number}_log_chars.py").write_text(revision)
    done = copy.python("-c", _RECORDED_AND_CARRIED)
    assert done.returncode == 0, done.stderr
    [job] = json.loads(copy.farm("report", "latest@default", "--json").stdout)["jobs"]
    assert job["attempts"][0]["log_chars"] == 7


class Weather(StrEnum):
    FAIR = "fair"
    FOUL = "foul"


class Sample(msgspec.Struct, frozen=True):
    word: str = ""
    count: int = 0
    is_wet: bool = False
    weather: Weather = Weather.FAIR
    temperature_c: float | None = None
    remark: str | None = None
    notes: tuple[str, ...] = ()


@pytest.mark.parametrize(
    ("sample", "kept"),
    [
        (Sample(), Sample()),
        (
            Sample("w", -(2**63), True, Weather.FOUL, 36.6, "r", ("a", "b")),
            Sample("w", -(2**63), True, Weather.FOUL, 36.6, "r", ("a", "b")),
        ),
        (
            Sample("nul \0", remark="x" * 9_000, temperature_c=math.nan, notes=("n",) * 9_000),
            Sample("nul ␀", remark="x" * 3_997 + "...", temperature_c=None, notes=("n",) * 200),
        ),
    ],
)
def test_a_field_of_any_kind_is_bounded_kept_and_carried(sample: Sample, kept: Sample) -> None:
    fields = fields_of(Sample)
    table = Table("sample", MetaData(), *(field.column for field in fields.values()))
    engine = create_engine("sqlite://")
    bounded: dict[str, Any] = {name: field.bounded(getattr(sample, name)) for name, field in fields.items()}
    with engine.begin() as connection:
        table.create(connection)
        connection.execute(table.insert(), bounded)
        row = connection.execute(select(table)).mappings().one()
    engine.dispose()
    assert msgspec.convert({name: row[name] for name in fields}, Sample, strict=False) == kept
    line = msgspec.defstruct("Line", [field.line for field in fields.values()])
    carried = msgspec.json.decode(msgspec.json.encode(bounded), type=line)
    assert msgspec.structs.asdict(carried) == msgspec.structs.asdict(kept)


@pytest.mark.parametrize("lies", ['{"word": "nul \\u0000"}', '{"count": 9223372036854775808}', '{"weather": "hot"}'])
def test_a_line_beyond_the_bounds_is_refused(lies: str) -> None:
    line = msgspec.defstruct("Line", [field.line for field in fields_of(Sample).values()])
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(lies, type=line)


def test_a_type_without_a_column_is_refused() -> None:
    with pytest.raises(KeyError):
        fields_of(msgspec.defstruct("Odd", [("odd", set[str])]))
