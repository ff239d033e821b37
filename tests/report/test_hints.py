"""Commands that the product prints, in the situation in which they are printed."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from farm.base.errors import UsageError
from farm.dispatch.pool.inventory import resolve_device
from farm.report.model.rerun import rerun_command, ways_again
from farm.results.attempt import Attempt, Cause, Stage, Verdict
from farm.store.store import open_store
from farm.store.view import JobView

JOB = "s/c[SM8650-htp-8a8w]"


def wrong() -> JobView:
    attempt = Attempt(
        JOB, Verdict.FAILED, Stage.NUMERICS, "sqnr 3 dB < 20 dB", device="virtual-SM8650-0", bundle_key="a" * 64,
        cause=Cause.NUMERICS,
    )  # fmt: skip
    return JobView(JOB, "s", "c", "SM8650", "htp", "8a8w", (attempt,), decisive_attempt=1)


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("farm run --soc SM8650 --suite s --virtual 1", ["--virtual", "1"]),
        ("farm run --soc SM8650 --suite s --virtual=2", ["--virtual", "1"]),
        ("farm run --soc SM8650 --suite s", []),
    ],
)
def test_layers_of_a_failure_are_looked_for_where_the_run_had_its_devices(command: str, expected: list[str]) -> None:
    again = rerun_command(wrong(), virtual=True, run_command=command)
    ways = dict(ways_again(wrong(), again, "run-1"))
    assert shlex.split(ways["Layer by layer"]) == ["farm", "debug", JOB, *expected]


def test_a_virtual_device_of_a_run_is_known_to_be_gone(tmp_path: Path) -> None:
    with (
        open_store(f"sqlite:///{tmp_path / 'farm.db'}") as store,
        pytest.raises(UsageError, match="unknown device 'virtual-SM8650-0' .*a virtual device of a run ends with it"),
    ):
        resolve_device(store, "virtual-SM8650-0")
