"""`farm pytest`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from farm.base.backends.registry import BACKENDS, DEFAULT_BACKEND
from farm.base.errors import UsageError
from farm.cli import options as opt
from farm.cli.output import as_called, deliver, notice

if TYPE_CHECKING:
    from farm.dispatch.pytest_plugin.upstream import UpstreamCommand


@click.command("pytest")
@click.option("--soc", metavar="SOC", default="",
              help="SoC of the devices; otherwise the only SoC of the attached devices.")  # fmt: skip
@click.option("--backend", metavar="BACKEND", default=DEFAULT_BACKEND, show_default=True,
              help=f"Backend of the programs: {', '.join(BACKENDS)}.")  # fmt: skip
@opt.devices_options
@opt.purpose_options
@opt.toolchain_option()
@click.option("--html", type=opt.OUTPUT_FILE, help="Write the report here as well.")
@opt.json_option("Print the run as JSON; pytest then writes to standard error.")
@click.argument("pytest_arguments", nargs=-1, type=click.UNPROCESSED, metavar="[-- PYTEST ARGUMENTS]")
def command(
    devices: tuple[str, ...],
    labels: tuple[str, ...],
    html: Path | None,
    toolchain: str,
    pytest_arguments: tuple[str, ...],
    **asked: Any,
) -> int:
    """Run any pytest tests on devices, one worker a device.

    Arguments behind `--` go to your pytest, with your rootdir, conftest and
    plugins. Tests have the fixtures device, runner and bundle; ExecuTorch's
    own Qualcomm tests get the device and the options they need. Every test is
    a job of a run in the store: farm report latest shows it. A command of
    upstream's test_qnn_delegate.py behind `--` is taken with its own flags.

    \b
    farm pytest --soc SM8650 --virtual 2 -- tests -k conv
    farm pytest --soc SM8650 -- --pyargs \\
        executorch.backends.qualcomm.tests.test_qnn_delegate -k relu
    farm pytest -- test_qnn_delegate.py CLASS.test -s SERIAL -m SM8650

    \b
    Exit codes: 0 all passed, expected failures aside; 1 a test failed;
    2 usage or configuration; 4 no device or infrastructure; 5 no test,
    or all skipped; 6 missing tool; 130 interrupted.
    """
    from farm.builds.toolchains.selection import use_toolchain
    from farm.dispatch.pool.fleet import Choice
    from farm.dispatch.pytest_plugin.launch import SuiteRequest, is_listing, list_tests, run
    from farm.dispatch.pytest_plugin.upstream import read_upstream
    from farm.store.records import Purpose

    opt.require_separator(pytest_arguments)
    upstream = read_upstream(pytest_arguments, Path.cwd())
    if upstream is not None:
        devices, pytest_arguments = _with_upstream(upstream, asked, devices)
        asked["upstream"] = upstream.attributes
    if is_listing(pytest_arguments):
        opt.refuse_given("tests are listed by farm's own Python: leave {} out", "toolchain")
        return list_tests(pytest_arguments)
    opt.refuse_attached(virtual=asked["virtual"])
    if asked["virtual"] and not asked["soc"]:
        raise UsageError("--soc must be given with --virtual; 'farm devices socs' lists the SoCs")
    asked["purpose"] = Purpose(asked["purpose"] or Purpose.LOCAL)
    choice = Choice(devices, labels)
    request = SuiteRequest(**asked, choice=choice, arguments=pytest_arguments, command=as_called(), quiet=opt.is_json())
    outcome = run(use_toolchain(opt.configured(), toolchain), request)
    deliver(outcome.view, report=outcome.report, html=html, junitxml=None)
    return outcome.exit_code


def _with_upstream(
    upstream: UpstreamCommand, asked: dict[str, Any], devices: tuple[str, ...]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return devices and arguments of pytest with upstream's flags; set the others in `asked`.

    Raises UsageError for a contradiction.
    """
    if upstream.soc and asked["soc"].upper() not in ("", upstream.soc.upper()):
        raise UsageError(f"--soc {asked['soc']} and upstream's {upstream.soc}: name one SoC")
    asked["soc"] = asked["soc"] or upstream.soc
    asked["backend"] = upstream.backend or asked["backend"]
    asked["virtual"] = asked["virtual"] or (1 if upstream.simulated else asked["virtual"])
    for line in upstream.shown():
        notice(line)
    if asked["virtual"]:
        if upstream.device:
            notice(f"left out: {upstream.device}, as the tests run on virtual devices")
        return devices, upstream.arguments
    return devices or ((upstream.device,) if upstream.device else ()), upstream.arguments
