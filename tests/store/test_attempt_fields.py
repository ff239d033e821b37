"""Fields of an attempt are columns of its row and members of its line in an export, each declared once."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

from recipe import FarmCopy, recipe_code
from store_template import place_store

from farm.results.attempt import Attempt
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
import msgspec
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
with open_store("farm.db") as store, LineFile("runs.jsonl") as lines:
    import_runs(store.transfer, runs_in([lines]))
    print(msgspec.json.encode(store.runs.view(run_id)).decode())
"""


def test_the_recipe_of_a_column_records_carries_and_views_it(tmp_path: Path, farm_cache: Path) -> None:
    field, revision = recipe_code("developers/recipes.md", "Adding a column to attempts")
    copy = FarmCopy.make(tmp_path, farm_cache)
    copy.insert("farm/results/attempt.py", "\n\nclass Ending(", field)
    number = f"{int(REVISION) + 1:04}"
    revision = revision.replace('down_revision = "0015"', f'down_revision = "{REVISION}"')
    revision = revision.replace('revision = "0016"', f'revision = "{number}"', 1)
    (tmp_path / f"farm/store/migrations/versions/rev_{number}_log_chars.py").write_text(revision)
    done = copy.python("-c", _RECORDED_AND_CARRIED)
    assert done.returncode == 0, done.stderr
    [job] = json.loads(done.stdout)["jobs"]
    assert job["attempts"][0]["log_chars"] == 7
