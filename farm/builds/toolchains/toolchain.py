"""Toolchain of a run: an interpreter, its ExecuTorch, a QNN SDK, and their identity by content."""

from __future__ import annotations

import msgspec

from farm.builds.bundles.key import QNN_PRODUCT, facts_of
from farm.builds.bundles.reuse import DevelopedRoot

STUB_BRANCH = "stub"
"""Last word of the branch of runs over a stub of QNN."""


class SourceState(msgspec.Struct, frozen=True):
    """Origin of a toolchain's code, for people: the identity is by content alone."""

    commit: str = ""
    """Full hash of a checkout's HEAD; empty without git."""
    branch: str = ""
    subject: str = ""
    """First line of the commit's message."""
    committed_ms: int = 0
    """Epoch, milliseconds."""
    dirty: bool = False
    """True if files that take part differ from the commit or, in an environment, from the wheel."""
    changed: tuple[str, ...] = ()
    """Some of these files, relative."""
    submodules: dict[str, str] = {}
    """Commit by path."""
    warnings: tuple[str, ...] = ()
    """Warnings for the user, such as a native library that is older than its sources."""


class Compiler(msgspec.Struct, frozen=True):
    """Interpreter and variables of a compiler process."""

    python: str
    """Path of the interpreter."""
    env: dict[str, str]
    """Variables that are added to this process's variables: paths to QNN, ExecuTorch and farm."""
    developed: tuple[DevelopedRoot, ...] = ()
    """Folders under development: each bundle has a record of their functions that ran."""
    as_of_ns: int = 0
    """Time of the look at the content, or just before, in nanoseconds since the epoch; 0 if it does not matter."""


class Toolchain(msgspec.Struct, frozen=True):
    """The compiler's versions, content and processes."""

    versions: dict[str, str]
    """Dependencies of a bundle besides its job: executorch, torch, torchao, qnn, HOST_CPU, and hashes of contents under
    names that end in CONTENT."""
    compiler: Compiler
    runner: str
    """Hash of the native build."""
    runner_of: str = ""
    """ExecuTorch of the runner, `executorch 1.5.1`, if it is not the toolchain's own; else empty."""
    name: str = ""
    """Name in farm.toml and options; empty for the default."""
    branch: str = ""
    """Branch of the toolchain's nightly runs; empty for the default."""
    private: bool = False
    """True for a dirty or private checkout, whose runs are compared with the branch and never belong to it."""
    source: SourceState = SourceState()
    qnn_product: str = ""
    """Product name of the QNN SDK; empty without an SDK, or for one without a name."""

    def fingerprint(self, kind: str) -> dict[str, str]:
        """Return the known facts of this machine that the numbers of a run on devices of a `kind` depend on."""
        from farm import __version__

        facts = {"farm": __version__, **facts_of(self.versions), "native_runner": self.runner[:16], "device_kind": kind}
        known = {
            QNN_PRODUCT: self.qnn_product,
            "native_runner_of": self.runner_of,
            "toolchain": self.name,
            "commit": self.source.commit,
            "dirty": "yes" if self.source.dirty else "",
        }
        return facts | {name: fact for name, fact in known.items() if fact}
