"""A thread of an agent that ends by a defect ends the agent, which its service manager starts again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from store_template import drop_database

from farm.base.config.settings import load_config
from farm.base.errors import InfraError
from farm.base.exit_codes import ExitCode
from farm.dispatch.cluster.agent.claimer import Claimer
from farm.dispatch.cluster.agent.heartbeats import HeartbeatSender
from farm.dispatch.cluster.agent.host_agent import HostAgent
from farm.dispatch.recorder import Recorder


@pytest.mark.parametrize(
    ("part", "method"), [(HeartbeatSender, "_send"), (Claimer, "_until_undecided"), (Recorder, "_next")]
)
def test_an_agent_ends_with_its_thread(
    new_store: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: type, method: str
) -> None:
    address = new_store(f"death_of_{part.__name__.lower()}")
    monkeypatch.setenv("FARM_STORE", address)
    monkeypatch.setenv("FARM_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("FARM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("FARM_ARTIFACTS", f"file://{tmp_path}/artifacts")
    monkeypatch.setattr("threading.excepthook", lambda _: None)

    def broken(*_: object, **__: object) -> None:
        raise AttributeError("a defect")

    monkeypatch.setattr(part, method, broken)
    agent = HostAgent(load_config(folder=tmp_path), "h1", has_devices=False)
    with pytest.raises(InfraError, match="AttributeError: a defect: the agent ends, to be started again") as raised:
        agent.run()
    # systemd starts an agent again after this exit code: see tests/test_exit_codes.py.
    assert raised.value.exit_code == ExitCode.INFRA
    drop_database(address)
