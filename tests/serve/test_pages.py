"""Pages over real HTTP: content, JSON, and answers to invalid requests."""

from __future__ import annotations

import hashlib
import html
import json
import socket
from typing import TYPE_CHECKING
from urllib.parse import quote

import pytest
from recipe import recipe_code

from farm.devices.device import AdbAddress, Device
from farm.policy.situation import Priority
from farm.report.formats.run_json import parse_json
from farm.serve import app
from farm.serve.pages import all as all_pages
from farm.store.store import open_store

if TYPE_CHECKING:
    from conftest import Filled, Server
    from farm_home import FarmHome

    from farm.base.config.settings import Config

JOB = quote("quantized_ops/softmax[SM8650-htp-8a8w]", safe="")
PAGES = ("/", "/runs", "/runs/latest", "/runs/latest~1/files", "/diff", "/devices", "/devices/pixel-left",
         "/history?job=quantized_ops", "/history", "/grid", "/grid?q=softmax&state=new_failure", "/nightly",
         f"/jobs/{JOB}", f"/jobs/{JOB}?run=latest~1", "/suites", "/suites/quantized_ops", "/hosts", "/hosts/bench",
         "/toolchains", "/toolchains/-", "/alerts", "/alerts?state=all", "/alerts/1", "/queue")  # fmt: skip


@pytest.mark.parametrize("path", PAGES)
def test_every_page_is_whole_and_nothing_of_a_device_is_markup(server_of_unchanged: Server, path: str) -> None:
    page = server_of_unchanged.get(path)
    assert page.status == 200
    assert page.headers["content-type"].startswith("text/html")
    assert page.text.rstrip().endswith("</html>")
    assert "<script>window.pwned" not in page.text
    assert "<img src=x" not in page.text
    assert "\u202e" not in page.text
    assert " style=" not in page.text


def test_the_status_tells_what_farm_status_tells(server_of_unchanged: Server, unchanged: Filled) -> None:
    page = server_of_unchanged.get("/").text
    assert "New failures" in page
    assert "quantized_ops/softmax[SM8650-htp-8a8w]" in page
    assert "Infra <span" in page
    assert "lent to the camera team" in page
    assert 'Regressions <span class="soft">1</span>' in page
    assert "latency <strong>slower</strong>: +30.0 %" in page
    assert "grace: see #345" in page
    assert "grace: a new toolchain" in page
    assert f"/diff?a={unchanged.runs[2]}&amp;b={unchanged.runs[3]}" in page
    assert unchanged.live in page
    assert "1 of 8 jobs: 1 passed" in page
    answer = server_of_unchanged.json("/")
    assert answer["status"]["runs"][0]["run"]["run_id"] == unchanged.runs[-1]
    assert answer["status"]["runs"][0]["jobs"]["quantized_ops/softmax[SM8650-htp-8a8w]"] == "new_failure"


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
    text = server.get("/runs/latest/report?format=json").text
    assert parse_json(text).id == filled.live
    assert text.strip() == home.farm("report", filled.live, "--json").stdout.strip()


def test_runs_are_filtered_and_paged_by_the_address(server_of_unchanged: Server, unchanged: Filled) -> None:
    def ids(query: str) -> list[str]:
        return [run["run_id"] for run in server_of_unchanged.json(f"/runs?{query}")["runs"]]

    newest_first = [unchanged.live, *reversed(unchanged.runs)]
    assert ids("") == newest_first
    assert ids("limit=2&page=2") == newest_first[2:4]
    assert ids("user=grace&purpose=nightly") == [unchanged.runs[3], unchanged.runs[1]]
    assert ids("state=failed") == [unchanged.runs[3]]
    assert ids("state=unfinished") == [unchanged.live]
    assert ids("soc=SM8750&suite=quantized_ops&state=passed") == newest_first[2:]
    assert ids("soc=SM8550") == []
    page = server_of_unchanged.get("/runs?user=ada&limit=1").text
    assert 'href="/runs?user=ada&amp;limit=1&amp;page=2"' in page
    assert '<option value="ada" selected>' in page


def test_how_far_a_run_is(server_of_unchanged: Server) -> None:
    (first, *_) = server_of_unchanged.json("/runs")["runs"]
    assert first["progress"]["counts"] == {"passed": 1}
    assert first["progress"]["planned"] == 8
    assert first["progress"]["exit_code"] is None
    failed = server_of_unchanged.json("/runs?state=failed")["runs"][0]["progress"]
    assert failed["counts"] == {"failed": 2, "infra": 2, "passed": 4}


def test_the_progress_of_runs_and_the_state_of_devices_are_polled(server: Server, filled: Filled) -> None:
    first = server.get("/api/v1/progress")
    (run,) = (run for run in first.json["runs"] if run["run_id"] == filled.live)
    assert (run["done"], run["text"]) == (1, "1 of 8 jobs: 1 passed")
    assert {device["id"]: device["state"] for device in first.json["devices"]} == {
        "R5CX1": "idle", "R5CX2": "quarantined", "R5CX3": "out",
    }  # fmt: skip
    filled.finish_one()
    changed = server.get("/api/v1/progress").json
    assert [run["done"] for run in changed["runs"] if run["run_id"] == filled.live] == [2]


def test_two_runs_are_compared_and_what_is_told_is_chosen(server_of_unchanged: Server, unchanged: Filled) -> None:
    a, b = unchanged.runs[2:]
    page = server_of_unchanged.get(f"/diff?a={a}&b={b}").text
    for title in ("New failures", "Missing", "Slower"):
        assert f"{title} <span" in page
    only = server_of_unchanged.get(f"/diff?a={a}&b={b}&part=slower&q=conv2d+sm8750").text
    assert "New failures <span" not in only
    assert only.count("<th scope=\"row\">") == 1  # fmt: skip
    assert "latency: 2.000 ms -&gt; 2.600 ms" in only


def test_a_device_shows_its_drift_its_events_and_what_ran(server_of_unchanged: Server, unchanged: Filled) -> None:
    page = server_of_unchanged.get("/devices/pixel-left").text
    assert "+20.0 %" in page
    assert "health check in ms of 1 series with 6 values" in page
    assert unchanged.runs[0] in page
    answer = server_of_unchanged.json("/devices/R5CX1")
    assert answer["drift"]["health_check_ratio"] == pytest.approx(1.2)
    assert answer["drift"]["jobs"] == 3
    assert len(answer["events"]) == 6
    assert answer["attempts"][0]["run_id"] == unchanged.live
    assert "token" not in json.dumps(answer)


def test_devices_are_filtered(server_of_unchanged: Server) -> None:
    def ids(query: str) -> list[str]:
        return [device["id"] for device in server_of_unchanged.json(f"/devices?{query}")["devices"]]

    assert ids("") == ["R5CX2", "R5CX3", "R5CX1"]
    assert ids("soc=SM8650&health=healthy") == ["R5CX1"]
    assert ids("state=out") == ["R5CX3"]
    assert ids("q=PIXEL") == ["R5CX1"]


def test_who_waits_for_a_device_is_told_to_the_eye_and_to_programs(server: Server, filled: Filled) -> None:
    token = filled.store.leases.request(
        ["R5CX1"], count=1, user="<b>eve", host="bench", pid=1, purpose="farm lease", priority=Priority.PERSON, ttl_s=60
    )
    try:
        page, answer = server.get("/devices").text, server.json("/devices")
    finally:
        filled.store.leases.withdraw(token)
    assert '<th scope="row">&lt;b&gt;eve</th><td>pixel-left</td>' in page
    assert [(one["user"], one["devices"], one["purpose"]) for one in answer["waiting"]] == [
        ("<b>eve", ["R5CX1"], "farm lease")
    ]
    assert token not in page + json.dumps(answer)


def test_history_has_a_plot_of_what_moved_and_a_table(server_of_unchanged: Server) -> None:
    page = server_of_unchanged.get("/history?job=quantized_ops/conv2d&soc=SM8650").text
    assert page.count("<figure") == 2
    assert "latency in ms of 1 series with 5 values" in page
    [latency, _] = server_of_unchanged.json("/history?job=quantized_ops/conv2d&soc=SM8650")["plots"]
    assert [point["n"] for point in latency["series"][0]["points"]] == [3] * 5
    assert "1.300" in page
    assert "metric=pte_size" in server_of_unchanged.get("/history?job=quantized_ops/conv2d&metric=latency").text
    assert "Page 2 of" not in page
    several = server_of_unchanged.get("/history?job=*&limit=1").text
    assert several.count("<h2 id=") == 8


def test_files_are_served_by_hash_and_only_those_that_the_store_knows(
    server: Server, filled: Filled, config: Config
) -> None:
    assert filled.sha256 in server.get(f"/runs/{filled.runs[3]}/files").text
    assert f'href="/artifacts/{filled.sha256}"' in server.get(f"/runs/{filled.runs[3]}/report").text
    job = quote(filled.jobs[0].id, safe="")
    assert f'data-view="/artifacts/{filled.sha256}/view"' in server.get(f"/jobs/{job}?run={filled.runs[3]}").text
    found = server.get(f"/artifacts/{filled.sha256}")
    assert (found.status, found.body) == (200, b"an etdump")
    assert found.headers["content-type"] == "application/octet-stream"
    assert found.headers["content-disposition"].startswith("attachment")
    assert found.headers["x-content-type-options"] == "nosniff"
    from farm.store.artifacts import ArtifactStore

    artifacts = ArtifactStore(config.state_dir / "artifacts")
    unknown = artifacts.put(b"of nobody")
    assert server.get(f"/artifacts/{unknown}").status == 404
    for path in ("../farm.db", "..%2f..%2ffarm.db", "A" * 64, "0" * 63, hashlib.sha256(b"").hexdigest()):
        assert server.get(f"/artifacts/{path}").status == 404, path
    artifacts.path(filled.sha256).unlink()
    gone = server.get(f"/artifacts/{filled.sha256}")
    assert gone.status == 404
    assert "pruned" in gone.text


@pytest.mark.parametrize(
    ("path", "status", "message"),
    [
        ("/nowhere", 404, "Not found"),
        ("/runs/20991231-9", 404, "unknown run '20991231-9'"),
        ("/devices/pixel-lift", 404, "pixel-left"),
        ("/history?job=quantized_ops/conv3d", 404, "quantized_ops/conv2d"),
        ("/history?job=relu*&soc=SM1", 404, "unknown job"),
        ("/runs?limit=many", 400, "limit: Expected `int`, got `str`"),
        ("/runs?limit=101", 400, "limit: Expected `int`"),
        ("/runs?page=-7", 400, "page: Expected `int`"),
        ("/runs?state=green", 400, "unfinished"),
        ("/runs?user=" + "u" * 600, 400, "user: Expected `str` of length"),
        ("/diff?a=latest~99", 400, "the store has 5 runs"),
        ("/diff?a=%00%ff%F0%9F", 400, "a: Expected `str` matching"),
        ("/diff?a=%ff%F0%9F", 404, "unknown run"),
        (f"/history?job={quote('<script>')}", 404, "&lt;script&gt;"),
        ("/devices/%2e%2e%2f%2e%2e", 404, "unknown device"),
        ("/assets/../../farm.db", 404, "Not found"),
        ("/assets/report.css", 404, "reload"),
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


@pytest.mark.parametrize("path", PAGES)
def test_the_api_returns_the_facts_of_the_page(server_of_unchanged: Server, path: str) -> None:
    facts = server_of_unchanged.json(path)
    assert facts == server_of_unchanged.json(f"/api/v1{path}")
    title = server_of_unchanged.get(path).text.partition("<title>")[2].partition("</title>")[0]
    assert html.unescape(title) == f"{facts['title']} · farm"


def test_the_api_is_described(server_of_unchanged: Server) -> None:
    described = json.loads(server_of_unchanged.get("/api/v1/openapi").body)
    assert set(described["paths"]) >= {"/api/v1", "/api/v1/runs", "/api/v1/devices/{device}"}
    limit = next(one for one in described["paths"]["/api/v1/runs"]["get"]["parameters"] if one["name"] == "limit")
    assert (limit["schema"]["minimum"], limit["schema"]["maximum"]) == (1, 100)


def test_a_cell_of_the_grid_leads_to_the_job_of_that_nightly_run(
    server_of_unchanged: Server, unchanged: Filled
) -> None:
    facts = server_of_unchanged.json("/grid")
    newest, before, oldest = facts["nightly_runs"]
    assert (newest["id"], newest["new"], newest["counts"]) == (unchanged.runs[3], 2, {"f": 2, "i": 2, "p": 4})
    assert oldest["id"] == unchanged.runs[1]
    assert [row["cells"] for row in facts["rows"]] == ["fpp"] * 2 + ["ipp"] * 2 + ["ppp"] * 4
    softmax = next(row for row in facts["rows"] if row["job_id"] == "quantized_ops/softmax[SM8650-htp-8a8w]")
    assert softmax["standing"] == "new_failure"
    page = server_of_unchanged.get("/grid").text
    assert f'<tr data-c="fpp"><th scope="row"><a href="/jobs/{JOB}">softmax</a>' in page
    assert "2 new failures, 0 still failing of 8 jobs" in page
    for nightly_run, outcome in ((newest, "failed"), (before, "passed")):
        job = server_of_unchanged.json(f"/jobs/{JOB}?nightly_run={nightly_run['id']}")
        assert (job["run"]["id"], job["outcome"]) == (nightly_run["id"], outcome)
    assert server_of_unchanged.get(f"/jobs/{JOB}?nightly_run=of-nobody").status == 404


def test_the_grid_is_filtered_by_its_address(server_of_unchanged: Server) -> None:
    def jobs(query: str) -> list[str]:
        return [row["case"] for row in server_of_unchanged.json(f"/grid?{query}")["rows"]]

    assert jobs("soc=SM8650&state=passed") == ["conv2d", "relu"]
    assert jobs("q=SOFT+8750") == ["softmax"]
    # Both passed and failed with the same code.
    assert jobs("state=flaky") == ["softmax", "softmax"]
    assert jobs("backend=gpu") == jobs("suite=fp_ops") == []
    assert len(jobs("limit=3")) == 3
    page = server_of_unchanged.get("/grid?soc=SM8650&nights=2").text
    assert '<option value="SM8650" selected>' in page
    assert 'href="/grid?soc=SM8650&amp;nights=2&amp;state=new_failure"' in page
    assert [
        nightly_run["counts"]["p"] for nightly_run in server_of_unchanged.json("/grid?nights=2")["nightly_runs"]
    ] == [4, 8]


def test_a_job_shows_its_run_its_files_its_commands_and_its_history(
    server_of_unchanged: Server, unchanged: Filled
) -> None:
    run = unchanged.runs[3]
    answer = server_of_unchanged.json(f"/jobs/{JOB}?run={run}")
    assert answer["title"] == f"failed: quantized_ops/softmax[SM8650-htp-8a8w] in {run}"
    assert [one["outcome"] for one in answer["runs"]] == ["not_run", "failed", "passed", "passed", "passed"]
    assert [(one["kind"], one["size"]) for one in answer["files"]] == [("etdump", 9)]
    assert [plot["metric"] for plot in answer["plots"]] == ["latency"]
    assert answer["commands"][-1][1] == "farm history 'quantized_ops/softmax[SM8650-htp-8a8w]'"
    page = server_of_unchanged.get(f"/jobs/{JOB}?run={run}").text
    assert f"farm jobs rerun &#39;quantized_ops/softmax[SM8650-htp-8a8w]&#39; --run {run}" in page
    assert f'href="/runs/{run}"' in page
    newest = server_of_unchanged.json(f"/jobs/{JOB}")
    assert newest["run"]["id"] == run
    slower = quote("quantized_ops/conv2d[SM8650-htp-8a8w]", safe="")
    assert [one["id"] for one in server_of_unchanged.json(f"/jobs/{slower}")["alerts"]] == [1]


def test_files_are_displayed_as_text_or_as_a_checked_image_or_not_at_all(
    server: Server, filled: Filled, config: Config
) -> None:
    from farm.store.artifacts import ArtifactStore
    from farm.store.records import ArtifactRecord

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
    virtual = Device(
        serial="farm-virtual-1", soc="SM8650", kind="virtual", build="v", address=AdbAddress(5037), product=""
    )
    filled.record(filled.jobs[2], virtual)
    [row] = [row for row in server.json("/devices")["devices"] if row["id"] == virtual.serial]
    assert (row["state"], row["kind"], row["soc"]) == ("ended", "virtual", "SM8650")
    answer = server.json("/devices/farm-virtual-1")
    assert [one["job_id"] for one in answer["attempts"]] == [filled.jobs[2].id]
    assert "farm-virtual-1" in server.get("/devices?state=ended").text


def test_a_toolchain_has_its_runs(server_of_unchanged: Server, unchanged: Filled) -> None:
    [one] = server_of_unchanged.json("/toolchains")["toolchains"]
    assert (one["hash"], one["runs"], one["passed"], one["failed"]) == ("", 5, 3, 1)
    answer = server_of_unchanged.json("/toolchains/-")
    assert [run["run_id"] for run in answer["runs"]] == [unchanged.live, *reversed(unchanged.runs)]
    assert server_of_unchanged.get("/toolchains/abc").status == 404


def test_an_alert_has_its_chart_remarks_and_commands(server_of_unchanged: Server, unchanged: Filled) -> None:
    answer = server_of_unchanged.json("/alerts/1")
    assert answer["alert"]["first_bad"] == unchanged.runs[3]
    assert [one["id"] for one in answer["plots"][0]["alerts"]] == [1]
    assert ["Accept the new level", "farm alerts accept 1 --note REASON"] in answer["commands"]
    assert answer["remarks"][0]["owner"] == "grace"
    assert server_of_unchanged.json("/alerts?state=refuted")["alerts"] == []
    assert server_of_unchanged.get("/alerts?state=green").status == 400


def test_pages_of_a_demo_say_so(start: object, filled: Filled) -> None:
    assert filled.live
    with start(demo=True) as server:  # type: ignore[operator]
        for path in ("/", "/grid", f"/jobs/{JOB}"):
            page = server.get(path).text
            assert "<title>demo data: " in page
            assert "nothing here was measured" in page
            assert server.json(path)["title"].startswith("demo data: ")
    with start() as server:  # type: ignore[operator]
        assert "demo" not in server.get("/grid").text


@pytest.mark.parametrize("path", ["/runs", "/api/v1/suites", "/nowhere", "/metrics"])
def test_head_is_get_without_a_body(server_of_unchanged: Server, path: str) -> None:
    asked = server_of_unchanged.get(path)
    with socket.create_connection(("127.0.0.1", server_of_unchanged.port), timeout=30) as connection:
        connection.sendall(
            f"HEAD {path} HTTP/1.1\r\nHost: localhost\r\nAccept: text/html\r\nConnection: close\r\n\r\n".encode()
        )
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    assert answer.startswith(f"HTTP/1.1 {asked.status} ".encode())
    assert f"content-type: {asked.headers['content-type']}".encode() in answer
    assert answer.endswith(b"\r\n\r\n")
    assert answer.count(b"\r\n\r\n") == 1


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
def test_nothing_can_be_changed(server_of_unchanged: Server, unchanged: Filled, method: str) -> None:
    for path in ("/", "/runs/latest", "/devices/pixel-left", "/api/v1/progress", f"/artifacts/{unchanged.sha256}"):
        assert server_of_unchanged.get(path, method=method).status == 405


def test_without_a_store_it_says_what_makes_one_and_finds_it_when_it_is_there(start: object, config: Config) -> None:
    with start() as server:  # type: ignore[operator]
        missing = server.get("/")
        assert missing.status == 503
        assert "there is no store yet" in missing.text.replace("&#39;", "'")
        assert server.get("/api/v1/progress").status == 503
        with open_store(config.store_url):
            page = server.get("/")
        assert page.status == 200
        assert "No run yet" in page.text
        for path in ("/runs", "/devices", "/history"):
            assert server.get(path).status == 200
        assert server.get("/diff").status == 400


def test_the_recipe_for_a_page(start: object, filled: Filled, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(all_pages, "PAGES", [*all_pages.PAGES])
    [code] = recipe_code("developers/recipes.md", "Adding a page")
    exec(compile(code, "recipe", "exec", dont_inherit=True), {"__name__": "recipe"})  # noqa: S102 -- the documentation's own
    monkeypatch.setattr(app, "PAGES", all_pages.PAGES)
    assert filled.live
    with start() as server:  # type: ignore[operator]
        assert server.json("/api/v1/labels/none") == {"schema": 1, "title": "none", "label": "none", "devices": []}
        assert server.get("/api/v1/labels/none?limit=0").status == 400
