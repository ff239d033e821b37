"""Notices of quarantined devices, to real servers on loopback; `farm lab notify`."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from farm_home import FarmHome
from log_lines import LogLines
from receivers import LOOPBACK, mail_server, make_certificate, trickling_server, web_server

from farm.base.config.settings import Config, load_config
from farm.base.errors import ConfigError
from farm.devices.health import HealthEvent
from farm.dispatch.notify import delivery
from farm.dispatch.notify import quarantine as announce
from farm.dispatch.notify.credentials import NotifyError
from farm.dispatch.notify.quarantine import announcing
from farm.dispatch.notify.webhook import post
from farm.store.store import Store

REASON = 'its health check fails: "no\x1b[31m answer" <!channel>\nfor 10 s'


def config_of(folder: Path, text: str) -> Config:
    (folder / "farm.toml").write_text(text)
    return load_config(folder / "farm.toml")


def quarantine(store: Store, device: str = "R5CT1") -> None:
    store.devices.record_health(
        HealthEvent(device, "gave_up", "quarantined", REASON, {"run": "20260301-020000-0a1b2c"})
    )


def announce_once(config: Config, store: Store) -> list[str]:
    """Return the lines that a command prints at its end."""
    lines = LogLines()
    with announcing(config, store):
        pass
    return lines


def outcome(store: Store, device: str = "R5CT1") -> str:
    return next(one.reason for one in store.devices.health_events(device, 9) if one.event == "notice")


def test_everybody_hears_of_a_quarantine_once(tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    certificate = make_certificate(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    (tmp_path / "password").write_text("mailsecret\n")
    with (
        web_server([503]) as plain,
        web_server(tls=certificate) as slack,
        mail_server(tls=certificate, password="mailsecret") as box,
    ):
        monkeypatch.setenv("LAB_HOOK", slack.url("/T0/hooksecret", "https"))
        monkeypatch.setenv("LAB_TOKEN", "tokensecret")
        monkeypatch.setenv("LAB_MAIL_USER", "farm")
        monkeypatch.setattr(delivery, "_WAITS_S", (0.01, 0.01))
        config = config_of(tmp_path, f"""
            [[notify.webhook]]
            url = "{plain.url('/quarantine')}"
            [[notify.webhook]]
            url_env = "LAB_HOOK"
            token_env = "LAB_TOKEN"
            template = "slack"
            [notify.mail]
            host = "{LOOPBACK}"
            port = {box.port}
            from = "farm@example.com"
            to = ["lab@example.com"]
            user_env = "LAB_MAIL_USER"
            password_file = "password"
        """)  # fmt: skip
        quarantine(store)
        assert announce_once(config, store) == []
        # Neither a second look at the device nor another run with the same finding sends a notice.
        quarantine(store)
        assert announce_once(config, store) == []
        assert len(plain.requests) == 2, "an answer that may get better is asked for again"
        [(path, headers, body)] = slack.requests
        [mail] = box.mails
    assert {"LAB_HOOK", "LAB_TOKEN"} & os.environ.keys() == set(), "no child process inherits them"
    answer = json.loads(plain.bodies[-1])
    assert (answer["event"], answer["device"]["id"], answer["test"]) == ("device_quarantined", "R5CT1", False)
    assert answer["reason"] == 'its health check fails: "no answer" <!channel> for 10 s'
    assert answer["run"] == "20260301-020000-0a1b2c"
    assert (path, headers["Authorization"]) == ("/T0/hooksecret", "Bearer tokensecret")
    assert "&lt;!channel&gt;" in json.loads(body)["text"]
    assert mail["Subject"].startswith("[farm] R5CT1 is quarantined: its health check fails")
    assert "farm devices show R5CT1" in mail.get_payload()
    sent = outcome(store)
    assert sent == (
        f"sent: webhook 1 (http://{LOOPBACK}:{plain.port}); sent: webhook 2 (https://{LOOPBACK}:{slack.port}); "
        "sent: mail to lab@example.com"
    )
    assert not any(b"secret" in file.read_bytes() for file in tmp_path.glob("state/farm.db*"))


def test_receivers_that_are_broken_cost_a_line_and_nothing_else(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    with trickling_server(b"HTTP/1.1 200 OK\r\nX-Slow: ", b".", 20) as port, web_server([404]) as hook:
        config = config_of(tmp_path, f"""
            [[notify.webhook]]
            url = "{hook.url('/secret')}"
            [[notify.webhook]]
            url_env = "NOT_SET_ANYWHERE"
        """)  # fmt: skip
        quarantine(store)
        origin = f"http://{LOOPBACK}:{hook.port}"
        lines = announce_once(config, store)
        assert lines == [
            f"NOT NOTIFIED that R5CT1 is quarantined: webhook 1 ({origin}): {origin}: answers 404 Not Found",
            "NOT NOTIFIED that R5CT1 is quarantined: webhook 2: the environment variable NOT_SET_ANYWHERE is not set",
        ]
        assert "NOT SENT: webhook 1" in outcome(store)
        monkeypatch.setattr(announce, "_LAST_SECONDS", 0.5)
        config = config_of(tmp_path, f'[[notify.webhook]]\nurl = "http://{LOOPBACK}:{port}/"\n')
        quarantine(store, "R5CT2")
        began = time.monotonic()
        [line] = announce_once(config, store)
        assert line == "NOT NOTIFIED that R5CT2 is quarantined: no answer in 0.5 s"
        assert time.monotonic() - began < 10, "a command does not wait for a receiver"
        assert outcome(store, "R5CT2") == "NOT SENT: no answer in 0.5 s"


def test_plain_http_is_for_an_address_that_is_no_secret() -> None:
    with web_server() as proxy, pytest.MonkeyPatch.context() as patch:
        for name in ("no_proxy", "NO_PROXY"):
            patch.delenv(name, raising=False)
        # The proxy takes the place of the other machine, whose name does not resolve.
        patch.setenv("http_proxy", proxy.url(""))
        post("http://hub.lab.invalid/hook", "{}", secret=False)
        assert [path for path, _, _ in proxy.requests] == ["http://hub.lab.invalid/hook"]
        for token, secret in (("", True), ("token", False)):
            with pytest.raises(NotifyError, match="which http would send unencrypted: use https"):
                post("http://hub.lab.invalid/hook", "{}", token, secret=secret)
        assert len(proxy.requests) == 1


HOOK = "[[notify.webhook]]\n"
MAIL = '[notify.mail]\nhost = "h"\nfrom = "a@b"\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (HOOK, "notify.webhook[0]: expected url or url_env or url_file, one of them"),
        (f'{HOOK}url = "http://h"\nurl_env = "U"\n', "one of them"),
        (f'{HOOK}url_env = "https://h/SECRET"\n', "url_env is no name of an environment variable"),
        (f'{HOOK}url = "http://h"\ntemplate = "teams"\n', "template"),
        (f'{HOOK}url = "SECRET.lab/x"\n', "notify.webhook[0]: url: expected http://HOST/PATH"),
        (f'{HOOK}url = "https://me:SECRET@h/x"\n', "without a user"),
        (f'{HOOK}url = "https://h:SECRET/x"\n', "expected http://HOST/PATH"),
        (f'{HOOK}url = "http://h"\ntoken_env = "T"\n', "http would send the token unencrypted"),
        (f'{MAIL}to = ["nobody"]\n', "notify.mail: to: 'nobody' is no address"),
        (f'{MAIL}to = ["c@d"]\npassword_env = "P"\n', "go together"),
    ],
)
def test_what_cannot_be_is_refused_without_showing_it(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config_of(tmp_path, text)
    assert message in str(caught.value)
    assert "SECRET" not in str(caught.value)


def test_farm_notify_shows_and_tries_receivers(home: FarmHome) -> None:
    assert "notify: no receiver" in home.farm("lab", "notify", code=2).stderr
    (home.cwd / "farm.toml").write_text('[[notify.webhook]]\nurl_env = "LAB_HOOK"\n')
    with web_server() as hook:
        env = {"LAB_HOOK": hook.url("/T0/SECRET")}
        shown = home.farm("lab", "notify", env=env, code=0)
        assert (shown.stdout, hook.requests) == ("webhook 1: address in $LAB_HOOK, json\n", [])
        tried = home.farm("lab", "notify", "--test", env=env, code=0)
        assert tried.stdout == f"sent: webhook 1 (http://{LOOPBACK}:{hook.port})\n"
        answer: dict[str, Any] = json.loads(hook.bodies[0])
        assert (answer["test"], answer["device"]["id"]) == (True, "no-device")
    missing = home.farm("lab", "notify", code=2).stdout
    assert "MISSING: [[notify.webhook]] 1: the environment variable LAB_HOOK" in missing
    failed = home.farm("lab", "notify", "--test", "--json", code=4)
    assert json.loads(failed.stdout)["deliveries"][0]["ok"] is False
