"""Runs that users submit by the server: uploaded suites, options, and the id of the run."""

from __future__ import annotations

import errno
import os
import subprocess
import tarfile
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import msgspec
import pytest

from farm.base.config.shared import ArtifactsAddress
from farm.base.errors import FarmError, InfraError, NoDeviceError, UsageError
from farm.base.processes import Supervisor
from farm.builds.toolchains.toolchain import Compiler, Toolchain
from farm.replay.stored_result import build_bundle
from farm.serve import actions, submission
from farm.store.accounts import Role
from farm.store.objects.archive import write_archive
from farm.suites.manifests import load_suite
from farm.suites.suite import Job, Target

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import Filled

    from farm.base.config.settings import Config

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
