"""Actions of accounts; each calls the function of the command with the same name.

An action is a function that takes its context and checked fields and returns a sentence, and a line in `ACTIONS`.
`farm/serve/app.py` makes its routes: a form for pages, and JSON below `/api/v1/actions`.
"""

from __future__ import annotations

import datetime
import os
import re
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple, get_type_hints

import msgspec

from farm.base.config.settings import OWN_COMMAND, Config
from farm.base.errors import UsageError
from farm.dispatch.cluster.client.follow import cancel
from farm.dispatch.pool.inventory import clock_time, give_back, reserve_device, resolve_device
from farm.numbers.regressions import baseline
from farm.numbers.regressions.remarks import assign
from farm.serve import submission
from farm.serve.page import Text
from farm.store.accounts import Role
from farm.store.store import Store

# Without a dot: `farm.toml` would be a file of the server.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
# A run compiles and uses all cores; submissions of a shared farm end within seconds.
_MOST_COMMANDS = 4
_STARTING = threading.Lock()
# Commands by user, also ended ones.
_STARTED: dict[str, list[subprocess.Popen[bytes]]] = {}
Seconds = Annotated[int, msgspec.Meta(ge=1, le=90 * 86_400)]
TimeMs = Annotated[int, msgspec.Meta(ge=0, le=1 << 53, description="Epoch, milliseconds; 0 is now.")]
Note = Annotated[str, msgspec.Meta(max_length=4000)]


class Context(NamedTuple):
    """Configuration, store and user of an action."""

    config: Config
    store: Store
    user: str
    role: Role


class TooManyCommandsError(UsageError):
    """Refusal of a command: the user has the most commands that the server starts at once."""


class Done(msgspec.Struct, frozen=True, omit_defaults=True):
    """Result of an action."""

    done: str
    """Effect in words."""
    schema: int = 1
    device: str = ""
    from_ms: int = 0
    until_ms: int = 0
    run_id: str = ""
    suite: str = ""
    """Name of an uploaded suite in `run`."""
    log: str = ""
    """File on the server with the output of a started command."""


class LeaseDevice(msgspec.Struct, frozen=True):
    """Device or SoC to reserve, and the time."""

    device: Text
    seconds: Seconds = 3600
    from_ms: TimeMs = 0
    from_time: Text = ""
    """Time on the clock of the server instead of `from_ms`, as `farm lease --from`: `2026-03-01 14:00`."""


def lease(context: Context, asked: LeaseDevice) -> Done:
    """Reserve a named device or a free device of an SoC, now or from a given time."""
    from_ms = _time_ms(asked.from_time) if asked.from_time else asked.from_ms
    known, found = reserve_device(context.store, asked.device, context.user, asked.seconds, from_ms)
    begin = f"from {clock_time(found.reserved_from_ms)} " if found.reserved_from_ms else ""
    text = f"{known.called} ({known.soc}, {known.kind}) is yours {begin}until {clock_time(found.reserved_until_ms)}"
    return Done(text, device=known.id, from_ms=found.reserved_from_ms, until_ms=found.reserved_until_ms)


class ReleaseDevice(msgspec.Struct, frozen=True):
    """Device to give back."""

    device: Text
    force: bool = False
    """Also another user's; only operators may."""


def release(context: Context, asked: ReleaseDevice) -> Done:
    """Give a device back."""
    _require_operator(context, force=asked.force)
    return Done(give_back(context.store, asked.device, context.user, force=asked.force))


class SubmittedRun(msgspec.Struct, frozen=True):
    """Submitted run."""

    run: Text
    force: bool = False
    """Also another user's; only operators may."""


def cancel_run(context: Context, asked: SubmittedRun) -> Done:
    """Cancel a submitted run of a shared farm."""
    _require_operator(context, force=asked.force)
    run_id = context.store.runs.resolve(asked.run, own=False)
    cancel(context.store, run_id, context.user, force=asked.force)
    return Done(f"run {run_id} is cancelled", run_id=run_id)


class StartRun(msgspec.Struct, frozen=True):
    """Suites and SoCs of a run."""

    suite: Annotated[str, msgspec.Meta(max_length=4000)]
    """Names of suites, also uploaded ones, separated by commas."""
    soc: Text
    """Names of SoCs, separated by commas."""
    keyword: Text = ""
    """Expression of `-k`."""
    name: Text = ""
    virtual: Annotated[int, msgspec.Meta(ge=0, le=16)] = 0
    """Virtual devices that the run starts on the server; 0 for attached devices."""
    options: Annotated[list[Text], msgspec.Meta(max_length=100)] = []
    """Further options of `farm run`, as `--iterations=5`; none that names a file."""
    followed: bool = False
    """Refuse a run that is not submitted to a shared farm: its id is unknown at first."""


def run(context: Context, asked: StartRun) -> Done:
    """Start a run, as `farm run`; on a shared farm it is submitted."""
    is_submitted = context.config.is_shared and not asked.virtual
    if asked.followed and not is_submitted:
        raise UsageError("the server runs it without this command: give --detach")
    words = ["run"]
    for option, text in (("--suite", asked.suite), ("--soc", asked.soc)):
        names = [name.strip() for name in text.split(",") if name.strip()]
        uploads = {name for name in names if "@" in name and option == "--suite"}
        # A path would name code of any folder of the server.
        if not names or not all(_NAME.fullmatch(name) for name in names if name not in uploads):
            raise UsageError(f"{option}: {text[:60]!r}: expected names, separated by commas")
        if uploads and not is_submitted:
            raise UsageError("an uploaded suite is compiled by build hosts of a shared farm alone")
        found = [
            submission.folder_of(context.config, context.user, name) if name in uploads else name for name in names
        ]
        words += [f"{option}={name}" for name in found]
    given = (("-k", asked.keyword), ("--name=", asked.name), ("--virtual=", asked.virtual))
    words += [f"{option}{value}" for option, value in given if value]
    words += submission.checked(asked.options)
    return _start(context, [*words, "--detach"]) if is_submitted else _start(context, words)


def resume(context: Context, asked: SubmittedRun) -> Done:
    """Submit the missing jobs of a run, as `farm run --resume`."""
    _require_operator(context, force=asked.force)
    run_id = context.store.of_user(context.user).runs.resolve(asked.run, own=not asked.force, unbegun=True)
    owner = context.store.runs.view(run_id).user
    if owner != context.user and not asked.force:
        raise UsageError(f"run {run_id} is {owner}'s: ask them")
    done = _start(context, ["run", f"--resume={run_id}", *(["--detach"] if context.config.is_shared else [])])
    return msgspec.structs.replace(done, run_id=run_id)


class UploadSuite(msgspec.Struct, frozen=True):
    """Suite of a user for runs on a shared farm."""

    name: Text
    content: Annotated[bytes, msgspec.Meta(max_length=submission.MOST_BYTES)]
    """Archive with `suites/NAME/suite.toml` and the files of its cases: tar, without compression."""


def upload(context: Context, asked: UploadSuite) -> Done:
    """Keep a suite on the server, for the field `suite` of a run; build hosts execute its code."""
    if not context.config.is_shared:
        raise UsageError("a suite is uploaded to a shared farm alone: this server has the suites of its machine")
    name = submission.keep_suite(context.config, context.user, asked.name, asked.content)
    return Done(f"suite {asked.name} is on the server", suite=name)


class RerunJob(msgspec.Struct, frozen=True):
    """Job to run again, and the run with its result."""

    job: Text
    run: Text = ""
    virtual: bool = False


def rerun(context: Context, asked: RerunJob) -> Done:
    """Run a stored result again from its bundle, as `farm jobs rerun`."""
    words = ["jobs", "rerun"]
    if asked.run:
        words.append(f"--run={context.store.runs.resolve(asked.run, own=False)}")
    words += ["--virtual"] if asked.virtual else []
    return _start(context, [*words, "--", asked.job])


class AssignAlert(msgspec.Struct, frozen=True):
    """Remark on an alert or a failing job."""

    subject: Text
    """Number of an alert, or a job."""
    owner: Text = ""
    state: Text = ""
    note: Note = ""
    until: Annotated[str, msgspec.Meta(pattern=r"^(\d{4}-\d{2}-\d{2})?$")] = ""
    """Last day (UTC) of the remark."""


def assign_alert(context: Context, asked: AssignAlert) -> Done:
    """Record owner, state and note of an alert or a failing job."""
    if not (asked.owner or asked.state or asked.note or asked.until):
        raise UsageError("owner, state and note are empty: give one")
    try:
        until = datetime.datetime.fromisoformat(asked.until) if asked.until else None
    except ValueError:
        raise UsageError(f"until: {asked.until!r}: expected a day such as 2026-03-01") from None
    _, title = assign(
        context.store, asked.subject, context.user, state=asked.state or None, owner=asked.owner, note=asked.note,
        until=until,
    )  # fmt: skip
    return Done(f"recorded: {title}")


class AcceptLevel(msgspec.Struct, frozen=True):
    """Job whose numbers have a new level."""

    job: Text
    note: Note
    soc: Text = ""
    metric: Text = ""
    """Metrics, separated by commas; empty for those with an open alert."""
    run: Text = ""
    branch: Text = ""


def accept(context: Context, asked: AcceptLevel) -> Done:
    """Accept the new level of a job's numbers."""
    if not asked.note.strip():
        raise UsageError("note: is empty: give the reason why the level is right")
    store = context.store
    run_id = store.runs.resolve(asked.run, own=False) if asked.run else None
    named = asked.branch or None
    branch = store.runs.branch(run_id)[0] if run_id and named is None else store.status.branch_to_show(named)
    metrics = tuple(one.strip() for one in asked.metric.split(",") if one.strip())
    done = baseline.accept(
        store, asked.job, asked.soc or None, metrics, run_id, user=context.user, note=asked.note, branch=branch
    )
    return Done("accepted: " + (", ".join(f"{one.job_id} {one.metric}" for one in done) or "no open regression"))


class DeviceService(msgspec.Struct, frozen=True):
    """Device to take out of service."""

    device: Text
    note: Note = ""


def disable(context: Context, asked: DeviceService) -> Done:
    """Take a device out of service."""
    known = resolve_device(context.store, asked.device)
    context.store.devices.set_service(known.id, in_service=False, note=asked.note, user=context.user)
    return Done(f"{known.called} is out of service", device=known.id)


class NamedDevice(msgspec.Struct, frozen=True):
    """Device by its name, serial or id."""

    device: Text


def enable(context: Context, asked: NamedDevice) -> Done:
    """Put a device into service again."""
    known = resolve_device(context.store, asked.device)
    context.store.devices.set_service(known.id, in_service=True, note="", user=context.user)
    return Done(f"{known.called} is in service", device=known.id)


def check(context: Context, asked: NamedDevice) -> Done:
    """Start the health check of a device that is attached to the server."""
    known = resolve_device(context.store, asked.device)
    return _start(context, ["devices", "check", "--", known.id])


class Action:
    """Name of an action, its function, and the role that it needs."""

    def __init__(
        self, name: str, role: Role, perform: Callable[[Context, Any], Done], most_bytes: int = 1 << 20
    ) -> None:
        self.name, self.role, self.perform, self.most_bytes = name, role, perform, most_bytes
        self.asked: type[msgspec.Struct] = get_type_hints(perform)["asked"]


ACTIONS = [
    Action("lease", Role.DEVELOPER, lease),
    Action("release", Role.DEVELOPER, release),
    Action("cancel", Role.DEVELOPER, cancel_run),
    Action("run", Role.DEVELOPER, run),
    Action("resume", Role.DEVELOPER, resume),
    Action("upload", Role.DEVELOPER, upload, submission.MOST_BYTES * 3 // 2),
    Action("rerun", Role.DEVELOPER, rerun),
    Action("assign", Role.DEVELOPER, assign_alert),
    Action("accept", Role.DEVELOPER, accept),
    Action("disable", Role.OPERATOR, disable),
    Action("enable", Role.OPERATOR, enable),
    Action("check", Role.OPERATOR, check),
]


ROLES = {action.name: action.role for action in ACTIONS}


def _time_ms(text: str) -> int:
    try:
        # A field of a browser has a T between day and time.
        return round(time.mktime(time.strptime(text.replace("T", " "), "%Y-%m-%d %H:%M")) * 1000)
    except (ValueError, OverflowError):
        raise UsageError(f"from_time: {text[:40]!r}: expected a time such as 2026-03-01 14:00") from None


def _require_operator(context: Context, *, force: bool) -> None:
    if force and not context.role.may(Role.OPERATOR):
        raise UsageError("force: needs the role operator")


def _start(context: Context, words: list[str]) -> Done:
    """Start a command of farm in the name of the user; it goes on without the server.

    With `--detach` at its end the command submits a run, whose id is awaited. Raises TooManyCommandsError for a user
    whose earlier commands go on.
    """
    folder = context.config.state_dir / "serve"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    log = folder / f"{context.store.leases.now_ms()}-{words[0]}-{os.urandom(3).hex()}.log"
    with _STARTING:
        going = [one for one in _STARTED.get(context.user, ()) if one.poll() is None]
        if len(going) >= _MOST_COMMANDS:
            processes = ", ".join(str(one.pid) for one in going)
            raise TooManyCommandsError(
                f"{len(going)} commands of {context.user} are running here (processes {processes}), and the "
                "server starts no further one: wait for the end of one; 'farm runs list' shows their runs"
            )
        with log.open("xb") as output:
            process = subprocess.Popen(
                [*OWN_COMMAND, *words],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**context.config.environment, "FARM_USER": context.user, "NO_COLOR": "1"},
                start_new_session=True,
            )
        _STARTED[context.user] = [*going, process]
    if words[-1] == "--detach" and (run_id := submission.run_id_of(process, log)):
        return Done(f"run {run_id} is submitted", run_id=run_id, log=str(log))
    # A reaped process leaves no zombie.
    threading.Thread(target=process.wait, daemon=True).start()
    command = submission.without_folders(" ".join(words))
    return Done(f"started as process {process.pid} on the server: farm {command}", log=str(log))
