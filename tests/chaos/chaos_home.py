"""Folders, suite, devices and processes of one round of chaos.py."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import NamedTuple

from chaos_farm import HERE, VERSIONS
from stub_farm import SOC, fill_bundle, words_of

from farm.base.socs import find_soc
from farm.builds.bundles.cache import BundleCache
from farm.builds.bundles.key import bundle_key
from farm.builds.compile.protocol import BUILDER_NAME, TEMPLATE_NAME
from farm.dispatch.device_forks import PROCESS_NAME, SERVER_NAME
from farm.dispatch.device_run.health_check import health_check_jobs
from farm.suites.manifests import load_suite
from farm.suites.suite import Job, plan

SUITE = "chaos"
PRECISION = "8a8w"
PLANTED = {"wrong": 3, "crash": 2, "hang": 1, "refused": 2}
"""Number of failing jobs in forty, by behaviour of the stub runner."""
TMPFS_MB = 256
"""Devices refuse to work with less than 64 MB of room, and up to three share one file system."""
_OF = 40
_ROLES = {
    "virtual device": "farm.devices.virtual",
    "adb server": "server nodaemon",
    "runner": "--serve",
    "builder": BUILDER_NAME,
    "template": TEMPLATE_NAME,
    "tunnel": "farm.devices.ssh.tunnel",
    "worker": PROCESS_NAME,
    "fork server": SERVER_NAME,
    "controller": "chaos_farm.py run",
}
"""Part of the command line of a process, by role."""
_HEAD = """\
[suite]
name = "{name}"
description = "jobs of a stub"
[suite.tolerance.{precision}.fp32]
sqnr_db = 60.0
[suite.tolerance.{precision}.quantized]
sqnr_db = 60.0
"""
_CASE = """
[case.{name}]
module = "stub:Stub"
kwargs = {{ words = "{word} {latency_ms}", seconds = {seconds} }}
inputs = [{{ shape = [16] }}]
"""
_CONFIG = """\
[build]
builders = 2
[leases]
ttl_s = {ttl_s}
[health]
gate_wait_s = 2
"""
LEASE_TTL_S = 10


class Process(NamedTuple):
    """Process of a round."""

    pid: int
    role: str
    command: str


class Home:
    """Files of a round: its own state folder, cache and suite, and its own devices if they are attached."""

    def __init__(self, folder: Path, runner: Path, chance: Random, *, jobs: int, attached: int) -> None:
        """`attached` is how many devices are attached; with 0 every run boots two of its own."""
        self.folder, self.attached = folder, attached
        self.state, self.cache, self.cwd = folder / "state", folder / "cache", folder / "cwd"
        self.stacks = folder / "stacks"
        self.storage = folder / "devices" if attached else self.cache / "virtual"
        """Folder with the files of virtual devices."""
        for each in (self.state, self.cwd / SUITE, self.stacks, self.storage):
            each.mkdir(parents=True)
        self.mounts = [each for each in (self.state, self.storage) if _mount(each)]
        self._runner = runner
        self.behaviours: dict[str, str] = {}
        """Behaviour of each job's code, by id: a key of EXPECTED."""
        (self.cwd / "farm.toml").write_text(_CONFIG.format(ttl_s=LEASE_TTL_S))
        self._write_suite(chance, jobs)
        self._compile_some()

    def environment(self, store_url: str, more: Mapping[str, str]) -> dict[str, str]:
        """Return the environment of `farm`."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("FARM_", "PYTEST_"))}
        return {
            **kept,
            "FARM_STATE_DIR": str(self.state),
            "FARM_CACHE_DIR": str(self.cache),
            "FARM_STORE": store_url,
            "CHAOS_RUNNER": str(self._runner),
            "CHAOS_STACKS": str(self.stacks),
            "PYTHONPATH": os.pathsep.join([str(HERE / "chaos_site"), str(HERE.parents[1])]),
            "COLUMNS": "200",
            **more,
        }

    def start(self, arguments: list[str], environment: Mapping[str, str], output: Path) -> subprocess.Popen[bytes]:
        """Start `farm`, as a shell does that leaves it to itself."""
        with output.open("wb") as file:
            return subprocess.Popen(
                [sys.executable, str(HERE / "chaos_farm.py"), *arguments],
                env=dict(environment),
                cwd=self.cwd,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def configure(self, more: str) -> None:
        """Add something to farm.toml."""
        with (self.cwd / "farm.toml").open("a") as file:
            file.write(more)

    def close(self) -> None:
        """Take the file systems away."""
        for folder in self.mounts:
            subprocess.run(["umount", "--lazy", str(folder)], check=False, capture_output=True)

    def _write_suite(self, chance: Random, jobs: int) -> None:
        words = [word for word, count in PLANTED.items() for _ in range(max(1, count * jobs // _OF))]
        words += ["pass"] * (jobs - len(words))
        chance.shuffle(words)
        cases = []
        for number, word in enumerate(words):
            name = f"{word}_{number:03}"
            self.behaviours[f"{SUITE}/{name}[{SOC}-htp-{PRECISION}]"] = word
            # Every fifth job has a program of its own, which has to be compiled.
            seconds = 0.2 + number / 1000 if number % 5 == 4 else 0.0
            cases.append(_CASE.format(name=name, word=word, latency_ms=chance.choice((20, 80, 200)), seconds=seconds))
        text = _HEAD.format(name=SUITE, precision=PRECISION) + "".join(cases)
        (self.cwd / SUITE / "suite.toml").write_text(text)

    def _compile_some(self) -> None:
        cache = BundleCache(self.cache)
        jobs = plan([load_suite(self.cwd / SUITE / "suite.toml")], [find_soc(SOC)], "htp")
        for job in (*jobs, *health_check_jobs(jobs)):
            if not job.case.kwargs.get("seconds"):
                _compile(cache, job)


def _compile(cache: BundleCache, job: Job) -> None:
    key = bundle_key(job, VERSIONS)
    cache.build(key, lambda folder: fill_bundle(folder, key, words_of(job.case)))


def _mount(folder: Path) -> bool:
    """Give a folder a small file system of its own; return whether this may be done here."""
    command = ["mount", "-t", "tmpfs", "-o", f"size={TMPFS_MB}m,mode=700", "none", str(folder)]
    return (
        bool(os.environ.get("CHAOS_NAMESPACE"))
        and subprocess.run(command, check=False, capture_output=True).returncode == 0
    )


def processes_of(folder: Path) -> list[Process]:
    """Return the living processes that have to do with `folder`, and the reapers that watch for them, by id."""
    found, reapers, mark = [], [], str(folder).encode()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            raw = (entry / "cmdline").read_bytes()
            command = raw.replace(b"\0", b" ").decode(errors="replace").strip()
            if "reaper.py" in command:
                reapers.append(Process(int(entry.name), "reaper", command))
            elif raw and (mark in raw or mark in (entry / "environ").read_bytes()):
                # A worker is a copy of the controller, under a name that it gives itself.
                name = (entry / "comm").read_text().strip()
                command = (
                    f"{name} {command}" if name in (SERVER_NAME, PROCESS_NAME, BUILDER_NAME, TEMPLATE_NAME) else command
                )
                role = next((role for role, word in _ROLES.items() if word in command), "other")
                found.append(Process(int(entry.name), role, command))
        except OSError:
            continue
    ours = {str(one.pid) for one in found}
    found += [one for one in reapers if one.command.split()[-2] in ours]
    return sorted(one for one in found if one.pid != os.getpid())
