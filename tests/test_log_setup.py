"""Log records of farm: their forms, levels and places."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from farm.base.errors import UsageError
from farm.base.log_setup import (
    JournalFormatter,
    JsonFormatter,
    LineFormatter,
    RecordHandler,
    begin_logging,
    is_journal,
    logged_to,
    only_warnings,
    shown_by,
)
from farm.cli.setup.lab import agent_command

LOG = logging.getLogger("farm.dispatch.cluster.test")
HOSTILE = "\x1b[2J\x1b]0;x\x07\r\n::error::not from farm \u202e"


@pytest.fixture(autouse=True)
def _levels() -> Iterator[None]:
    """Take back the levels that a test sets."""
    yield
    for name in ("farm.dispatch.cluster", "farm.store", LOG.name):
        logging.getLogger(name).setLevel(logging.NOTSET)


def record(level: int, message: str, **fields: str) -> logging.LogRecord:
    return LOG.makeRecord(LOG.name, level, __file__, 1, message, (), None, extra=dict(fields))


def test_each_form_keeps_a_record_on_one_visible_line() -> None:
    hostile = record(logging.WARNING, f"device {HOSTILE}", device=HOSTILE)
    lines = [one.format(hostile) for one in (LineFormatter("%H:%M:%S"), JournalFormatter(), JsonFormatter(agent="h1"))]
    assert all(line.isprintable() for line in lines)
    assert re.fullmatch(r"\d\d:\d\d:\d\d device ::error::not from farm \\u202e", lines[0])
    assert lines[1] == "<4>device ::error::not from farm \\u202e"
    others = [(logging.DEBUG, "<7>x"), (logging.INFO, "<6>x"), (logging.ERROR, "<3>x")]
    assert [JournalFormatter().format(record(level, "x")) for level, _ in others] == [line for _, line in others]
    assert json.loads(lines[2])["message"].startswith("device")


def test_json_has_the_fields() -> None:
    form = JsonFormatter(agent="h1")
    answer = json.loads(form.format(record(logging.INFO, "it ended", run="r1", job="s/add[SM8650]", device="phone")))
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", answer.pop("time"))
    assert answer == {
        "level": "info", "logger": "farm.dispatch.cluster.test", "agent": "h1", "run": "r1", "job": "s/add[SM8650]",
        "device": "phone", "message": "it ended",
    }  # fmt: skip
    assert "run" not in json.loads(form.format(record(logging.INFO, "it ended")))


@pytest.mark.parametrize(
    ("variable", "verbose", "shown"),
    [
        ("", False, ["info", "warning"]),
        ("", True, ["debug", "info", "warning"]),
        ("warning", True, ["warning"]),
        ("error, farm.dispatch.cluster=DEBUG", False, ["debug", "info", "warning"]),
        ("farm.dispatch.cluster=error", False, []),
        ("farm.store=error", False, ["info", "warning"]),
    ],
)
def test_levels(monkeypatch: pytest.MonkeyPatch, variable: str, shown: list[str], *, verbose: bool) -> None:
    monkeypatch.setenv("FARM_LOG", variable)
    lines: list[str] = []
    begin_logging(RecordHandler(lambda _: lines.append("of the handler before")))
    begin_logging(RecordHandler(lines.append), verbose=verbose)
    LOG.debug("debug")
    LOG.info("info")
    LOG.warning("warning")
    assert lines == shown


@pytest.mark.parametrize("variable", ["loud", "farm.clutser=debug", "os=debug", "=debug"])
def test_levels_that_do_not_exist(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv("FARM_LOG", variable)
    with pytest.raises(UsageError, match=r"^FARM_LOG: (unknown level 'loud'|(farm.clutser|os|): expected a module of)"):
        begin_logging(RecordHandler(print))


def test_a_display_takes_the_lines_while_it_is_drawn() -> None:
    plain, drawn = list[str](), list[str]()
    begin_logging(RecordHandler(plain.append))
    LOG.info("before")
    with shown_by(drawn.append):
        LOG.info("meanwhile")
        with only_warnings():
            LOG.info("a step of another command")
            LOG.warning("lost")
    LOG.info("after")
    assert (plain, drawn) == (["before", "after"], ["meanwhile", "lost"])


def test_the_journal_is_known_by_its_stream(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with (tmp_path / "journal").open("w") as stream, (tmp_path / "file").open("w") as other:
        status = os.fstat(stream.fileno())
        monkeypatch.setenv("JOURNAL_STREAM", f"{status.st_dev}:{status.st_ino}")
        assert is_journal(stream.fileno())
        assert not is_journal(other.fileno())


def test_a_log_file_is_bounded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("farm.base.log_setup.FILE_BYTES", 1000)
    LOG.setLevel(logging.INFO)
    with logged_to(tmp_path / "agent.log", JsonFormatter(agent="h1")):
        for number in range(100):
            LOG.info("line %s", number)
    LOG.info("not in the file")
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["agent.log", "agent.log.1", "agent.log.2"]
    assert all(file.stat().st_size <= 1000 for file in files)
    lines = [json.loads(line) for file in reversed(files) for line in file.read_text().splitlines()]
    assert [line["message"] for line in lines][-2:] == ["line 98", "line 99"]


def test_a_full_disk_ends_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "agent.log").symlink_to("/dev/full")
    LOG.setLevel(logging.INFO)
    with logged_to(tmp_path / "agent.log", LineFormatter()):
        LOG.info("lost")
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("form", ["json", "text"])
def test_an_agent_logs_in_the_form_that_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, form: str
) -> None:
    (tmp_path / "farm.toml").write_text(
        f'store = "postgresql://farm@db.invalid/farm"\nartifacts = "file://{tmp_path}"\n'
        f'[paths]\nstate = "{tmp_path}/state"\ncache = "{tmp_path}/cache"\n'
    )
    monkeypatch.setattr(
        "farm.dispatch.cluster.agent.host_agent.HostAgent.run",
        lambda _: LOG.warning("phone is not used for a while", extra={"device": "phone"}),
    )
    monkeypatch.setattr("farm.dispatch.cluster.agent.host_agent.stop_by_signal", lambda _: None)
    done = CliRunner().invoke(
        agent_command, ["--name", "h1", "--log", form, "--config", str(tmp_path / "farm.toml")], catch_exceptions=False
    )
    assert (done.exit_code, done.stdout) == (0, "")
    if form == "json":
        answer = json.loads(done.stderr)
        assert (answer["agent"], answer["device"], answer["level"]) == ("h1", "phone", "warning")
    else:
        assert re.fullmatch(r"\d\d:\d\d:\d\d phone is not used for a while\n", done.stderr)
