"""Listing is fast because it imports nothing heavy, and it shows the jobs that a run would have."""

from __future__ import annotations

import json
import sys

import pytest
from farm_home import FarmHome
from made_runs import record_run
from programs import run_program

from farm.store.store import Store

_HEAVY = ("torch", "executorch", "numpy", "sqlalchemy", "adbutils", "jinja2")
_SLOW = ("sqlalchemy.orm", "alembic", "numpy", "scipy", "torch", "jinja2", "rich", "pytest", "litestar")
_OF_THE_SERVER = ("litestar", "uvicorn", "anyio", "torch")
_COLLECT = ("run", "--soc", "SM8650", "--suite", "smoke", "--collect-only")
_RUN_ALL = """
import json, sys
from farm.cli.main import main
for words, light in json.loads(sys.argv[1]):
    sys.argv = ["farm", *words]
    try:
        main()
    except SystemExit as ended:
        assert not ended.code, (words, ended.code)
    loaded = [name for name in light if name in sys.modules]
    assert not loaded, (words, loaded)
"""


@pytest.mark.parametrize(
    "calls",
    [
        [
            (["--help"], (*_HEAVY, *_OF_THE_SERVER, "msgspec", "rich", "pytest")),
            (["devices", "socs"], (*_HEAVY, "pytest")),
            (["suites"], (*_HEAVY, "pytest")),
            (["doctor"], (*_HEAVY, "pytest")),
            (_COLLECT, _HEAVY),
        ],
        [
            (["serve", "--help"], _OF_THE_SERVER),
            (["history", "s/c"], _SLOW),
            (["status"], (*_SLOW, *_OF_THE_SERVER)),
            (["alerts", "list"], _SLOW),
            (["jobs", "coverage", "--soc", "SM8650"], ("torch", "executorch", "numpy")),
            (["diff", "latest", "latest"], _OF_THE_SERVER),
            ([*_COLLECT, "-k", "conv2d"], ("torch", "executorch")),
        ],
    ],
    ids=["without a store", "of a store"],
)
def test_a_listing_imports_nothing_heavy(
    home: FarmHome, store: Store, calls: list[tuple[list[str], tuple[str, ...]]]
) -> None:
    with store:
        record_run(store)
    command = [sys.executable, "-c", _RUN_ALL, json.dumps(calls)]
    run_program(command, env={**home.env, "ANDROID_ADB_SERVER_PORT": "9"}, cwd=home.cwd, timeout_s=120)


def test_collecting_lists_the_jobs_and_touches_nothing(home: FarmHome) -> None:
    done = home.farm("run", "--soc", "SM8650", "--soc", "SM8750", "--suite", "smoke", "--collect-only", "-k", "conv2d")
    assert done.stdout.splitlines() == ["smoke/conv2d[SM8650-htp-8a8w]", "smoke/conv2d[SM8750-htp-8a8w]"]
    assert list(home.cwd.iterdir()) == []
    assert not home.state.exists()


def test_a_suite_of_the_users_own_is_listed_from_farm_toml_and_by_path(home: FarmHome) -> None:
    folder = home.cwd / "suites" / "mine"
    folder.mkdir(parents=True)
    (folder / "suite.toml").write_text(
        '[suite]\nname = "mine"\ndescription = "my own"\n'
        '[case.relu]\nmodule = "torch.nn:ReLU"\ninputs = [{ shape = [4] }]\n'
        "tolerance = { 8a8w = { fp32 = { sqnr_db = 30.0 } } }\n"
    )
    by_path = home.farm("run", "--soc", "SM8650", "--suite", "./suites/mine", "--collect-only")
    assert by_path.stdout == "mine/relu[SM8650-htp-8a8w]\n"
    (home.cwd / "farm.toml").write_text('suites = ["suites"]\n')
    assert "my own" in home.farm("suites").stdout
    by_name = home.farm("run", "--soc", "SM8650", "--suite", "mine", "--collect-only")
    assert by_name.stdout == by_path.stdout
