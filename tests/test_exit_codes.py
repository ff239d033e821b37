"""Exit code 2 means usage and configuration alone; services are started again only where waiting may help."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from sqlalchemy.exc import OperationalError

from farm.base import errors
from farm.base.exit_codes import ENDED_EARLY, ExitCode
from farm.store.problems import store_error

UNITS = Path(__file__).parents[1] / "examples/shared_farm"


def test_only_usage_errors_end_with_the_code_of_usage() -> None:
    kinds = [one for one in vars(errors).values() if isinstance(one, type) and issubclass(one, errors.FarmError)]
    assert all(issubclass(one, errors.UsageError) for one in kinds if one.exit_code == ExitCode.USAGE)
    assert all(isinstance(one.exit_code, ExitCode) for one in kinds)
    assert {*range(6, 12), 2, 4, 130} == ENDED_EARLY


@pytest.mark.parametrize("name", ["farm-agent", "farm-build", "farm-serve"])
def test_a_service_is_started_again_if_waiting_may_help(name: str) -> None:
    [row] = re.findall(r"^RestartPreventExitStatus=(.*)$", (UNITS / f"{name}.service").read_text(), re.MULTILINE)
    final = {ExitCode(int(code)) for code in row.split()} | {ExitCode.AGENT_REFUSED}
    kept = {ExitCode.USAGE, ExitCode.MISSING_TOOL, ExitCode.REFUSED, ExitCode.NO_STORE, ExitCode.AGENT_REFUSED}
    assert final == kept


def test_a_server_without_an_answer_has_its_own_code() -> None:
    refused = OperationalError("", None, Exception("connection to server at 127.0.0.1, port 1 failed: refused"))
    signed_in = OperationalError("", None, Exception("connection failed: password authentication failed for user"))
    assert store_error("farm", refused).exit_code == ExitCode.STORE_UNREACHABLE
    assert store_error("farm", signed_in).exit_code == ExitCode.INFRA
