"""Forms of device names, run ids and bundle keys, checked before one becomes a word or a path."""

from __future__ import annotations

import re

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
"""A serial, a product or a name that can be a word of a command and a part of a file's name."""
RUN_ID = r"[0-9]{8}-[0-9]{6}-[0-9a-f]{6}"
"""Pattern of what `farm.store.rows.new_run_id` makes; the ids of nightly runs are the same."""

_RUN_ID = re.compile(RUN_ID)
# A SHA-256: `farm.builds.bundles.key`.
_BUNDLE_KEY = re.compile(r"[0-9a-f]{64}")


def is_run_id(text: str) -> bool:
    """Return whether `text` is the id of a run or a nightly run, and so a name that leads nowhere else."""
    return _RUN_ID.fullmatch(text) is not None


def is_bundle_key(text: str) -> bool:
    """Return whether `text` is the key of a bundle, and so a name that leads nowhere else."""
    return _BUNDLE_KEY.fullmatch(text) is not None
