"""An export format is one module that registers itself: the recipe in the documentation, followed literally."""

from __future__ import annotations

import re
from pathlib import Path

from recipe import FarmCopy, recipe_code

from farm.report.formats import export_formats
from farm.results.attempt import Attempt, Stage, Verdict
from farm.store.records import RunRecord
from farm.store.store import open_store
from farm.suites.suite import Case, InputSpec, Job, Target

ROOT = Path(__file__).parents[2]
EXPORTS = (ROOT / "docs/reference/exports.md").read_text(encoding="utf-8")
JOB = Job(Case("s", "c", module="torch.nn:ReLU", inputs=(InputSpec(shape=(1, 3)),)), Target("SM8650", "htp", "8a8w"))


def test_the_documentation_has_a_row_for_each_format() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (one run|runs) \| `\.([\w.]+)` \| (.*) \|$", EXPORTS, re.MULTILINE)
    assert rows == [
        (one.name, "runs" if one.several_runs else "one run", one.suffix, one.about)
        for one in export_formats().values()
    ]


def test_the_recipe_adds_a_format(tmp_path: Path, farm_cache: Path) -> None:
    recipe = (ROOT / "docs/developers/recipes.md").read_text().partition("## Adding a format")[2]
    name = re.findall(r"`(farm/report/formats/\w+\.py)`", recipe)[0]
    (code,) = recipe_code("developers/recipes.md", "Adding a format")
    copy = FarmCopy.make(tmp_path, farm_cache)
    (tmp_path / name).write_text(code, encoding="utf-8")
    state = tmp_path / "state"
    state.mkdir()
    with open_store(state / "farm.db") as store:
        run_id = store.begin_run(RunRecord("farm run", "ada", "bench", {}, 1_790_000_000_000))
        store.plan_jobs(run_id, [JOB])
        store.record_attempt(run_id, Attempt(JOB.id, Verdict.FAILED, Stage.BUILD, "no such operator"), None)
        store.finish_run(run_id, 1)
    night = tmp_path / "nightly.toml"
    night.write_text(
        '[nightly]\nname = "n"\n[[run]]\nsocs = ["SM8650"]\nsuites = ["smoke"]\nvirtual = 1\n'
        '[export]\nfolder = "out"\nformats = ["tsv", "xlsx"]\n',
        encoding="utf-8",
    )
    done = copy.farm("data", "export", run_id, "--format", "tsv")
    assert (done.returncode, done.stdout) == (0, f"{JOB.id}\tfailed\tNone\n"), done.stderr
    assert "tsv    a line for each job, for spreadsheets" in copy.farm("data", "export", "--help").stdout
    checked = copy.farm("nightly", "--check", str(night))
    assert checked.returncode == 2
    assert "[export]: formats: unknown format 'xlsx': known are ctrf, hud, jsonl, junit, trace, tsv" in checked.stderr
