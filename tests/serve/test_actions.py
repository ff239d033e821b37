"""Actions of accounts: who may do what, over real HTTP, as JSON and as forms; and the record of each."""

from __future__ import annotations

import json
import re
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from waiting import until

from farm.serve import actions
from farm.serve.actions import ACTIONS
from farm.store.accounts import Role

from .conftest import proof_of

if TYPE_CHECKING:
    from conftest import Answer, Filled, Server, Start
    from farm_home import FarmHome

ASKED: dict[str, dict[str, Any]] = {
    "lease": {"device": "pixel-left", "seconds": 600},
    "release": {"device": "pixel-left"},
    "cancel": {"run": "latest"},
    "run": {"suite": "smoke", "soc": "SM8650"},
    "resume": {"run": "latest"},
    "upload": {"name": "mine", "content": ""},
    "rerun": {"job": "quantized_ops/conv2d"},
    "assign": {"subject": "1", "owner": "ada", "note": "mine"},
    "accept": {"job": "quantized_ops/conv2d", "note": "a better compiler"},
    "disable": {"device": "pixel-left", "note": "a new battery"},
    "enable": {"device": "bench-8750"},
    "check": {"device": "pixel-left"},
}


def act(server: Server, name: str, asked: dict[str, Any], token: str = "") -> Answer:
    """Perform an action by the API."""
    who = {"Authorization": f"Bearer {token}"} if token else {}
    headers = {"Content_Type": "application/json", "Accept": "application/json", **who}
    return server.get(f"/api/v1/actions/{name}", method="POST", body=json.dumps(asked), **headers)


def test_an_action_is_for_its_role_and_above(start: Start, filled: Filled, started: list[list[str]]) -> None:
    accounts = filled.store.accounts
    assert {action.name for action in ACTIONS} == set(ASKED)
    with start() as server:
        for name, asked in ASKED.items():
            assert act(server, name, asked).status == 403, "there is no account"
            assert act(server, name, asked, "a token").status == 401
            assert server.send(f"/actions/{name}", "device=R5CX1").status == 403
        tokens = {role: accounts.add(f"a {role}", role) for role in Role}
        for name, asked in ASKED.items():
            assert act(server, name, asked).status == 401
        assert accounts.audit(10) == []

        def attempt(action: actions.Action, role: Role) -> Answer:
            answer = act(server, action.name, ASKED[action.name], tokens[role])
            [newest] = accounts.audit(1)
            assert (newest.user, newest.action) == (f"a {role}", action.name)
            assert newest.outcome == "done" if answer.status == 200 else newest.outcome.startswith("refused: ")
            return answer

        for action in ACTIONS:
            refused = [role for role in Role if not role.may(action.role)]
            assert refused == list(Role)[: len(refused)]
            for role in refused:
                answer = attempt(action, role)
                assert answer.status == 403
                assert f"needs the role {action.role}" in answer.json["error"]
        assert started == []
        assert {one.id for one in filled.store.devices.all() if not one.in_service} == {"R5CX3"}
        assert filled.store.leases.all() == []
        assert len(filled.store.alerts.remarks(["alert:1"])["alert:1"]) == 1
        for action in ACTIONS:
            for role in Role:
                if role.may(action.role):
                    answer = attempt(action, role)
                    assert answer.status in (200, 400, 409), answer.text


def test_a_device_is_leased_now_or_later_and_released(start: Start, filled: Filled, home: FarmHome) -> None:
    ada, bob, root = (
        filled.store.accounts.add(name, role)
        for name, role in (("ada", Role.DEVELOPER), ("bob", Role.DEVELOPER), ("root", Role.OPERATOR))
    )
    later_ms = round((time.time() + 7200) * 1000)
    with start() as server:
        done = act(server, "lease", {"device": "pixel-left", "seconds": 600, "from_ms": later_ms}, ada).json
        assert (done["device"], done["from_ms"], done["until_ms"]) == ("R5CX1", later_ms, later_ms + 600_000)
        [lease] = filled.store.leases.upcoming()
        assert (lease.device, lease.reserved_for, lease.reserved_from_ms) == ("R5CX1", "ada", later_ms)
        assert filled.store.leases.all() == []
        assert "R5CX1 is ada's" in act(server, "lease", {"device": "SM8650"}, bob).json["error"]
        refused = act(server, "release", {"device": "pixel-left"}, bob)
        assert (refused.status, "is reserved for ada from" in refused.json["error"]) == (400, True)
        assert (
            "needs the role operator" in act(server, "release", {"device": "R5CX1", "force": True}, bob).json["error"]
        )
        forced = {"device": "R5CX1", "force": True}
        assert act(server, "release", forced, root).status == 200
        assert filled.store.leases.upcoming() == []
        assert act(server, "lease", {"device": "SM8650"}, bob).json["device"] == "R5CX1"
        assert [one.reserved_for for one in filled.store.leases.all()] == ["bob"]
        assert act(server, "release", {"device": "R5CX1"}, bob).status == 200
    output = home.farm("lab", "audit").stdout
    assert "needs the role operator" in output
    assert [one["user"] for one in home.json("lab", "audit", "--user", "root")["actions"]] == ["root"]
    assert ada not in output + str(filled.store.accounts.audit(100))


def test_a_form_needs_its_field_and_leads_back(start: Start, filled: Filled) -> None:
    token = filled.store.accounts.add("root", Role.OPERATOR)
    with start() as server:
        session = server.session(token)
        csrf, cookie = proof_of(server.get("/devices/pixel-left", Cookie=session), session)
        fields = {"device": "R5CX1", "note": "<b>broken</b>", "next": "/devices/pixel-left"}
        path = "/actions/disable"
        for body, cookies in ((fields, cookie), ({**fields, "_csrf_token": "0" * 128}, cookie),
                              ({**fields, "_csrf_token": csrf}, session)):  # fmt: skip
            assert server.send(path, body, Cookie=cookies).status == 403
        # A page of another site may send forms to the API, with the cookie of the session.
        api = server.send(f"/api/v1{path}", json.dumps(fields), Cookie=session)
        assert api.status == 401
        assert all(one.in_service for one in filled.store.devices.all() if one.id == "R5CX1")
        done = server.send(path, {**fields, "_csrf_token": csrf}, Cookie=cookie)
        assert done.status == 200
        assert "pixel-left is out of service" in done.text
        assert 'href="/devices/pixel-left"' in done.text
    [known] = [one for one in filled.store.devices.all() if one.id == "R5CX1"]
    assert (known.in_service, known.service_note, known.service_user) == (False, "<b>broken</b>", "root")


def test_pages_have_the_forms_of_the_role_of_a_signed_in_user_alone(start: Start, filled: Filled) -> None:
    pages = ("/devices/pixel-left", "/runs", "/alerts/1", "/jobs/quantized_ops%2Fconv2d%5BSM8650-htp-8a8w%5D")
    tokens = {role: filled.store.accounts.add(f"a {role}", role) for role in Role}

    def forms(server: Server, **headers: str) -> set[str]:
        text = "".join(server.get(page, **headers).text for page in pages)
        return set(re.findall(r'<form method="post" action="/actions/(\w+)"', text))

    own = {"lease", "run", "rerun", "assign", "accept"}
    with start() as server:
        found = {role: forms(server, Cookie=server.session(token)) for role, token in tokens.items()}
        program = forms(server, Authorization=f"Bearer {tokens[Role.OPERATOR]}")
    assert found == {Role.VIEWER: set(), Role.DEVELOPER: own, Role.OPERATOR: own | {"disable", "check"}}
    assert program == set(), "a program sends no forms"


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("run", {"suite": "/etc", "soc": "SM8650"}, "expected names"),
    ("run", {"suite": "--resume=x", "soc": "SM8650"}, "expected names"),
    ("run", {"suite": "farm.toml", "soc": "SM8650"}, "expected names"),
    ("run", {"suite": "smoke", "soc": ""}, "expected names"),
    ("run", {"suite": f"mine@{'0' * 64}", "soc": "SM8650"}, "build hosts of a shared farm alone"),
    *(
        ("run", {"suite": "smoke", "soc": "SM8650", "options": options}, message)
        for options, message in (
            *(([f"--toolchain={path}"], "names a path") for path in ("/tmp", "~", "~root", ".", "..", ".venv")),  # noqa: S108
            (["--html=/tmp/x"], "options: '--html': expected"),
            (["--label"], "expected --label=VALUE"),
            (["--toolchain="], "expected --toolchain=VALUE"),
            (["--heap=1"], "expected --heap"),
            (["--toolchain=a", "--toolchain=b"], "one toolchain"),
            (["--heap"] * 101, "options"),
        )
    ),
    ("lease", {"device": "pixel-lift"}, "unknown device or SoC"),
    ("lease", {"device": "pixel-left", "seconds": 0}, "seconds"),
    ("lease", {"device": "pixel-left", "from_time": "noon"}, "expected a time such as"),
    ("lease", {"device": "bench-8750"}, "lent to the camera team"),
    ("lease", {}, "device"),
    ("assign", {"subject": "1"}, "are empty"),
    ("assign", {"subject": "1", "state": "green"}, "expected open"),
    ("assign", {"subject": "1", "until": "2026-02-30"}, "expected a day such as"),
    ("assign", {"subject": "1", "until": "2020-02-03"}, "is over"),
    ("accept", {"job": "quantized_ops/conv2d", "note": " "}, "give the reason"),
    ("cancel", {"run": "latest"}, "share a store on PostgreSQL"),
    ("upload", {"name": "mine", "content": "AAAA"}, "to a shared farm alone"),
    ("resume", {"run": "latest"}, "latest"),
]


def test_what_cannot_be_is_said(start: Start, filled: Filled) -> None:
    token = filled.store.accounts.add("root", Role.OPERATOR)
    with start() as server:
        for name, asked, message in REFUSED:
            answer = act(server, name, asked, token)
            assert answer.status in (400, 404, 409), asked
            assert message in answer.json["error"], asked


def test_a_run_is_a_command_in_the_name_of_the_account(start: Start, filled: Filled, started: list[list[str]]) -> None:
    token = filled.store.accounts.add("ada", Role.DEVELOPER)
    with start() as server:
        asked = {"suite": "smoke, quantized_ops", "soc": "SM8650", "keyword": "-- x", "name": "mine", "virtual": 1}
        assert act(server, "run", asked, token).status == 200
        assert act(server, "rerun", {"job": "--help", "run": "latest"}, token).status == 200
    assert [" ".join(words) for words in started] == [
        "ada run --suite=smoke --suite=quantized_ops --soc=SM8650 -k-- x --name=mine --virtual=1",
        f"ada jobs rerun --run={filled.live} -- --help",
    ]


def test_an_action_that_ends_unexpectedly_is_in_the_audit(
    start: Start, filled: Filled, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    token = filled.store.accounts.add("ada", Role.DEVELOPER)
    monkeypatch.setattr(actions, "_start", lambda *_: dict[str, actions.Done]()["x"])
    with start() as server:
        assert act(server, "rerun", {"job": "a"}, token).status == 500
        assert act(server, "rerun", {"job": "a\0b"}, token).status == 400
        deep = server.get(
            "/api/v1/actions/rerun", method="POST", body="[" * 200_000, Authorization=f"Bearer {token}",
            Content_Type="application/json",
        )  # fmt: skip
        assert deep.status == 400, deep.text
    assert [one.outcome for one in filled.store.accounts.audit(3)] == ["failed: KeyError"]
    assert "KeyError" in capfd.readouterr().err


def test_an_action_that_hangs_is_in_the_audit(
    start: Start, filled: Filled, home: FarmHome, monkeypatch: pytest.MonkeyPatch
) -> None:
    token, goes_on = filled.store.accounts.add("ada", Role.DEVELOPER), threading.Event()

    def hang(*_: object) -> actions.Done:
        assert goes_on.wait(60)
        return actions.Done("started")

    monkeypatch.setattr(actions, "_start", hang)
    with start() as server, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(act, server, "rerun", {"job": "a"}, token)
        until(lambda: [one.outcome for one in filled.store.accounts.audit(3)] == ["not ended"])
        assert "not ended" in home.farm("lab", "audit", code=0).stdout
        goes_on.set()
        assert answer.result().status == 200
    [entry] = filled.store.accounts.audit(3)
    assert (entry.user, entry.action, json.loads(entry.asked)["job"], entry.outcome) == ("ada", "rerun", "a", "done")


def test_a_user_has_a_few_commands_on_the_server_at_once(
    start: Start, filled: Filled, monkeypatch: pytest.MonkeyPatch
) -> None:
    going: dict[str, list[subprocess.Popen[bytes]]] = {}
    monkeypatch.setattr(actions, "_STARTED", going)
    monkeypatch.setattr(actions, "OWN_COMMAND", ["sh", "-c", "exec sleep 300"])
    ada, bob = (filled.store.accounts.add(name, Role.DEVELOPER) for name in ("ada", "bob"))
    asked = {"suite": "smoke", "soc": "SM8650"}
    try:
        with start() as server:
            assert [act(server, "run", asked, ada).status for _ in range(5)] == [200] * 4 + [429]
            refused = act(server, "rerun", {"job": "a"}, ada)
            assert refused.status == 429
            assert "4 commands of ada are running here" in refused.json["error"]
            assert "'farm runs list' shows their runs" in refused.json["error"]
            assert filled.store.accounts.audit(1)[0].outcome.startswith("refused: 4 commands of ada")
            assert act(server, "run", asked, bob).status == 200
            going["ada"][0].kill()
            until(lambda: going["ada"][0].poll() is not None)
            assert act(server, "run", asked, ada).status == 200
    finally:
        for processes in going.values():
            for process in processes:
                process.kill()


def test_a_started_command_is_of_the_user_and_ends_by_itself(
    filled: Filled, config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command uses the server's farm.toml, and no code of the folder in which the server was started."""
    (tmp_path / "click.py").write_text("raise SystemExit('planted')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FARM_SERVER", "http://127.0.0.1:1")
    monkeypatch.delenv("FARM_STORE", raising=False)
    lab = tmp_path / "lab.toml"
    lab.write_text(f'store = "{config.store_url}"\n')
    config = msgspec.structs.replace(config, file=lab)
    context = actions.Context(config, filled.store, "ada", Role.DEVELOPER)
    done = actions._start(context, ["devices", "disable", "R5CX1"])
    until(lambda: not all(one.in_service for one in filled.store.devices.all() if one.id == "R5CX1"))
    [known] = [one for one in filled.store.devices.all() if one.id == "R5CX1"]
    assert (known.in_service, known.service_user) == (False, "ada"), Path(done.log).read_text()
