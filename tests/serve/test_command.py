"""`farm serve` as a process: start, refusals, end."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import urllib.request

from farm_home import FarmHome
from waiting import Started

from farm.store.accounts import Role

from .conftest import Filled


def test_it_says_where_answers_and_ends_by_sigterm_while_somebody_is_connected(home: FarmHome, filled: Filled) -> None:
    token = filled.store.accounts.add("ada", Role.DEVELOPER)
    with home.running("serve", "--port", "0", "--json") as process:
        output = json.loads(process.stdout.readline())
        assert output["url"].startswith("http://127.0.0.1:")
        request = urllib.request.Request(  # noqa: S310 - http
            f"{output['url']}runs", headers={"Authorization": f"Bearer {token}", "Accept": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=30) as answer:  # noqa: S310
            assert json.load(answer)["total"] == 5
        port = int(output["url"].rstrip("/").rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port)) as idle:
            idle.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n")
            process.terminate()
            assert process.wait(20) in (0, -signal.SIGTERM, 128 + signal.SIGTERM)
        rest = process.stdout.read()
    for word in ("Traceback", token, filled.live):
        assert word not in rest


def test_ctrl_c_does_not_wait_for_a_page_that_takes_long(home: FarmHome, filled: Filled) -> None:
    assert filled.live
    code = (
        "import sys, time\nfrom farm.serve.pages.all import PAGES\nfrom farm.cli.main import main\n"
        "[runs] = [page for page in PAGES if page.path == '/runs']\n"
        "runs.make = lambda *_: (print('begun', flush=True), time.sleep(300))\n"
        "sys.argv = ['farm', 'serve', '--port', '0', '--json']\nmain()\n"
    )
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with Started([sys.executable, "-c", code], env=home.env, cwd=home.cwd, **pipes) as process:
        port = int(json.loads(process.stdout.readline())["url"].rstrip("/").rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port)) as asking:
            # Answered in turn: when the first is, the second is being made.
            asking.sendall(b"GET /login HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert asking.recv(20).startswith(b"HTTP/1.1 303")
            asking.sendall(b"GET /runs HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert process.stdout.readline() == "begun\n"
            process.send_signal(signal.SIGINT)
            _, output = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in output
    assert "GET /runs 503" in output


def test_an_address_that_cannot_be_is_one_line(home: FarmHome) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        for options, message in (
            (("--port", port), f"port {port} of 127.0.0.1 is taken"),
            (("--port", "0", "--host", "0.0.0.0"), "farm lab accounts --add NAME"),  # noqa: S104 - it refuses
            (("--host", "no such host"), "no such host"),
            (("--host", "192.0.2.1"), "192.0.2.1"),
        ):
            assert message in home.refused("serve", *options)


def test_two_runs_as_a_page_in_one_file(home: FarmHome, filled: Filled) -> None:
    file = home.cwd / "pages" / "diff.html"
    home.farm("diff", filled.runs[2], filled.runs[3], "--html", str(file), code=0)
    page = file.read_text(encoding="utf-8")
    for text in ("New failures", "Content-Security-Policy", "<style>"):
        assert text in page
    for text in ("/assets/", 'href="/', "<script>window.pwned"):
        assert text not in page
