"""`farm perf confirm` as a user calls it: a slower compiler is found, on the real simulator."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import shutil
import signal
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
from attached import attach
from farm_home import FarmHome, wait_for_no_process
from planted import JOB, Planted, write_suite

from farm.devices.virtual.faults import Fault, inject
from farm.results.analysis.scale import GATES, Scale
from farm.store.store import Store, open_store


@pytest.fixture(scope="module")
def planted(farm_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Planted:
    """Home with the planted suite, before its first run."""
    folder = tmp_path_factory.mktemp("planted")
    return Planted(FarmHome.make(farm_cache, folder), folder, write_suite(folder / "planted"))


@pytest.fixture(scope="module")
def good(planted: Planted) -> str:
    return planted.run()


@pytest.fixture(scope="module")
def again(planted: Planted, good: str) -> str:
    """Run of programs by the same release."""
    del good
    return planted.run()


@pytest.fixture(scope="module")
def twice(planted: Planted, again: str) -> str:
    """Run of programs by a release that does twice the work, a difference visible on a busy machine as well."""
    del again
    return planted.run(12)


@pytest.fixture
def store(planted: Planted, good: str) -> Iterator[Store]:
    assert good
    with open_store(f"sqlite:///{planted.home.state / 'farm.db'}", readonly=True) as store:
        yield store


@pytest.mark.whole
def test_a_slower_compiler_is_confirmed(planted: Planted, again: str, twice: str, store: Store) -> None:
    before = store.history.points(JOB)
    answer = planted.json("perf", "confirm", "planted/*", code=3)
    assert (answer["job"], answer["good"]["run"], answer["new"]["run"]) == (JOB, again, twice)
    assert answer["differences"].pop("torchao") == ["0.18.0", "0.18.12"]
    # Python imports the hook that plants the layers at its start.
    assert set(answer["differences"]) == {"packages_content"}
    [one] = answer["metrics"]
    output = one["confirmation"]
    assert (one["metric"], output["answer"]) == ("htp_cycles", "confirmed")
    # A second ten pairs are measured if the first ten give no answer, on a very busy machine.
    assert output["pairs"] in (10, 20)
    assert GATES[Scale.RATIO].confirmed < output["change"]
    assert output["low"] < output["change"] < output["high"]
    # The simulator's cycles are wall time: beside other work the longer program loses the processor more often, and the
    # least times alone have the ratio of the programs.
    good, new = (min(cycles for pair in one["pairs"] for cycles in pair[side]) for side in (0, 1))
    assert math.log(new / good) == pytest.approx(math.log(2.0), abs=0.2)
    inferences = [(len(was), len(now)) for was, now in one["pairs"]]
    # The number of inferences in added pairs follows from the noise of the first pairs.
    assert len(inferences) == output["pairs"]
    assert inferences[:10] == [(5, 5)] * 10
    assert all(was == now >= 5 for was, now in inferences)
    assert (answer["attribution"]["guilt"], answer["attribution"]["axes"]) == ("axis", ["program"])
    roles = [turn["role"] for turn in answer["turns"] if turn["pair"] >= 0]
    assert roles[:8] == ["good", "new", "new", "good"] * 2
    assert store.history.points(JOB) == before
    assert store.leases.all() == []
    assert wait_for_no_process(planted.home) == {}


# Enough pairs to make the gate of 2 % several times the chance error of the estimate, also on a busy machine.
MANY = ("--pairs", "16", "--inferences", "20")


@pytest.mark.whole
def test_a_side_whose_numbers_are_wrong_has_no_pairs(planted: Planted, good: str, twice: str) -> None:
    plan = planted.home.state / "runs" / twice / "intent.json"
    kept = plan.read_text()
    assert '"sqnr_db":20.0' in kept
    plan.write_text(kept.replace('"sqnr_db":20.0', '"sqnr_db":200.0'))
    done = planted.home.farm("perf", "confirm", JOB, "--good", good, "--bad", twice, code=0)
    plan.write_text(kept)
    assert "htp_cycles: new: numerics: " in done.stdout
    assert "unknown" in done.stdout
    assert all(len(line) <= 80 for line in done.stdout.splitlines())


@pytest.mark.whole
def test_ctrl_c_leaves_nothing(planted: Planted, good: str, twice: str) -> None:
    with planted.home.running("perf", "confirm", JOB, "--good", good, "--bad", twice, "--pairs", "1000") as process:
        assert process.stdout is not None
        while "measuring 1000 pairs" not in (line := process.stdout.readline()):
            assert line
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 130
    assert wait_for_no_process(planted.home) == {}


@pytest.mark.whole
def test_the_first_bad_run_and_its_changes_are_found(planted: Planted, good: str, again: str, twice: str) -> None:
    done = planted.home.farm("perf", "bisect", JOB, "--good", good, "--bad", twice, code=3)
    lines = done.stdout.splitlines()
    assert lines[0] == f"{again} good: the same bundle as in a measured run"
    assert lines[lines.index(f"last good: {again}") + 1] == f"first bad: {twice}"
    assert "exact: there is no other result between them" in lines
    assert "differs: torchao: 0.18.0 -> 0.18.12" in lines
    assert not any("executorch" in line for line in lines)
    assert all(len(line) <= 80 for line in lines)


@pytest.mark.usefixtures("twice")
@pytest.mark.whole
def test_where_there_is_no_step_none_is_looked_for(planted: Planted, good: str, again: str) -> None:
    answer = planted.json("perf", "bisect", JOB, "--good", good, "--bad", again, *MANY, code=0)
    assert (answer["found"], answer["probes"], answer["first_bad"]) == (False, [], None)
    assert [one["run"] for one in answer["runs"]] == [good, again]
    assert "is both ends" in planted.home.farm("perf", "bisect", JOB, "--good", good, "--bad", good, code=2).stderr
    assert "has no result before run" in planted.home.farm("perf", "confirm", JOB, "--bad", good, code=7).stderr


@pytest.mark.whole
def test_without_a_bundle_the_nearest_run_with_one_is_named(planted: Planted, twice: str, tmp_path: Path) -> None:
    home = planted.home.without("bundles", folder=tmp_path / "cache")
    later = planted.run(12)
    asked = ("perf", "confirm", JOB, "--good", twice, "--bad", later, "--pairs", "5")
    key = planted.json(*asked, code=None)["good"]["bundle"]
    found = next(path for path in (planted.home.cache / "bundles").rglob("*") if path.name == key)
    place = home.cache / found.relative_to(planted.home.cache)
    place.parent.mkdir(parents=True, exist_ok=True)
    shutil.copytree(found, place)
    code = planted.suite / "nets.py"
    before = code.read_text()
    code.write_text(before + "# changed\n")
    done = home.farm("perf", "confirm", JOB, "--bad", later, code=7)
    code.write_text(before)
    assert "is no longer in the cache" in done.stderr
    assert "the nearest run whose bundle is here is " in done.stderr


@pytest.mark.whole
class TestAxes:
    def test_a_kept_runner_is_swapped_and_a_gone_one_named(
        self, planted: Planted, good: str, twice: str, tmp_path: Path
    ) -> None:
        """Both runs are of one bundle; the earlier one had another build of the runner."""
        del twice
        state = tmp_path / "state"
        shutil.copytree(planted.home.state, state)
        own = planted.home.without("runtimes", folder=tmp_path / "cache")
        cache = own.cache
        shutil.copytree(planted.home.cache / "runtimes", cache / "runtimes")
        with contextlib.closing(sqlite3.connect(state / "farm.db")) as database:
            [[text]] = database.execute("SELECT runtime FROM run_device WHERE run_id = ?", [good])
            had = json.loads(text)
            older = {**had, "runner": "feedface" * 2}
            database.execute("UPDATE run_device SET runtime = ? WHERE run_id = ?", [json.dumps(older), good])
            database.commit()
        home = dataclasses.replace(own, state=state)
        new = dataclasses.replace(planted, home=dataclasses.replace(home, cache=planted.home.cache)).run()
        asked = ("perf", "confirm", JOB, "--good", good, "--bad", new, "--pairs", "5")
        gone = dataclasses.replace(planted, home=home).json(*asked, code=0)
        answer = gone["metrics"][0]["confirmation"]
        assert answer["answer"] == "unknown"
        assert answer["reason"].endswith("was not measured") == ("not the program" in answer["reason"])
        # The runner of the earlier run: a copy of today's with another digest.
        # Other tests leave runtimes in this cache, and files that no version names may differ.
        records = sorted((cache / "runtimes").glob("*/runtime.json"), key=lambda path: path.parent.stat().st_mtime)
        kept = next(path for path in reversed(records) if had == json.loads(path.read_text())["runtime"]["versions"])
        folder = shutil.copytree(kept.parent, cache / "runtimes" / ("feedface" * 8))
        record = json.loads((folder / "runtime.json").read_text())
        record["runtime"] |= {"versions": older, "digest": "feedface" * 8}
        (folder / "runtime.json").write_text(json.dumps(record))
        facts = dataclasses.replace(planted, home=home).json(*asked, code=None)
        output = facts["attribution"]
        assert (facts["same_bundle"], output["differing"], list(output["alone"])) == (True, ["runtime"], ["runtime"])
        assert len({turn["runtime"] for turn in facts["turns"]}) >= 2


@pytest.mark.whole
def test_trouble_of_the_device_costs_a_pair_at_most(planted: Planted, again: str, twice: str, tmp_path: Path) -> None:
    with attach(planted.home, tmp_path, ["SM8650"]) as attached:
        inject(attached.root(0), Fault("reset", match="farm_runner", times=1))
        inject(attached.root(0), Fault("kill_runner"))
        serial = attached.devices[0].serial
        asked = ("perf", "confirm", JOB, "--good", again, "--bad", twice, "--device", serial, "--json")
        done = attached.farm(*asked, code=3)
        assert "once more: " in done.stderr
        answer = json.loads(done.stdout)
        assert answer["metrics"][0]["confirmation"]["pairs"] >= 9
        assert any(turn["failure"] for turn in answer["turns"])
