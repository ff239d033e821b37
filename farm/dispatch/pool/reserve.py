"""Reservations of devices in the store, for users of this machine and of `farm serve` alike."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from farm.base.errors import LeaseLostError, NoDeviceError, UnknownNameError, UsageError
from farm.base.socs import load_socs, reported_profile
from farm.devices.text import clean_text
from farm.dispatch.pool.inventory import resolve_device

if TYPE_CHECKING:
    from farm.policy.situation import Lease
    from farm.store.leases.registry import Registered
    from farm.store.store import Store

_SHOWN_CHARACTERS = 500
_MOST_DAYS = 90


def reserve_device(store: Store, wanted: str, user: str, seconds: float, from_ms: int = 0) -> tuple[Registered, Lease]:
    """Reserve a known device by its name, serial, id or SoC for `user`, at once or from `from_ms` on.

    An SoC stands for any free device of it that is not reserved for `user` yet.

    Raises UnknownNameError for an unknown name, UsageError for a time out of range, and NoDeviceError with the users.
    """
    if not 0 < seconds <= _MOST_DAYS * 86_400:
        raise UsageError(f"a reservation of {seconds:.0f} s: expected at most {_MOST_DAYS} days")
    if from_ms > store.leases.now_ms() + 1000 * _MOST_DAYS * 86_400:
        raise UsageError(f"a reservation from {clock_time(from_ms)} on: expected at most {_MOST_DAYS} days ahead")
    known = store.devices.all()
    named = [one for one in known if wanted and wanted in (one.id, one.serial, one.name)]
    soc = (reported_profile(wanted) or wanted).casefold()
    mine = {one.device for one in (*store.leases.all(), *store.leases.upcoming()) if one.reserved_for == user}
    found = named or [one for one in known if one.soc.casefold() == soc and one.id not in mine]
    if not found:
        if any(one.soc.casefold() == soc for one in known):
            raise NoDeviceError(f"every {wanted} is yours already: 'farm devices release' without a name lists them")
        names = {*load_socs(), *(name for one in known for name in (one.name, one.serial) if name)}
        raise UnknownNameError("device or SoC", wanted, names, "(farm devices shows the attached devices)")
    problems = []
    for one in sorted(found, key=lambda one: (one.health != "healthy", one.id)):
        if problem := why_unfit(one):
            problems.append(f"{one.called} {problem}")
            continue
        try:
            return one, store.leases.reserve(one.id, user, seconds, from_ms)
        except LeaseLostError as error:
            problems.append(str(error))
    raise NoDeviceError(clean_text("; ".join(problems), _SHOWN_CHARACTERS))


def give_back(store: Store, device: str, user: str, *, force: bool) -> str:
    """Give back a device that is reserved for `user`, and return what happens now, as text.

    With `force` also a device of another user, whose process ends or leaves it after its job.
    Raises UnknownNameError, and UsageError for a device that is free or another user's.
    """
    leases = {lease.device: lease for lease in (*store.leases.upcoming(), *store.leases.all())}
    id_ = device if device in leases else resolve_device(store, device).id
    if id_ not in leases:
        raise UsageError(f"{device} is free already")
    lease = leases[id_]
    name = next((one.called for one in store.devices.all() if one.id == lease.device), lease.device)
    if lease.reserved_for != user and not force:
        end = "end that" if lease.user == user else "ask for it"
        raise UsageError(f"{holder_text(lease, name)}: {end}, or give --force")
    if lease.reserved_for:
        store.leases.cancel(lease.device, lease.reserved_for)
    if lease.token and force:
        store.leases.release([lease])
    after = ""
    if lease.token and not force:
        after = f"; {lease.user} uses it still, for {lease.purpose!r}"
    elif lease.token and lease.purpose.startswith("farm shell"):
        after = f"; the shell of {lease.user} is being ended"
    elif lease.token and lease.purpose.startswith(("farm devices adb", "farm devices connect")):
        after = f"; {lease.purpose!r} of {lease.user} is being ended"
    elif lease.token:
        after = f"; {lease.purpose!r} of {lease.user} stops using it after its running job"
    return clean_text(f"{name} is given back{after}", 400)


def reserved_for(store: Store, user: str) -> list[Lease]:
    """Return the leases of devices that are reserved for a user."""
    return [lease for lease in store.leases.all() if lease.reserved_for == user]


def holder_text(lease: Lease, name: str) -> str:
    """Return user, time and purpose of the lease of the device `name`."""
    parts = []
    if lease.reserved_for:
        begin = f"from {clock_time(lease.reserved_from_ms)} " if lease.reserved_from_ms else ""
        parts.append(f"is reserved for {lease.reserved_for} {begin}until {clock_time(lease.reserved_until_ms)}")
    if lease.token:
        purpose = f" for {lease.purpose!r}" if lease.purpose else ""
        where = f"process {lease.pid} on {lease.host}"
        parts.append(f"is used by {lease.user} since {clock_time(lease.acquired_ms)}{purpose} ({where})")
    # Programs of other users wrote these texts into the store.
    return clean_text(f"{name} {' and '.join(parts)}", _SHOWN_CHARACTERS)


def clock_time(time_ms: int) -> str:
    """Return a local time, with the date unless it is today."""
    then = time.localtime(time_ms / 1000)
    today = time.strftime("%Y-%m-%d", then) == time.strftime("%Y-%m-%d")
    return time.strftime("%H:%M" if today else "%Y-%m-%d %H:%M", then)


def why_unfit(known: Registered) -> str:
    """Return why a device cannot be leased; empty for a device that can."""
    if not known.in_service:
        note = f" ({known.service_note})" if known.service_note else ""
        return f"is out of service{note}: 'farm devices enable {known.called}' puts it back"
    if known.health == "quarantined":
        return f"is quarantined ({known.health_reason}): 'farm devices show {known.called}' shows its history"
    return ""
