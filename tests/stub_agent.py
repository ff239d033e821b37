"""Agent of a stub host: farm's own agent; its devices do not exist and its device processes sleep (stub_hosts.py).

    python tests/stub_agent.py PLAN.json

A device process sleeps for the time in the words of its job, unless it is broken off, and answers that the job
passed. It keeps to the device's grant as a real one does, and writes its jobs and their times down (stub_evidence.py).
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from queue import SimpleQueue

import msgspec
from made import device
from stub_farm import Evidence, now_s, words_of
from stub_hosts import HostPlan

from farm.base.config.settings import LeaseConfig, load_config
from farm.base.errors import FarmError
from farm.base.log_setup import RecordHandler, begin_logging
from farm.devices.device import Device
from farm.dispatch import messages
from farm.dispatch.cluster.agent.host_agent import HostAgent
from farm.dispatch.request.request import read_plan
from farm.results.attempt import Attempt, Stage, Verdict
from farm.store.cluster.records import PlannedJob


class StubProcess:
    """A thread that sleeps."""

    def __init__(self, evidence: Path, device: Device) -> None:
        self._device = device
        self._evidence = Evidence(evidence, device.id)
        self._queue: SimpleQueue[messages.ToDevice] = SimpleQueue()
        self._grant = messages.Grant(go=False)
        self._broken = threading.Event()
        self._holds_back = False
        self._run_id = ""
        self._dead = False
        self._thread = threading.Thread(target=self._work, name=f"process of {device.serial}", daemon=True)

    def start(self, answer: Callable[[messages.FromDevice], None]) -> None:
        """Begin."""
        self._answer = answer
        self._thread.start()

    def send(self, *sent: messages.ToDevice) -> None:
        """Take messages, as farm/dispatch/device_process.py does."""
        for message in sent:
            if isinstance(message, messages.Grant):
                self._grant, self._holds_back = message, False
            elif isinstance(message, messages.Abort):
                self._broken.set()
            else:
                if isinstance(message, messages.End):
                    self._grant, self._holds_back = messages.Grant(go=False), True
                    self._broken.set()
                self._queue.put(message)

    @property
    def is_stopped(self) -> bool:
        """Never: it is a thread."""
        return False

    def close(self) -> None:
        """End."""
        self.send(messages.End())
        self._thread.join()

    def kill(self) -> None:
        """End the process with the exit code of a kill."""
        self._dead = True
        self.close()
        self._answer(messages.ProcessEnded("killed"))

    def _work(self) -> None:
        while not isinstance(message := self._queue.get(), messages.End):
            if isinstance(message, messages.Begin):
                self._run_id = read_plan(Path(message.plan)).run_id
                self._broken.clear()
            elif isinstance(message, messages.ApplyGrant):
                self._answer(messages.JobReturned())
            elif isinstance(message, messages.RunJob) and not self._dead:
                self._answer(self._run(message))
        self._evidence.close()

    def _run(self, message: messages.RunJob) -> messages.FromDevice:
        if self._holds_back or not self._grant.go or self._grant.is_over:
            self._holds_back = True
            return messages.JobReturned(number=message.number)
        planned: PlannedJob = message.planned
        _, milliseconds = words_of(planned.job.case).split()
        began_s, began_ms = time.monotonic(), time.time_ns() // 1_000_000
        with self._evidence.running(planned.job.id, self._run_id):
            broken = self._broken.wait(int(milliseconds) / 1000)
        if broken:
            self._holds_back = True
            return messages.JobReturned(number=message.number)
        attempt = Attempt(
            planned.job.id, Verdict.PASSED, Stage.DONE, "", device=self._device.serial, started_ms=began_ms,
            seconds=time.monotonic() - began_s, bundle_key=planned.key,
        )  # fmt: skip
        return messages.JobEnded((attempt,), number=message.number)


def devices_of(plan: HostPlan) -> list[Device]:
    """Return the devices of a host, which nothing can reach."""
    about = {"kind": "virtual", "host": plan.folder.name}
    return [device(f"virtual-{soc}-{number}", soc, **about) for number, soc in enumerate(plan.socs)]


def main() -> int:
    """Run until SIGTERM, and return what `farm lab agent` would exit with."""
    plan = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=HostPlan, dec_hook=lambda kind, value: kind(value))
    devices = devices_of(plan)
    begin_logging(RecordHandler(show))
    agent = HostAgent(
        msgspec.structs.replace(load_config(folder=plan.folder), leases=LeaseConfig(plan.ttl_s, plan.ttl_s * 0.3)),
        name=plan.name,
        devices=lambda: devices,
        processes=partial(StubProcess, plan.evidence),
        rest_s=plan.rest_s,
        fetch_s=plan.fetch_s,
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: agent.stop())
    try:
        agent.run()
    except FarmError as error:
        show(str(error))
        return error.exit_code
    return 0


def show(line: str) -> None:
    """Write a line with the time that evidence is on."""
    sys.stdout.write(f"{now_s():.3f} {line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    # Remaining threads have no output.
    os._exit(code)
