"""Files of a shared farm that rows of the store name, and unused bundles."""

from __future__ import annotations

import re
from collections.abc import Collection

import msgspec
from sqlalchemy import Connection, delete, select, update

from farm.builds.compile.protocol import BuildReply
from farm.store import schema
from farm.store.statements import KEYS, Group, chunks, in_parts

# Time between a run's check that a bundle exists and its submission: an hour would suffice.
_QUIET_MS = 86_400_000
_SHA256 = re.compile(r"\b[0-9a-f]{64}\b")


class NamedFiles(Group):
    """Rows that keep files of a shared farm from being removed; every method is one transaction."""

    def named_files(self, sha256s: Collection[str]) -> set[str]:
        """Return the given files that a row names.

        These are files of attempts, archives of bundles, code for unfinished builds, and runtimes of open runs.
        """
        build, order, artifact = schema.build.c, schema.run_order.c, schema.artifact.c
        wanted, found = set(sha256s), set[str]()
        with self._database.reading() as connection:
            of_attempts = select(artifact.sha256).where(artifact.sha256.in_(KEYS)).distinct()
            found.update(row.sha256 for row in in_parts(connection, of_attempts, wanted))
            found.update(connection.scalars(select(build.archive).where(build.state == "built")))
            going_on = (
                select(build.task).where(build.state == "waiting"),
                select(order.terms).where(order.state == "open"),
            )
            for query in going_on:
                for text in connection.scalars(query):
                    # Any text in the form of a hash may be the hash of a file.
                    found.update(_SHA256.findall(text))
        return found & wanted

    def forget_builds(self) -> int:
        """Remove the bundles that no run has and that none requested within a day; return their number.

        Their files stay.
        """

        def change(connection: Connection) -> int:
            keys = _unused_builds(connection, self._clock(connection))
            build = schema.build.c
            for part in chunks(keys):
                connection.execute(
                    delete(schema.build).where(build.key.in_(part), build.state.in_(("built", "failed")))
                )
            return len(keys)

        return self._database.write(change)

    def unused_archives(self) -> set[str]:
        """Return the archives of the bundles that `forget_builds` would remove."""
        archives = select(schema.build.c.archive).where(schema.build.c.key.in_(KEYS))
        with self._database.reading() as connection:
            keys = _unused_builds(connection, self._clock(connection))
            return {row.archive for row in in_parts(connection, archives, keys)}

    def lose_bundle(self, key: str, archive: str, why: str) -> None:
        """Mark the archive of a bundle as lost or damaged, so that the next run with the bundle has it made again."""
        reply = BuildReply(key, ok=False, seconds=0.0, reason=f"the bundle is lost: {why}", infra=True)
        build, text = schema.build.c, msgspec.json.encode(reply).decode()
        known = update(schema.build).where(build.key == key, build.state == "built", build.archive == archive)
        lost = known.values(state="failed", archive="", nbytes=0, reply=text)
        self._database.write(lambda connection: connection.execute(lost))


def _unused_builds(connection: Connection, now_ms: int) -> list[str]:
    """Return the keys of the built or failed bundles that no job of a run has."""
    build, run_job, attempt, wanted = (schema.build.c, schema.run_job.c, schema.attempt.c, schema.build_wanted.c)
    # A bundle without a manifest is recorded with its jobs only when they are executed: keep it while a run is open.
    is_open = select(schema.run_order.c.run_id).where(schema.run_order.c.state == "open").exists()
    query = select(build.key).where(
        build.state.in_(("built", "failed")),
        build.asked_ms < now_ms - _QUIET_MS,
        build.manifest.is_not(None) | ~is_open,
    )
    query_of_rows = query.except_(
        select(run_job.bundle_key).where(run_job.bundle_key.is_not(None)),
        select(attempt.bundle_key),
        select(wanted.key),
    )
    return sorted(connection.scalars(query_of_rows))
