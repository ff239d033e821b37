"""`farm serve` as a process: start, refusals, end."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import urllib.request
from typing import TYPE_CHECKING

import pytest
from farm_home import FarmHome
from programs import run_program

if TYPE_CHECKING:
    from conftest import Filled


def test_it_says_where_answers_and_ends_with_ctrl_c_while_somebody_is_connected(home: FarmHome, filled: Filled) -> None:
    token = home.farm("lab", "accounts", "--add", "ada").stdout.strip()
    with home.running("serve", "--port", "0", "--json") as process:
        assert process.stdout is not None
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
            process.send_signal(signal.SIGINT)
            assert process.wait(20) in (0, 130)
        rest = process.stdout.read()
    assert "Traceback" not in rest
    assert token not in rest
    assert filled.live not in rest


def test_ctrl_c_does_not_wait_for_a_page_that_takes_long(home: FarmHome, filled: Filled) -> None:
    assert filled.live
    code = (
        "import sys, time\nfrom farm.serve.pages.all import PAGES\nfrom farm.cli.main import main\n"
        "[runs] = [page for page in PAGES if page.path == '/runs']\n"
        "runs.make = lambda *_: (print('begun', flush=True), time.sleep(300))\n"
        "sys.argv = ['farm', 'serve', '--port', '0', '--json']\nmain()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        env=home.env,
        cwd=home.cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        port = int(json.loads(process.stdout.readline())["url"].rstrip("/").rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port)) as asking:
            # Answered in turn: when the first is, the second is being made.
            asking.sendall(b"GET /login HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert asking.recv(20).startswith(b"HTTP/1.1 303")
            asking.sendall(b"GET /runs HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert process.stdout.readline() == "begun\n"
            process.send_signal(signal.SIGINT)
            _, output = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130
    assert "Traceback" not in output
    assert "GET /runs 503" in output


def test_sigterm_ends_it_too(home: FarmHome) -> None:
    with home.running("serve", "--port", "0") as process:
        assert process.stdout is not None
        assert "(Ctrl-C ends it)" in process.stdout.readline()
        process.terminate()
        assert process.wait(20) in (0, -signal.SIGTERM, 128 + signal.SIGTERM)


def test_a_port_that_is_taken_is_named(home: FarmHome) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        done = home.farm("serve", "--port", str(port))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"farm: port {port} of 127.0.0.1 is taken: another 'farm serve'? "
        "--port names another, --port 0 takes a free one\n"
    )


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])  # noqa: S104 - it refuses
def test_beyond_this_machine_it_does_not_start_without_an_account(home: FarmHome, host: str) -> None:
    done = home.farm("serve", "--host", host, "--port", "0")
    assert (done.returncode, done.stdout) == (2, "")
    assert "farm lab accounts --add NAME" in done.stderr
    assert done.stderr.count("\n") == 1


def test_an_address_that_is_none_is_one_line(home: FarmHome) -> None:
    for host in ("no such host", "192.0.2.1"):
        done = home.farm("serve", "--host", host, code=2)
        assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("arguments", [["--help"], ["status"], ["diff", "RUN", "RUN"], ["serve", "--help"]])
def test_nothing_else_loads_the_server(home: FarmHome, filled: Filled, arguments: list[str]) -> None:
    runs = iter(filled.runs[-2:])
    arguments = [next(runs) if word == "RUN" else word for word in arguments]
    code = (
        "import sys\nfrom farm.cli.main import main\n"
        f"sys.argv = ['farm', *{arguments!r}]\n"
        "try:\n    main()\nexcept SystemExit as ended:\n    assert not ended.code, ended.code\n"
        "assert not {'litestar', 'uvicorn', 'anyio', 'torch'} & set(sys.modules)\n"
    )
    run_program([sys.executable, "-c", code], env=home.env, cwd=home.cwd)


def test_two_runs_as_a_page_in_one_file(home: FarmHome, filled: Filled) -> None:
    file = home.cwd / "pages" / "diff.html"
    home.farm("diff", filled.runs[2], filled.runs[3], "--html", str(file), code=0)
    page = file.read_text(encoding="utf-8")
    assert "New failures" in page
    assert "Content-Security-Policy" in page
    assert "<style>" in page
    assert "/assets/" not in page
    assert 'href="/' not in page
    assert "<script>window.pwned" not in page
