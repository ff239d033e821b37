"""Output of commands: text or JSON on standard output, files, and reviews of pull requests."""

from __future__ import annotations

import logging
import os
import shlex
import shutil
import signal
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import click

from farm.base.errors import UsageError
from farm.base.files import replacing
from farm.base.text import json_document, one_line, visible
from farm.cli.options import configured, is_json, require_for_server
from farm.report.terminal.layout import UNBOUNDED

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

    from farm.base.config.settings import Config
    from farm.dispatch.notify.pull_request import PullRequest
    from farm.report.formats.review import Review
    from farm.serve.client import Reader, Server
    from farm.store.records import RunView
    from farm.store.store import Store


# Output of commands: text or JSON on standard output, and files.


@contextmanager
def opened(*, readonly: bool = False, existing: bool = False) -> Iterator[tuple[Config, Store]]:
    """Yield the configuration and its store, as `open_store` opens it."""
    from farm.store.store import open_store

    config = configured()
    with open_store(config.store_url, readonly=readonly, existing=existing) as store:
        yield config, store


def asked_server() -> Server | None:
    """Return the server that $FARM_SERVER names; its modules are loaded only then.

    Raises UsageError for an address or a token that is none, and never prints either: both may have a secret.
    """
    url = os.environ.get("FARM_SERVER")
    if not url:
        return None
    from farm.serve.client import Server

    return Server(url, os.environ.get("FARM_TOKEN", ""))


@contextmanager
def reading(*, readonly: bool = True) -> Iterator[Reader]:
    """Yield the reader of an everyday command: the server that $FARM_SERVER names, else the store."""
    server = asked_server()
    if server is not None:
        yield server
        return
    from farm.serve.client import StoreReader

    with opened(readonly=readonly) as (config, store):
        yield StoreReader(config, store)


def acted(action: str, *, taken: Collection[str] = (), **asked: Any) -> bool:
    """Perform an action on the server of $FARM_SERVER and print its effect; return False without a server.

    Raises UsageError for a given option of the command that is neither in `asked` nor in `taken`.
    """
    server = asked_server()
    if server is None:
        return False
    require_for_server({*asked, *taken, "as_json", "config_file"})
    done = server.act(action, **asked)
    shown = {name: value for name in ("device", "run_id", "log") if (value := getattr(done, name))}
    show({"done": done.done, **shown}, [done.done])
    return True


def deliver(view: RunView, *, report: Path | str, html: Path | None, junitxml: Path | None) -> None:
    """Print the run and write the files; `report` is a file, or the address of a page.

    Raises UsageError for a file that cannot be written.
    """
    if html is not None and isinstance(report, Path):
        write_file(html, report.read_text(encoding="utf-8"))
    if junitxml is not None:
        from farm.report.formats.junit import render_junit

        write_file(junitxml, render_junit(view))
    if is_json():
        from farm.report.formats.run_json import render_json

        echo(render_json(view), whole=True)
        return
    from farm.report.terminal.run import render_summary

    text = render_summary(view, width(), color=True)
    if is_quiet():
        echo_coloured(text.partition("\n")[0])
        return
    echo_coloured(text)
    echo(f"report: {html or report}")


def as_called() -> str:
    """Return the command line of this process, quoted for a shell."""
    return shlex.join(["farm", *sys.argv[1:]])


def width() -> int:
    """Return the columns of the terminal, or $COLUMNS; output to a pipe or a file has no limit."""
    return shutil.get_terminal_size((UNBOUNDED, 24)).columns


def show(answer: Mapping[str, object], lines: Iterable[str]) -> None:
    """Print the answer of a command: as JSON, or else as text."""
    if is_json():
        print_json(answer)
    elif text := "\n".join(lines):
        echo(text)


def print_json(answer: Mapping[str, object]) -> None:
    """Print the answer of a command as JSON, with the version of its layout."""
    echo(json_document({"schema": 1, **answer}).decode(), whole=True)


def require_consent(removed: str, about: Iterable[str] = (), *, yes: bool) -> None:
    """Ask on a terminal whether to remove `removed`, after the lines `about` it.

    Raises UsageError without `yes` and without a terminal, and click.Abort for a refusal.
    """
    if yes:
        return
    if not sys.stdin.isatty():
        raise UsageError(f"{removed} would be removed: --yes does it")
    for line in about:
        echo(line, err=True)
    if not click.confirm(f"Remove {visible(removed)}?", default=False, err=True):
        raise click.Abort


def notice(text: str) -> None:
    """Print the progress of a command on standard error."""
    if is_quiet():
        return
    _print_notice(text)


def _print_notice(text: str) -> None:
    # On one line: a line break in a device's text could start a workflow command of GitHub.
    when = f"{time.strftime('%H:%M:%S')} " if is_verbose() else ""
    echo(f"farm: {when}{one_line(text)}", err=True)


def begin_log() -> None:
    """Print log records of farm as `notice` does. Raises UsageError for levels in FARM_LOG that do not exist."""
    from farm.base.log_setup import RecordHandler, begin_logging

    handler = RecordHandler(_print_notice)
    if is_quiet():
        handler.setLevel(logging.WARNING)
    begin_logging(handler, verbose=is_verbose())


_verbose = threading.Event()


def be_verbose() -> None:
    """Print the configuration in use from now on, and the time of each notice."""
    from farm.base.config import settings
    from farm.base.config.shared import shown_address

    _verbose.set()
    seen = set()

    def show_config(config: Config) -> None:
        shown = (
            f"configuration: {config.file or 'no farm.toml'}",
            f"store: {shown_address(config.store_url)}",
            f"state: {config.state_dir}",
            f"cache: {config.cache_dir}",
            f"QNN: {config.sdk_root or 'of the wheel in the environment'}",
        )
        if shown not in seen:
            seen.add(shown)
            for line in shown:
                notice(line)

    settings.HEARERS.append(show_config)


def is_verbose() -> bool:
    """Return True when the user asked for more with -v."""
    return _verbose.is_set()


_quiet = threading.Event()
_last_line: list[str] = []


def be_quiet() -> None:
    """Print from now on no progress, and of standard output the last line at the end of the command."""
    _quiet.set()


def is_quiet() -> bool:
    """Return True when the user asked for less with -q."""
    return _quiet.is_set()


def end_quiet() -> None:
    """Print the last line of a quiet command."""
    _quiet.clear()
    if _last_line:
        echo_coloured(_last_line.pop())


def echo(text: object = "", *, err: bool = False, nl: bool = True, whole: bool = False) -> None:
    """Print `text` with control characters and invisible ones spelled out: names come from files and devices."""
    echo_coloured(visible(str(text)), err=err, nl=nl, whole=whole)


def echo_coloured(text: str, *, err: bool = False, nl: bool = True, whole: bool = False) -> None:
    """Print text with our colours, on a terminal; all other control characters are spelled out before.

    A quiet command keeps only the last line of standard output, unless the text is `whole`, as for programs.
    """
    if is_quiet() and not err and not whole:
        _last_line[:] = [line for line in text.splitlines() if line.strip()][-1:] or _last_line
        return
    try:
        # Anything but a terminal gets no colours, and neither does one with $NO_COLOR.
        color = False if os.environ.get("NO_COLOR") else None
        click.echo(text, err=err, nl=nl, color=color)  # noqa: TID251 - here alone
    except BrokenPipeError:
        # The reader closed the pipe, like `| head`: the command continues, and its exit code is about its own work.
        discard(sys.stderr if err else sys.stdout)


def discard(stream: IO[str]) -> None:
    """Redirect a stream with a broken pipe to /dev/null: Python would print an error when it flushes the rest."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def write_file(path: Path, text: str) -> None:
    """Write a file that the user named, and its folder. Raises UsageError."""
    with written(path) as file:
        file.write(text.encode())


@contextmanager
def written(path: Path) -> Iterator[IO[bytes]]:
    """Yield a file that appears at `path` when it is complete, and not at all after a failure. Raises UsageError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not path.is_file():
            # A terminal or a pipe cannot be replaced.
            with path.open("wb") as file:
                yield file
            return
        with replacing(path.resolve()) as file:
            yield file
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from None


@contextmanager
def standard_output() -> Iterator[IO[bytes]]:
    """Yield standard output for bytes. When its reader goes away the command ends quietly, as if by SIGPIPE."""
    try:
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        discard(sys.stdout)
        raise click.exceptions.Exit(128 + signal.SIGPIPE) from None


# Option `--pull-request` of the commands that judge a commit.


def find_pull_request(text: str) -> PullRequest | None:
    """Return the pull request of the option, found on its server; None without the option.

    Raises UsageError, ReviewError; MissingToolError without the extra `review`.
    """
    if not text:
        return None
    from farm.dispatch.notify.pull_request import PullRequest, place_of, take_token

    place = place_of(text, os.environ)
    return PullRequest(place, take_token(place.kind))


def post_review(pull: PullRequest | None, make: Callable[[], Review]) -> None:
    """Post the result of `make`; an error becomes a notice, as the exit code is about the commit."""
    if pull is None:
        return
    from farm.dispatch.notify.pull_request import ReviewError

    try:
        pull.post(make())
    except ReviewError as error:
        notice(f"not posted: {error}")
    else:
        notice(f"posted to {pull.place}")


def review_of_run(config: Config, view: RunView) -> Review:
    """Return the review of a recorded run."""
    from farm.report.formats.review import run_review
    from farm.report.model.status import standing
    from farm.store.store import open_store

    with open_store(config.store_url, readonly=True) as store:
        states = {job.job_id: standing(job) for job in store.status.of_run(view.id).jobs}
        return run_review(view, states, store.alerts.of_run(view.id))
