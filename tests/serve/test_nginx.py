"""`farm serve` behind nginx with the file of the examples: TLS, cookies, addresses of clients, limits."""

from __future__ import annotations

import grp
import os
import pwd
import shutil
import ssl
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from parts import do_without
from programs import run_program
from waiting import free_port, require_listening

from farm.base.config.settings import Config, load_config
from farm.base.processes import Supervisor
from farm.store.accounts import Role

from .conftest import Filled, Server, running

pytestmark = pytest.mark.whole
EXAMPLE = Path(__file__).parents[2] / "examples" / "nginx" / "farm.conf"
# Workers of another user could not enter the folder of a test.
_FRAME = """daemon off; user {user} {group}; pid {folder}/pid; error_log stderr; worker_processes 1; events {{}}
http {{ access_log off; client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s; include {folder}/farm.conf; }}
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.setenv("FARM_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "farm.toml").write_text('[serve]\nurl = "https://farm.lab"\n', encoding="utf-8")
    return load_config(folder=tmp_path)


@contextmanager
def nginx(folder: Path, server: Server, supervisor: Supervisor) -> Iterator[tuple[httpx.Client, int]]:
    """Run nginx in the foreground; yield a client that knows its certificate, and the port without TLS."""
    program = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin")
    if program is None:
        do_without("nginx is not on PATH (Debian: apt-get install nginx-light)")
    folder.mkdir()
    tls, plain = free_port(), free_port()
    names = "subjectAltName=DNS:farm.lab,IP:127.0.0.1"
    words = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=farm.lab"]
    run_program([*words, "-addext", names, "-keyout", folder / "key", "-out", folder / "cert"])
    text = EXAMPLE.read_text(encoding="utf-8")
    for before, after in (
        ("listen 80;", f"listen 127.0.0.1:{plain};"),
        ("listen 443 ssl;", f"listen 127.0.0.1:{tls} ssl;"),
        ("/etc/ssl/farm.lab.pem", str(folder / "cert")),
        ("/etc/ssl/farm.lab.key", str(folder / "key")),
        ("http://127.0.0.1:8470", server.url),
        # A slow machine reaches this limit too.
        ("rate=20r/s", "rate=20r/m"),
    ):
        assert before in text, before
        text = text.replace(before, after)
    (folder / "farm.conf").write_text(text, encoding="utf-8")
    (folder / "nginx.conf").write_text(
        _FRAME.format(folder=folder, user=pwd.getpwuid(os.geteuid()).pw_name, group=grp.getgrgid(os.getegid()).gr_name),
        encoding="utf-8",
    )
    child = supervisor.spawn(
        [program, "-p", str(folder), "-e", "stderr", "-c", str(folder / "nginx.conf")],
        name="nginx",
        stderr=folder / "nginx.log",
    )
    try:
        require_listening(child, tls, 30)
        context = ssl.create_default_context(cafile=folder / "cert")
        # No proxy and no certificates of this machine's environment.
        with httpx.Client(
            base_url=f"https://127.0.0.1:{tls}", verify=context, trust_env=False, timeout=60,
            headers={"Host": "farm.lab", "Accept": "text/html"},
        ) as client:  # fmt: skip
            yield client, plain
    finally:
        child.terminate()


def test_the_example_of_nginx_has_tls_cookies_and_limits(
    config: Config, filled: Filled, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    token = filled.store.accounts.add("ada", Role.DEVELOPER)
    bearer = {"Authorization": f"Bearer {token}"}
    with running(config) as server, Supervisor() as supervisor, nginx(tmp_path / "nginx", server, supervisor) as (
        client, plain,
    ):  # fmt: skip
        moved = httpx.get(f"http://127.0.0.1:{plain}/runs?user=ada", headers={"Host": "farm.lab"}, trust_env=False)
        assert (moved.status_code, moved.headers["location"]) == (301, "https://farm.lab/runs?user=ada")

        refused = client.get("/runs", headers={"X-Forwarded-For": "203.0.113.7", "X-Forwarded-Proto": "http"})
        assert (refused.status_code, refused.headers["location"]) == (303, "/login?next=%2Fruns")
        assert "max-age" in refused.headers["strict-transport-security"]
        assert "default-src 'none'" in refused.headers["content-security-policy"]

        form = client.get("/login")
        csrf = form.text.partition('name="_csrf_token" value="')[2].partition('"')[0]
        answer = client.post("/login", data={"token": token, "next": "/runs", "_csrf_token": csrf})
        assert (answer.status_code, answer.headers["location"]) == (303, "/runs")
        cookies = [*form.headers.get_list("set-cookie"), *answer.headers.get_list("set-cookie")]
        assert len(cookies) >= 2
        assert all("secure" in one.lower() and "httponly" in one.lower() for one in cookies)
        assert filled.live in client.get("/runs").text

        # A client cannot choose the address that the server notes and limits sign-ins by.
        assert "203.0.113.7" not in capfd.readouterr().err
        assert client.get("/", headers={"Host": "elsewhere.example"}).status_code == 400
        assert client.post("/api/v1/actions/lease", content=b" " * (2 << 20), headers=bearer).status_code == 413
        suite = {"name": "mine", "content": "A" * (2 << 20)}
        assert client.post("/api/v1/actions/upload", json=suite, headers=bearer).status_code == 400

        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(lambda _: client.get("/api/v1/me", headers=bearer).status_code, range(400)))
        assert set(found) == {200, 429}
        # The burst, less the requests before.
        assert 80 <= found.count(200) <= 110
    with (tmp_path / "nginx" / "nginx.log").open(encoding="utf-8") as log:
        assert "limiting requests" in log.read()
