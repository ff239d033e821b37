"""`farm nightly`, end to end, on virtual devices, with receivers on loopback."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sqlite3
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

import pytest
from attached import attach
from farm_home import FarmHome, wait_for_no_process
from forge_server import HEAD, ForgeServer, forge_server
from forge_server import TOKEN as FORGE_TOKEN
from receivers import Hook, Mailbox, mail_server, make_certificate, web_server
from stub_home import StubHome, make_stub_home
from waiting import until

SECRETS = {"HOOK": "hooksecret", "TOKEN": "tokensecret", "MAIL_PASSWORD": "mailsecret"}

SUITE = """
[suite]
name = "mine"
description = "one that passes and one that does not"
tolerance.8a8w.fp32.sqnr_db = 20.0
tolerance.fp32.fp32.sqnr_db = 20.0
[case]
good = {{ module = "stub:Stub", kwargs.words = "pass {latency_ms}", inputs = [{{ shape = [16] }}] }}
no_signal = {{ module = "stub:Stub", kwargs.words = "wrong {latency_ms}", inputs = [{{ shape = [16] }}] }}
"""
NIGHT = """
[nightly]
name = "try"
report_dir = "reports"
report_url = "https://ci.example.com/night"
"""
CELL = """
[[run]]
name = "{name}"
socs = ["SM8650"]
suites = ["./mine"]
backends = ["xnnpack"]
{more}
"""
SMALL = 'virtual = 1\nkeyword = "good"'


class NightlyRun(NamedTuple):
    """Finished nightly run with its notices and files."""

    home: FarmHome
    done: subprocess.CompletedProcess[str]
    told: dict[str, Any]
    hook: Hook
    box: Mailbox
    summary: Path
    forge: ForgeServer


@pytest.fixture
def home(tmp_path: Path) -> StubHome:
    """Home of nightly runs whose programs are words for a stub of the runner."""
    return make_stub_home(tmp_path / "stub")


def write(home: FarmHome, *cells: str, more: str = "", latency_ms: int = 20, limit: str = 'budget = "2h"') -> None:
    folder = home.cwd / "mine"
    folder.mkdir(exist_ok=True)
    (folder / "suite.toml").write_text(SUITE.format(latency_ms=latency_ms))
    (home.cwd / "nightly.toml").write_text(f"{NIGHT}{limit}\n" + "".join(cells) + more)


def state_of(home: FarmHome) -> dict[str, Any]:
    [file] = (home.state / "nightly" / "try").glob("*.json")
    return dict(json.loads(file.read_text()))


def attempts(home: FarmHome) -> list[str]:
    try:
        with sqlite3.connect(f"file:{home.state / 'farm.db'}?mode=ro", uri=True) as connection:
            return [row[0] for row in connection.execute("select verdict from attempt order by id")]
    except sqlite3.Error:
        return []


@pytest.fixture(scope="module")
def nightly_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NightlyRun]:
    """Two cells with a failure in a single cell; webhooks that fail at first and always, and mail."""
    folder = tmp_path_factory.mktemp("nightly")
    home = make_stub_home(folder / "stub")
    certificate = make_certificate(folder)
    summary = folder / "summary.md"
    with (
        web_server([503, 500]) as hook,
        web_server([404]) as broken,
        mail_server(tls=certificate, password=SECRETS["MAIL_PASSWORD"]) as box,
        forge_server() as forge,
    ):
        (home.cwd / "broken-url").write_text(broken.url("/brokensecret") + "\n")
        write(
            home,
            CELL.format(name="all", more="virtual = 2"),
            CELL.format(name="good", more=SMALL),
            more=f"""
[export]
folder = "exports"
formats = ["jsonl", "junit", "hud", "trace"]
[[notify.webhook]]
url_env = "HOOK_URL"
token_env = "TOKEN"
template = "slack"
[[notify.webhook]]
url_file = "broken-url"
when = "failure"
[notify.mail]
host = "127.0.0.1"
port = {box.port}
from = "farm@example.com"
to = ["team@example.com"]
user_env = "MAIL_USER"
password_env = "MAIL_PASSWORD"
""",
        )
        env = {
            **SECRETS,
            "HOOK_URL": hook.url(f"/{SECRETS['HOOK']}"),
            "MAIL_USER": "farm",
            "SSL_CERT_FILE": str(certificate),
            "GITHUB_STEP_SUMMARY": str(summary),
            "GITHUB_ACTIONS": "true",
            "GITHUB_TOKEN": FORGE_TOKEN,
            "no_proxy": "*",
        }
        pull = f"{forge.address}/lab/net/pull/3"
        done = home.farm("nightly", "nightly.toml", "--pull-request", pull, "--json", env=env, timeout_s=300, code=1)
        yield NightlyRun(home, done, json.loads(done.stdout)["nightly_run"], hook, box, summary, forge)


def test_every_cell_is_a_nightly_run_in_the_store(nightly_run: NightlyRun) -> None:
    cells = nightly_run.told["cells"]
    assert [(cell["name"], cell["code"], cell["counts"]) for cell in cells] == [
        ("all", 1, {"passed": 1, "failed": 1}),
        ("good", 0, {"passed": 1}),
    ]
    assert nightly_run.told["code"] == 1
    [failure] = cells[0]["new_failures"]
    assert failure["job_id"] == "mine/no_signal[SM8650-xnnpack-fp32]"
    runs = [one["run"] for one in json.loads(nightly_run.home.farm("status", "--json").stdout)["status"]["runs"]]
    assert [run["run_id"] for run in runs] == [cell["run_id"] for cell in cells], "the failure is in the first cell"
    assert {run["purpose"] for run in runs} == {"nightly"}
    assert [run["name"].partition("/")[2] for run in runs] == ["all", "good"]
    assert wait_for_no_process(nightly_run.home) == {}


def test_the_pull_request_gets_a_status_and_a_comment(nightly_run: NightlyRun) -> None:
    [(commit, status)] = nightly_run.forge.statuses
    assert (commit, status["state"]) == (HEAD, "failure")
    [body] = nightly_run.forge.bodies()
    assert "#### Newly failing: 1" in body
    run_id = nightly_run.told["cells"][0]["run_id"]
    assert f"    farm jobs rerun 'mine/no_signal[SM8650-xnnpack-fp32]' --run {run_id}" in body
    assert "posted to lab/net#3" in nightly_run.done.stderr


def test_the_pages_lead_to_the_runs_and_the_exports_have_stable_names(nightly_run: NightlyRun) -> None:
    reports = nightly_run.home.cwd / "reports"
    folder = reports / nightly_run.told["id"]
    for page, link in ((reports / "index.html", f"{folder.name}/all.html"), (folder / "index.html", "all.html")):
        text = page.read_text()
        assert f'href="{link}"' in text
        assert "mine/no_signal[SM8650-xnnpack-fp32]" in text
        assert "VIRTUAL DEVICES" in text
    assert "no_signal" in (folder / "all.html").read_text()
    names = {path.name for path in (nightly_run.home.cwd / "exports").iterdir()}
    assert names == {
        f"{cell}.{suffix}" for cell in ("all", "good")
        for suffix in ("jsonl", "junit.xml", "hud.json", "trace.json")
    }  # fmt: skip
    junit = ElementTree.parse(nightly_run.home.cwd / "exports" / "all.junit.xml").getroot()  # noqa: S314 - our own
    assert junit.get("failures") == "1"


def test_receivers_were_told_and_one_that_failed_is_said_loudly(nightly_run: NightlyRun) -> None:
    path, headers, body = nightly_run.hook.requests[-1]
    assert (len(nightly_run.hook.requests), path, headers["Authorization"]) == (3, "/hooksecret", "Bearer tokensecret")
    assert "https://ci.example.com/night" in json.loads(body)["text"]
    assert [one["ok"] for one in nightly_run.told["deliveries"]] == [True, False, True]
    assert re.search(r"NOT NOTIFIED: webhook 2 \(http://127\.0\.0\.1:.*answers 404 Not Found", nightly_run.done.stderr)
    assert "NOT SENT" in (nightly_run.home.cwd / "reports" / "index.html").read_text()
    [mail] = nightly_run.box.mails
    assert mail["Subject"].replace("\n", "").startswith("[farm] try: failed: 1 new failure, ")
    assert "| all | FAILED &#40;virtual&#41; |" in nightly_run.summary.read_text()
    assert "::error title=new failure%3A mine/no_signal[SM8650-xnnpack-fp32]::" in nightly_run.done.stderr


def test_secrets_are_nowhere(nightly_run: NightlyRun) -> None:
    secrets = [*SECRETS.values(), "brokensecret"]
    said = [nightly_run.done.stdout, nightly_run.done.stderr, nightly_run.summary.read_text()]
    folders = (nightly_run.home.state, nightly_run.home.cwd)
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    assert len(files) > 20
    assert not [one for one in said for secret in secrets if secret in one]
    assert [path.name for path in files for secret in secrets if secret.encode() in path.read_bytes()] == ["broken-url"]


def test_the_same_nightly_run_again_is_no_news(nightly_run: NightlyRun, tmp_path: Path) -> None:
    # A copy: other tests read the pages of the first nightly run.
    home = replace(nightly_run.home, state=tmp_path / "state", cwd=tmp_path / "cwd")
    shutil.copytree(nightly_run.home.state, home.state)
    shutil.copytree(nightly_run.home.cwd, home.cwd)
    before = len(nightly_run.hook.requests)
    env = {**SECRETS, "HOOK_URL": nightly_run.hook.url(), "MAIL_USER": "farm", "no_proxy": "*"}
    done = home.farm("nightly", "nightly.toml", env=env, timeout_s=300, code=1)
    assert len(nightly_run.hook.requests) == before
    assert "STILL FAILING: 1" in done.stdout
    assert all(len(line) <= 80 for line in done.stdout.splitlines() if not line.startswith("report: ")), done.stdout
    assert f"{nightly_run.told['id']}/index.html" in (home.cwd / "reports" / "index.html").read_text()
    assert "ok mine/good" not in done.stderr, "without a terminal, what passes is not worth a line"


def test_check_shows_what_would_be_run(nightly_run: NightlyRun, home: FarmHome) -> None:
    file = str(nightly_run.home.cwd / "nightly.toml")
    known = nightly_run.home.farm("nightly", "--check", file, code=0)
    assert "jobs: 3" in known.stdout
    assert "2 jobs on virtual devices, 2 of each SoC; about" in known.stdout
    assert "a notification cannot be sent: [[notify.webhook]] 1: the environment variable HOOK_URL" in known.stderr
    rows = home.json("nightly", "--check", file)["runs"]
    assert [(row["name"], row["jobs"], row["expected_s"]) for row in rows] == [("all", 2, None), ("good", 1, None)]
    write(home, CELL.format(name="a", more='precisions = ["8a9w"]'))
    assert "run[0] (a): precisions: unknown precision '8a9w'" in home.farm("nightly", "nightly.toml", code=2).stderr
    home.farm("nightly", "--check", "--resume", "nightly.toml", code=2)
    assert not home.state.exists()


@pytest.mark.whole
def test_a_cell_without_a_device_is_infra_and_the_next_one_runs(home: FarmHome, tmp_path: Path) -> None:
    both = CELL.format(name="both", more='keyword = "good"').replace('"SM8650"', '"SM8650", "SM8750"')
    write(home, CELL.format(name="phone", more=""), both, CELL.format(name="good", more=SMALL), limit='wait = "1s"')
    with attach(home, tmp_path, ["SM8750"]) as attached:
        done = attached.farm("nightly", "nightly.toml", timeout_s=300, code=4)
    assert "waiting up to 1.0 s: no usable SM8650 is attached" in done.stderr
    for line in (
        "phone  INFRA",
        "- no usable SM8650 is attached",
        "both   INFRA: 1 passed, 1 NOT RUN",
        "- no device of SM8650: 1 job was not run",
        "good   passed: VIRTUAL, 1 passed",
    ):
        assert line in done.stdout


@pytest.mark.whole
def test_a_device_that_is_not_given_back_in_time_is_infra(home: FarmHome, tmp_path: Path) -> None:
    write(home, CELL.format(name="shared", more='keyword = "good"'), limit='wait = "2s"')
    with attach(home, tmp_path, ["SM8650"]) as attached:
        attached.farm("lease", "virtual-SM8650-0", "--for", "10m", user="ann", code=0)
        done = attached.farm("nightly", "nightly.toml", user="nightly", code=4)
        assert re.search("waiting for a SM8650.*is with ann", done.stderr)
        assert "no SM8650 became free within 2.0 s" in done.stdout
        attached.farm("devices", "release", user="ann", code=0)
        attached.farm("nightly", "nightly.toml", user="nightly", code=0)


def test_a_night_that_was_killed_goes_on_with_what_is_missing(home: FarmHome) -> None:
    write(home, CELL.format(name="good", more=SMALL), CELL.format(name="long", more=SMALL), latency_ms=1500)
    with home.running("nightly", "nightly.toml") as process:
        until(lambda: attempts(home) and state_of(home)["cells"][1]["run_id"], "the second cell")
        second = home.farm("nightly", "nightly.toml", code=2)
        assert f"the nightly run 'try' is running already (process {process.pid})" in second.stderr
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    assert wait_for_no_process(home) == {}
    killed = state_of(home)
    assert (killed["code"], killed["cells"][0]["code"]) == (None, 0)
    nightly_run = home.json("nightly", "nightly.toml", "--resume", timeout_s=300)["nightly_run"]
    assert [cell["run_id"] for cell in nightly_run["cells"]] == [cell["run_id"] for cell in killed["cells"]]
    assert attempts(home) == ["passed", "passed"]
    assert "is finished" in home.farm("nightly", "nightly.toml", "--resume", code=2).stderr


def test_a_budget_that_is_over_and_nothing_selected_have_a_code_of_their_own(home: FarmHome) -> None:
    write(home, CELL.format(name="good", more=SMALL), CELL.format(name="b", more=SMALL), limit='budget = "0.5s"')
    done = home.farm("nightly", "nightly.toml", timeout_s=300, code=5)
    assert "the budget of the nightly run was over before it could begin" in done.stdout
    write(home, CELL.format(name="none", more='virtual = 1\nkeyword = "nothing_is_called_so"'))
    for arguments in (("--check",), ()):
        home.farm("nightly", "nightly.toml", *arguments, code=5)
