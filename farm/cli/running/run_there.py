"""`farm run` with $FARM_SERVER: the server submits the run, and this machine follows it."""

from __future__ import annotations

import base64
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import click

from farm.base.errors import InfraError, UsageError
from farm.base.paths import is_suite_path
from farm.cli.options import duration, is_given, require_for_server
from farm.cli.output import notice, show

if TYPE_CHECKING:
    from types import SimpleNamespace

    from farm.serve.client import Server


def run_there(
    server: Server, asked: SimpleNamespace, *, html: Path | None, junitxml: Path | None, as_json: bool
) -> int:
    """Start a run on the server of $FARM_SERVER, and follow it. Raises UsageError for options that it does not take."""
    from farm.serve.submission import RUN_OPTIONS

    context = click.get_current_context()
    fields = {"socs", "suites", "keyword", "name", "virtual", "detach", "resume", "html", "junitxml", "as_json"}
    sent = {
        str(option.name): (option, long)
        for option in context.command.params
        for long in option.opts
        if long in RUN_OPTIONS and is_given(context, option)
    }
    require_for_server({*fields, *sent})
    words: list[str] = []
    for name, (option, long) in sent.items():
        values = context.params[name]
        words += [_word(option, long, one) for one in (values if isinstance(values, tuple) else [values])]
    if asked.resume is not None:
        if words or asked.socs or asked.suites:
            raise UsageError("--resume keeps the options of the run: leave the others out")
        done = server.act("resume", run=asked.resume)
    elif asked.socs and asked.suites:
        suites = [_uploaded(server, suite) for suite in asked.suites]
        done = server.act(
            "run", soc=",".join(asked.socs), suite=",".join(suites), keyword=asked.keyword or "",
            name=asked.name or "", virtual=asked.virtual or 0, options=words, followed=not asked.detach,
        )  # fmt: skip
    else:
        raise UsageError("--soc and --suite must be given")
    if not asked.detach and not done.run_id:
        raise InfraError(f"{done.done}, and has no id yet: 'farm runs list' shows it")
    if asked.detach:
        # A server of one machine starts the command, whose run it does not know yet.
        show({"done": done.done, "run": done.run_id, "log": done.log}, [done.run_id or done.done], as_json=as_json)
        return 0
    notice(done.done)
    from farm.cli.cluster.following import follow_there

    return follow_there(server, done.run_id, html=html, junitxml=junitxml, as_json=as_json)


def _word(option: click.Parameter, long: str, value: object) -> str:
    if value is True:
        return long
    return f"{long}={value}s" if option.callback is duration else f"{long}={value}"


def _uploaded(server: Server, suite: str) -> str:
    """Return the name of a suite on the server, after an upload of a suite that is given by its path."""
    if not is_suite_path(suite):
        return suite
    from farm.dispatch.cluster.files.suite_archive import suite_members
    from farm.store.objects.archive import write_archive
    from farm.suites.manifests import load_suite, resolve_suite

    loaded = resolve_suite(str(Path(suite).resolve()), {})
    manifest = Path(loaded.path)
    files = {f"suites/{manifest.parent.name}/{manifest.name}": manifest}
    # Included suites are whole, as the server reads their manifests.
    for one in {manifest, *(case.manifest for case in loaded.cases if case.manifest.is_file())}:
        for case in load_suite(one).cases:
            files |= suite_members(case)
    with tempfile.TemporaryDirectory() as folder:
        archive = Path(folder, "suite.tar")
        write_archive(files, archive)
        content = base64.b64encode(archive.read_bytes()).decode()
    return server.act("upload", name=manifest.parent.name, content=content).suite
