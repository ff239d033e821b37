"""Name of the user who runs farm."""

from __future__ import annotations

import getpass
import os


def user_name() -> str:
    """Return the name of the user, or the number for a user without a name, as in a container."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())
