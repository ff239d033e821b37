"""Exit codes of every command: one table, from which the page of the documentation is made."""

from __future__ import annotations

from enum import IntEnum
from typing import Self


class ExitCode(IntEnum):
    """Exit code of a command, with its meaning for users.

    Codes up to 5 and 130 are also ends of runs in the store, and their numbers stay.
    """

    meaning: str

    def __new__(cls, code: int, meaning: str) -> Self:
        """Return the code, with its meaning as an attribute."""
        one = int.__new__(cls, code)
        one._value_ = code
        one.meaning = meaning
        return one

    PASSED = 0, "all passed"
    FAILED = 1, "a job failed"
    USAGE = 2, "usage or configuration error"
    REGRESSION = 3, "nothing failed, but there are regressions"
    INFRA = 4, "no device, or infrastructure trouble"
    NOTHING = 5, "nothing was selected, or all jobs were skipped"
    MISSING_TOOL = 6, "a library, compiler, tool or file of the setup is missing"
    NO_HISTORY = 7, "too little history: no result, or its bundle is gone"
    REFUSED = 8, "refused: a file that another user could write, a run that no host can read, a login that only reads"
    NO_STORE = 9, "there is no store, or no store is possible at the named place"
    STORE_UNREACHABLE = 10, "the server of the store cannot be reached"
    AGENT_REFUSED = 11, "another agent has the name, or the agent is of another farm"
    INTERRUPTED = 130, "interrupted"


ENDED_EARLY = frozenset(ExitCode) - {ExitCode.PASSED, ExitCode.FAILED, ExitCode.REGRESSION, ExitCode.NOTHING}
"""Exit codes of commands that ended before their work was done."""
