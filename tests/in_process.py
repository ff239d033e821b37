"""Commands of `farm` in the process of the tests: for refusals, which change nothing."""

from __future__ import annotations

from click import ClickException
from click.testing import CliRunner, Result

from farm.base.errors import FarmError
from farm.cli.main import cli


def call(*words: str) -> tuple[int, str]:
    """Call `farm` in this process; return its exit code, and its output and error on one line."""
    result = _invoke(words)
    if result.exception is None:
        return result.return_value, " ".join(result.output.split())
    code, message = _error(result)
    return code, f"{result.output} {message}"


def refused(*words: str) -> str:
    """Call `farm` with bad input; return its error. Raises AssertionError for another exit code than 2."""
    code, output = call(*words)
    assert code == 2, output
    return output


def refusal(*words: str) -> tuple[int, str]:
    """Call `farm` with bad input; return exit code and error. Raises AssertionError for text on standard output."""
    result = _invoke(words)
    assert result.stdout == ""
    return _error(result)


def _invoke(words: tuple[str, ...]) -> Result:
    return CliRunner().invoke(cli, words, standalone_mode=False)


def _error(result: Result) -> tuple[int, str]:
    error = result.exception
    assert isinstance(error, FarmError | ClickException), (error, result.output)
    return error.exit_code, error.format_message() if isinstance(error, ClickException) else str(error)
