"""`/metrics`: what Prometheus reads, and the dashboard that shows it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from prometheus_client.parser import text_string_to_metric_families

from farm.serve.metrics import StoreCollector

if TYPE_CHECKING:
    from conftest import Filled, Server

DASHBOARD = Path(__file__).parents[2] / "examples" / "grafana" / "farm.json"


def test_prometheus_reads_devices_jobs_and_wear(server_of_unchanged: Server) -> None:
    page = server_of_unchanged.get("/metrics")
    assert page.headers["content-type"].startswith("text/plain")
    found = {
        (sample.name, *(sample.labels[name] for name in sorted(sample.labels))): sample.value
        for family in text_string_to_metric_families(page.text)
        for sample in family.samples
    }
    # Jobs of four finished runs and of the live run, on one device.
    assert found["farm_jobs", "hardware", "SM8650", "failed"] == 1
    assert found["farm_jobs", "hardware", "SM8750", "infra"] == 1
    assert sum(value for name, *labels, value in ((*key, value) for key, value in found.items())
               if name == "farm_jobs" and labels[-1] == "passed") == 4 * 8 + 1 - 4  # fmt: skip
    assert sum(value for key, value in found.items() if key[0] == "farm_device_attempts_total") == 33
    assert sum(value for key, value in found.items() if key[0] == "farm_devices") == 3
    assert sum(value for key, value in found.items() if key[0] == "farm_devices" and "quarantined" in key) == 1
    [busy] = {value for key, value in found.items() if key[0] == "farm_device_utilization"}
    assert busy == pytest.approx(33 * 0.3 / 86_400)


def test_the_dashboard_asks_for_metrics_and_labels_that_exist(unchanged: Filled) -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    known = {metric.name: metric for metric in StoreCollector(unchanged.store).collect()}
    # Only a shared farm has these.
    shared = {"farm_queue_shards": {"soc", "state"}, "farm_agents": {"state"}}
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) == 8
    for panel in panels:
        for target in panel["targets"]:
            for name in re.findall(r"farm_\w+", target["expr"]):
                assert name.removesuffix("_total") in known or name in shared, name
    assert {name for panel in panels for name in re.findall(r"farm_\w+", panel["targets"][0]["expr"])} >= {
        "farm_devices", "farm_jobs", "farm_infra_attempts", "farm_device_utilization", "farm_queue_oldest_seconds",
    }  # fmt: skip
