"""Pages and metrics over real HTTP: content, JSON, and answers to invalid requests."""

from __future__ import annotations

import hashlib
import html
import json
import re
import socket
from pathlib import Path
from urllib.parse import quote

import made
import msgspec
import pytest
from farm_home import FarmHome
from made_runs import ask
from prometheus_client.parser import text_string_to_metric_families
from recipe import recipe_code

from farm.base.config.settings import Config
from farm.report.formats.run_json import parse_json
from farm.serve import app
from farm.serve.metrics import StoreCollector
from farm.serve.pages import all as all_pages
from farm.store.artifacts import ArtifactStore
from farm.store.records import ArtifactRecord
from farm.store.store import open_store

from .conftest import Filled, Server, Start, running

# Pages over real HTTP: content, JSON, and answers to invalid requests.


SOFTMAX = "quantized_ops/softmax[SM8650-htp-8a8w]"
JOB = quote(SOFTMAX, safe="")
PAGES = ("/", "/runs", "/runs/latest", "/diff", "/devices", "/devices/pixel-left",
         "/history?job=quantized_ops", "/history", "/grid", "/grid?q=softmax&state=new_failure", "/nightly",
         f"/jobs/{JOB}", f"/jobs/{JOB}?run=latest~1", "/suites", "/suites/quantized_ops", "/hosts", "/hosts/bench",
         "/toolchains", "/toolchains/-", "/alerts", "/alerts?state=all", "/alerts/1", "/queue")  # fmt: skip


@pytest.mark.parametrize("path", PAGES)
def test_every_page_is_whole_without_markup_of_a_device_and_the_api_has_its_facts(
    server_of_unchanged: Server, path: str
) -> None:
    page = server_of_unchanged.get(path)
    assert page.status == 200
    assert page.headers["content-type"].startswith("text/html")
    assert page.text.rstrip().endswith("</html>")
    for text in ("<script>window.pwned", "<img src=x", "\u202e", " style="):
        assert text not in page.text
    facts = server_of_unchanged.json(path)
    assert facts == server_of_unchanged.json(f"/api/v1{path}")
    title = page.text.partition("<title>")[2].partition("</title>")[0]
    assert html.unescape(title) == f"{facts['title']} · farm"


def test_every_link_of_a_page_leads_to_a_page(server_of_unchanged: Server) -> None:
    pages = [server_of_unchanged.get(path).text for path in PAGES]
    links = {html.unescape(one) for page in pages for one in re.findall(r'href="(/[^"#]*)', page)}
    assert len(links) > len(PAGES)
    assert {link: answer.status for link in links if (answer := server_of_unchanged.get(link)).status != 200} == {}


def test_the_status_tells_what_farm_status_tells(server_of_unchanged: Server, unchanged: Filled) -> None:
    page = server_of_unchanged.get("/").text
    for text in (
        "New failures", SOFTMAX, "Infra <span", "lent to the camera team",
        'Regressions <span class="soft">1</span>', "latency <strong>slower</strong>: +30.0 %", "grace: see #345",
        "grace: a new toolchain", f"/diff?a={unchanged.runs[2]}&amp;b={unchanged.runs[3]}", unchanged.live,
        "1 of 8 jobs: 1 passed",
    ):  # fmt: skip
        assert text in page, text
    answer = server_of_unchanged.json("/")
    assert answer["status"]["runs"][0]["run"]["run_id"] == unchanged.runs[-1]
    assert answer["status"]["runs"][0]["jobs"][SOFTMAX] == "new_failure"


def test_json_is_what_the_command_says(server: Server, filled: Filled, home: FarmHome, config: Config) -> None:
    assert config.state_dir == home.state
    for path, arguments, key in (
        ("/", ["status"], "status"),
        ("/diff?a=latest~2&b=latest~1", ["diff", *filled.runs[-2:]], "diff"),
        ("/history?job=quantized_ops/relu&limit=3", ["history", "quantized_ops/relu", "--limit", "3"], "points"),
        ("/history?job=quantized_ops/softmax", ["history", "quantized_ops/softmax"], "reliability"),
        ("/devices/pixel-left", ["devices", "show", "pixel-left"], "events"),
    ):
        assert server.json(path)[key] == home.json(*arguments)[key]
    text = server.get("/runs/latest/report", Accept="application/json").text
    assert parse_json(text).id == filled.live
    assert text.strip() == home.farm("report", filled.live, "--json").stdout.strip()


def test_runs_are_filtered_and_paged_by_the_address(server_of_unchanged: Server, unchanged: Filled) -> None:
    newest_first = [unchanged.live, *reversed(unchanged.runs)]
    for query, ids in (
        ("", newest_first),
        ("limit=2&page=2", newest_first[2:4]),
        ("user=grace&purpose=nightly", [unchanged.runs[3], unchanged.runs[1]]),
        ("state=failed", [unchanged.runs[3]]),
        ("state=unfinished", [unchanged.live]),
        ("soc=SM8750&suite=quantized_ops&state=passed", newest_first[2:]),
        ("soc=SM8550", []),
    ):
        assert [run["run_id"] for run in server_of_unchanged.json(f"/runs?{query}")["runs"]] == ids
    page = server_of_unchanged.get("/runs?user=ada&limit=1").text
    assert 'href="/runs?user=ada&amp;limit=1&amp;page=2"' in page
    assert '<option value="ada" selected>' in page


def test_progress_states_and_who_waits_are_told(server: Server, filled: Filled) -> None:
    first = server.json("/api/v1/progress")
    (run,) = (run for run in first["runs"] if run["run_id"] == filled.live)
    assert (run["done"], run["text"]) == (1, "1 of 8 jobs: 1 passed")
    states = {device["id"]: device["state"] for device in first["devices"]}
    assert states == {"R5CX1": "idle", "R5CX2": "quarantined", "R5CX3": "out"}
    filled.record(filled.jobs[1])
    changed = server.json("/api/v1/progress")
    assert [run["done"] for run in changed["runs"] if run["run_id"] == filled.live] == [2]
    token = ask(filled.store.leases, "R5CX1", user="<b>eve", purpose="farm lease", ttl_s=60)
    page, answer = server.get("/devices").text, server.json("/devices")
    assert '<th scope="row">&lt;b&gt;eve</th><td>pixel-left</td>' in page
    [waiting] = answer["waiting"]
    assert (waiting["user"], waiting["devices"], waiting["purpose"]) == ("<b>eve", ["R5CX1"], "farm lease")
    assert token not in page + json.dumps(answer)


def test_two_runs_are_compared_and_what_is_told_is_chosen(server_of_unchanged: Server, unchanged: Filled) -> None:
    address = "/diff?a={}&b={}".format(*unchanged.runs[2:])
    page = server_of_unchanged.get(address).text
    for title in ("New failures", "Missing", "Slower"):
        assert f"{title} <span" in page
    only = server_of_unchanged.get(f"{address}&part=slower&q=conv2d+sm8750").text
    assert "New failures <span" not in only
    assert only.count('<th scope="row">') == 1
    assert "latency: 2.000 ms -&gt; 2.600 ms" in only


def test_a_device_shows_its_drift_its_events_and_what_ran(server_of_unchanged: Server, unchanged: Filled) -> None:
    page = server_of_unchanged.get("/devices/pixel-left").text
    for text in ("+20.0 %", "health check in ms of 1 series with 6 values", unchanged.runs[0]):
        assert text in page
    answer = server_of_unchanged.json("/devices/R5CX1")
    assert (answer["drift"]["jobs"], len(answer["events"])) == (3, 6)
    assert answer["attempts"][0]["run_id"] == unchanged.live
    assert "token" not in json.dumps(answer)


def test_devices_are_filtered(server_of_unchanged: Server) -> None:
    for query, ids in (
        ("", ["R5CX2", "R5CX3", "R5CX1"]), ("soc=SM8650&health=healthy", ["R5CX1"]), ("state=out", ["R5CX3"]),
        ("q=PIXEL", ["R5CX1"]),
    ):  # fmt: skip
        assert [device["id"] for device in server_of_unchanged.json(f"/devices?{query}")["devices"]] == ids


def test_history_has_a_plot_of_what_moved_and_a_table(server_of_unchanged: Server) -> None:
    page = server_of_unchanged.get("/history?job=quantized_ops/conv2d&soc=SM8650").text
    assert page.count("<figure") == 2
    assert "latency in ms of 1 series with 5 values" in page
    assert "1.300" in page
    assert "metric=pte_size" in server_of_unchanged.get("/history?job=quantized_ops/conv2d&metric=latency").text
    assert server_of_unchanged.get("/history?job=*&limit=1").text.count("<h2 id=") == 8


def test_files_are_served_by_hash_and_only_those_that_the_store_knows(
    server: Server, filled: Filled, config: Config
) -> None:
    run, job, path = filled.runs[3], quote(filled.jobs[0].id, safe=""), f"/artifacts/{filled.sha256}"
    assert f'href="{path}"' in server.get(f"/runs/{run}/report").text
    assert f'data-view="{path}/view"' in server.get(f"/jobs/{job}?run={run}").text
    found = server.get(path)
    assert (found.status, found.body) == (200, b"an etdump")
    assert found.headers["content-type"] == "application/octet-stream"
    assert found.headers["content-disposition"].startswith("attachment")
    assert found.headers["x-content-type-options"] == "nosniff"
    artifacts = ArtifactStore(config.state_dir / "artifacts")
    unknown = artifacts.put(b"of nobody")
    empty = hashlib.sha256(b"").hexdigest()
    for name in (unknown, "../farm.db", "..%2f..%2ffarm.db", "A" * 64, "0" * 63, empty):
        assert server.get(f"/artifacts/{name}").status == 404, name
    artifacts.path(filled.sha256).unlink()
    gone = server.get(path)
    assert (gone.status, "pruned" in gone.text) == (404, True)


@pytest.mark.parametrize(
    ("path", "status", "message"),
    [
        ("/nowhere", 404, "Not found"),
        ("/runs/20991231-9", 404, "unknown run '20991231-9'"),
        ("/devices/pixel-lift", 404, "pixel-left"),
        ("/devices/%2e%2e%2f%2e%2e", 404, "unknown device"),
        ("/history?job=quantized_ops/conv3d", 404, "quantized_ops/conv2d"),
        (f"/history?job={quote('<script>')}", 404, "&lt;script&gt;"),
        ("/runs?limit=many", 400, "limit: Expected `int`, got `str`"),
        ("/runs?limit=101", 400, "limit: Expected `int`"),
        ("/runs?page=-7", 400, "page: Expected `int`"),
        ("/runs?state=green", 400, "unfinished"),
        ("/runs?user=" + "u" * 600, 400, "user: Expected `str` of length"),
        ("/diff?a=latest~99", 400, "the store has 5 runs"),
        ("/diff?a=%00%ff%F0%9F", 400, "a: Expected `str` matching"),
        ("/diff?a=%ff%F0%9F", 404, "unknown run"),
        ("/assets/../../farm.db", 404, "Not found"),
        ("/assets/report.css", 404, "reload"),
        ("/toolchains/abc", 404, "unknown commit 'abc'"),
        ("/alerts?state=green", 400, "state"),
    ],
)
def test_what_cannot_be_is_said_as_a_page_and_as_json(
    server_of_unchanged: Server, path: str, status: int, message: str
) -> None:
    page = server_of_unchanged.get(path)
    assert page.status == status
    assert message in page.text.replace("&#39;", "'")
    assert "<script>" not in page.text
    answer = server_of_unchanged.get(path, Accept="application/json")
    assert answer.status == status
    assert isinstance(answer.json["error"], str)


def test_the_api_is_described(server_of_unchanged: Server) -> None:
    described = json.loads(server_of_unchanged.get("/api/v1/openapi").body)
    assert set(described["paths"]) >= {"/api/v1", "/api/v1/runs", "/api/v1/devices/{device}"}
    limit = next(one for one in described["paths"]["/api/v1/runs"]["get"]["parameters"] if one["name"] == "limit")
    assert (limit["schema"]["minimum"], limit["schema"]["maximum"]) == (1, 100)


def test_a_cell_of_the_grid_leads_to_the_job_of_that_nightly_run(
    server_of_unchanged: Server, unchanged: Filled
) -> None:
    facts = server_of_unchanged.json("/grid")
    newest, before, _ = facts["nightly_runs"]
    assert (newest["id"], newest["new"], newest["counts"]) == (unchanged.runs[3], 2, {"f": 2, "i": 2, "p": 4})
    assert [row["cells"] for row in facts["rows"]] == ["fpp"] * 2 + ["ipp"] * 2 + ["ppp"] * 4
    page = server_of_unchanged.get("/grid").text
    assert f'<tr data-c="fpp"><th scope="row"><a href="/jobs/{JOB}">softmax</a>' in page
    for nightly_run, outcome in ((newest, "failed"), (before, "passed")):
        job = server_of_unchanged.json(f"/jobs/{JOB}?nightly_run={nightly_run['id']}")
        assert (job["run"]["id"], job["outcome"]) == (nightly_run["id"], outcome)
    assert server_of_unchanged.get(f"/jobs/{JOB}?nightly_run=of-nobody").status == 404


def test_the_grid_is_filtered_by_its_address(server_of_unchanged: Server) -> None:
    for query, cases in (
        ("soc=SM8650&state=passed", ["conv2d", "relu"]),
        ("q=SOFT+8750", ["softmax"]),
        # Both passed and failed with the same code.
        ("state=flaky", ["softmax", "softmax"]),
        ("backend=gpu", []),
        ("suite=fp_ops", []),
        ("limit=1", ["softmax"]),
    ):
        assert [row["case"] for row in server_of_unchanged.json(f"/grid?{query}")["rows"]] == cases
    page = server_of_unchanged.get("/grid?soc=SM8650&nights=2").text
    assert '<option value="SM8650" selected>' in page
    assert 'href="/grid?soc=SM8650&amp;nights=2&amp;state=new_failure"' in page


def test_a_job_shows_its_run_its_files_its_commands_and_its_history(
    server_of_unchanged: Server, unchanged: Filled
) -> None:
    run = unchanged.runs[3]
    answer = server_of_unchanged.json(f"/jobs/{JOB}?run={run}")
    assert answer["title"] == f"failed: {SOFTMAX} in {run}"
    assert [one["outcome"] for one in answer["runs"]] == ["not_run", "failed", "passed", "passed", "passed"]
    assert [(one["kind"], one["size"]) for one in answer["files"]] == [("etdump", 9)]
    assert [plot["metric"] for plot in answer["plots"]] == ["latency"]
    assert f"farm jobs rerun '{SOFTMAX}' --run {run}" in json.dumps(answer["commands"])
    assert f'href="/runs/{run}"' in server_of_unchanged.get(f"/jobs/{JOB}?run={run}").text
    assert server_of_unchanged.json(f"/jobs/{JOB}")["run"]["id"] == run
    slower = quote("quantized_ops/conv2d[SM8650-htp-8a8w]", safe="")
    assert [one["id"] for one in server_of_unchanged.json(f"/jobs/{slower}")["alerts"]] == [1]


def test_files_are_displayed_as_text_or_as_a_checked_image_or_not_at_all(
    server: Server, filled: Filled, config: Config
) -> None:
    kinds = {
        b"<script>alert(1)</script>": ("text/plain; charset=utf-8", 200),
        b"<svg xmlns='http://www.w3.org/2000/svg' onload='alert(1)'/>": ("text/plain; charset=utf-8", 200),
        b"\x89PNG\r\n\x1a\n<script>": ("image/png", 200),
        b"PK\x03\x04\0\0": ("", 415),
        b"\xff\xfe\x81\x82": ("", 415),
        "ä".encode() * 2**20: ("text/plain; charset=utf-8", 200),
    }
    artifacts = ArtifactStore(config.state_dir / "artifacts")
    kept = [ArtifactRecord(artifacts.put(content), len(content), "log") for content in kinds]
    filled.record(filled.jobs[3], artifacts=kept)
    for record, (content, (kind, status)) in zip(kept, kinds.items(), strict=True):
        shown = server.get(f"/artifacts/{record.sha256}/view")
        assert shown.status == status
        if kind:
            assert shown.headers["content-type"] == kind
            assert shown.body.startswith(content[:1000])
            assert len(shown.body) < 2**20 + 100
            assert shown.headers["content-security-policy"] == "default-src 'none'; sandbox; frame-ancestors 'none'"
            assert shown.headers["x-content-type-options"] == "nosniff"
    assert server.get(f"/artifacts/{'0' * 64}/view").status == 404


def test_a_virtual_device_is_known_after_its_run(server: Server, filled: Filled) -> None:
    virtual = msgspec.structs.replace(made.device("farm-virtual-1"), kind="virtual")
    filled.record(filled.jobs[2], virtual)
    [row] = [row for row in server.json("/devices")["devices"] if row["id"] == virtual.serial]
    assert (row["state"], row["kind"], row["soc"]) == ("ended", "virtual", "SM8650")
    answer = server.json("/devices/farm-virtual-1")
    assert [one["job_id"] for one in answer["attempts"]] == [filled.jobs[2].id]
    assert "farm-virtual-1" in server.get("/devices?state=ended").text


def test_toolchains_and_alerts_have_their_runs_charts_and_remarks(
    server_of_unchanged: Server, unchanged: Filled
) -> None:
    [one] = server_of_unchanged.json("/toolchains")["toolchains"]
    assert (one["hash"], one["runs"], one["passed"], one["failed"]) == ("", 5, 3, 1)
    runs = [run["run_id"] for run in server_of_unchanged.json("/toolchains/-")["runs"]]
    assert runs == [unchanged.live, *reversed(unchanged.runs)]
    answer = server_of_unchanged.json("/alerts/1")
    assert answer["alert"]["first_bad"] == unchanged.runs[3]
    assert [one["id"] for one in answer["plots"][0]["alerts"]] == [1]
    assert ["Accept the new level", "farm alerts accept 1 --note REASON"] in answer["commands"]
    assert answer["remarks"][0]["owner"] == "grace"
    assert server_of_unchanged.json("/alerts?state=refuted")["alerts"] == []


def test_pages_of_a_demo_say_so(start: Start) -> None:
    with start(demo=True) as server:
        for path in ("/", "/grid", f"/jobs/{JOB}"):
            page = server.get(path).text
            assert "<title>demo data: " in page
            assert "nothing here was measured" in page
            assert server.json(path)["title"].startswith("demo data: ")
    with start() as server:
        assert "demo" not in server.get("/grid").text


def test_head_is_get_without_a_body_and_nothing_else_changes_anything(
    server_of_unchanged: Server, unchanged: Filled
) -> None:
    for path in ("/runs", "/api/v1/suites", "/nowhere", "/metrics"):
        asked = server_of_unchanged.get(path)
        with socket.create_connection(("127.0.0.1", server_of_unchanged.port), timeout=30) as connection:
            request = f"HEAD {path} HTTP/1.1\r\nHost: localhost\r\nAccept: text/html\r\nConnection: close\r\n\r\n"
            connection.sendall(request.encode())
            answer = b"".join(iter(lambda place=connection: place.recv(65536), b""))
        assert answer.startswith(f"HTTP/1.1 {asked.status} ".encode())
        assert f"content-type: {asked.headers['content-type']}".encode() in answer
        assert (answer.endswith(b"\r\n\r\n"), answer.count(b"\r\n\r\n")) == (True, 1)
    for path in ("/", "/runs/latest", "/devices/pixel-left", "/api/v1/progress", f"/artifacts/{unchanged.sha256}"):
        for method in ("POST", "PUT", "DELETE", "PATCH"):
            assert server_of_unchanged.get(path, method=method).status == 405


def test_without_a_store_it_says_what_makes_one_and_finds_it_when_it_is_there(config: Config) -> None:
    with running(config) as server:
        missing = server.get("/")
        assert missing.status == 503
        assert "there is no store yet" in missing.text.replace("&#39;", "'")
        assert server.get("/api/v1/progress").status == 503
        with open_store(config.store_url):
            page = server.get("/")
        assert (page.status, "No run yet" in page.text) == (200, True)
        for path in ("/runs", "/devices", "/history"):
            assert server.get(path).status == 200
        assert server.get("/diff").status == 400


def test_the_recipe_for_a_page(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(all_pages, "PAGES", [*all_pages.PAGES])
    [code] = recipe_code("developers/recipes.md", "Adding a page")
    exec(compile(code, "recipe", "exec", dont_inherit=True), {"__name__": "recipe"})  # noqa: S102 -- the documentation's own
    monkeypatch.setattr(app, "PAGES", all_pages.PAGES)
    with start() as server:
        assert server.json("/api/v1/labels/none") == {"schema": 1, "title": "none", "label": "none", "devices": []}
        assert server.get("/api/v1/labels/none?limit=0").status == 400


# `/metrics`: what Prometheus reads, and the dashboard that shows it.


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
