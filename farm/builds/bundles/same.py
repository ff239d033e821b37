"""Comparison of the programs of two sides without a device: before and after a commit, with two toolchains.

Equal *programs* make a device do the same. Equal *jobs* also lead to the same verdict: inputs, references, and the
outputs with their quantization steps, writes and expected tokens are equal as well.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import msgspec

from farm.base.grouping import grouped
from farm.builds.bundles.bundle import INPUTS, Bundle, Manifest
from farm.builds.program.canonical import program_hash

_DATA = (f"{INPUTS}/", "reference_")
# Fields of a manifest that a verdict depends on.
_JUDGED_BY = (
    "samples", "inputs", "outputs", "references", "dynamic", "stateful", "state", "generation", "writes", "lost_writes"
)  # fmt: skip


class ProgramComparison(msgspec.Struct, frozen=True):
    """Jobs of two sides, sorted into the groups below; within a group they keep the given order."""

    same: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    newly_failing: tuple[str, ...] = ()
    """The second side did not compile them, the first did."""
    newly_compiling: tuple[str, ...] = ()
    failing: tuple[str, ...] = ()
    """Neither side compiled them."""
    only_first: tuple[str, ...] = ()
    """The second side does not have them."""
    only_second: tuple[str, ...] = ()

    def __str__(self) -> str:
        compiled = len(self.same) + len(self.changed)
        parts = [f"{len(self.same)} of {compiled} programs are the same"]
        if compiled and not self.changed:
            parts = [f"no program of {compiled} jobs has changed" if compiled > 1 else "the program has not changed"]
        for name in ("newly_failing", "newly_compiling", "failing", "only_first", "only_second"):
            if jobs := getattr(self, name):
                parts.append(f"{len(jobs)} {name.replace('_', ' ')}")
        return ", ".join(parts)


def program_of(bundle: Bundle) -> str:
    """Return the hash of a bundle's program, from the manifest or, for an older one, computed. Raises OSError."""
    return bundle.manifest.program or program_hash(bundle.model)


def data_hash(manifest: Manifest) -> str:
    """Return a hash of the data that a bundle is judged by: inputs, references, outputs, writes, tokens."""
    files = sorted((name, sha256) for name, sha256 in manifest.files.items() if name.startswith(_DATA))
    parts = (files, *(getattr(manifest, name) for name in _JUDGED_BY))
    return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()


def differences(first: Manifest, first_program: str, second: Bundle) -> tuple[str, ...]:
    """Return the differences of a bundle from its predecessor, as texts for people; empty for equal bundles.

    The first bundle is given by its manifest and the hash of its program. Raises OSError.
    """
    found = []
    if first_program != program_of(second):
        facts = (
            (name, getattr(first, field), getattr(second.manifest, field))
            for name, field in (("bytes", "pte_bytes"), ("partitions", "partitions"), ("operators", "delegated_ops"))
        )
        changed = ", ".join(
            f"{name} {was:,} -> {now:,}" for name, was, now in facts if None not in (was, now) and was != now
        )
        found.append(f"another program ({changed})" if changed else "another program")
    then, now = first.files, second.manifest.files
    data = {name for name in (*then, *now) if name.startswith(_DATA)}
    if changed_data := sum(then.get(name) != now.get(name) for name in data):
        found.append(f"other inputs or references ({changed_data} of {len(data)} files)")
    elif data_hash(first) != data_hash(second.manifest):
        found.append("other outputs or writes")
    return tuple(found)


def compare_hashes(first: Mapping[str, str], second: Mapping[str, str]) -> ProgramComparison:
    """Return the comparison for hashes of programs by job, as in the store; "" is a job that was not compiled."""
    found = grouped((_group(first.get(job), second.get(job)), job) for job in dict.fromkeys((*first, *second)))
    return ProgramComparison(**{group: tuple(jobs) for group, jobs in found.items()})


def _group(first: str | None, second: str | None) -> str:
    if first is None or second is None:
        return "only_second" if first is None else "only_first"
    if not first or not second:
        return "newly_failing" if first else "newly_compiling" if second else "failing"
    return "same" if first == second else "changed"
