"""Store with example data without any measurement, and a real server in front of it."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import made
import pytest
import uvicorn
from made_runs import attempt_of, measured, record_run
from sqlalchemy import text

from farm.base.config.settings import Config, load_config
from farm.devices.device import Device, HealthEvent
from farm.devices.facts import DeviceStatus
from farm.results.attempt import Attempt, Direction, Measurement, Stage, Verdict
from farm.serve import actions
from farm.serve.server import listen, settings
from farm.store.artifacts import ArtifactStore
from farm.store.leases.registry import Seen
from farm.store.records import ArtifactRecord, NewAlert, Remark
from farm.store.rows import now_ms
from farm.store.store import Store, open_store
from farm.suites.suite import Job

HOUR = 3_600_000
EVIL = '<script>window.pwned=1</script><img src=x onerror="window.pwned=2">\'"&amp;\x1b[31m\u202e'
Start = Callable[..., contextlib.AbstractContextManager["Server"]]
CASES = ("conv2d", "relu", "softmax", "cat")


def attempt(job: Job, latency_ns: float, verdict: Verdict = Verdict.PASSED, **changes: Any) -> Attempt:
    samples = (latency_ns, latency_ns * 1.001, latency_ns * 0.999)
    numbers = (
        Measurement("latency", "ns", Direction.LOWER, samples),
        measured("pte_size", 14_000.0, "bytes", exact=True),
    )
    facts = {"device": "R5CX1", "started_ms": now_ms(), "seconds": 0.3, "bundle_key": "b" * 64, **changes}
    return attempt_of(job, verdict, measurements=numbers, **facts)


@dataclass
class Filled:
    """Store with its recorded runs."""

    store: Store
    runs: list[str] = field(default_factory=list)
    """Finished runs, oldest first."""
    live: str = ""
    """Run without an end."""
    sha256: str = ""
    jobs: tuple[Job, ...] = tuple(
        made.job(case, soc, suite="quantized_ops") for case in CASES for soc in ("SM8650", "SM8750")
    )
    device: Device = field(default_factory=lambda: made.device("R5CX1", name="pixel-left"))

    def record(self, job: Job, device: Device | None = None, artifacts: Sequence[ArtifactRecord] = ()) -> None:
        """Record an attempt of a job of the run that has no end."""
        device = device or self.device
        done = attempt(job, 1e6, device=device.serial)
        self.store.record_attempt(self.live, done, device, artifacts=artifacts)


def fill(store: Store, artifacts: ArtifactStore) -> Filled:
    """Record four runs, of which the last three are nightly, a run without an end, and three devices."""
    filled = Filled(store)
    filled.sha256 = artifacts.put(b"an etdump")
    sick, out = made.device("R5CX2"), made.device("R5CX3", "SM8750", name="bench-8750")
    status = DeviceStatus(False, 80, 31.5, 20 * 10**9, "b", 1e4, 0)
    store.devices.see([Seen(one, "device", status) for one in (filled.device, sick, out)])
    for number in range(6):
        latency_ns = 1.5e6 * (1.2 if number == 5 else 1)
        event = HealthEvent(filled.device.id, "check_passed", "healthy", "", {}, (latency_ns,) * 3, now_ms() - HOUR)
        store.devices.record_health(event)
    store.devices.record_health(HealthEvent(sick.id, "gave_up", "quarantined", f"does not answer {EVIL}"))
    store.devices.set_service(out.id, in_service=False, note="lent to the camera team", user="ada")
    for number in range(4):
        began = now_ms() - (4 - number) * HOUR
        facts = {"executorch": "1.5.1", "qnn": "2.51", "device_kind": "hardware"}
        run_id = record_run(
            store, filled.jobs, (), command="farm run --suite quantized_ops", user=("ada", "grace")[number % 2],
            fingerprint=facts, started_ms=began, priority="nightly" if number else "person", exit_code=None,
        )  # fmt: skip
        for place, job in enumerate(filled.jobs):
            last = number == 3
            changes: dict[str, Any] = {"started_ms": began + place}
            if last and job.case.name == "softmax":
                changes |= {"verdict": Verdict.FAILED, "reason": f"sqnr 3 dB {EVIL}"}
            if last and job.case.name == "cat":
                changes |= {"verdict": Verdict.INFRA, "stage": Stage.EXECUTE, "reason": "the device went offline"}
            slower = 1.3 if last and job.case.name == "conv2d" else 1 + number / 1e5
            kept = [ArtifactRecord(filled.sha256, 9, "etdump")] if last and place in (0, 4) else []
            done = attempt(job, (place + 1) * 1e6 * slower, **changes)
            store.record_attempt(run_id, done, filled.device, artifacts=kept)
        store.finish_run(run_id, int(number == 3))
        filled.runs.append(run_id)
    with store._database.reading() as connection:
        series_id = connection.execute(text("SELECT min(id) FROM series WHERE metric = 'latency'")).scalar_one()
    slower = NewAlert(
        series_id=series_id, device_kind="hardware", finding="regression", state="confirmed",
        last_good=filled.runs[2], first_bad=filled.runs[3], change=0.262, low=0.25, high=0.27, p_value=0.001,
        reason="latency", likely_cause=f"the program {EVIL}",
    )  # fmt: skip
    store.alerts.record(filled.runs[3], [slower])
    store.alerts.remark("alert:1", Remark("acknowledged", "ada", "grace", f"see #345 {EVIL}"))
    store.alerts.remark(f"job:{filled.jobs[4].id}", Remark("acknowledged", "ada", "grace", "a new toolchain"))
    facts = {"executorch": "1.5.1", "device_kind": "hardware"}
    begun = {"user": "ada", "fingerprint": facts, "started_ms": now_ms() - 60_000, "exit_code": None}
    filled.live = record_run(store, filled.jobs, (), **begun)
    filled.record(filled.jobs[0])
    return filled


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    """Names in small letters."""
    body: bytes
    cookies: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        return self.body.decode()

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass(frozen=True)
class Server:
    """A server that listens on loopback."""

    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def get(self, path: str, *, method: str = "GET", body: str | None = None, **headers: str) -> Answer:
        """Ask for a path; `_` in the names of headers is `-`."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        with contextlib.closing(connection):
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, path, body, {"Accept": "text/html", **named})
            found = connection.getresponse()
            pairs = {name.lower(): value for name, value in found.getheaders()}
            cookies = tuple(value for name, value in found.getheaders() if name.lower() == "set-cookie")
            return Answer(found.status, pairs, found.read(), cookies)

    def send(self, path: str, fields: str | dict[str, str], **headers: str) -> Answer:
        """Send a form."""
        body = fields if isinstance(fields, str) else urlencode(fields)
        form = {"Content_Type": "application/x-www-form-urlencoded"}
        return self.get(path, method="POST", body=body, **form, **headers)

    def log_in(self, token: str, path: str = "/", cookie: str = "") -> Answer:
        """Log in as a browser does, which has read the form before."""
        csrf, cookies = proof_of(self.get("/login", Cookie=cookie), cookie)
        return self.send("/login", {"token": token, "next": path, "_csrf_token": csrf}, Cookie=cookies)

    def session(self, token: str) -> str:
        """Log in and return the cookie of the session."""
        return session_of(self.log_in(token))

    def json(self, path: str, **headers: str) -> Any:
        """Return the answer of a path as JSON."""
        answer = self.get(path, Accept="application/json", **headers)
        assert (answer.status, answer.headers["content-type"]) == (200, "application/json"), answer.text
        return answer.json


def session_of(answer: Answer) -> str:
    """Return the session's cookie of an answer."""
    [cookie] = [one.partition(";")[0] for one in answer.cookies if one.startswith("farm-session")]
    return cookie


def proof_of(page: Answer, cookie: str = "") -> tuple[str, str]:
    """Return the field of a form against requests of other pages, and the cookies with it."""
    field = re.search(r'name="_csrf_token" value="([0-9a-f]+)"', page.text)
    assert field
    given = "; ".join(one.partition(";")[0] for one in page.cookies if "csrf" in one)
    return field[1], "; ".join(filter(None, (cookie, given)))


@contextlib.contextmanager
def running(config: Config, host: str = "127.0.0.1", *, demo: bool = False) -> Iterator[Server]:
    """Run a server in a thread until the block ends; `host` is the name that it believes to listen on."""
    with listen("127.0.0.1", 0) as bound:
        server = uvicorn.Server(settings(config, host, demo=demo))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
        thread.start()
        try:
            yield Server(bound.getsockname()[1])
        finally:
            server.should_exit = True
            thread.join(30)
            assert not thread.is_alive()


@contextlib.contextmanager
def filled_store(config: Config) -> Iterator[Filled]:
    config.state_dir.mkdir(parents=True, exist_ok=True)
    with open_store(config.store_url) as store:
        yield fill(store, ArtifactStore(config.state_dir / "artifacts"))


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.setenv("FARM_CACHE_DIR", str(tmp_path / "cache"))
    return load_config(folder=tmp_path)


@pytest.fixture
def filled(config: Config) -> Iterator[Filled]:
    with filled_store(config) as filled:
        yield filled


@pytest.fixture
def server(config: Config, filled: Filled) -> Iterator[Server]:
    assert filled.live
    with running(config) as found:
        yield found


@pytest.fixture(scope="module")
def config_of_unchanged(tmp_path_factory: pytest.TempPathFactory) -> Config:
    folder = tmp_path_factory.mktemp("unchanged")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FARM_CACHE_DIR", str(folder / "cache"))
        patch.setenv("FARM_STATE_DIR", str(folder / "state"))
        return load_config(folder=folder)


@pytest.fixture(scope="module")
def unchanged(config_of_unchanged: Config) -> Iterator[Filled]:
    """Store for tests that only read: it is filled once for all of a module."""
    with filled_store(config_of_unchanged) as filled:
        yield filled


@pytest.fixture(scope="module")
def server_of_unchanged(config_of_unchanged: Config, unchanged: Filled) -> Iterator[Server]:
    assert unchanged.live
    with running(config_of_unchanged) as found:
        yield found


@pytest.fixture
def start(config: Config, filled: Filled) -> Start:
    """Return a function that starts a server of the filled store, which believes to listen on a host."""
    assert filled.live
    return lambda host="127.0.0.1", *, demo=False: running(config, host, demo=demo)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Commands that the server would start."""
    found: list[list[str]] = []

    def note(context: actions.Context, words: list[str]) -> actions.Done:
        found.append([context.user, *words])
        return actions.Done("started")

    monkeypatch.setattr(actions, "_start", note)
    return found
