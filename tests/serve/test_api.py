"""The API against its own description, by Schemathesis: no request ends in an error of the server."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from programs import run_program

from farm.store.accounts import Role

from .conftest import Filled, Server

# Checks beside the default that hold for any input.
_CHECKS = "not_a_server_error,response_schema_conformance,content_type_conformance,status_code_conformance"


def fuzz(server: Server, token: str, examples: int, folder: Path, seed: int = 39) -> str:
    """Return the output of Schemathesis after `examples` requests of each operation; raises when a check failed."""
    described = json.loads(server.get("/api/v1/openapi", Authorization=f"Bearer {token}").body)
    # Commands that the server starts have tests of their own.
    for name in ("run", "resume", "rerun", "check"):
        del described["paths"][f"/api/v1/actions/{name}"]
    file = folder / "openapi.json"
    file.write_text(json.dumps(described))
    program = [str(os.path.join(os.path.dirname(sys.executable), "schemathesis")), "run", str(file)]
    options = ["--url", server.url, "--header", f"Authorization: Bearer {token}", "--checks", _CHECKS]
    options += ["--phases", "fuzzing", "--max-examples", str(examples), "--seed", str(seed), "--workers", "2"]
    # With a database Hypothesis shrinks a Pareto front of examples, which takes twice the time of all else.
    options += ["--generation-database", "none"]
    # Tables of Unicode, which would take some seconds in each new folder.
    env = {**os.environ, "HYPOTHESIS_STORAGE_DIRECTORY": str(Path(__file__).parents[2] / ".hypothesis")}
    return run_program([*program, *options], cwd=folder, env=env, timeout_s=3000).stdout


def test_no_request_of_the_api_is_an_error_of_the_server(
    start: Callable[..., AbstractContextManager[Server]], filled: Filled, tmp_path: Path
) -> None:
    token = filled.store.accounts.add("fuzz", Role.OPERATOR)
    with start() as server:
        fuzz(server, token, 3, tmp_path)


# In parts, none of which takes as long as a test that hangs.
@pytest.mark.soak
@pytest.mark.parametrize("seed", range(5))
def test_ten_thousand_requests_are_no_error_of_the_server(
    start: Callable[..., AbstractContextManager[Server]], filled: Filled, tmp_path: Path, seed: int
) -> None:
    token = filled.store.accounts.add("fuzz", Role.OPERATOR)
    with start() as server:
        found = re.search(r"(\d+) generated", fuzz(server, token, 120, tmp_path, seed))
    assert found
    assert int(found[1]) >= 10_000 / 5
