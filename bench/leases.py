"""Competition of many processes for few devices in one store: double ownership, and the time between two owners.

    python bench/leases.py [--processes 200] [--devices 16] [--seconds 60] [--store URL] [--quick]

Ownership is checked by files that are made with O_EXCL, independent of leases. Processes are killed all the time. The
last line is JSON: `grants`; `double`, the number of times that two living processes had a device; `p50_ms` and `p99_ms`
from the release of a device to its next owner; `person_p50_ms` and `person_max_ms` from the request of a person to the
device, while nightly runs with jobs of at most `job_ms` hold all devices; `killed` processes, and `taken_over` devices
of killed ones; `left`: leases left over.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import signal
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from farm.base.errors import LeaseLostError
from farm.policy.situation import Lease, Priority
from farm.store.store import Store, open_store

# Seconds between two attempts to get a device: of farm lease, and of runs.
PERSON_LOOKS_S, RUN_LOOKS_S = 0.3, 0.8
TTL_S = 5.0
JOB_S = 0.2
PERSONS = 4
USERS = 12
KILL_EVERY_S = 2.0
# Longest delay of a person or a nightly run, so that not all come at once.
ARRIVE_S = 3.0


class Referee:
    """Record of the owners of devices, by files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def take(self, device: str) -> str:
        """Return "" for a free device, "taken over" from a dead process, or "double"."""
        path = self._folder / device
        output = ""
        while True:
            try:
                file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
            except FileExistsError:
                with contextlib.suppress(OSError, ValueError):
                    if _lives(int(path.read_text())):
                        return "double"
                path.unlink(missing_ok=True)
                output = "taken over"
            else:
                os.write(file, str(os.getpid()).encode())
                os.close(file)
                return output

    def idle_ms(self, device: str) -> float | None:
        """Return the seconds since the last owner released the device; None if that owner died."""
        path = self._folder / f"{device}.free"
        with contextlib.suppress(OSError, ValueError):
            since = float(path.read_text())
            path.unlink()
            return (time.monotonic() - since) * 1000
        return None

    def holds(self, device: str) -> bool:
        with contextlib.suppress(OSError):
            return (self._folder / device).read_text() == str(os.getpid())
        return False

    def leave(self, device: str) -> None:
        (self._folder / f"{device}.free").write_text(str(time.monotonic()))
        (self._folder / device).unlink(missing_ok=True)


def _lives(pid: int) -> bool:
    try:
        # A zombie process holds no device.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


class Start:
    """Common start of all processes, so that the start of Python is not measured."""

    def __init__(self, context: Any, seconds: float) -> None:
        self._ready, self._begin = context.Semaphore(0), context.Event()
        self._until, self._seconds = context.Value("d", 0.0), seconds

    def wait(self) -> float:
        """Wait for the start, and return the time of the end on the monotonic clock."""
        self._ready.release()
        self._begin.wait()
        return float(self._until.value)

    def begin(self, processes: int) -> float:
        """Wait until so many processes are ready, start them, and return the time of their end."""
        for _ in range(processes):
            self._ready.acquire()
        self._until.value = time.monotonic() + self._seconds
        self._begin.set()
        return float(self._until.value)


def compete(address: str, folder: Path, number: int, devices: int, start: Start, person: bool) -> None:
    """Lease, use and release devices until the end; write a line of JSON for each."""
    chance = random.Random(number * 1000 + os.getpid())
    referee = Referee(folder)
    with open_store(address) as store, (folder / f"log-{os.getpid()}").open("w", buffering=1) as log:
        warm_up(store)
        until = start.wait()
        time.sleep(chance.random() * ARRIVE_S)
        while time.monotonic() < until:
            asked = time.monotonic()
            lease = acquire(store, number, devices, until, person, chance)
            if lease is None:
                return
            waited_ms = (time.monotonic() - asked) * 1000
            output, idle_ms = referee.take(lease.device), referee.idle_ms(lease.device)
            event: dict[str, Any] = {"result": output, "idle_ms": idle_ms, "waited_ms": waited_ms, "person": person}
            print(json.dumps(event), file=log)
            double = use(store, lease, referee, chance, until)
            if double:
                print(json.dumps({"result": "double"}), file=log)
            if person:
                time.sleep(chance.random() * 2)


def warm_up(store: Store) -> None:
    """Run each statement once with a separate device, as a statement is compiled on first use."""
    token = store.leases.request(
        [f"warm-up-{os.getpid()}"], count=1, user="", host="", pid=0, purpose="", priority=Priority.NIGHTLY, ttl_s=TTL_S
    )
    leases = store.leases.poll(token, ttl_s=TTL_S)
    store.leases.renew(leases, ttl_s=TTL_S, heartbeat_s=TTL_S / 3)
    store.leases.release(leases)
    store.leases.withdraw(token)


def acquire(store: Store, number: int, devices: int, until: float, person: bool, chance: random.Random) -> Lease | None:
    names = [f"device-{index}" for index in range(devices)]
    priority = Priority.PERSON if person else Priority.NIGHTLY
    token = store.leases.request(
        names,
        count=1,
        user=f"person-{number}" if person else f"user-{number % USERS}",
        host="bench",
        pid=os.getpid(),
        purpose="bench",
        priority=priority,
        ttl_s=TTL_S,
    )
    try:
        while time.monotonic() < until:
            taken = store.leases.poll(token, ttl_s=TTL_S)
            if taken:
                return taken[0]
            time.sleep((PERSON_LOOKS_S if person else RUN_LOOKS_S) * chance.uniform(0.7, 1.3))
        return None
    finally:
        store.leases.withdraw(token)


def use(store: Store, lease: Lease, referee: Referee, chance: random.Random, until: float) -> bool:
    """Run a few jobs while the lease is neither lost nor requested; return whether another owner had the device."""
    for _ in range(chance.randrange(1, 8)):
        time.sleep(JOB_S * chance.uniform(0.5, 1.0))
        try:
            renewal = store.leases.renew([lease], ttl_s=TTL_S, heartbeat_s=TTL_S / 3)
        except LeaseLostError:
            return False
        if renewal.lost:
            # The process slept for longer than the lease's time to live: the device belongs to another owner.
            return False
        if not referee.holds(lease.device):
            return True
        if renewal.wanted or time.monotonic() > until:
            break
    referee.leave(lease.device)
    store.leases.release([lease])
    return False


def main() -> None:
    """Run the competition."""
    parser = argparse.ArgumentParser(description="Leases under competition.")
    parser.add_argument("--processes", type=int, default=200)
    parser.add_argument("--devices", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument(
        "--store", default="", help="a store, which gets leases of devices 'device-N'; a new SQLite file"
    )
    parser.add_argument("--quick", action="store_true", help="12 processes, 4 devices, 5 seconds")
    options = parser.parse_args()
    if options.quick:
        options.processes, options.devices, options.seconds = 12, 4, 5.0
    with tempfile.TemporaryDirectory(prefix="farm-leases-") as name:
        folder = Path(name)
        address = options.store or str(folder / "farm.db")
        with open_store(address) as store:
            warm_up(store)
        killed = run(address, folder, options.processes, options.devices, options.seconds)
        # Leases of killed processes end after their time to live.
        deadline = time.monotonic() + TTL_S + 1
        with open_store(address) as store:
            while (left := len(store.leases.all())) and time.monotonic() < deadline:
                time.sleep(PERSON_LOOKS_S)
        events = [json.loads(line) for log in folder.glob("log-*") for line in log.read_text().splitlines()]
    print(
        json.dumps(
            {
                **summary(events),
                "processes": options.processes,
                "devices": options.devices,
                "seconds": options.seconds,
                "job_ms": JOB_S * 1000,
                "killed": killed,
                "left": left,
            }
        )
    )


def run(address: str, folder: Path, processes: int, devices: int, seconds: float) -> int:
    """Start all processes, kill some over time, and wait; return the number of killed ones."""
    # Processes are forked, so that 200 interpreters share their memory; each opens the store itself.
    context = multiprocessing.get_context("fork")
    start = Start(context, seconds)
    persons = min(PERSONS, max(1, processes // 4))

    def spawn(number: int) -> Any:
        arguments = (address, folder, number, devices, start, number < persons)
        process = context.Process(target=compete, args=arguments)
        process.start()
        return process

    running = [spawn(number) for number in range(processes)]
    until = start.begin(processes)
    killed = 0
    chance = random.Random(7)
    while time.monotonic() + KILL_EVERY_S < until:
        time.sleep(KILL_EVERY_S)
        number = chance.randrange(persons, processes)
        os.kill(running[number].pid, signal.SIGKILL)
        running[number].join()
        running[number] = spawn(number)
        killed += 1
    for process in running:
        process.join()
    return killed


def summary(events: list[dict[str, Any]]) -> dict[str, Any]:
    grants = [event for event in events if "waited_ms" in event]
    idle = sorted(event["idle_ms"] for event in grants if event["idle_ms"] is not None)
    persons = sorted(event["waited_ms"] for event in grants if event["person"])
    return {
        "grants": len(grants),
        "double": sum(event["result"] == "double" for event in events),
        "taken_over": sum(event["result"] == "taken over" for event in events),
        "p50_ms": round(statistics.median(idle)) if idle else None,
        "p99_ms": round(idle[int(0.99 * (len(idle) - 1))]) if idle else None,
        "person_grants": len(persons),
        "person_p50_ms": round(statistics.median(persons)) if persons else None,
        "person_max_ms": round(persons[-1]) if persons else None,
    }


if __name__ == "__main__":
    main()
