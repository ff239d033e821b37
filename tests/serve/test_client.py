"""Everyday commands without a store: $FARM_SERVER and a token, against a running server."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from farm_home import FarmHome

from farm.base.config.settings import load_config
from farm.base.errors import InfraError
from farm.serve import actions
from farm.serve.client import Server
from farm.store.accounts import Role

from .conftest import Filled, filled_store, running

_AGE = re.compile(r"[\d.]+ (s|min|h)\b( \d+ (s|min)\b)? *")
COMMANDS = (
    ("runs", "list", "--user", "grace", "--limit", "1"),
    ("status",),
    ("show", "quantized_ops/conv2d[SM8650-htp-8a8w]"),
    ("show", "quantized_ops/relu*SM8650*", "--run", "latest"),
    ("history", "quantized_ops/conv2d", "--soc", "SM8650", "--metric", "latency"),
    ("history", "quantized_ops/conv2d", "--soc", "SM8650", "--metric", "latency", "--no-local"),
    ("lab", "queue", "--mine"),
)
# Commands whose answer is another for each user.
OF_A_USER = (("status", "latest"), ("show", "quantized_ops/conv2d[SM8650-htp-8a8w]", "--run", "latest~1"))


@pytest.fixture
def laptop(home: FarmHome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[dict[str, str], Filled]]:
    """Environment of a machine without the store, and the store of the server."""
    monkeypatch.setenv("FARM_STATE_DIR", str(home.state))
    config = load_config(folder=tmp_path)
    with filled_store(config) as filled, running(config) as server:
        token = filled.store.accounts.add("ada", Role.DEVELOPER)
        state = {"FARM_STATE_DIR": str(tmp_path / "elsewhere"), "FARM_SERVER": server.url, "FARM_TOKEN": token}
        yield state, filled


def test_a_command_says_the_same_with_the_server_as_with_the_store(
    home: FarmHome, laptop: tuple[dict[str, str], Filled], tmp_path: Path
) -> None:
    asked = {words: home.farm(*words, env=laptop[0], code=0) for words in (*COMMANDS, *OF_A_USER)}
    for words, there in asked.items():
        here = home.farm(*words, env={"FARM_USER": "ada"}, code=0)
        # Ages grow between the two.
        assert _AGE.sub("", there.stdout) == _AGE.sub("", here.stdout), words
    for words in (*OF_A_USER, COMMANDS[1], COMMANDS[4]):
        # Numbers of the store may be whole: 14000 there is 14000.0 here.
        facts = [home.json(*words, env=env) for env in (laptop[0], {"FARM_USER": "ada"})]
        for one in facts if words[0] == "show" else ():
            # A file has a path on the machine of the store alone.
            for file in one["files"]:
                del file["path"]
        assert facts[0] == facts[1], words
    assert "pixel-left" in home.farm("devices", env=laptop[0], code=0).stdout
    assert len({asked[words].stdout for words in OF_A_USER}) == len(OF_A_USER)
    assert not (tmp_path / "elsewhere").exists()


def test_a_laptop_leases_releases_and_starts_a_run(
    home: FarmHome, laptop: tuple[dict[str, str], Filled], monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr(actions, "_start", lambda _, words: started.append(words) or actions.Done("started"))
    state, filled = laptop
    output = home.farm("lease", "pixel-left", "--for", "10m", env=state, code=0).stdout
    assert output.startswith("pixel-left (SM8650, hardware) is yours until ")
    assert [one.reserved_for for one in filled.store.leases.all()] == ["ada"]
    assert home.farm("devices", "release", "pixel-left", env=state, code=0).stdout == "pixel-left is given back\n"
    run = ("run", "--soc", "SM8650", "--suite", "smoke")
    assert home.farm(*run, "--detach", "-k", "conv", env=state, code=0).stdout == "started\n"
    assert started == [["run", "--suite=smoke", "--soc=SM8650", "-kconv"]]
    assert home.farm(*run, "--detach", "--iterations", "5", "--budget", "1h", "--heap", env=state, code=0)
    assert started[1:] == [["run", "--suite=smoke", "--soc=SM8650", "--heap", "--budget=3600.0s", "--iterations=5"]]
    for more, problem in (
        (("--detach", "--build-on", "here"), "--build-on is not for the server"),
        ((), "give --detach"),
    ):
        assert problem in home.farm(*run, *more, env=state, code=2).stderr
    assert len(started) == 2


def test_a_nightly_run_is_not_started_beside_the_server(home: FarmHome) -> None:
    file = str(Path(__file__).parents[2] / "examples" / "nightly.toml")
    env = {"FARM_SERVER": "http://127.0.0.1:1"}
    refused = home.farm("nightly", file, env=env, code=2).stderr
    assert "list the file in [agent] nights of a device host, or unset FARM_SERVER" in refused
    assert home.farm("nightly", "--check", file, env=env, code=0)


def test_a_laptop_remarks_and_changes_devices_as_its_role_allows(
    home: FarmHome, laptop: tuple[dict[str, str], Filled]
) -> None:
    state, filled = laptop
    operator = {**state, "FARM_TOKEN": filled.store.accounts.add("root", Role.OPERATOR)}
    assert "recorded: #1" in home.farm("alerts", "assign", "1", "--owner", "ada", env=state, code=0).stdout
    assert filled.store.alerts.remarks(["alert:1"])["alert:1"][-1].user == "ada"
    accepted = home.farm("alerts", "accept", "quantized_ops/conv2d", "--note", "better", "--json", env=state, code=0)
    assert json.loads(accepted.stdout)["done"].startswith("accepted: ")
    assert "needs the role operator" in home.farm("devices", "disable", "pixel-left", env=state, code=2).stderr
    home.farm("devices", "disable", "pixel-left", "--note", "wobbly", env=operator, code=0)
    assert {one.id: one.service_note for one in filled.store.devices.all()}["R5CX1"] == "wobbly"
    home.farm("devices", "enable", "pixel-left", env=operator, code=0)
    assert "share a store on PostgreSQL" in home.farm("runs", "cancel", "latest", env=state, code=2).stderr
    finished = filled.runs[-1]
    report = home.farm("runs", "watch", finished, env=state)
    assert report.returncode == filled.store.runs.view(finished).exit_code
    assert f"report: {state['FARM_SERVER'].rstrip('/')}/runs/{finished}/report" in report.stdout
    assert f"run {finished} is grace's" in home.farm("run", "--resume", finished, env=state, code=2).stderr


def test_a_server_that_does_not_help_is_one_line(home: FarmHome, laptop: tuple[dict[str, str], Filled]) -> None:
    for change, code, message in (
        ({"FARM_TOKEN": "wrong"}, 2, "this is no token of an account: $FARM_TOKEN names"),
        ({"FARM_TOKEN": ""}, 2, "$FARM_TOKEN names"),
        ({"FARM_SERVER": "http://farm.lab"}, 2, "is no address of a server: expected https://HOST"),
        ({"FARM_SERVER": "farm.lab"}, 2, "is no address of a server"),
        ({"FARM_SERVER": "http://127.0.0.1:9"}, 4, "does not answer"),
    ):
        refused = home.refused("runs", "list", env={**laptop[0], **change}, code=code)
        assert (message in refused, laptop[0]["FARM_TOKEN"] in refused) == (True, False), refused


def test_an_error_of_the_server_keeps_its_words(home: FarmHome, laptop: tuple[dict[str, str], Filled]) -> None:
    for words, problem in (
        (("history", "nothing/here"), "unknown job"),
        (("show", "quantized_ops/conv2d"), "means 2 jobs"),
        (("show", "x", "--files", "f"), "leave it out"),
        (("lease", "bench-8750"), "lent to the camera team"),
    ):
        assert problem in home.farm(*words, env=laptop[0], code=2).stderr


def test_an_answer_of_something_else_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server("https://farm.lab", "")
    for content in (b"<html>sign in</html>", b'{"schema": 1}', b'{"error": 5}'):
        monkeypatch.setattr(Server, "_ask", lambda *_, content=content, **__: content)
        with pytest.raises(InfraError, match="no answer of this version of farm"):
            server.act("release", device="x")


def test_a_proxy_of_the_environment_gets_no_token_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as proxy, socket.create_server(("127.0.0.1", 0)) as closed:
        address = closed.getsockname()[1]
        closed.close()
        proxy.settimeout(0.2)
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.getsockname()[1]}")
        for name in ("NO_PROXY", "no_proxy"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr("farm.serve.client._TIMEOUT_S", 2.0)
        with pytest.raises(InfraError, match="does not answer"):
            Server(f"http://127.0.0.1:{address}", "token").act("cancel", run="latest")
        with pytest.raises(TimeoutError):
            proxy.accept()
