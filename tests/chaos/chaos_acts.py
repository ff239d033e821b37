"""Faults of a run: a script that a seed decides, and the thread that plays it. For chaos.py."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import NamedTuple

from chaos_home import Disturbed, Home, Process, processes_of

SPREAD_S = 0.3
"""Within which all of one act are killed."""
OURS = ("controller", "reaper", "worker", "builder", "tunnel")
DEVICE_SIDE = ("runner", "virtual device")
ROLES = (*OURS, "adb server", *DEVICE_SIDE)
_NEAR_DEVICE = (*DEVICE_SIDE, "adb server", "tunnel")
THEMES = ("kills", "newborn", "state disk", "storage", "database", "everything")
LOCAL = frozenset(("controller", "reaper", "worker", "builder", "state disk", "database"))
"""Targets whose faults are neither a device's fault nor could be mistaken for it."""
_SPARED = 0.8
_BIRTH_S = 8.0
_POLL_S = 0.01
_CHUNK = bytes(2**20)


class Pace(NamedTuple):
    """How much happens in one run."""

    most: int
    """Acts, of one or more kills each."""
    longest_s: float
    """Longest time in seconds that a disk is full or a database is away."""
    last_s: float
    """Within which the first of them happens."""


class Act(NamedTuple):
    """Fault of a run at a time."""

    at_s: float
    """After the run's start."""
    kind: str
    """`kill`; `newborn`: a worker, and then what replaces it; `fill` a disk, take the `database` away."""
    roles: tuple[str, ...] = ()
    """Roles of the killed processes, in this order; for a disk its name."""
    delays_s: tuple[float, ...] = ()
    """Before each of them; of a newborn, since its birth."""
    seconds: float = 0.0
    """How long a disk stays full, a database away."""
    choice: float = 0.0
    """Random number in [0, 1) for the choice among several targets."""


def plan_acts(chance: Random, theme: str, pace: Pace, *, disks: bool, attached: bool) -> list[Act]:
    """Return the acts of a run with this `theme`. Pure.

    A run's own devices are not started again: unless devices are `attached`, few are killed.
    """
    acts: list[Act] = []
    at_s = chance.uniform(0.2, pace.last_s)
    for _ in range(chance.randint(1, pace.most)):
        acts += _one(chance, theme, at_s, pace, disks=disks)
        at_s += chance.uniform(0.3, 6.0)
    if not attached and chance.random() < _SPARED:
        spared = [tuple("runner" if role == "virtual device" else role for role in act.roles) for act in acts]
        acts = [act._replace(roles=roles) for act, roles in zip(acts, spared, strict=True)]
    return sorted(acts)


def _one(chance: Random, theme: str, at_s: float, pace: Pace, *, disks: bool) -> list[Act]:
    kind = chance.choice(THEMES[:-1]) if theme == "everything" else theme
    if not disks and kind in ("state disk", "storage"):
        kind = "kills"
    long_s = chance.uniform(0.5, 8.0) if chance.random() < 0.85 else chance.uniform(8.0, 40.0)
    long_s = min(long_s, pace.longest_s)
    if kind in ("state disk", "storage"):
        acts = [Act(at_s, "fill", (kind,), seconds=min(long_s, 15.0))]
    elif kind == "database":
        acts = [Act(at_s, "database", ("database",), seconds=long_s, choice=chance.random())]
    elif kind == "newborn":
        # The device may have been lost just before while its worker starts.
        first = (chance.choice(_NEAR_DEVICE),) if chance.random() < 0.4 else ()
        count = chance.choice((1, 1, 2))
        delays = (*[chance.uniform(0.0, 2.0)] * len(first), 0.0, *(chance.uniform(0.0, 1.5) for _ in range(count)))
        acts = [Act(at_s, "newborn", (*first, *["worker"] * (count + 1)), delays, choice=chance.random())]
    else:
        roles = tuple(chance.choices(ROLES, k=chance.choice((1, 2, 2, 3, 4))))
        delays = tuple(chance.uniform(0.0, SPREAD_S / len(roles)) for _ in roles)
        acts = [Act(at_s, "kill", roles, delays, choice=chance.random())]
        if chance.random() < 0.3:
            # The process that brings a device back is killed as well.
            again = Act(at_s + chance.uniform(0.3, 4.0), "kill", ("worker",), (0.0,), choice=chance.random())
            acts.append(again)
    return acts


class Tormentor:
    """Thread that plays the script of one run; at its end it restores all that it took away."""

    def __init__(
        self,
        home: Home,
        store: Disturbed,
        acts: Sequence[Act],
        log: Callable[[str], None],
    ) -> None:
        self._home, self._store, self._log = home, store, log
        self._acts = acts
        self._stop = threading.Event()
        self._started = time.monotonic()
        self._ends: list[tuple[float, Callable[[], None]]] = []
        self.struck: set[str] = set()
        """Roles, disks and database that were met."""
        self.count = 0
        self._is_away = False
        self._thread = threading.Thread(target=self._play, name="tormentor", daemon=True)
        self._thread.start()

    @property
    def is_over(self) -> bool:
        """Return whether all acts are over."""
        return not self._thread.is_alive()

    def stop(self) -> None:
        """Skip the remaining acts, and restore all that is away."""
        self._stop.set()
        self._thread.join()

    def _play(self) -> None:
        try:
            for act in self._acts:
                self._wait_until(self._started + act.at_s)
                if self._stop.is_set():
                    return
                self._do(act)
            while self._ends and not self._stop.is_set():
                self._wait_until(self._ends[0][0])
        finally:
            for _, end in self._ends:
                end()
            self._ends.clear()

    def _wait_until(self, moment: float) -> None:
        while (now := time.monotonic()) < moment and not self._stop.is_set():
            self._end_due(now)
            self._stop.wait(min(_POLL_S * 2, moment - now))
        self._end_due(time.monotonic())

    def _end_due(self, now: float) -> None:
        due = [end for moment, end in self._ends if moment <= now]
        self._ends = sorted((one for one in self._ends if one[0] > now), key=lambda one: one[0])
        for end in due:
            end()

    def _do(self, act: Act) -> None:
        if act.kind == "fill":
            self._fill(act)
        elif act.kind == "database":
            self._take_database(act)
        elif act.kind == "newborn":
            self._kill_newborn(act)
        else:
            # Looked for before, so that all go within the time.
            victims = self._victims(act)
            for role, pid, delay_s in victims:
                self._stop.wait(delay_s)
                self._kill(role, pid)

    def _victims(self, act: Act) -> list[tuple[str, int, float]]:
        there, found = self._living(), list[tuple[str, int, float]]()
        for role, delay_s in zip(act.roles, act.delays_s, strict=True):
            taken = {pid for _, pid, _ in found}
            left = [one for one in there if one.pid not in taken]
            # A role without a process at this moment is replaced by another one.
            able = [one for one in left if one.role == role] or [one for one in left if one.role in OURS]
            if able:
                chosen = able[int(act.choice * len(able))]
                found.append((chosen.role, chosen.pid, delay_s))
            else:
                self._say(f"nobody to kill for a {role}")
        return found

    def _kill_newborn(self, act: Act) -> None:
        """Kill the first process of the role, a worker, and its successor at its birth."""
        known: set[int] = set()
        killed = False
        for role, delay_s in zip(act.roles, act.delays_s, strict=True):
            able = [one for one in self._living() if one.role == role]
            if role != "worker" or not killed:
                self._stop.wait(delay_s)
                known = {one.pid for one in able}
                if able:
                    self._kill(role, able[int(act.choice * len(able))].pid)
                    killed = role == "worker"
                else:
                    self._say(f"no {role} to kill")
                continue
            newborn = self._await_birth(known)
            if newborn is None:
                self._say("no worker was born")
                return
            known.add(newborn)
            self._stop.wait(delay_s)
            self._kill("worker", newborn, "newborn ")

    def _await_birth(self, known: set[int]) -> int | None:
        deadline = time.monotonic() + _BIRTH_S
        while time.monotonic() < deadline and not self._stop.is_set():
            self._end_due(time.monotonic())
            for one in self._living():
                if one.role == "worker" and one.pid not in known:
                    return one.pid
            self._stop.wait(_POLL_S)
        return None

    def _living(self) -> list[Process]:
        return processes_of(self._home.folder)

    def _kill(self, role: str, pid: int, word: str = "") -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            self._say(f"killed {word}{role} {pid}")
            self.struck.add(role)
            self.count += 1

    def _fill(self, act: Act) -> None:
        (name,) = act.roles
        folder = self._home.state if name == "state disk" else self._home.storage
        ballast = folder / "ballast"
        if ballast.exists():
            return
        _fill(ballast)
        self._say(f"{name} full for {act.seconds:.1f} s")
        self.struck.add(name)
        self.count += 1

        def end() -> None:
            ballast.unlink(missing_ok=True)
            self._say(f"{name} has room again")

        self._end_after(act.seconds, end)

    def _take_database(self, act: Act) -> None:
        if self._is_away:
            return
        self._is_away = True
        way = self._store.ways[int(act.choice * len(self._store.ways))]
        self._store.leave(way)
        self._say(f"database {way} for {act.seconds:.1f} s")
        self.struck.add("database")
        self.count += 1

        def end() -> None:
            self._store.come_back()
            self._is_away = False
            self._say("database is back")

        self._end_after(act.seconds, end)

    def _end_after(self, seconds: float, end: Callable[[], None]) -> None:
        self._ends.append((time.monotonic() + seconds, end))
        self._ends.sort(key=lambda one: one[0])

    def _say(self, text: str) -> None:
        self._log(f"+{time.monotonic() - self._started:.2f} s {text}")


def _fill(file: Path) -> None:
    """Write until there is no room for another byte."""
    with contextlib.suppress(OSError), file.open("wb", buffering=0) as out:
        while out.write(_CHUNK):
            pass
    with contextlib.suppress(OSError), file.open("ab", buffering=0) as out:
        while out.write(b"\0"):
            pass
