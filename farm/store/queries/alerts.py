"""Alerts with measurements and remarks: `store.alerts`; standing of a series against its accepted level."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
from msgspec import UNSET
from sqlalchemy import ColumnElement, Connection, Row, String, bindparam, cast, delete, insert, select, update

from farm.base.errors import UnknownNameError
from farm.base.grouping import grouped
from farm.results.analysis.statistics import GATES, TURNS, change_text, scale_of
from farm.results.attempt import Direction
from farm.store import rows, schema, values
from farm.store.records import STEPS, AlertRecord, AlertState, NewAlert, Remark, RemarkState
from farm.store.statements import KEYS, Group, chunks, in_parts, struct_of

# Standing of a series against its accepted level, after its established steps. Pure.


SETTLED_MS = 21 * 86_400_000
"""Time after which a better level is the accepted one: a loss of it is an open alert from then on."""

# Deterministic metrics have no gate: this is rounding of sums.
_ROUNDING = 1e-12
_SETTLED = (RemarkState.ACCEPTED, RemarkState.FIXED)
# States without an answer for a change that could not be measured.
_OPEN = (AlertState.SUSPECTED, AlertState.UNKNOWN)


class Standing(NamedTuple):
    """Level of a series after its steps, and its open alert."""

    level: float = 0.0
    """Distance from the accepted level, on the scale of the series."""
    alert: AlertRecord | None = None
    """Alert of the whole distance, from the first step on; None while the level is not worse than the accepted one."""


def standing(steps: Iterable[AlertRecord], started_ms: Mapping[str, int]) -> Standing:
    """Return the standing of a series after `steps`, oldest first; `started_ms` has the start of runs by id.

    Steps add up: an alert grows with each, and is closed when the level has returned. A step that a user accepted or
    marked as fixed makes its level the accepted one, and so does a better level that lasts. A deterministic metric that
    is none after all has one alert of the worst level. A suspected change of which a part could not be measured stays
    until another answer. An alert that is needed again within that time has its number.
    """
    level = worse = worst = last = 0.0
    turns, since_ms, sign, number = 0, 0, 1.0, 0
    rows: list[AlertRecord] = []
    left: AlertRecord | None = None
    for one in steps:
        settled = (one.remark.state if one.remark else one.state) in _SETTLED
        if one.finding == "regression" and one.state == AlertState.UNKNOWN and one.likely_cause:
            left = None if settled else one if left is None else msgspec.structs.replace(left, newest=one.id)
        elif left is not None and _answers(one, left):
            left = None
        if one.state not in STEPS or one.finding not in ("regression", "improvement"):
            continue
        gate = _ROUNDING if one.exact else GATES[scale_of(one.metric, one.unit)].confirmed
        sign = -1.0 if one.direction == Direction.HIGHER else 1.0
        started = started_ms.get(one.first_bad, 0)
        if started - since_ms >= SETTLED_MS:
            turns, worst = 0, 0.0
            if worse <= 0.0:
                level, rows, number = 0.0, [], 0
        turns += last * one.change < 0.0
        last, since_ms = one.change, started
        level = 0.0 if math.isnan(level + one.change) else level + one.change
        worse = sign * level
        if settled:
            level, worse, worst, rows, turns, number = 0.0, 0.0, 0.0, [], 0, 0
        elif worse > gate or turns >= TURNS:
            number = number or one.id
            rows.append(one)
        else:
            rows = []
        if abs(level) <= gate:
            level = worse = 0.0
        worst = max(worst, worse)
    is_unstable = turns >= TURNS and bool(rows) and rows[0].exact
    if not rows or (worse <= 0.0 and not is_unstable):
        return Standing(level, left)
    return Standing(level, _grown(rows, sign * worst if is_unstable else level, number, alternates=turns >= TURNS))


def _answers(one: AlertRecord, left: AlertRecord) -> bool:
    """Return whether `one` settles `left`, an alert without a measurement: same level before, or the way back."""
    if one.state not in _OPEN:
        return one.last_good < left.first_bad
    return one.finding == "improvement" and bool(one.likely_cause) and one.likely_cause != left.likely_cause


def _grown(rows: list[AlertRecord], level: float, number: int, *, alternates: bool) -> AlertRecord:
    """Return the alert of the first of `rows` with the distance after all of them, and its `number`."""
    first, newest = rows[0], rows[-1]
    if first is newest:
        return first if number == first.id else msgspec.structs.replace(first, id=number, newest=first.id)
    reason = f"{change_text(scale_of(first.metric, first.unit), level)} in {len(rows)} steps: {newest.reason}"
    if first.exact:
        reason = f"{first.reason.partition(' -> ')[0]} -> {newest.reason.partition(' -> ')[2]}"
    elif alternates:
        reason = f"programs alternate between levels: {reason}"
    by = level - newest.change
    return msgspec.structs.replace(
        first, id=number, finding="regression", change=level, low=newest.low + by, high=newest.high + by, reason=reason,
        remark=next((one.remark for one in reversed(rows) if one.remark), None), newest=newest.id,
    )  # fmt: skip


# Alerts with their measurements and remarks: `store.alerts`.


class Alerts(Group):
    """The alerts of a store. Every method is one transaction."""

    def record(self, run_id: str, found: Sequence[NewAlert]) -> None:
        """Record the suspected changes of a run, in place of an earlier judgement of it.

        Changes found before stay with their measurements and remarks; so does a suspected change with a remark.
        """

        def write(connection: Connection) -> None:
            alert = schema.alert
            there = {(one.series_id, one.device_kind) for one in found}
            exact = alert.c.state == AlertState.EXACT
            not_measured = (alert.c.run_id == run_id) & (exact | (alert.c.state == AlertState.SUSPECTED))
            of_run = select(alert.c.id, alert.c.series_id, alert.c.device_kind).where(
                not_measured, exact | not_remarked()
            )
            gone = [row.id for row in connection.execute(of_run) if (row.series_id, row.device_kind) not in there]
            for part in chunks(gone):
                connection.execute(delete(alert).where(alert.c.id.in_(part)))
            new = _new_rows(connection, run_id, found)
            rows.insert_missing(connection, alert, new)
            # A run that was resumed may have other numbers now.
            same = (alert.c.series_id == bindparam("of_series")) & (alert.c.device_kind == bindparam("of_kind"))
            again = [
                {"of_series": row["series_id"], "of_kind": row["device_kind"], **{name: row[name] for name in _LOOKS}}
                for row in new
            ]
            if again:
                connection.execute(update(alert).where(not_measured, same), again)
                # Numbers measured before any suspicion become visible with their finding.
                hidden = (alert.c.run_id == run_id) & (alert.c.finding == "unchanged")
                seen = [{name: row[name] for name in ("of_series", "of_kind", "finding")} for row in again]
                connection.execute(update(alert).where(hidden, same), seen)

        self._database.write(write)

    def answer(
        self,
        alert_id: int,
        new: NewAlert,
        *,
        device: str,
        pairs: Sequence[tuple[float, float]] | None,
        was: AlertState = AlertState.SUSPECTED,
    ) -> bool:
        """Record the result of pairs: finding, state, range, change and reason of `new`, and `pairs` of medians.

        Return False without a record if the alert differs from `was`: another process measured it meanwhile.
        """
        row = {
            **_judged(new),
            "device": values.clean(device, values.NAME_LIMIT),
            # JSON knows neither NaN nor infinity.
            "pairs": None
            if pairs is None
            else [[one if math.isfinite(one) else None for one in pair] for pair in pairs],
        }
        alert = schema.alert.c
        still = update(schema.alert).where(alert.id == alert_id, alert.state == was)
        return self._database.write(lambda connection: connection.execute(still.values(row)).rowcount == 1)

    def add(self, run_id: str, one: NewAlert) -> AlertRecord:
        """Record a number of a run for measurement without a suspicion; return its alert, new or existing."""

        def write(connection: Connection) -> AlertRecord:
            rows.insert_missing(connection, schema.alert, _new_rows(connection, run_id, [one]))
            alert = schema.alert.c
            same = (alert.series_id == one.series_id) & (alert.device_kind == one.device_kind)
            [found] = _find(connection, same & (alert.run_id == run_id))
            return found

        return self._database.write(write)

    def of_run(self, run_id: str, *, unchanged: bool = False) -> list[AlertRecord]:
        """Return the alerts of a run in every state; with `unchanged` also numbers that were only measured."""
        of_run = schema.alert.c.run_id == run_id
        return self._find(of_run if unchanged else of_run & (schema.alert.c.finding != "unchanged"))

    def of_jobs(self, job_ids: Iterable[str], branch: str = "") -> list[AlertRecord]:
        """Return all that ever stood out of jobs, by their ids, in runs of a branch, oldest first."""
        found = []
        for part in chunks(sorted(set(job_ids))):
            found += self._find(
                schema.job.c.name.in_(part) & (schema.alert.c.alert_branch == branch) & ~schema.alert.c.alert_private
            )
        return found

    def all(self, most: int = 2000) -> list[AlertRecord]:
        """Return the newest alerts of every state and of no local run, oldest first."""
        alert = schema.alert.c
        newest = select(alert.id).where(~alert.alert_private, alert.finding != "unchanged")
        return self._find(alert.id.in_(newest.order_by(alert.id.desc()).limit(most)))

    def get(self, alert_id: int) -> AlertRecord:
        """Return one alert. Raises UnknownNameError."""
        found = self._find(schema.alert.c.id == alert_id) if alert_id < _MOST_IDS else []
        if not found:
            known = [str(one.id) for one in self.open()]
            raise UnknownNameError("alert", str(alert_id), known, "" if known else "(none is open)")
        return found[0]

    def open(self, device_kind: str | None = None, branch: str | None = None) -> list[AlertRecord]:
        """Return the alerts that are shown, as `open_alerts`, of one kind of device, and of one branch, where given."""
        with self._database.reading() as connection:
            found = open_alerts(connection)
        return [one for one in found if device_kind in (None, one.device_kind) and branch in (None, one.branch or "")]

    def remark(self, subject: str, remark: Remark) -> None:
        """Record a remark on a subject, `alert:12` or `job:` and its id; of a grown alert also on its newest step."""
        grown = [f"alert:{one.newest}" for one in self.open() if one.newest and subject == f"alert:{one.id}"]
        row = {
            "state": remark.state,
            "user_name": values.clean(remark.user, values.NAME_LIMIT),
            "owner": values.clean(remark.owner, values.NAME_LIMIT),
            "note": values.clean(remark.note),
            "time_ms": remark.time_ms or rows.now_ms(),
            "until_ms": remark.until_ms,
        }
        found = [{**row, "subject": values.clean(one, 576)} for one in (subject, *grown)]
        self._database.write(lambda connection: connection.execute(insert(schema.triage), found))

    def remarks(self, subjects: Collection[str]) -> dict[str, list[Remark]]:
        """Return the remarks on subjects, oldest first."""
        with self._database.reading() as connection:
            return _remarks(connection, subjects)

    def remarks_of_jobs(self, job_ids: Iterable[str]) -> dict[str, Remark]:
        """Return the newest valid remark by job id, for jobs with one."""
        found = self.remarks([f"job:{job_id}" for job_id in job_ids])
        newest = {subject.removeprefix("job:"): remarks[-1] for subject, remarks in found.items()}
        return {job_id: remark for job_id, remark in newest.items() if _counts(remark)}

    def declare(self, run_id: str, accepted: NewAlert, remark: Remark) -> int:
        """Record a step declared and accepted by a user, and return the alert's id."""

        def write(connection: Connection) -> int:
            alert = schema.alert
            same = (alert.c.run_id == run_id) & (alert.c.series_id == accepted.series_id)
            same &= alert.c.device_kind == accepted.device_kind
            connection.execute(delete(alert).where(same))
            statement = insert(alert).values(_new_rows(connection, run_id, [accepted])).returning(alert.c.id)
            return int(connection.execute(statement).scalar_one())

        alert_id = self._database.write(write)
        self.remark(f"alert:{alert_id}", remark)
        return alert_id

    def _find(self, condition: Any) -> list[AlertRecord]:
        with self._database.reading() as connection:
            return _find(connection, condition)


def open_alerts(connection: Connection) -> list[AlertRecord]:
    """Return the alerts of series that are worse than their accepted level, by `farm.store.queries.alerts`.

    Metrics without a better direction and findings of local runs are left out.
    """
    alert = schema.alert.c
    # Answers after a change of which a part could not be measured.
    unsure = select(alert.series_id).where(alert.state == AlertState.UNKNOWN, alert.guilt != "")
    answers = alert.state.in_((AlertState.UNKNOWN, AlertState.REFUTED)) & alert.series_id.in_(unsure)
    found = _find(connection, (alert.state.in_(STEPS) | answers) & ~alert.alert_private)
    runs = select(schema.run.c.id, schema.run.c.started_ms).where(schema.run.c.id.in_(KEYS))
    first_bad = sorted({one.first_bad for one in found})
    started = {row.id: row.started_ms for row in in_parts(connection, runs, first_bad)}
    steps = grouped(((one.series_id, one.device_kind, one.branch or ""), one) for one in found)
    found = [grown for of_series in steps.values() if (grown := standing(of_series, started).alert)]
    return sorted(found, key=lambda one: (one.first_bad, one.id))


def not_remarked() -> ColumnElement[bool]:
    """Return the condition that an alert has no remark."""
    subject = "alert:" + cast(schema.alert.c.id, String)
    return ~select(schema.triage.c.id).where(schema.triage.c.subject == subject).correlate(schema.alert).exists()


def _find(connection: Connection, condition: Any) -> list[AlertRecord]:
    alert, series = schema.alert.c, schema.series.c
    query = (
        select(schema.alert, schema.job.c.name, series.metric, series.unit, series.direction, series.exact)
        .select_from(schema.alert.join(schema.series).join(schema.job, schema.job.c.id == series.job_id))
        .where(condition)
        .order_by(alert.first_bad, alert.id)
    )
    found: Any = connection.execute(query).all()
    remarks = _remarks(connection, [f"alert:{row.id}" for row in found])
    return [_record(row, remarks.get(f"alert:{row.id}", [])) for row in found]


def _counts(remark: Remark) -> bool:
    return remark.until_ms is None or remark.until_ms > rows.now_ms()


def _remarks(connection: Connection, subjects: Collection[str]) -> dict[str, list[Remark]]:
    triage = schema.triage.c
    query = select(schema.triage).where(triage.subject.in_(KEYS)).order_by(triage.id)
    found = in_parts(connection, query, sorted(set(subjects)))
    return grouped((row.subject, struct_of(Remark, row, user=row.user_name)) for row in found)


def _record(row: Row[Any], remarks: Sequence[Remark]) -> AlertRecord:
    last = remarks[-1] if remarks else None
    if last and not _counts(last):
        last = None
    return struct_of(
        AlertRecord,
        row,
        job_id=row.name,
        state=AlertState.ACCEPTED if last and last.state == RemarkState.ACCEPTED else row.state,
        **{name: math.nan for name in _FIGURES if getattr(row, name) is None},
        remark=last,
        branch=row.alert_branch or UNSET,
        private=row.alert_private or UNSET,
    )


_FIGURES = ("change", "low", "high", "p_value")
# Columns that another judgement of a run may change.
_LOOKS = ("finding", "last_good", "first_bad", *_FIGURES, "reason")
# Greater than what databases number rows with.
_MOST_IDS = 2**63


def _new_rows(connection: Connection, run_id: str, found: Iterable[NewAlert]) -> list[dict[str, Any]]:
    """Return the rows of alerts of a run. Raises StoreLostError for a missing run."""
    branch, private = rows.branch_of_run(connection, run_id)
    of_run = {"run_id": run_id, "alert_branch": branch, "alert_private": private}
    return [{**_judged(one), **of_run, "device": "", "found_ms": rows.now_ms()} for one in found]


def _judged(one: NewAlert) -> dict[str, Any]:
    """Return the columns of an alert that come from its judgement; NULL stands for NaN."""
    row = msgspec.to_builtins(one)
    row |= {name: None for name in _FIGURES if math.isnan(row[name])}
    return {**row, "reason": values.clean(one.reason), "guilt": values.clean(one.likely_cause)}
