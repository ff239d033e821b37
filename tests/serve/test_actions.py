"""Actions of accounts, over real HTTP, as JSON and as forms; and runs that users submit, with uploaded suites."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import tarfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
from farm_home import FarmHome
from waiting import until

from farm.base.config.settings import Config
from farm.base.config.shared import ArtifactsAddress
from farm.base.errors import FarmError, InfraError, NoDeviceError, UsageError
from farm.base.processes import Supervisor
from farm.builds.toolchains.toolchain import Compiler, Toolchain
from farm.replay.stored_result import build_bundle
from farm.serve import actions, submission
from farm.serve.actions import ACTIONS
from farm.store.accounts import Role
from farm.store.objects.archive import write_archive
from farm.suites.manifests import load_suite
from farm.suites.suite import Job, Target

from .conftest import Answer, Filled, Server, Start, proof_of

# Actions of accounts: who may do what, over real HTTP, as JSON and as forms; and the record of each.


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


def test_an_action_is_for_its_role_and_above(server: Server, filled: Filled, started: list[list[str]]) -> None:
    accounts = filled.store.accounts
    assert {action.name for action in ACTIONS} == set(ASKED)
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


def test_a_device_is_leased_now_or_later_and_released(server: Server, filled: Filled, home: FarmHome) -> None:
    ada, bob, root = (
        filled.store.accounts.add(name, role)
        for name, role in (("ada", Role.DEVELOPER), ("bob", Role.DEVELOPER), ("root", Role.OPERATOR))
    )
    later_ms = round((time.time() + 7200) * 1000)
    done = act(server, "lease", {"device": "pixel-left", "seconds": 600, "from_ms": later_ms}, ada).json
    assert (done["device"], done["from_ms"], done["until_ms"]) == ("R5CX1", later_ms, later_ms + 600_000)
    [lease] = filled.store.leases.upcoming()
    assert (lease.device, lease.reserved_for, lease.reserved_from_ms) == ("R5CX1", "ada", later_ms)
    assert filled.store.leases.all() == []
    assert "R5CX1 is ada's" in act(server, "lease", {"device": "SM8650"}, bob).json["error"]
    refused = act(server, "release", {"device": "pixel-left"}, bob)
    assert (refused.status, "is reserved for ada from" in refused.json["error"]) == (400, True)
    assert "needs the role operator" in act(server, "release", {"device": "R5CX1", "force": True}, bob).json["error"]
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


def test_a_form_needs_its_field_and_leads_back(server: Server, filled: Filled) -> None:
    token = filled.store.accounts.add("root", Role.OPERATOR)
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


def test_pages_have_the_forms_of_the_role_of_a_signed_in_user_alone(server: Server, filled: Filled) -> None:
    pages = ("/devices/pixel-left", "/runs", "/alerts/1", "/jobs/quantized_ops%2Fconv2d%5BSM8650-htp-8a8w%5D")
    tokens = {role: filled.store.accounts.add(f"a {role}", role) for role in Role}

    def forms(server: Server, **headers: str) -> set[str]:
        text = "".join(server.get(page, **headers).text for page in pages)
        return set(re.findall(r'<form method="post" action="/actions/(\w+)"', text))

    own = {"lease", "run", "rerun", "assign", "accept"}
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


def test_what_cannot_be_is_said(server: Server, filled: Filled) -> None:
    token = filled.store.accounts.add("root", Role.OPERATOR)
    for name, asked, message in REFUSED:
        answer = act(server, name, asked, token)
        assert answer.status in (400, 404, 409), asked
        assert message in answer.json["error"], asked


def test_a_run_is_a_command_in_the_name_of_the_account(
    server: Server, filled: Filled, started: list[list[str]]
) -> None:
    token = filled.store.accounts.add("ada", Role.DEVELOPER)
    asked = {"suite": "smoke, quantized_ops", "soc": "SM8650", "keyword": "-- x", "name": "mine", "virtual": 1}
    assert act(server, "run", asked, token).status == 200
    assert act(server, "rerun", {"job": "--help", "run": "latest"}, token).status == 200
    assert [" ".join(words) for words in started] == [
        "ada run --suite=smoke --suite=quantized_ops --soc=SM8650 -k-- x --name=mine --virtual=1",
        f"ada jobs rerun --run={filled.live} -- --help",
    ]


def test_an_action_that_ends_unexpectedly_is_in_the_audit(
    server: Server, filled: Filled, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    token = filled.store.accounts.add("ada", Role.DEVELOPER)
    monkeypatch.setattr(actions, "_start", lambda *_: dict[str, actions.Done]()["x"])
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
    server: Server, filled: Filled, home: FarmHome, monkeypatch: pytest.MonkeyPatch
) -> None:
    token, goes_on = filled.store.accounts.add("ada", Role.DEVELOPER), threading.Event()

    def hang(*_: object) -> actions.Done:
        assert goes_on.wait(60)
        return actions.Done("started")

    monkeypatch.setattr(actions, "_start", hang)
    with ThreadPoolExecutor(1) as pool:
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


# Runs that users submit by the server: uploaded suites, options, and the id of the run.


SUITE = """\
[suite]
name = "mine"
description = "A suite of a user."
[case.net]
module = ".net:Net"
inputs = [{{shape = [1, 3]}}]
{more}
"""


@pytest.fixture
def shared(config: Config) -> Config:
    """Configuration of a server of a shared farm."""
    artifacts = ArtifactsAddress("file", str(config.state_dir))
    return msgspec.structs.replace(config, store_url="postgresql://labserver/farm", artifacts=artifacts)


def archive(folder: Path, more: str = "", code: str = "raise SystemExit('executed')", root: str = "suites") -> bytes:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "suite.toml").write_text(SUITE.format(more=more))
    (folder / "net.py").write_text(code)
    target = folder.with_suffix(".tar")
    write_archive({f"{root}/mine/{path.name}": path for path in folder.iterdir()}, target)
    return target.read_bytes()


def test_an_uploaded_suite_is_one_of_a_run_and_none_of_its_code_is_executed(
    shared: Config, filled: Filled, started: list[list[str]], tmp_path: Path
) -> None:
    context = actions.Context(shared, filled.store, "ada", Role.DEVELOPER)
    asked = actions.UploadSuite("mine", archive(tmp_path / "mine"))
    name = actions.upload(context, asked).suite
    assert actions.upload(context, asked).suite == name
    folder = submission.folder_of(shared, "ada", name)
    suite = load_suite(folder / "suite.toml")
    assert [case.name for case in suite.cases] == ["net"]
    actions.run(context, actions.StartRun(f"{name}, smoke", "SM8650", options=["--iterations=5", "--heap"]))
    suites = [f"--suite={folder}", "--suite=smoke", "--soc=SM8650"]
    assert started == [["ada", "run", *suites, "--iterations=5", "--heap", "--detach"]]
    for wrong in (f"{name[:-1]}@", f"../{name}", f"other@{name.partition('@')[2]}", f"mine@{'0' * 64}"):
        with pytest.raises(UsageError, match="is not on the server"):
            actions.run(context, actions.StartRun(wrong, "SM8650"))
    with pytest.raises(UsageError, match="is not on the server"):
        submission.folder_of(shared, "bob", name)
    with pytest.raises(UsageError, match="shared farm alone"):
        actions.run(context, actions.StartRun(name, "SM8650", virtual=1))
    job, tools = Job(suite.cases[0], Target("SM8650", "htp", "8a8w")), Toolchain({}, Compiler("", {}), "")
    with Supervisor() as supervisor, pytest.raises(UsageError, match="build hosts alone execute its code"):
        build_bundle(shared, job, "0" * 64, tools, supervisor)


def test_an_upload_that_is_repeated_after_90_days_stays(shared: Config, tmp_path: Path) -> None:
    content = archive(tmp_path / "mine")
    name = submission.keep_suite(shared, "ada", "mine", content)
    for one in (root := submission.folder_of(shared, "ada", name).parents[1], root.with_name(f"other@{'0' * 64}")):
        one.mkdir(exist_ok=True)
        os.utime(one, (0, 0))
    assert submission.keep_suite(shared, "ada", "mine", content) == name
    assert submission.folder_of(shared, "ada", name).is_dir()
    assert [one.name for one in root.parent.iterdir() if one.is_dir()] == [name]


def test_the_oldest_uploads_of_a_user_are_removed_beyond_the_most_bytes(
    shared: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = []
    for number, user in enumerate(("bob", "ada", "ada", "ada")):
        content = archive(tmp_path / "mine", code=f"# {number} ".ljust(1000))
        names.append((user, submission.keep_suite(shared, user, "mine", content)))
        root = submission.folder_of(shared, *names[-1]).parents[1]
        os.utime(root, (time.time() - 100 + number,) * 2)
        size = sum(path.stat().st_size for path in root.rglob("*"))
        monkeypatch.setattr(submission, "_MOST_KEPT_BYTES", size * 5 // 2)
    for user, name in (names[0], *names[2:]):
        assert submission.folder_of(shared, user, name).is_dir()
    with pytest.raises(UsageError, match="is not on the server"):
        submission.folder_of(shared, *names[1])


def test_uploads_at_the_same_moment_are_whole(shared: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submission, "_MOST_KEPT_BYTES", 1)
    contents = [archive(tmp_path / "mine", code=f"# {number}") for number in range(3)] * 8
    with ThreadPoolExecutor(8) as pool:
        names = list(pool.map(lambda content: submission.keep_suite(shared, "ada", "mine", content), contents))
    assert len(set(names)) == 3
    left = [path for path in shared.uploads_folder.glob("*/*") if path.is_dir()]
    assert left
    for root in left:
        assert load_suite(root / "suites" / "mine" / "suite.toml").cases


def test_a_server_without_space_names_no_folder(
    shared: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    content = archive(tmp_path / "mine")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "x")

    monkeypatch.setattr("farm.store.objects.archive.unpack", full)
    with pytest.raises(InfraError, match="the server cannot keep the suite") as error:
        submission.keep_suite(shared, "ada", "mine", content)
    assert str(shared.state_dir) not in str(error.value)
    assert "No space left on device" in caplog.text
    assert kept(shared) == []


def test_names_that_no_suite_has_are_refused_without_a_folder_of_the_server(
    shared: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submission, "_MOST_FILES", 100)
    deep = [f"{number}/" + "a/" * 49 + "b" for number in range(2)]
    for names in (
        ["a/" * 64 + "b"], deep, [".archive"], ["a", "a/b"], ["a/b", "a"], ["x" * 256], ["\xe4" * 200],
    ):  # fmt: skip
        target = tmp_path / "mine.tar"
        with tarfile.open(target, "w", format=tarfile.PAX_FORMAT) as tar:
            for name in names:
                tar.addfile(tarfile.TarInfo(name))
        with pytest.raises(UsageError, match="none that farm wrote") as error:
            submission.keep_suite(shared, "ada", "mine", target.read_bytes())
        assert str(shared.state_dir) not in str(error.value)
        assert kept(shared) == []


def test_a_hostile_upload_leaves_nothing(shared: Config, tmp_path: Path) -> None:
    good = archive(tmp_path / "mine")
    for name, content in (
        ("mine", b"no archive"), ("mine", archive(tmp_path / "elsewhere", root="../suites")),
        ("mine", archive(tmp_path / "absolute", root="/srv")), ("other", good), ("../mine", good), ("", good),
    ):  # fmt: skip
        with pytest.raises(FarmError):
            submission.keep_suite(shared, "ada", name, content)
    assert kept(shared) == []


def kept(config: Config) -> list[Path]:
    folder = config.state_dir / "serve" / "suites"
    return [one for one in folder.glob("*/*") if not one.name.endswith(".lock")]


TASK = "output_type: multiple_choice\ndoc_to_text: q\ndoc_to_choice: c\ndoc_to_target: t\n"
SCORED = """\
[case.scored]
precisions = ["16a8w"]
generate = {params = {dim = 64, n_layers = 1, n_heads = 2, vocab_size = 512}, tokenizer = "bytes", task = "task.yaml"}
"""


@pytest.mark.parametrize(
    "name", ["{place}/there", "{place}/missing", "../../{up}{place}/there", "../../x", "../../../x"]
)
@pytest.mark.parametrize(
    "more",
    [
        'checkpoint = "NAME"',
        '[case.other]\ninputs = [{shape = [1]}]\nprogram = "NAME"',
        '[case.other]\ninputs = [{shape = [1]}]\npte = "NAME"',
        '[case.files]\nmodule = ".net:Net"\ninputs = [{files = ["NAME"]}]',
        '[case.words]\ngenerate = {hugging_face = "NAME", prompts = [[1]]}',
        '[[include]]\nsuite = "NAME"',
        f"{SCORED}#include: NAME",
        f"{SCORED}#dataset_path: NAME.json",
    ],
)
def test_a_name_outside_of_an_upload_is_refused_before_it_is_looked_up(
    shared: Config, tmp_path: Path, more: str, name: str
) -> None:
    """The message is equal for existing and missing files, and names no folder of the server."""
    place = tmp_path / "place"
    for folder in (place, place / "there"):
        folder.mkdir()
    (place / "there" / "suite.toml").write_text("[secret]")
    (place / "there.json").write_text("[]")
    name = name.format(place=place, up="../" * 40)
    manifest, _, task = more.replace("NAME", name).partition("#")
    root = tmp_path / "mine"
    root.mkdir()
    (root / "task.yaml").write_text(TASK + task)
    with pytest.raises(UsageError) as error:
        submission.keep_suite(shared, "ada", "mine", archive(root, manifest))
    message = str(error.value)
    expected = "is not a name" if "include]]" in more else "is outside of the suite"
    assert message.startswith("mine/")
    assert expected in message
    assert str(shared.state_dir) not in message
    assert kept(shared) == []


def test_a_refused_upload_names_no_folder_of_the_server(shared: Config, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as error:
        submission.keep_suite(shared, "ada", "mine", archive(tmp_path / "mine", 'checkpoint = "missing.pt"'))
    assert str(error.value) == "mine/suite.toml: case.net: 'missing.pt' is no file; it is looked for in mine"


@pytest.mark.parametrize(
    ("printed", "code", "found"),
    [
        ("farm: run ... is submitted\n20260101-000000-abcdef", 0, "20260101-000000-abcdef"),
        ("something else", 0, ""),
        ("farm: unknown suite 'x'", 2, UsageError),
        (f"farm: /srv/lab/serve/suites/{'a' * 16}/mine@{'b' * 64}/suites/mine/suite.toml: no case", 2, UsageError),
        ("waiting\nfarm: no living host has a SM8650", 4, NoDeviceError),
        ("", 9, NoDeviceError),
    ],
)
def test_the_id_of_a_submitted_run_or_the_reason_why_there_is_none(
    tmp_path: Path, printed: str, code: int, found: str | type[FarmError]
) -> None:
    log = tmp_path / "log"
    log.write_text(printed)
    process = subprocess.Popen(["sh", "-c", f"exit {code}"])
    if isinstance(found, str):
        assert submission.run_id_of(process, log) == found
        return
    with pytest.raises(found) as error:
        submission.run_id_of(process, log)
    last = printed.splitlines()[-1].removeprefix("farm: ") if printed else "farm ended with exit code 9"
    assert str(error.value) == (last if "/srv" not in last else "mine/suite.toml: no case")
