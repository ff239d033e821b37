"""Protection of two users of a store from each other: docs/explanation/leases.md, with real users.

Ada calls `farm` in her own home; Bob writes arbitrary rows to the store.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from attached import attach
from users import User

from farm.store.store import open_store

PLANT = Path(__file__).with_name("plant_runs.py")
# Bisecting looks for bundles in the same way as `perf confirm`.
BISECT = pytest.param("perf bisect", marks=pytest.mark.soak)
CONFIRM, BUNDLE = (
    pytest.param(command, marks=pytest.mark.whole) for command in ("perf confirm", "jobs bundle --to=out")
)
# For commands whose statements differ. A value that a database returns is handled by the same code whichever it is.
EACH_DATABASE = pytest.mark.parametrize(
    "world", ["sqlite", pytest.param("postgresql", marks=pytest.mark.whole)], indirect=True
)
JOB = "smoke/conv2d[SM8650-htp-8a8w]"

EVIL = """\
from pathlib import Path
import torch
Path({marker!r}).write_text("Bob's code was executed")

class Net(torch.nn.Module):
    def forward(self, x):
        return torch.relu(x)
"""
MANIFEST = """\
[suite]
name = "his"
description = "Bob's"
[case.conv2d]
module = ".evil:Net"
inputs = [{shape = [1, 3]}]
"""


@dataclass(frozen=True)
class World:
    """Two users with one store."""

    ada: User
    bob: User
    url: str
    common: Path
    """A folder of the group that both are in."""

    def farm(self, *arguments: str, user: User | None = None, **env: str) -> subprocess.CompletedProcess[str]:
        """Run `farm` as Ada, or as `user`."""
        done = (user or self.ada).farm(*arguments, env={"FARM_STORE": self.url, **env}, timeout_s=300)
        assert "Traceback" not in done.stderr, done.stderr
        return done

    def plant(self, *specs: dict[str, Any], user: User | None = None) -> list[str]:
        """Let Bob, or `user`, write runs with Ada's name, and return their ids."""
        hers = [{"user": self.ada.name, **spec} for spec in specs]
        answer = (user or self.bob).python(str(PLANT), json.dumps(hers), env={"FARM_STORE": self.url})
        ids: list[str] = json.loads(answer)
        return ids

    def write(self, statement: str = "UPDATE attempt SET recorded_ms = 0") -> None:
        """Let Bob write to the store; by default, so that nothing counts as recorded today."""
        code = (
            "import os, sys; from sqlalchemy import text; from farm.store.store import open_store\n"
            "with open_store(os.environ['FARM_STORE']) as store:\n"
            "    store._database.write(lambda connection: connection.execute(text(sys.argv[1])))\n"
        )
        self.bob.python("-c", code, statement, env={"FARM_STORE": self.url})

    def prune(self, user: User | None = None) -> str:
        done = self.farm("runs", "prune", "--keep=90d", "--keep-results=1", "--yes", user=user)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def refused(self, *arguments: str, code: int = 2, **env: str) -> str:
        """Return the message of a command of Ada's that is refused before it prints anything."""
        done = self.farm(*arguments, **env)
        assert (done.returncode, done.stdout) == (code, ""), done.stderr
        return done.stderr

    def runs(self) -> set[str]:
        """Return the ids of all runs in the store."""
        with open_store(self.url, readonly=True) as store:
            return store.pruning.run_ids()


@pytest.fixture
def world(request: pytest.FixtureRequest, two_users: tuple[User, User], toolchain: Path) -> Iterator[World]:
    ada, bob = two_users
    common = ada.home.parent / "common"
    subprocess.run(["install", "-d", "-g", str(ada.shared_gid), "-m", "2770", str(common)], check=True)
    # Hashes of installed files, equal for all tests and users.
    hashes = ada.home.parent / "hashes"
    for user in two_users:
        user.run("mkdir", "-p", str(user.cache))
        if hashes.is_dir():
            user.run("cp", "-r", str(hashes), str(user.cache))
        for part in toolchain.iterdir():
            (user.cache / part.name).symlink_to(part)
    if getattr(request, "param", "sqlite") == "sqlite":
        # These are the steps of docs/explanation/leases.md.
        url = f"sqlite:///{common / 'farm.db'}"
        assert ada.farm("devices", env={"FARM_STORE": url}).returncode == 0
        ada.run("chmod", "g+w", str(common / "farm.db"))
    else:
        folder = Path(request.getfixturevalue("postgresql_cluster"))
        os.chown(folder, -1, ada.shared_gid)
        folder.chmod(0o750)
        new_database: Callable[[str], str] = request.getfixturevalue("new_database")
        url = new_database(f"two{abs(hash(request.node.nodeid))}")
        assert ada.farm("devices", env={"FARM_STORE": url}).returncode == 0
    yield World(ada, bob, url, common)
    for user in two_users:
        if (user.cache / "hashes").is_dir():
            shutil.copytree(user.cache / "hashes", hashes, dirs_exist_ok=True)
    for file in hashes.glob("*"):
        file.chmod(0o644)
    shutil.rmtree(common)


@pytest.fixture
def precious(world: World) -> Path:
    """Folder of Ada's that must not be removed."""
    folder = world.ada.home / "precious"
    world.ada.write(folder / "thesis.txt", "years of work")
    return folder


@pytest.fixture
def suite(world: World) -> Path:
    """A suite of Bob's, whose code leaves a marker where it is executed."""
    folder = world.bob.home / "his"
    world.bob.write(folder / "suite.toml", MANIFEST)
    world.bob.write(folder / "evil.py", EVIL.format(marker=str(world.common / "executed")))
    return folder


def executed(world: World) -> bool:
    return (world.common / "executed").exists()


def relative(path: Path, start: Path) -> str:
    return os.path.relpath(path, start)


class TestWhatAUserCannotDo:
    @pytest.mark.whole
    @EACH_DATABASE
    def test_make_prune_remove_a_folder_that_is_no_run_of_hers(self, world: World, precious: Path) -> None:
        runs = world.ada.state / "runs"
        own = world.ada.write(runs / "notes.txt", "mine").parent
        [old] = world.plant({"days": 300}, user=world.ada)
        world.ada.write(runs / old / "report.html", "a report")
        hostile = [str(precious), relative(precious, runs), ".", "..", "notes.txt", f"{old}/../../../../precious"]
        world.plant(*({"id": one, "days": 200, "artifacts": [["../../../precious", "etdump"]]} for one in hostile))
        [new] = world.plant({})
        world.write()
        would = world.farm("runs", "prune", "--keep=90d", "--keep-results=1")
        assert would.returncode == 0, would.stderr
        output = world.prune()
        # Ids sort by time: the run left has the newest result.
        assert world.runs() == {new, "notes.txt"}
        assert "folders      1 on this machine" in output
        assert (precious / "thesis.txt").read_text() == "years of work"
        assert sorted(path.name for path in precious.iterdir()) == ["thesis.txt"]
        assert [path.name for path in own.iterdir()] == ["notes.txt"]

    @EACH_DATABASE
    def test_make_prune_follow_a_link_out_of_her_runs(self, world: World, precious: Path) -> None:
        [old, _] = world.plant({"days": 300}, {})
        world.ada.run("mkdir", "-p", str(world.ada.state / "runs"))
        long_ago = time.time() - 300 * 86_400
        for name in (old, "20200101-000000-abcdef"):
            world.ada.run("ln", "-sn", str(precious), str(world.ada.state / "runs" / name))
        os.utime(precious, (long_ago, long_ago))
        world.write()
        world.prune()
        assert sorted(path.name for path in precious.iterdir()) == ["thesis.txt"]
        assert world.farm("runs", "prune", "--orphans", "--yes").returncode == 0
        assert sorted(path.name for path in precious.iterdir()) == ["thesis.txt"]

    @pytest.mark.whole
    @pytest.mark.parametrize("command", ["jobs rerun --virtual=1", BUNDLE, CONFIRM, BISECT])
    def test_make_a_look_for_a_bundle_remove_a_folder(self, world: World, precious: Path, command: str) -> None:
        bundles = world.ada.cache / "bundles"
        keys = [str(precious), relative(precious, bundles / ".."), "..", ".", "c" * 63 + "/"]
        for number, key in enumerate(keys):
            world.plant({"key": key, "days": 1}, {"key": key})
            group, name, *options = command.replace("=out", f"=out{number}").split()
            ends = ["--good=latest~1", "--bad=latest"] if name == "bisect" else []
            assert "is no key of a bundle" in world.refused(group, name, JOB, *ends, *options)
            assert (precious / "thesis.txt").read_text() == "years of work"

    @pytest.mark.whole
    @pytest.mark.parametrize("command", ["jobs rerun", BUNDLE, CONFIRM, BISECT])
    def test_have_his_intent_executed_by_the_id_of_his_run(self, world: World, suite: Path, command: str) -> None:
        intents = [world.bob.home / "his" / f"run{number}" for number in range(2)]
        ids = [str(intents[0]), relative(intents[1], world.ada.state / "runs")]
        world.ada.run("mkdir", "-p", str(world.ada.state / "runs"))
        world.plant(*(
            {"id": one, "suite": str(suite), "intent": str(intent), "key": "right", "days": 2 - n}
            for n, (one, intent) in enumerate(zip(ids, intents, strict=True))
        ))  # fmt: skip
        ends = [] if command.startswith("jobs") else ["--good=latest~1", "--bad=latest"]
        world.refused(*command.split(), "his/conv2d", *ends)
        assert not executed(world)

    @pytest.mark.parametrize("command", ["jobs rerun", BUNDLE, CONFIRM, BISECT])
    def test_have_his_suite_executed_by_its_path(self, world: World, suite: Path, command: str) -> None:
        for path in (str(suite), str(suite / "suite.toml")):
            spec = {"suite": str(suite), "suite_column": path, "key": "right"}
            world.plant({**spec, "days": 1}, spec)
            group, name, *more = command.split()
            ends = [] if group == "jobs" else ["--good=latest~1", "--bad=latest"]
            world.refused(group, name, "his/conv2d[SM8650-htp-8a8w]", *ends, *more)
            assert not executed(world)

    @pytest.mark.whole
    def test_have_her_finish_his_run(self, world: World, suite: Path) -> None:
        intent = world.bob.home / "his" / "run"
        world.plant({"id": str(intent), "suite": str(suite), "intent": str(intent), "key": "right"})
        assert "is not the id of a run" in world.refused("run", "--resume", str(intent))
        assert not executed(world)

    @pytest.mark.whole
    def test_have_his_intent_executed_in_a_state_folder_that_both_write(self, world: World, suite: Path) -> None:
        state = world.common / "state"
        run_id = "20260101-000000-abcdef"
        intent = state / "runs" / run_id
        world.plant({"id": run_id, "suite": str(suite), "intent": str(intent), "key": "right"})
        for arguments in (["jobs", "rerun", "his/conv2d"], ["run", "--resume", run_id]):
            message = world.refused(*arguments, FARM_STATE_DIR=str(state))
            assert not executed(world)
        assert f"belongs to {world.bob.name}" in message

    @pytest.mark.whole
    @EACH_DATABASE
    def test_keep_her_from_seeing_a_run_by_a_hash_that_is_none(self, world: World) -> None:
        [run_id] = world.plant({"artifacts": [["../../secret", "etdump"], ["x", "output:output_0_0.raw"]]})
        done = world.farm("report", run_id)
        assert done.returncode == 0, done.stderr
        done = world.farm("jobs", "bundle", JOB, "--to", "out")
        assert (done.returncode, "is no key of a bundle" in done.stderr) == (7, False)

    def test_have_her_write_a_report_or_files_of_a_profile_where_he_likes(self, world: World, precious: Path) -> None:
        world.plant(
            {"artifacts": [["../../precious/thesis.txt", "optrace:../../precious/stolen"]], "days": 1},
            {"id": str(precious)},
        )
        world.refused("report", "latest")
        assert world.farm("show", JOB, "--files", "files").returncode != 0
        assert sorted(path.name for path in precious.iterdir()) == ["thesis.txt"]

    @pytest.mark.whole
    def test_have_her_execute_a_program_from_his_cache(self, world: World) -> None:
        cache = world.common / "cache"
        for part in world.bob.cache.iterdir():
            world.bob.run("cp", "-r", str(part), str(world.bob.cwd / part.name))
        world.bob.run("mkdir", "-p", str(cache))
        world.bob.run("mv", *map(str, world.bob.cwd.iterdir()), str(cache))
        world.plant({"key": "right"})
        message = world.refused("jobs", "rerun", JOB, code=8, FARM_CACHE_DIR=str(cache))
        assert "set FARM_CACHE_DIR to a folder that only you can write" in message


class TestWhatAUserCanDo:
    @EACH_DATABASE
    def test_see_and_delete_her_runs_but_not_her_files_and_write_numbers(self, world: World) -> None:
        [old, newer] = world.plant({"days": 300}, {"days": 299}, user=world.ada)
        done = world.farm("history", JOB, user=world.bob)
        assert (done.returncode, newer[-6:] in done.stdout) == (0, True)
        assert world.farm("report", newer, user=world.bob).returncode == 0
        assert (world.bob.state / "runs" / newer / "report.html").is_file()
        world.write()
        report = world.ada.write(world.ada.state / "runs" / old / "report.html", "a report")
        world.prune(world.bob)
        assert world.runs() == {newer}
        assert report.is_file()
        [his] = world.plant({"level": 7.0})
        assert his[-6:] in world.farm("history", JOB).stdout

    def test_make_her_next_prune_remove_a_young_run_of_hers_with_its_folder(self, world: World) -> None:
        [young, _] = world.plant({"days": 10}, {}, user=world.ada)
        report = world.ada.write(world.ada.state / "runs" / young / "report.html", "a report")
        world.write()
        world.write(f"UPDATE run SET started_ms = 0 WHERE id = '{young}'")  # noqa: S608 - the attack
        world.prune()
        assert not report.parent.exists()

    @pytest.mark.whole
    @EACH_DATABASE
    def test_lease_in_her_name_and_release_what_she_has(self, world: World, tmp_path: Path) -> None:
        with attach(world.ada, tmp_path, ["SM8650"]) as bench:
            ada, bob = ((user, bench.env) for user in (world.ada, world.bob))

            def farm(who: tuple[User, Mapping[str, str]], *arguments: str, **env: str) -> int:
                return world.farm(*arguments, user=who[0], **who[1], **env).returncode

            assert farm(ada, "lease", "SM8650", "--for", "1h") == 0
            assert farm(bob, "lease", "SM8650", "--no-wait") == 4
            serial = bench.devices[0].serial
            assert farm(bob, "lease", serial, "--no-wait", LOGNAME=world.ada.name) == 0
            assert farm(bob, "devices", "release", serial) != 0
            assert farm(bob, "devices", "release", serial, "--force") == 0
            assert farm(bob, "lease", serial, "--no-wait") == 0
            assert farm(bob, "devices", "disable", serial) == 0
            assert farm(ada, "run", "--soc", "SM8650", "--suite", "smoke") == 4

    @pytest.mark.whole
    def test_have_her_run_again_what_she_has_in_the_same_words(self, world: World) -> None:
        [his] = world.plant({"key": "right"})
        done = world.farm("jobs", "rerun", JOB)
        assert done.returncode == 0, done.stderr
        assert "building it again, from the same code and versions" in done.stderr
        assert (his in done.stdout, len(world.runs())) == (True, 2)
        assert len(list((world.ada.cache / "bundles").glob("*/*/manifest.json"))) == 1
