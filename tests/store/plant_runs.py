"""Write forged runs to a store: `python plant_runs.py SPECS`, JSON, to $FARM_STORE. Prints the ids.

Rows come from farm's own functions, with single values that farm itself would never write.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import made
from made_runs import record_run

from farm.base.config.settings import load_config
from farm.base.paths import data_folder
from farm.builds.bundles.key import bundle_key
from farm.builds.toolchains.selection import prepare
from farm.dispatch.request.records import leave_intent
from farm.results.attempt import Direction, Measurement
from farm.store import rows, schema
from farm.store.records import ArtifactRecord
from farm.store.store import Store, open_store
from farm.suites.manifests import load_suite
from farm.suites.suite import Job, Target

DAY_S = 86_400


def job_of(spec: dict[str, Any]) -> Job:
    """Return the job of a run: of a case that farm ships, unless a folder is named that has another suite."""
    folder = Path(spec["suite"]) if "suite" in spec else data_folder("test_suites") / "smoke"
    cases = {case.name: case for case in load_suite(folder / "suite.toml").cases}
    return Job(cases[spec.get("case", "conv2d")], Target("SM8650", "htp", "8a8w"))


def plant(store: Store, spec: dict[str, Any]) -> str:
    """Write a run and return its id."""
    started_ms = int((time.time() - spec.get("days", 0) * DAY_S) * 1000)
    if "id" in spec:
        rows.new_run_id = lambda _: spec["id"]
    job = job_of(spec)
    key = spec.get("key", "b" * 64)
    kind = spec.get("kind", "virtual")
    facts = {"device_kind": kind, "executorch": "1.5.1"}
    if key == "right":
        tools = prepare(load_config(), virtual=True)
        key, facts = bundle_key(job, tools.versions), tools.fingerprint("virtual")
    if "intent" in spec:
        leave_intent(Path(spec["intent"]), None, [job])
    latency = Measurement("latency", "ns", Direction.LOWER, tuple(1e6 * spec.get("level", 1.0) + n for n in range(9)))
    run_id = record_run(
        store, [job], started_ms=started_ms, user=spec.get("user", "somebody"), fingerprint=facts,
        device=made.device(kind=kind), attempt={"bundle_key": key, "measurements": (latency,)},
        artifacts=[ArtifactRecord(sha256, 10, kind) for sha256, kind in spec.get("artifacts", ())],
    )  # fmt: skip
    if "suite_column" in spec:
        changed = schema.job.update().where(schema.job.c.name == job.id).values(suite=spec["suite_column"])
        store._database.write(lambda connection: connection.execute(changed))
    return run_id


def main() -> None:
    """Write all of them."""
    with open_store(load_config().store_url) as store:
        ids = [plant(store, spec) for spec in json.loads(sys.argv[1])]
    sys.stdout.write(json.dumps(ids))


if __name__ == "__main__":
    main()
