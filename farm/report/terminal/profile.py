"""Profiles as lines of text, and the comparison of two profiles node by node. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from itertools import groupby

import msgspec

from farm.base.text import one_line
from farm.builds.bundles.key import stub_of
from farm.report.model import format as fmt
from farm.report.model.diff import ONE_STUB
from farm.report.model.sections import OriginSum, by_unit, operator_tables
from farm.report.terminal.layout import columns
from farm.results.analysis.history import changed_facts, fact_line
from farm.results.attempt import OperatorProfile
from farm.results.profile.event_names import is_whole_call, sums
from farm.store.records import ProfileRecord

# Suffix that QNN appends to the name of a node: a number that changes with the graph around the node.
_OP_ID = re.compile(r":?\bOpId_\d+$")
_HEAD = ("node", "delegate")
_ORIGIN_HEAD = ("node", "module", "source line", "delegate")
_LEAST_NAME = 12
# Options at the end of a job's id; neither names nor values contain a hyphen.
_OPTIONS = re.compile(r"(?:-[^-=\[\]]+=[^-\[\]]*)+\]$")


class NodeChange(msgspec.Struct, frozen=True):
    """Node before and after; None for a side without the node."""

    node: str
    delegate: str
    unit: str
    before: OperatorProfile | None
    after: OperatorProfile | None

    ratio: float | None
    """After divided by before, by medians; None when a side is missing or its time before was 0."""
    is_distinct: bool
    """True when no inference of one side was within the range of the other."""

    @property
    def difference(self) -> float:
        """Return after minus before, by medians; a missing node counts as 0."""
        return (self.after.p50 if self.after else 0.0) - (self.before.p50 if self.before else 0.0)


class JobChanges(msgspec.Struct, frozen=True):
    """Profiles of one job in two runs."""

    before_job: str
    """Id of the job before: `job_id`, or the job of the same case and target with other options."""
    job_id: str
    before_run: str
    after_run: str
    device_kind: str
    differences: tuple[str, ...]
    """Other differences: fingerprint, device, the case itself."""
    refused: str
    """Reason why the profiles are not compared; empty when they are."""
    nodes: tuple[NodeChange, ...] = ()


def job_changes(before: Iterable[ProfileRecord], after: Iterable[ProfileRecord]) -> list[JobChanges]:
    """Return the changes of each job that both sides have.

    If options make the ids differ, the only job of a case and target on one side is paired with the only one on the
    other side.
    """
    before, after = list(before), list(after)
    old = {record.job_id: record for record in before}
    plain_old, plain_new = (
        {name: list(records) for name, records in groupby(sorted(side, key=_plain_id), key=_plain_id)}
        for side in (before, after)
    )
    found = []
    for record in after:
        name = _plain_id(record)
        alone = len(plain_old.get(name, ())) == len(plain_new[name]) == 1
        earlier = plain_old[name][0] if alone else old.get(record.job_id)
        if earlier is not None:
            found.append(_job_change(earlier, record))
    return found


def _plain_id(record: ProfileRecord) -> str:
    return _OPTIONS.sub("]", record.job_id)


def _job_change(old: ProfileRecord, new: ProfileRecord) -> JobChanges:
    refused = ""
    if old.device_kind != new.device_kind:
        refused = f"before on {old.device_kind or 'no'} device, after on {new.device_kind or 'no'} device"
    elif bool(stub_of(old.facts)) != bool(stub_of(new.facts)):
        refused = ONE_STUB
    elif not old.operators or not new.operators:
        refused = f"run {(new if old.operators else old).run_id} kept files of it, but no rows"
    elif not {row.unit for row in old.operators} & {row.unit for row in new.operators}:
        refused = "the two have no unit in common"
    pairs = [(name, *values) for name, values in changed_facts(old.facts, new.facts).items()]
    pairs += [("device", old.device, new.device)] if old.device != new.device else []
    differences = [
        fact_line(name, one_line(was or fmt.NOTHING, 60), one_line(now or fmt.NOTHING, 60)) for name, was, now in pairs
    ]
    if old.case_version != new.case_version:
        differences.append("the case has changed: another test is measured")
    return JobChanges(
        before_job=old.job_id,
        job_id=new.job_id,
        before_run=old.run_id,
        after_run=new.run_id,
        device_kind=new.device_kind,
        differences=tuple(differences),
        refused=refused,
        nodes=() if refused else tuple(changes(old.operators, new.operators)),
    )


def changes(before: Iterable[OperatorProfile], after: Iterable[OperatorProfile]) -> list[NodeChange]:
    """Return each node of either side once, in the order of execution; nodes that are gone come last.

    Nodes are paired by delegate call, name and unit, the n-th of a name with the n-th; unpaired nodes are paired by
    name without the number that QNN appends.
    """
    old, new = _numbered(before), _numbered(after)
    same = old.keys() & new.keys()
    lost = _numbered((row for key, row in old.items() if key not in same), without_id=True)
    # The nodes of `new` without a pair, each with its former name.
    renamed = _numbered((row for key, row in new.items() if key not in same), without_id=True)
    earlier = {id(row): lost.pop(key, None) for key, row in renamed.items()}
    found = [_change(old[key] if key in same else earlier[id(row)], row) for key, row in new.items()]
    return found + [_change(row, None) for row in lost.values()]


def _change(before: OperatorProfile | None, after: OperatorProfile | None) -> NodeChange:
    [row, *_] = filter(None, (after, before))
    ratio, apart = None, True
    if before is not None and after is not None:
        ratio = after.p50 / before.p50 if before.p50 else None
        apart = before.greatest < after.least or after.greatest < before.least
    return NodeChange(row.node, row.delegate, row.unit, before, after, ratio, apart)


def profile_lines(rows: Sequence[OperatorProfile], limit: int, width: int = 80) -> list[str]:
    """Return tables of a profile, one a unit, the greatest shares first; no line is wider than `width`."""
    tables: list[Sequence[Sequence[str]]] = []
    for made in operator_tables(rows, len(rows)):
        found, total = made.rows, made.total
        origins = any(row.module or row.source for row in found)
        head = _ORIGIN_HEAD if origins else _HEAD
        none = [""] * (len(head) - 1)
        table = [[*head, made.unit, "share"]]
        table += [[*_cells(row, origins=origins), fmt.count(row.p50), _percent(row.share)] for row in found[:limit]]
        rest = found[limit:]
        if rest:
            left = sum(row.p50 for row in rest)
            table.append([f"{len(rest)} more", *none, fmt.count(left), _percent(left / total if total else 0.0)])
        table.append([f"all {len(found)}", *none, fmt.count(total), ""])
        if origins and len({row.delegate for row in found}) == 1:
            # If a single delegate call has all nodes, its name moves to the title, which leaves room for the other
            # columns.
            table = [[*row[:3], *row[4:]] for row in table]
            table[0][0] = f"node in {found[0].delegate}" if found[0].delegate else "node"
        tables.append(table)
    whole = [row for row in rows if is_whole_call(row)][:limit]
    if whole:
        calls = [(row.node.partition(": ")[2], row.delegate, fmt.count(row.p50), row.unit) for row in whole]
        tables.append([("totals of whole calls, from the delegate", "delegate", "median", ""), *calls])
    return _aligned(tables, width)


def sum_lines(found: Sequence[OriginSum], what: str, limit: int, width: int = 80) -> list[str]:
    """Return tables of the totals of modules or lines of code, one a unit; `what` is the title of the names."""
    tables = []
    for unit, of_unit in groupby(found, key=lambda one: one.unit):
        rows = list(of_unit)
        table = [(what, "nodes", unit, "share")]
        table += [
            (one.name or "not known", str(one.nodes), fmt.count(one.p50), _percent(one.share)) for one in rows[:limit]
        ]
        for name, part in ((f"{len(rows[limit:])} more", rows[limit:]), (f"all {len(rows)}", rows)):
            if part:
                nodes, total = str(sum(one.nodes for one in part)), fmt.count(sum(one.p50 for one in part))
                table.append((name, nodes, total, "" if part is rows else _percent(sum(one.share for one in part))))
        tables.append(table)
    return _aligned(tables, width)


def change_lines(found: Sequence[NodeChange], limit: int, width: int = 80) -> list[str]:
    """Return tables of changes, one a unit, the greatest first; no line is wider than `width`."""
    tables = []
    before = sums(change.before for change in found if change.before)
    after = sums(change.after for change in found if change.after)
    parts = [change for change in found if not is_whole_call(change)]
    several = len({change.delegate for change in parts if change.delegate}) > 1
    for unit, _ in by_unit({**before, **after}):
        ordered = sorted((change for change in parts if change.unit == unit), key=lambda one: -abs(one.difference))
        table = [("node", f"{unit} before", "after", "ratio", "")]
        table += [_change_cells(change, several=several) for change in ordered[:limit]]
        if ordered[limit:]:
            table.append((f"{len(ordered) - limit} more", "", "", "", ""))
        old, new = before.get(unit, 0.0), after.get(unit, 0.0)
        table.append((f"all {len(ordered)}", fmt.count(old), fmt.count(new), _ratio(new / old if old else None), ""))
        tables.append(table)
    return _aligned(tables, width)


def _cells(row: OperatorProfile, *, origins: bool) -> tuple[str, ...]:
    if not origins:
        return row.node, row.delegate
    # With a module or source line shown, the number that QNN appends is left out.
    node = _OP_ID.sub("", row.node) if row.module or row.source else row.node
    return node, row.module, row.source, row.delegate


def _percent(share: float) -> str:
    return f"{100 * share:.1f}%"


def _change_cells(change: NodeChange, *, several: bool) -> tuple[str, str, str, str, str]:
    mark = "new" if change.before is None else "gone" if change.after is None else "" if change.is_distinct else "~"
    # The index of `QnnBackend[1]` is enough to distinguish delegate calls.
    call = f" {change.delegate[change.delegate.find('[') :]}" if several and change.delegate else ""
    sides = [fmt.NOTHING if row is None else fmt.count(row.p50) for row in (change.before, change.after)]
    return f"{change.node}{call}", sides[0], sides[1], _ratio(change.ratio), mark


def _numbered(
    rows: Iterable[OperatorProfile], *, without_id: bool = False
) -> dict[tuple[str, str, str, int], OperatorProfile]:
    seen: dict[tuple[str, str, str], int] = {}
    found = {}
    for row in rows:
        name = (row.delegate, _OP_ID.sub("", row.node) if without_id else row.node, row.unit)
        seen[name] = seen.get(name, 0) + 1
        found[*name, seen[name]] = row
    return found


def _ratio(value: float | None) -> str:
    return fmt.NOTHING if value is None or not math.isfinite(value) else f"{value:.2f}"


def _aligned(tables: Iterable[Sequence[Sequence[str]]], width: int) -> list[str]:
    """Return the lines of tables, with a blank line between two."""
    return [line for table in tables for line in ("", *_lines_of(table, width))][1:]


def _lines_of(table: Sequence[Sequence[str]], width: int) -> list[str]:
    """Return aligned lines: names are cut to the width that the delegate and the figures leave."""
    cells = [[one_line(cell) for cell in row] for row in table]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    cut = 1 + sum(name in _ORIGIN_HEAD[1:3] for name in cells[0][1:])
    room = max(_LEAST_NAME * cut, width - 2 * len(widths) - sum(widths[cut:]))
    names = widths[:cut]
    while sum(names) > room:
        names[names.index(max(names))] -= 1
    left = cut + ("delegate" in cells[0])
    shown = [[_cut(row[0], names[0]), *map(_cut_front, row[1:cut], names[1:]), *row[cut:]] for row in cells]
    return columns(shown, right=range(left, len(widths)), indent="  ")


def _cut_front(name: str, width: int) -> str:
    """Return a path with its beginning cut: modules and files of one model begin alike."""
    return name if len(name) <= width else f"…{name[1 - width :]}"


def _cut(name: str, width: int) -> str:
    """Return a name with its middle cut: the operator is at its beginning, its number at the end."""
    if len(name) <= width:
        return name
    tail = width // 3
    return f"{name[: width - tail - 1]}…{name[-tail:]}"
