"""Toolchain, its commit, and the commits between two runs, in words and as links. Pure."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING
from urllib.parse import quote, urlsplit

from farm.results.analysis.facts import SHORT_COMMIT

if TYPE_CHECKING:
    import msgspec

    from farm.store.view import RunToolchain

_HASH = re.compile(r"[0-9a-f]{7,64}")
_PLACE = "{commit}"
# Address patterns of GitHub and GitLab, and of servers with the same patterns.
_ONE, _BETWEEN = "/commit/{commit}", "/compare/"


def short(commit: str) -> str:
    """Return the short form of a commit's hash."""
    return commit[:SHORT_COMMIT]


def commit_link(template: str, commit: str) -> str:
    """Return the address of a commit; "" when `template` is no web address with a place for the commit.

    Template and commit are untrusted: the result begins with http:// or https:// and contains no password.
    """
    if not _HASH.fullmatch(commit) or _PLACE not in template or not template.isprintable():
        return ""
    address = template.replace(_PLACE, quote(commit))
    try:
        parts = urlsplit(address)
    except ValueError:
        return ""
    is_web = parts.scheme in {"http", "https"} and parts.netloc and "@" not in parts.netloc
    return address if is_web and " " not in address else ""


def range_link(template: str, good: str, bad: str) -> str:
    """Return the address of the commits after `good` up to `bad`; "" when `template` is not of a known server."""
    if not template.endswith(_ONE) or not _HASH.fullmatch(good) or good == bad or not commit_link(template, bad):
        return ""
    return f"{template.removesuffix(_ONE)}{_BETWEEN}{quote(good)}...{quote(bad)}"


def toolchain_text(toolchain: RunToolchain | msgspec.UnsetType) -> str:
    """Return the toolchain of a run: `main, commit 1a2b3c4d5e (dirty) on branch x: Fix pad`; "" without one."""
    if not toolchain or not toolchain.is_named:
        return ""
    state = f"commit {short(toolchain.commit)}" if toolchain.commit else ""
    if toolchain.dirty:
        state = f"{state} (dirty)" if state else "changed files"
    state += f" on branch {toolchain.git_branch}" if toolchain.git_branch else ""
    parts = [toolchain.name or "default toolchain", *filter(None, [state])]
    text = ", ".join(parts)
    return f"{text}: {toolchain.subject}" if toolchain.subject and toolchain.commit else text


def branch_name(toolchain: RunToolchain | msgspec.UnsetType) -> str:
    """Return the branch of a run for a sentence."""
    return f"branch {toolchain.branch}" if toolchain and toolchain.branch else "the default branch"


def standing_text(toolchain: RunToolchain | msgspec.UnsetType) -> str:
    """Return the use of the numbers of a local run; "" for a run that belongs to its branch."""
    if not toolchain or not toolchain.private:
        return ""
    return f"compared with {branch_name(toolchain)} and not part of its history"


def since_text(toolchain: RunToolchain | msgspec.UnsetType) -> str:
    """Return the number of new commits since the previous run of the branch; "" when it is not known."""
    if not toolchain or not toolchain.since:
        return ""
    count = len(toolchain.since) + toolchain.more
    return f"{count} new commit{'' if count == 1 else 's'} since the previous run of its branch"
