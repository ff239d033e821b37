"""`farm confirm` as a user calls it: a slower compiler is found, on the real simulator."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from farm_home import FarmHome, wait_for_no_process
from planted import JOB, Planted

from farm.store.store import Store, open_store

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="module")
def planted(farm_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Planted:
    """The first run, by the good release."""
    folder = tmp_path_factory.mktemp("planted")
    (folder / "cwd").mkdir()
    return Planted(FarmHome(farm_cache, folder / "state", folder / "cwd"), folder)


@pytest.fixture(scope="module")
def good(planted: Planted) -> str:
    return planted.run()


@pytest.fixture(scope="module")
def twice(planted: Planted, good: str) -> str:
    """By a release that does twice the work: that is seen on a busy machine as well."""
    del good
    return planted.run(12)


@pytest.fixture
def store(planted: Planted) -> Iterator[Store]:
    with open_store(f"sqlite:///{planted.home.state / 'farm.db'}", readonly=True) as store:
        yield store


def test_a_slower_compiler_is_confirmed_and_its_program_blamed(
    planted: Planted, good: str, twice: str, store: Store
) -> None:
    before = store.history(JOB)
    told = planted.json("confirm", "planted/*", code=3)
    assert (told["job"], told["good"]["run"], told["new"]["run"]) == (JOB, good, twice)
    assert told["differences"] == {"torchao": ["0.18.0", "0.18.12"]}
    [one] = told["metrics"]
    said = one["confirmation"]
    assert (one["metric"], said["answer"], said["pairs"]) == ("htp_cycles", "confirmed", 10)
    assert 0.3 < said["low"] < said["change"] < said["high"]
    assert [(len(was), len(now)) for was, now in one["pairs"]] == [(5, 5)] * 10
    assert (told["attribution"]["guilt"], told["attribution"]["axes"]) == ("axis", ["program"])
    roles = [turn["role"] for turn in told["turns"] if turn["pair"] >= 0]
    assert roles[:8] == ["good", "new", "new", "good"] * 2
    assert store.history(JOB) == before
    assert store.leases.all() == []
    assert wait_for_no_process(planted.home) == {}


def test_a_bundle_is_not_worse_than_itself(planted: Planted, good: str) -> None:
    done = planted.home.farm("confirm", JOB, "--good", good, "--bad", good, "--metric", "htp_cycles", "--pairs", "6",
                             "--metric", "sqnr_fp32[0]")  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "both runs have the same program" in done.stderr
    lines = done.stdout.splitlines()
    answers = {line.split()[0]: line.split()[-1] for line in lines if line.startswith(("htp_cycles", "sqnr"))}
    assert answers["htp_cycles"] in ("refuted", "unknown")
    assert answers["sqnr_fp32[0]"] == "refuted"
    assert "guilty" not in done.stdout
    assert all(len(line) <= 80 for line in lines)


@pytest.mark.usefixtures("twice")
def test_what_cannot_be_compared_is_refused(planted: Planted, good: str, twice: str) -> None:
    for arguments, said in (
        (["planted/layer"], "did you mean 'planted/layers'"),
        ([JOB, "--bad", "nonsense"], "unknown run 'nonsense'"),
        ([JOB, "--good", twice, "--bad", good], f"run {twice} is newer than run {good}"),
        ([JOB, "--bad", good], "has no result before run"),
        ([JOB, "--metric", "htp_cycle"], "did you mean 'htp_cycles'"),
        ([JOB, "--metric", "pte_size"], "repeats exactly"),
        ([JOB, "--device", "x", "--virtual"], "--device is for attached devices"),
    ):
        done = planted.home.farm("confirm", *arguments)
        assert (done.returncode, said in done.stderr) == (2, True), done.stderr
        assert len(done.stderr.splitlines()) == 1
    done = planted.home.farm("confirm", JOB, "--device", "nobody")
    assert done.returncode in (2, 4)
    assert "nobody" in done.stderr or "no attached device" in done.stderr


@pytest.mark.whole
def test_eight_per_cent_are_confirmed_with_their_size(planted: Planted, good: str) -> None:
    slower = planted.run(1)
    told = planted.json("confirm", JOB, "--good", good, "--bad", slower, "--inferences", "20", "--pairs", "20", code=3)
    said = told["metrics"][0]["confirmation"]
    assert said["answer"] == "confirmed"
    assert said["low"] < 0.08 < said["high"] + 0.02
    assert 0.02 < said["change"] < 0.2
