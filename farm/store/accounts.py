"""Accounts of `farm serve` and the record of their actions: `store.accounts`."""

from __future__ import annotations

import hashlib
import secrets
from enum import StrEnum

import msgspec
from sqlalchemy import ColumnElement, delete, func, insert, select, true

from farm.base.errors import UnknownNameError, UsageError
from farm.store import rows, schema, values
from farm.store.statements import Group, struct_of

_PREFIX = "farm_"
_MOST_TEXT = 4000
_NOT_ENDED = "not ended"


class Role(StrEnum):
    """Role of an account; each role has the rights of the roles before it."""

    VIEWER = "viewer"
    DEVELOPER = "developer"
    OPERATOR = "operator"

    def may(self, needed: Role) -> bool:
        """Return True if this role includes `needed`."""
        order = list(Role)
        return order.index(self) >= order.index(needed)


class Account(msgspec.Struct, frozen=True):
    """Account of a person or a program."""

    name: str
    role: Role
    created_ms: int = 0


class AuditEntry(msgspec.Struct, frozen=True):
    """Action of an account, also a refused one."""

    time_ms: int
    user: str
    action: str
    asked: str
    """Parameters of the action as JSON."""
    outcome: str
    """`done`, the reason of the refusal, or `not ended`."""


class Accounts(Group):
    """Accounts and audit of a store. Every method is one transaction."""

    def add(self, name: str, role: Role) -> str:
        """Create an account and return its token, of which the store keeps a hash alone.

        Raises UsageError for a name that is taken or unfit.
        """
        if values.clean(name, values.NAME_LIMIT) != name or not name.strip() or not name.isprintable():
            raise UsageError(f"account {name[:60]!r}: a name has printable characters, at most {values.NAME_LIMIT}")
        token = f"{_PREFIX}{secrets.token_urlsafe(32)}"
        row = {"name": name, "role": str(role), "token_hash": _hash(token), "created_ms": rows.now_ms()}
        if self._database.write(lambda connection: rows.insert_new(connection, schema.account, row)) is None:
            raise UsageError(f"account {name!r} exists: 'farm lab accounts --remove NAME --yes' ends it and its token")
        return token

    def remove(self, name: str) -> None:
        """Remove an account; its sessions end with its next request. Raises UnknownNameError."""
        gone = delete(schema.account).where(schema.account.c.name == name)
        if not self._database.write(lambda connection: connection.execute(gone).rowcount):
            raise UnknownNameError("account", name, [one.name for one in self.all()])

    def all(self) -> list[Account]:
        """Return the accounts by name."""
        return self._find(true())

    def named(self, name: str) -> Account | None:
        """Return the account with a name."""
        return next(iter(self._find(schema.account.c.name == name)), None)

    def of_token(self, token: str) -> Account | None:
        """Return the account of a token."""
        return next(iter(self._find(schema.account.c.token_hash == _hash(token))), None)

    def _find(self, condition: ColumnElement[bool]) -> list[Account]:
        query = select(schema.account).where(condition).order_by(schema.account.c.name)
        return [struct_of(Account, row) for row in self._rows(query)]

    def record(self, user: str, action: str, asked: str, outcome: str = _NOT_ENDED, begin_id: int | None = None) -> int:
        """Record the begin of an action and return its id, or with this id its end; no entry is changed."""
        row = {
            "time_ms": rows.now_ms(),
            "user_name": values.clean(user, values.NAME_LIMIT),
            "action": action,
            "asked": values.clean(asked, _MOST_TEXT),
            "outcome": values.clean(outcome, _MOST_TEXT),
            "begin_id": begin_id,
        }
        new = insert(schema.audit).values(row).returning(schema.audit.c.id)
        return self._database.write(lambda connection: int(connection.execute(new).scalar_one()))

    def audit(self, limit: int, user: str = "") -> list[AuditEntry]:
        """Return the newest actions with their outcomes, also of one user, newest first."""
        row, end = schema.audit.c, schema.audit.alias()
        outcome = func.coalesce(end.c.outcome, row.outcome)
        query = select(row.time_ms, row.user_name, row.action, row.asked, outcome).order_by(row.id.desc())
        query = query.outerjoin_from(schema.audit, end, end.c.begin_id == row.id).where(row.begin_id.is_(None))
        if user:
            query = query.where(row.user_name == user)
        return [AuditEntry(*one) for one in self._rows(query.limit(limit))]


def _hash(token: str) -> str:
    return hashlib.sha256(token.encode("utf-8", "replace")).hexdigest()
