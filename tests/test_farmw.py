"""`farmw` on incomplete and complete machines, and an installed wheel outside the checkout."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from farm_home import FarmHome
from programs import run_program
from waiting import until

# `farmw` on incomplete machines: one line with the missing part and its remedy; on complete ones it runs `farm`.


ROOT = Path(__file__).resolve().parent.parent
TOOLS = (
    *("sh", "dirname", "readlink", "cksum", "df", "awk", "sed", "mkdir", "mv", "rm", "cat", "sleep", "grep", "tail"),
    *("env", "touch"),
)


class Machine:
    """A PATH of its own, made of links, and a copy of what farmw reads."""

    def __init__(self, folder: Path) -> None:
        self.bin, self.checkout = folder / "bin", folder / "checkout"
        self.bin.mkdir()
        self.checkout.mkdir()
        for name in ("farmw", "pyproject.toml"):
            shutil.copy(ROOT / name, self.checkout / name)
        for tool in TOOLS:
            self.link(tool, shutil.which(tool) or "")
        self.link("python3", sys.executable)
        self.script("c++", "exit 0")

    def link(self, name: str, target: str) -> None:
        (self.bin / name).symlink_to(target)

    def script(self, name: str, body: str) -> None:
        path = self.bin / name
        path.unlink(missing_ok=True)
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)

    @property
    def env(self) -> dict[str, str]:
        return {
            "PATH": str(self.bin), "HOME": str(self.bin), "PIP_CONFIG_FILE": os.devnull, "PIP_RETRIES": "0",
            "PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_TIMEOUT": "2", "PIP_NO_CACHE_DIR": "1",
        }  # fmt: skip

    def farmw(self, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(self.checkout / "farmw"), *arguments],
            env={**self.env, **env}, capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip

    def set_up(self, extras: str = "build,simulator") -> Path:
        """Create the files of a finished set-up, with stand-ins that print their arguments."""
        venv = self.checkout / ".venv"
        (venv / "bin").mkdir(parents=True)
        for name in ("farm", "python"):
            stub = venv / "bin" / name
            stub.write_text(f'#!/bin/sh\necho stub {name} "$@"\nexit 7\n')
            stub.chmod(0o755)
        sums = run_program(["cksum"], stdin=(self.checkout / "pyproject.toml").open("rb"))
        (venv / ".farmw").write_text(f"{sums.stdout.strip()} {self.checkout} stub python -V extras={extras}")
        return venv


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_with_nothing_to_do_arguments_and_exit_code_are_farms(machine: Machine) -> None:
    machine.set_up()
    done = machine.farmw("run", "--soc", "SM8650", "a b")
    assert (done.returncode, done.stdout, done.stderr) == (7, "stub farm run --soc SM8650 a b\n", "")
    link = machine.bin / "farm-link"
    link.symlink_to(machine.checkout / "farmw")
    done = subprocess.run([link, "socs"], env=machine.env, capture_output=True, text=True, check=False, cwd="/")
    assert done.stdout == "stub farm socs\n"


def test_pytest_runs_the_tests_with_the_same_workers_for_all_arguments(machine: Machine) -> None:
    machine.set_up("build,simulator,conformance,dev,docs")
    for arguments, workers in (("", 3), (" -n 1 tests/store", 3), (" --pdb", 0)):
        done = machine.farmw("test", *arguments.split())
        assert done.stdout == f"stub python -m pytest -n {workers} --dist worksteal{arguments}\n"


@pytest.mark.parametrize(
    ("command", "chosen", "installed", "asked"),
    [
        ("socs", "cluster", "build,simulator,cluster", None),
        ("socs", "", "build,simulator,conformance,dev,docs,cluster", None),
        ("test", "conformance,dev cluster", "build,simulator,conformance,dev,docs,cluster", None),
        ("test", "dev,dev", "build,simulator", "build,simulator,conformance,dev,docs"),
        ("socs", "cluster", "build,simulator,conformance,dev,docs", "build,simulator,conformance,dev,docs,cluster"),
        ("socs", "", "build,removed", "build,simulator"),
    ],
)
def test_each_extra_is_installed_once_and_stays(
    command: str, chosen: str, installed: str, asked: str | None, machine: Machine
) -> None:
    machine.set_up(installed)
    log = machine.checkout / "pip"
    (machine.checkout / ".venv/bin/python").write_text(
        f'#!/bin/sh\ncase "$*" in *" pip install "*) echo "$@" >>{log} ;; esac\necho stub python "$@"\n'
    )
    done = machine.farmw(command, FARM_EXTRAS=chosen)
    assert (done.returncode, "stub" in done.stdout) == (7 if command == "socs" else 0, True)
    found = log.read_text().split("\n")[-2].rpartition("[")[2].rstrip("]") if log.exists() else None
    assert found == asked
    log.unlink(missing_ok=True)
    machine.farmw(command)
    assert not log.exists()


def test_an_extra_that_pyproject_does_not_have_is_refused(machine: Machine) -> None:
    machine.set_up()
    for wrong in ("clutser", "x; touch /tmp/x", "../x"):
        done = machine.farmw("socs", FARM_EXTRAS=wrong)
        assert (done.returncode, "cluster" in done.stderr) == (2, True)


@pytest.mark.parametrize(
    ("tool", "body", "code", "says"),
    [
        ("c++", "", 6, "farmw: a C.. compiler is missing; on Debian and Ubuntu: apt-get install g"),
        ("python3", "exit 1", 6, "Python 3.11 or newer is missing; .* apt-get install python3"),
        ("python3", 'case "$*" in *ensurepip*) exit 1 ;; esac', 6, "venv module is missing; .*install python3-venv"),
        ("df", "echo head; echo /dev/x 1 1 123456 99% /", 4, "4 GB of free space are needed.*123 MB are there"),
    ],
)
def test_a_missing_part_is_named(machine: Machine, tool: str, body: str, code: int, says: str) -> None:
    if body:
        machine.script(tool, body)
    else:
        (machine.bin / tool).unlink()
    done = machine.farmw("socs")
    assert done.returncode == code
    assert re.search(says, done.stderr, re.DOTALL), done.stderr


def test_a_python_that_is_named_and_is_not_there(machine: Machine) -> None:
    done = machine.farmw("socs", PYTHON="python9")
    assert (done.returncode, done.stderr) == (2, "farmw: PYTHON=python9: there is no such program\n")


def test_no_network_and_it_resumes(machine: Machine) -> None:
    first = machine.farmw("socs")
    assert first.returncode == 4
    assert "the Python package index cannot be reached, or has no torch==" in first.stderr
    assert not (machine.checkout / ".venv.lock").exists()
    made = (machine.checkout / ".venv" / "pyvenv.cfg").stat().st_mtime_ns
    second = machine.farmw("socs")
    assert "cannot be reached" in second.stderr
    assert (machine.checkout / ".venv" / "pyvenv.cfg").stat().st_mtime_ns == made


def test_a_lock_of_a_dead_farmw_is_taken_over(machine: Machine) -> None:
    (machine.bin / "c++").unlink()
    dead = subprocess.Popen(["true"])
    dead.wait()
    lock = machine.checkout / ".venv.lock"
    lock.mkdir()
    (lock / "pid").write_text(f"{dead.pid}\n")
    assert "C++ compiler is missing" in machine.farmw("socs").stderr
    assert not lock.exists()


def test_a_second_farmw_waits_for_the_first(machine: Machine) -> None:
    lock = machine.checkout / ".venv.lock"
    lock.mkdir()
    (lock / "pid").write_text(f"{os.getpid()}\n")
    waiting = subprocess.Popen(
        [machine.checkout / "farmw", "socs"], env=machine.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert waiting.stderr is not None
    assert "waiting for another farmw" in waiting.stderr.readline()
    machine.set_up()
    shutil.rmtree(lock)
    out, _ = waiting.communicate(timeout=30)
    assert out == "stub farm socs\n"


def test_ctrl_c_leaves_no_lock(machine: Machine) -> None:
    machine.script("df", "sleep 60; echo")
    process = subprocess.Popen(
        [machine.checkout / "farmw", "socs"], env=machine.env, stderr=subprocess.PIPE, start_new_session=True
    )
    until((machine.checkout / ".venv.lock" / "pid").exists, "the lock", 60)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(30) == 130
    assert process.stderr is not None
    process.stderr.close()
    assert not (machine.checkout / ".venv.lock").exists()


# An installed wheel, outside the checkout, has everything that the main job needs.


@pytest.fixture(scope="module")
def installed_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", str(folder), str(ROOT)]
    subprocess.run(build, check=True, timeout=120, capture_output=True)
    [wheel] = folder.glob("*.whl")
    target = folder / "site"
    subprocess.run([*pip, "install", "--no-deps", "--target", str(target), str(wheel)], check=True, timeout=120)
    return target


def test_the_data_folders_travel_in_it(installed_wheel: Path) -> None:
    [wheel] = installed_wheel.parent.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    for name in (
        "farm/_data/device_profiles/SM8650.toml",
        "farm/_data/test_suites/quantized_ops/suite.toml",
        "farm/_data/test_suites/quantized_ops/operators.py",
        "farm/_data/native_runner/CMakeLists.txt",
        "farm/_data/native_runner/bridge/qnn_bridge.cpp",
        "farm/_data/reports/base.html.j2",
        "farm/_data/reports/notify/slack.j2",
        "farm/py.typed",
        "farm/store/migrations/env.py",
    ):
        assert name in names
    assert not [name for name in names if name.startswith(("tests/", "bench/")) or name.endswith((".so", ".pte"))]


@pytest.mark.whole
def test_it_runs_the_main_job(installed_wheel: Path, home: FarmHome) -> None:
    env = {"PYTHONPATH": str(installed_wheel)}
    where = subprocess.run(
        [sys.executable, "-c", "import farm; print(farm.__file__)"],
        env={**home.env, **env}, cwd=home.cwd, capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    assert where.stdout.startswith(str(installed_wheel))
    run = ("run", "--soc", "SM8650", "--suite", "smoke", "--virtual", "2")
    done = home.farm(*run, env=env, timeout_s=300, code=0)
    assert "8 passed" in done.stdout
