"""`farm pytest`."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from farm.backends.registry import BACKENDS, DEFAULT_BACKEND
from farm.cli.options import config_option, devices_options
from farm.cli.output import as_called, echo
from farm.config.settings import load_config
from farm.errors import UsageError


@click.command("pytest")
@click.option("--soc", default="", help="SoC of the devices; where only devices of one are attached, that one.")
@click.option("--backend", default=DEFAULT_BACKEND, show_default=True,
              help=f"What programs are compiled for: {', '.join(BACKENDS)}.")
@devices_options
@click.option("--html", type=click.Path(path_type=Path, dir_okay=False), help="Write the report here as well.")
@click.option("--json", "as_json", is_flag=True,
              help="Print the run as JSON; pytest then writes to standard error.")  # fmt: skip
@config_option
@click.argument("pytest_arguments", nargs=-1, type=click.UNPROCESSED, metavar="[-- PYTEST ARGUMENTS]")
def command(
    soc: str,
    backend: str,
    virtual: int,
    devices: tuple[str, ...],
    labels: tuple[str, ...],
    most_devices: int | None,
    html: Path | None,
    as_json: bool,
    config_file: Path | None,
    pytest_arguments: tuple[str, ...],
) -> int:
    """Run any pytest tests on devices, one worker a device.

    What stands behind `--` goes to your pytest, with your rootdir, conftest
    and plugins. Tests have the fixtures device, runner and bundle;
    ExecuTorch's own Qualcomm tests find what they need. Every test is a job
    of a run in the store: farm report latest shows it.

    \b
    farm pytest --soc SM8650 --virtual 2 -- tests -k conv
    farm pytest --soc SM8650 -- --pyargs \\
        executorch.backends.qualcomm.tests.test_qnn_delegate -k relu

    \b
    Exit codes: 0 all passed, expected failures aside; 1 a test failed;
    2 usage, configuration or a missing tool; 4 no device or
    infrastructure; 5 no test; 130 interrupted.
    """
    from farm.pool.fleet import Choice
    from farm.pytest_plugin.launch import SuiteRequest, is_listing, list_tests, run

    if pytest_arguments and "--" not in sys.argv:
        raise UsageError(f"{pytest_arguments[0]!r} is not understood; arguments for pytest stand behind --")
    if is_listing(pytest_arguments):
        return list_tests(pytest_arguments)
    attached = [("--device", devices), ("--label", labels), ("--devices", most_devices)]
    if virtual and (chosen := [option for option, given in attached if given]):
        raise UsageError(f"{chosen[0]} is for attached devices: leave it, or --virtual, out")
    if virtual and not soc:
        raise UsageError("--soc must be given with --virtual; 'farm socs' lists what there is")
    request = SuiteRequest(
        soc=soc,
        backend=backend,
        virtual=virtual,
        choice=Choice(devices, labels),
        most_devices=most_devices,
        arguments=pytest_arguments,
        command=as_called(),
        quiet=as_json,
    )

    from farm.cli.output import deliver

    outcome = run(load_config(config_file), request, lambda text: echo(f"farm: {text}", err=True))
    deliver(outcome.view, report=outcome.report, html=html, junitxml=None, as_json=as_json)
    return outcome.exit_code
