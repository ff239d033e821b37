"""`farm nightly`, end to end, on virtual devices, with receivers on loopback."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sqlite3
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
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
[suite.tolerance.8a8w.fp32]
sqnr_db = 20.0
[suite.tolerance.fp32.fp32]
sqnr_db = 20.0
[case.good]
module = "stub:Stub"
kwargs = {{ words = "pass {latency_ms}" }}
inputs = [{{ shape = [16] }}]
[case.no_signal]
module = "stub:Stub"
kwargs = {{ words = "wrong {latency_ms}" }}
inputs = [{{ shape = [16] }}]
"""
NIGHT = """
[nightly]
name = "try"
report_dir = "reports"
report_url = "https://ci.example.com/night"
budget = "2h"
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


@dataclass
class NightlyRun:
    """Finished nightly run with its notices and files."""

    home: FarmHome
    done: subprocess.CompletedProcess[str]
    hook: Hook
    box: Mailbox
    summary: Path
    forge: ForgeServer

    @property
    def told(self) -> dict[str, Any]:
        nightly_run: dict[str, Any] = json.loads(self.done.stdout)["nightly_run"]
        return nightly_run


@pytest.fixture
def home(tmp_path: Path) -> StubHome:
    """Home of nightly runs whose programs are words for a stub of the runner."""
    return make_stub_home(tmp_path / "stub")


def write(home: FarmHome, *cells: str, more: str = "", latency_ms: int = 20) -> None:
    folder = home.cwd / "mine"
    folder.mkdir(exist_ok=True)
    (folder / "suite.toml").write_text(SUITE.format(latency_ms=latency_ms))
    (home.cwd / "nightly.toml").write_text(NIGHT + "".join(cells) + more)


def state_of(home: FarmHome) -> dict[str, Any]:
    [file] = (home.state / "nightly" / "try").glob("*.json")
    found: dict[str, Any] = json.loads(file.read_text())
    return found


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
formats = ["jsonl", "junit", "ctrf", "hud", "trace"]
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
        done = home.farm("nightly", "nightly.toml", "--pull-request", pull, "--json", env=env, timeout_s=300)
        yield NightlyRun(home, done, hook, box, summary, forge)


def test_every_cell_is_a_nightly_run_in_the_store(nightly_run: NightlyRun) -> None:
    assert nightly_run.done.returncode == 1, nightly_run.done.stderr
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
        for suffix in ("jsonl", "junit.xml", "ctrf.json", "hud.json", "trace.json")
    }  # fmt: skip
    junit = ElementTree.parse(nightly_run.home.cwd / "exports" / "all.junit.xml").getroot()  # noqa: S314 - our own
    assert junit.get("failures") == "1"


def test_a_webhook_that_failed_at_first_was_told_and_one_that_went_on_is_said_loudly(nightly_run: NightlyRun) -> None:
    assert [path for path, _, _ in nightly_run.hook.requests] == ["/hooksecret"] * 3
    assert nightly_run.hook.requests[-1][1]["Authorization"] == "Bearer tokensecret"
    text = json.loads(nightly_run.hook.bodies[-1])["text"]
    assert "FAILED" in text
    assert "mine/no\\_signal" in text or "mine/no_signal" in text
    assert "https://ci.example.com/night" in text
    assert [one["ok"] for one in nightly_run.told["deliveries"]] == [True, False, True]
    assert "NOT NOTIFIED: webhook 2 (http://127.0.0.1:" in nightly_run.done.stderr
    assert "answers 404 Not Found" in nightly_run.done.stderr
    assert "NOT SENT" in (nightly_run.home.cwd / "reports" / "index.html").read_text()


def test_mail_came_in_text_and_html(nightly_run: NightlyRun) -> None:
    [mail] = nightly_run.box.mails
    assert mail["Subject"].replace("\n", "").startswith("[farm] try: failed: 1 new failure, ")
    text, html = (part.get_payload(decode=True).decode() for part in mail.get_payload())  # type: ignore[union-attr]
    assert "NEW FAILURES: 1" in text
    assert "<code>mine/no_signal[SM8650-xnnpack-fp32]</code>" in html


def test_github_has_a_summary_and_an_annotation(nightly_run: NightlyRun) -> None:
    text = nightly_run.summary.read_text()
    assert "#### New failures: 1" in text
    assert "| all | FAILED &#40;virtual&#41; |" in text
    assert "::error title=new failure%3A mine/no_signal[SM8650-xnnpack-fp32]::" in nightly_run.done.stderr


def test_secrets_are_nowhere(nightly_run: NightlyRun) -> None:
    secrets = [*SECRETS.values(), "brokensecret"]
    said = [nightly_run.done.stdout, nightly_run.done.stderr, nightly_run.summary.read_text()]
    files = [
        path
        for folder in (nightly_run.home.state, nightly_run.home.cwd)
        for path in folder.rglob("*")
        if path.is_file()
    ]
    assert len(files) > 20
    assert not [one for one in said for secret in secrets if secret in one]
    assert [path.name for path in files for secret in secrets if secret.encode() in path.read_bytes()] == ["broken-url"]


def test_the_same_nightly_run_again_is_no_news_and_the_one_before_is_on_its_page(
    nightly_run: NightlyRun, tmp_path: Path
) -> None:
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


def test_check_says_what_would_be_run_and_for_how_long_and_runs_nothing(
    nightly_run: NightlyRun, home: FarmHome
) -> None:
    file = str(nightly_run.home.cwd / "nightly.toml")
    known = nightly_run.home.farm("nightly", "--check", file, code=0)
    assert "jobs: 3" in known.stdout
    assert "2 jobs on virtual devices, 2 of each SoC; about" in known.stdout
    assert "a notification cannot be sent: [[notify.webhook]] 1: the environment variable HOOK_URL" in known.stderr
    new = home.farm("nightly", "--check", file, "--json")
    answer = json.loads(new.stdout)
    assert [(row["name"], row["jobs"], row["expected_s"]) for row in answer["runs"]] == [
        ("all", 2, None),
        ("good", 1, None),
    ]
    assert not home.state.exists()


def test_what_is_wrong_is_said_before_anything_runs(home: FarmHome) -> None:
    write(home, CELL.format(name="a", more='precisions = ["8a9w"]'), CELL.format(name="b", more="backend = 1"))
    done = home.farm("nightly", "nightly.toml", code=2)
    assert "2 problems" in done.stderr
    assert "[[run]] 1 (a): precisions: unknown precision '8a9w'" in done.stderr
    assert "[[run]] 2 (b): unknown key 'backend': did you mean 'backends'?" in done.stderr
    assert not home.state.exists()
    assert home.farm("nightly", "--check", "--resume", "nightly.toml").returncode == 2


@pytest.mark.whole
def test_a_cell_without_a_device_is_infra_and_the_next_one_runs(home: FarmHome, tmp_path: Path) -> None:
    both = CELL.format(name="both", more='keyword = "good"').replace('"SM8650"', '"SM8650", "SM8750"')
    write(home, CELL.format(name="phone", more=""), both, CELL.format(name="good", more=SMALL))
    text = (home.cwd / "nightly.toml").read_text().replace('budget = "2h"', 'wait = "1s"')
    (home.cwd / "nightly.toml").write_text(text)
    with attach(home, tmp_path, ["SM8750"]) as attached:
        done = attached.farm("nightly", "nightly.toml", timeout_s=300)
    assert done.returncode == 4, done.stderr
    assert "waiting up to 1.0 s: no usable SM8650 is attached" in done.stderr
    assert "phone  INFRA" in done.stdout
    assert "- no usable SM8650 is attached" in done.stdout
    assert "both   INFRA: 1 passed, 1 NOT RUN" in done.stdout
    assert "- no device of SM8650: 1 job was not run" in done.stdout
    assert "good   passed: VIRTUAL, 1 passed" in done.stdout


@pytest.mark.whole
def test_a_night_waits_politely_for_a_device_that_somebody_has(home: FarmHome, tmp_path: Path) -> None:
    write(home, CELL.format(name="shared", more='keyword = "good"'))
    with attach(home, tmp_path, ["SM8650"]) as attached:
        assert attached.farm("lease", "virtual-SM8650-0", "--for", "10m", user="ann").returncode == 0
        with attached.running("nightly", "nightly.toml", user="nightly") as process:
            assert process.stdout is not None
            said = next(line for line in process.stdout if "waiting for a SM8650" in line)
            assert "is with ann" in said
            assert attempts(home) == []
            assert attached.farm("devices", "release", user="ann").returncode == 0
            said = process.communicate(timeout=240)[0]
        assert process.returncode == 0, said
        assert "waiting" not in said, "it is said once"
        text = (home.cwd / "nightly.toml").read_text().replace('budget = "2h"', 'wait = "0s"')
        (home.cwd / "nightly.toml").write_text(text)
        assert attached.farm("nightly", "nightly.toml", user="nightly").returncode == 0, "it was free"
        # The next lease is not given back in time.
        (home.cwd / "nightly.toml").write_text(text.replace('"0s"', '"2s"'))
        assert attached.farm("lease", "virtual-SM8650-0", "--for", "10m", user="ann").returncode == 0
        done = attached.farm("nightly", "nightly.toml", user="nightly")
        assert done.returncode == 4, done.stderr
        assert "no SM8650 became free within 2.0 s" in done.stdout
        assert attempts(home) == ["passed", "passed"]


def test_ctrl_c_finishes_the_running_job_and_reports_and_resume_goes_on(home: FarmHome) -> None:
    write(home, CELL.format(name="long", more="virtual = 1"), CELL.format(name="good", more=SMALL), latency_ms=2000)
    with home.running("nightly", "nightly.toml") as process:
        until(lambda: list((home.state / "nightly" / "try").glob("*.json")), "a nightly run")
        second = home.farm("nightly", "nightly.toml", code=2)
        assert f"the nightly run 'try' is running already (process {process.pid})" in second.stderr
        until(lambda: attempts(home), "a first job")
        os.kill(process.pid, signal.SIGINT)
        said = process.communicate(timeout=120)[0]
        assert process.returncode == 130, said
    assert "Traceback" not in said
    assert "interrupted" in said
    assert (home.cwd / "reports" / "index.html").exists()
    first = state_of(home)
    assert first["cells"][1]["code"] in (None, 130)
    assert wait_for_no_process(home) == {}
    done = home.farm("nightly", "nightly.toml", "--resume", "--json", timeout_s=300, code=1)
    nightly_run = json.loads(done.stdout)["nightly_run"]
    assert nightly_run["id"] == first["id"]
    assert [cell["code"] for cell in nightly_run["cells"]] == [1, 0]
    assert nightly_run["cells"][0]["run_id"] == first["cells"][0]["run_id"]
    assert len(attempts(home)) == 3
    assert "is finished" in home.farm("nightly", "nightly.toml", "--resume", code=2).stderr


def test_a_night_that_was_killed_goes_on_with_what_is_missing(home: FarmHome) -> None:
    write(home, CELL.format(name="good", more=SMALL), CELL.format(name="long", more=SMALL), latency_ms=1500)
    with home.running("nightly", "nightly.toml") as process:
        until(lambda: attempts(home) and state_of(home)["cells"][1]["run_id"], "the second cell")
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    assert wait_for_no_process(home) == {}
    killed = state_of(home)
    assert (killed["code"], killed["cells"][0]["code"]) == (None, 0)
    nightly_run = home.json("nightly", "nightly.toml", "--resume", timeout_s=300)["nightly_run"]
    assert [cell["run_id"] for cell in nightly_run["cells"]] == [cell["run_id"] for cell in killed["cells"]]
    assert attempts(home) == ["passed", "passed"]


def test_a_budget_that_is_over_leaves_cells_out_and_says_so(home: FarmHome) -> None:
    write(home, CELL.format(name="good", more=SMALL), CELL.format(name="none", more=SMALL))
    text = (home.cwd / "nightly.toml").read_text().replace('budget = "2h"', 'budget = "0.5s"')
    (home.cwd / "nightly.toml").write_text(text)
    done = home.farm("nightly", "nightly.toml", timeout_s=300, code=5)
    assert "the budget of the nightly run was over before it could begin" in done.stdout


def test_nothing_selected_is_its_own_exit_code(home: FarmHome) -> None:
    write(home, CELL.format(name="none", more='virtual = 1\nkeyword = "nothing_is_called_so"'))
    for arguments in (("--check",), ()):
        assert home.farm("nightly", "nightly.toml", *arguments).returncode == 5
