"""A run on a shared farm as its user sees it: submitted, followed, left, attached to, cancelled, resumed.

Agents are stand-ins (stub_host.py) that claim and record through the store: nothing is compiled and nothing executed.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from farm_home import FarmHome
from networks import Relay
from shared_rows import execute
from store_template import drop_database
from stub_host import PASSED, StubHost, device_of, virtual_device, write_config
from waiting import until

from farm.base.config.settings import Config, load_config
from farm.builds.toolchains.prepare import prepare
from farm.dispatch.cluster.toolchain_id import offered
from farm.results.attempt import Stage, Verdict
from farm.store.cluster.records import AgentDevice
from farm.store.leases.registry import Seen
from farm.store.objects.objects import open_objects
from farm.store.store import Store, open_store

SUITE = """
[suite]
name = "mine"
description = "Of a test"
precisions = ["8a8w"]

[suite.tolerance.8a8w]
fp32 = { sqnr_db = 10.0 }
"""
CASE = """
[case.{name}]
module = "torch.nn:ReLU"
inputs = [{{ shape = [1, {size}] }}]
"""
RUN = ("run", "--soc", "SM8650", "--suite", "./mine")


class Shared:
    """A shared farm of this test alone: a database, a folder of artifacts, a farm.toml and a suite of four jobs."""

    def __init__(self, home: FarmHome, url: str, folder: Path) -> None:
        self.home, self.url = home, url
        artifacts = folder / "artifacts"
        artifacts.mkdir()
        self.file = write_config(home.cwd, url, artifacts)
        suite = home.cwd / "mine"
        suite.mkdir()
        cases = "".join(CASE.format(name=f"c{number}", size=3 + number) for number in range(4))
        (suite / "suite.toml").write_text(SUITE + cases)

    @property
    def config(self) -> Config:
        return load_config(self.file)

    def host(self, name: str = "lab1", devices: Sequence[AgentDevice] = (), **more: Any) -> StubHost:
        more |= {
            "objects": open_objects(self.config),
            "offered": offered("", prepare(self.config, virtual=True).versions),
        }
        return StubHost(self.url, name, devices or [virtual_device("v1", name)], **more)

    def store(self) -> Store:
        return open_store(self.url)


@pytest.fixture
def shared(home: FarmHome, new_store: Callable[[str], str], tmp_path: Path) -> Iterator[Shared]:
    address = new_store("farm")
    yield Shared(home, address, tmp_path)
    drop_database(address)


def run_of(text: str) -> str:
    """Return the run that a command submitted."""
    return next(word for line in text.splitlines() if "is submitted" in line for word in line.split() if "-" in word)


def test_a_run_is_handed_in_followed_and_ends_as_one_on_this_machine_does(shared: Shared) -> None:
    def answer(job_id: str, _device: str) -> tuple[Verdict, Stage, str]:
        return (Verdict.FAILED, Stage.NUMERICS, "SQNR 3 dB < 10 dB") if "/c2" in job_id else PASSED

    with shared.host(answer=answer) as host:
        done = shared.home.farm(*RUN, "--json", "--junitxml", "out.xml", code=1)
    view = json.loads(done.stdout)
    assert [job["attempts"][-1]["verdict"] for job in view["jobs"]].count("passed") == 3
    assert len(host.ran) == 4
    assert re.search(r"4 jobs, [45] to compile, 1 device: v1", done.stderr)
    assert "FAILED mine/c2[SM8650-htp-8a8w] (0.20 s): SQNR 3 dB < 10 dB" in done.stderr
    assert (shared.home.cwd / "out.xml").is_file()
    assert (view["exit_code"], bool(view["finished_ms"])) == (1, True)
    assert (shared.home.state / "runs" / view["id"] / "report.html").is_file()


@pytest.mark.whole
def test_nobody_follows_and_the_run_ends_all_the_same_and_can_be_attached_to(shared: Shared) -> None:
    with shared.host(jobs=1) as host:
        run_id = shared.home.farm(*RUN, "--detach", code=0).stdout.strip()
        with shared.home.running("runs", "watch", run_id) as process:
            assert process.stdout is not None
            seen = next(line for line in process.stdout if line.startswith("["))
            host.let()
            output, _ = process.communicate(timeout=60)
        assert process.returncode == 0, output
        assert seen.startswith("[1/4] ok mine/c")
        assert "[4/4]" in output
        assert len(host.ran) == 4
        # A late `farm runs watch` shows the end of the run.
        shared.home.farm("runs", "watch", code=0)
    with shared.store() as store:
        assert store.runs.view(run_id).exit_code == 0


@pytest.mark.whole
def test_cancelling_frees_the_devices_and_resume_does_what_is_missing(shared: Shared) -> None:
    farm = shared.home.farm
    with shared.host(jobs=1) as host:
        run_id = farm(*RUN, "--detach").stdout.strip()
        until(lambda: host.ran)
        farm("runs", "cancel", run_id, code=0)
        assert len(host.ran) == 1
        assert "is cancelled already" in farm("runs", "cancel", run_id, code=2).stderr
        assert f"farm run --resume {run_id}" in farm("runs", "watch", run_id, code=130).stderr
        host.let()
        resumed = farm("run", "--resume", run_id, code=0)
        assert f"run {run_id}: 1 of 4 jobs are finished" in resumed.stderr
        assert len(host.ran) == len({job for job, _ in host.ran}) == 4


@pytest.mark.whole
def test_who_follows_is_told_that_the_database_is_away_and_sees_the_run_again(
    shared: Shared, postgresql_cluster: str, tmp_path: Path
) -> None:
    name = shared.url.partition("@/")[2].partition("?")[0]
    with contextlib.closing(Relay(f"{postgresql_cluster}/.s.PGSQL.5432")) as line, shared.host(jobs=1) as host:
        write_config(shared.home.cwd, f"postgresql://farm@127.0.0.1:{line.port}/{name}", tmp_path / "artifacts")
        with shared.home.running(*RUN) as process:
            until(lambda: host.ran)
            line.abort(always=True)
            assert process.stdout is not None
            lines = iter(process.stdout.readline, "")
            facts = "".join(itertools.takewhile(lambda one: "is shown again once the store answers" not in one, lines))
            line.abort(always=False)
            host.let()
            output = process.communicate(timeout=60)[0]
    assert process.returncode == 0, facts + output
    assert "the store answers again" in output
    assert "[4/4]" in output


@pytest.mark.whole
def test_without_a_terminal_a_signal_cancels(shared: Shared) -> None:
    with shared.host(jobs=1) as host:
        with shared.home.running(*RUN) as process:
            until(lambda: host.ran)
            process.send_signal(signal.SIGTERM)
            output, _ = process.communicate(timeout=30)
        assert process.returncode == 130, output
        assert len(host.ran) == 1
    with shared.store() as store:
        assert not any(lease.token for lease in store.leases.all())
        assert store.runs.view(run_of(output)).exit_code == 130


class Terminal:
    """`farm` at a terminal of 80 columns."""

    def __init__(self, shared: Shared, *arguments: str) -> None:
        self._main, child = pty.openpty()
        env = {**shared.home.env, "TERM": "xterm", "COLUMNS": "80", "LINES": "24"}
        argv = [sys.executable, "-m", "farm.cli.main", *arguments]
        self.process = subprocess.Popen(
            argv, stdin=child, stdout=child, stderr=child, env=env, cwd=shared.home.cwd, start_new_session=True
        )
        os.close(child)
        self.text = ""

    def wait_for(self, words: str | None = None) -> None:
        """Read until `words` are on the terminal; without any, until the process has ended."""
        end_s = time.monotonic() + 60
        while words is None or words not in self.text:
            assert time.monotonic() < end_s, self.text
            if select.select([self._main], [], [], 0.2)[0]:
                try:
                    self.text += os.read(self._main, 65536).decode(errors="replace")
                except OSError:
                    assert words is None, self.text
                    return

    def type(self, text: str) -> None:
        os.write(self._main, text.encode())

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._main)


@pytest.mark.whole
@pytest.mark.parametrize(
    ("answer", "code", "ran"), [("leave", 130, 4), ("twice", 130, 4), ("cancel", 130, 1), ("follow", 0, 4)]
)
def test_ctrl_c_asks_whether_to_leave_or_to_cancel(shared: Shared, answer: str, code: int, ran: int) -> None:
    with shared.host(jobs=1) as host, contextlib.closing(Terminal(shared, *RUN)) as terminal:
        until(lambda: host.ran)
        terminal.process.send_signal(signal.SIGINT)
        terminal.wait_for("[l]eave it running")
        if answer == "twice":
            terminal.process.send_signal(signal.SIGINT)
        else:
            terminal.type(f"{answer[0]}\n")
        if answer == "follow":
            host.let()
        terminal.wait_for()
        assert terminal.process.wait(10) == code, terminal.text
        assert (f"run {run_of(terminal.text)} continues" in terminal.text) == (answer in ("leave", "twice"))
        if ran > 1:
            host.let()
            until(lambda: len(host.ran) == ran)
        assert len(host.ran) == ran


@pytest.mark.whole
def test_an_soc_that_no_living_host_has_is_an_error_at_once_or_waits(shared: Shared) -> None:
    refused = shared.home.farm(*RUN, code=4)
    assert "no living host has a SM8650" in refused.stderr
    assert "--wait-for-hosts" in refused.stderr
    with shared.store() as store:
        assert store.cluster.queue().orders == ()
        # The device is seen once, so that the farm knows its SoC.
        store.devices.see([Seen(device_of(virtual_device("v9", "lab9"), "lab9"), "device", None)])
        with shared.home.running(*RUN, "--wait-for-hosts") as process:
            until(lambda: store.cluster.queue().orders)
            assert "no living host has" in shared.home.farm("lab", "queue").stdout
            with shared.host("lab9", [virtual_device("v9", "lab9")]):
                output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output


@pytest.mark.whole
def test_exitfirst_and_a_budget_end_a_run_early(shared: Shared) -> None:
    with shared.host(answer=lambda *_: (Verdict.FAILED, Stage.NUMERICS, "wrong")) as host:
        shared.home.farm(*RUN, "-x", code=1)
        assert len(host.ran) == 1
    with shared.host(seconds=3.0):
        done = shared.home.farm(*RUN, "--budget", "4s", "--json")
    assert any(job["skipped"] for job in json.loads(done.stdout)["jobs"]), done.stderr
    assert done.returncode in (0, 5), done.stderr


@pytest.mark.whole
def test_what_a_shared_farm_and_what_only_a_shared_farm_can_do_is_said(shared: Shared, tmp_path: Path) -> None:
    for words, says in (
        ((*RUN, "--profile", "optrace"), "--virtual"),
        ((*RUN, "--detach", "--build-on", "here"), "leave one of them out"),
        ((*RUN, "--detach", "--html", "a.html"), "farm runs watch"),
        ((*RUN, "--virtual", "1", "--detach"), "--detach is of a shared farm"),
        ((*RUN, "--device", "nobody"), "unknown device"),
    ):
        assert says in shared.home.farm(*words, code=2).stderr
    (shared.home.cwd / "farm.toml").unlink()
    for words, says in ((("runs", "cancel", "latest"), ""), ((*RUN, "--detach"), "--detach is of a shared farm")):
        assert says in shared.home.farm(*words, env={"FARM_STORE": str(tmp_path / "farm.db")}, code=2).stderr


@pytest.mark.whole
def test_a_client_that_is_killed_in_the_middle_leaves_nothing_half(shared: Shared) -> None:
    with shared.host(seconds=0.2) as host:
        for wait_s in (0.7, 1.7):
            with shared.home.running(*RUN) as process:
                time.sleep(wait_s)
                process.kill()
                process.communicate()
        with shared.store() as store:
            until(lambda: not store.cluster.queue().orders)
            runs = [run_id for (run_id,) in execute(store, "SELECT run_id FROM run_order")]
            # The agent that ends the last shard of a run finishes the run.
            until(lambda: all(store.runs.view(run_id).exit_code == 0 for run_id in runs))
            # Runs that were not submitted never began.
            assert len(host.ran) == 4 * len(runs)
