"""Procrastinate's tables in a store: creation and upgrade, by farm's own migrations."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from importlib import resources
from pathlib import Path

from sqlalchemy import Connection, text

from farm.base.errors import MissingToolError, StoreError
from farm.store.rights.rights import HAS_JOBS, apply_again, become_owner, run_script

# Version of functions.sql and farm/store/rights, to increase with every change of these files.
_OWN = "10"
_VERSIONS = "SELECT version FROM farm_messages ORDER BY version DESC LIMIT 1"


def require_messages(connection: Connection) -> None:
    """Create or upgrade the tables of messages for the installed Procrastinate; one query if they are current.

    Raises StoreError for tables of a newer version.
    """
    needed = needed_version()
    found = installed_version(connection)
    if found == needed:
        return
    # Two agents may start at once: the lock lets the second find the tables of the first.
    connection.execute(text("SELECT pg_advisory_xact_lock(hashtext('farm_messages'))"))
    found = installed_version(connection)
    if found == needed:
        return
    theirs, own = (found or "/").split("/")
    if (theirs, int(own or 0)) > (needed.split("/")[0], int(_OWN)):
        raise StoreError(
            f"the store's messages are of a newer farm (Procrastinate {found}, this one has {needed}): update farm"
        )
    become_owner(connection)
    for script in _scripts(theirs):
        run_script(connection, script)
    schema = connection.scalar(text("SELECT quote_ident(current_schema())"))
    functions = resources.files("farm.store.messages").joinpath("functions.sql").read_text(encoding="utf-8")
    run_script(connection, functions.format(schema=schema))
    run_script(connection, "CREATE TABLE IF NOT EXISTS farm_messages (version text PRIMARY KEY)")
    connection.execute(text("DELETE FROM farm_messages"))
    connection.execute(text("INSERT INTO farm_messages VALUES (:version)"), {"version": needed})
    apply_again(connection)


def upgrade_messages(connection: Connection) -> None:
    """Upgrade the tables of messages and the rights of groups after another revision, if a store has them.

    Raises as `require_messages`.
    """
    if connection.scalar(HAS_JOBS):
        require_messages(connection)
        apply_again(connection)


def ensure_messages(connection: Connection) -> None:
    """Create missing tables; raises as `require_messages`."""
    if not connection.scalar(HAS_JOBS):
        require_messages(connection)


def installed_version(connection: Connection) -> str | None:
    """Return the `needed_version` of the last creation or change of the tables; None without tables."""
    # Not to_regclass: within a transaction it does not see tables that others create after its first call.
    is_there = text("SELECT 1 FROM pg_class WHERE relname = 'farm_messages' AND pg_table_is_visible(oid)")
    if connection.scalar(is_there) is None:
        return None
    version: str | None = connection.scalar(text(_VERSIONS))
    return version


def needed_version() -> str:
    """Return the newest migration of the installed Procrastinate, and the version of farm's additions.

    Raises MissingToolError without Procrastinate.
    """
    return f"{_migrations()[-1].name[:11]}/{_OWN}"


def _migrations() -> list[Path]:
    # Find the files without an import of Procrastinate, which takes longer than all of this.
    spec = importlib.util.find_spec("procrastinate")
    if spec is None or not spec.submodule_search_locations:
        raise MissingToolError(
            "a shared farm needs the Python package 'procrastinate': pip install 'snapdragon-farm[cluster]'"
        )
    folder = Path(spec.submodule_search_locations[0]) / "sql"
    return sorted(folder.glob("migrations/[0-9]*.sql"))


def _scripts(installed: str) -> Iterable[str]:
    """Yield the scripts that upgrade tables of the version `installed`; empty `installed` for no tables."""
    migrations = _migrations()
    if not installed:
        yield (migrations[0].parents[1] / "schema.sql").read_text(encoding="utf-8")
        return
    for migration in migrations:
        if migration.name[:11] > installed:
            yield migration.read_text(encoding="utf-8")
