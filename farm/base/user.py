"""Who runs this."""

from __future__ import annotations

import getpass
import os


def user_name() -> str:
    """Return the name of the user, or the number, as a container may run as one that has no name."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())
